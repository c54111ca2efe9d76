"""``--topology``: which workers exchange their copies. A file is read once, where the job is started.

The value of the flag is a name, or the edges themselves, ``0-1,1-2``. A file with one edge a line becomes such a value
when the command line is read, so it travels to all tasks like any other flag. Must not import TensorFlow.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from tfps.text import did_you_mean, show

NAMES = ("ring", "complete", "exponential")
_INLINE = re.compile(r"[0-9]{1,4}-[0-9]{1,4}(,[0-9]{1,4}-[0-9]{1,4})*")
_MOST = 100_000  # characters: an argument of a command has at most 128 KiB
_LONGEST = 10_000_000  # characters of a file, with comments
_MOST_SHOWN = 10  # problems of one file
_FORMS = f"{', '.join(NAMES)}, edges such as 0-1,1-2, or a file with one edge a line, such as '0 1'"

Edge = tuple[int, int]


class Edges(str):
    """The edges of a graph as a flag has them, ``0-1,1-2``, sorted.

    Attributes:
        source: What the user has given.
        lines: The line of each edge in a file, from 1; empty where there is none.
    """

    source: str
    lines: Mapping[Edge, int]

    @classmethod
    def of(cls, found: Mapping[Edge, int], source: str, is_file: bool) -> "Edges":
        """Return the value for some edges, each with its line."""
        made = cls(",".join(f"{a}-{b}" for a, b in sorted(found)))
        made.source, made.lines = source, found if is_file else {}
        return made


def topology(value: str) -> str:
    """Accept the name of a graph, the edges of one, or a file with the edges."""
    if value in NAMES:
        return value
    if _INLINE.fullmatch(value):
        return Edges.of(_checked(enumerate(value.replace("-", " ").split(","), 1), "part"), value, is_file=False)
    if not value:
        raise ValueError(f"is empty: give {_FORMS}")
    try:
        if Path(value).exists() and not Path(value).is_file():  # to open a pipe would wait for a writer
            raise ValueError("no regular file")
        with Path(value).open(encoding="utf-8-sig") as file:  # without the mark that some editors write first
            text = file.read(_LONGEST + 1)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or ("no text" if isinstance(error, UnicodeError) else str(error))
        hint = did_you_mean(value, NAMES)
        fix = f".{hint} Give {_FORMS}" if hint else f": give {_FORMS}"
        raise ValueError(f"cannot be read ({reason}){fix}") from None
    if len(text) > _LONGEST:
        raise ValueError(f"is longer than {_LONGEST:,} characters: give {_FORMS}")
    lines = text.splitlines()
    edges = Edges.of(_checked(enumerate((line.partition("#")[0] for line in lines), 1), "line"), value, is_file=True)
    if not edges:
        raise ValueError("has no edge: write one a line, such as '0 1'")
    if len(edges) > _MOST:
        raise ValueError(f"has {len(edges.lines)} edges, too many for a command line: give a sparser graph")
    return edges


def edges_of(value: str) -> Sequence[Edge]:
    """Return the edges of a value that ``topology`` has accepted and that is no name."""
    return [(int(a), int(b)) for a, b in (edge.split("-") for edge in value.split(","))]


def where(value: str, edge: Edge | None = None) -> str:
    """Return the flag as the user has given it, with the line of an edge if it is from a file."""
    given = f"--topology={show(getattr(value, 'source', value))}"
    line = getattr(value, "lines", {}).get(edge)
    return f"{given}, line {line}," if line else given


def _checked(rows: Iterator[tuple[int, str]], unit: str) -> Mapping[Edge, int]:
    """Return the edges of some numbered lines, each with its number.

    Raises:
        ValueError: If some are no edges, join a worker with itself, or are there twice; it names the first few.
    """
    found: dict[Edge, int] = {}
    problems: list[str] = []
    for number, row in rows:
        if not (parts := row.split()):
            continue
        if problem := _problem(parts, row.strip(), found, unit, number):
            problems.append(problem)
        else:
            low, high = sorted(map(int, parts))
            found[low, high] = number
    if problems:
        left = len(problems) - _MOST_SHOWN
        raise ValueError("; ".join(problems[:_MOST_SHOWN]) + (f"; and {left} more" if left > 0 else ""))
    return found


def _problem(parts: Sequence[str], row: str, found: Mapping[Edge, int], unit: str, number: int) -> str:
    """Return why a line is no edge that can be added to those found before it, or nothing."""
    place = f"{unit} {number}"
    if len(parts) != 2 or not all(re.fullmatch("[0-9]{1,4}", part) for part in parts):
        return f"has {show(row)} in {place}: write two workers, such as '0 1'"
    low, high = sorted(map(int, parts))
    if low == high:
        return f"joins worker {low} with itself in {place}: remove it, each keeps a part anyway"
    if first := found.get((low, high)):
        return f"has the edge of workers {low} and {high} in {unit}s {first} and {number}: remove one"
    return ""
