"""Expand the lists that Slurm writes: names of nodes like ``n[1-2],m5`` and counts like ``3(x2),2``.

Both functions take a limit, and apply it before they make anything of that size. Must not import TensorFlow.
"""

import itertools
import math
import re
from collections.abc import Iterator


def expand_nodes(text: str, most: int) -> list[str]:
    """Return the names in a nodelist like ``n[1-2],m5,o[03-06]``, in its order.

    Raises:
        ValueError: If the list is malformed or has more than ``most`` names.
    """
    names: list[str] = []
    for parts in _items(text, most):
        if len(names) + math.prod(len(part) for part in parts) > most:
            raise ValueError(f"names more nodes than the {most:,} tasks a cluster can have: ask for fewer")
        names += ["".join(choice) for choice in itertools.product(*parts)]
    return names


def expand_counts(text: str, most: int) -> list[int]:
    """Return the numbers in a list like ``3(x2),2,1``: 3, 3, 2, 1.

    Raises:
        ValueError: If the list is malformed or its numbers add up to more than ``most``.
    """
    counts: list[int] = []
    for item in text.split(","):
        match = re.fullmatch(r"([1-9][0-9]{0,8})(?:\(x([1-9][0-9]{0,8})\))?", item)
        if not match:
            raise ValueError("is not a list of counts like 3(x2),2,1: start the task with srun")
        times = int(match[2] or 1)
        if sum(counts) + int(match[1]) * times > most:
            raise ValueError(f"is more than the {most:,} tasks a cluster can have: ask for fewer")
        counts += [int(match[1])] * times
    return counts


def _items(text: str, most: int) -> Iterator[list[list[str]]]:
    """Yield each item of a nodelist as parts, each a list of alternatives: ``n[1-2]`` is ``[[n], [1, 2]]``."""
    parts: list[list[str]] = []
    for piece in [*re.findall(r"[^,\[\]]+|\[[^\[\]]*\]|.", text, re.DOTALL), ","]:
        if piece != ",":
            parts.append(_alternatives(piece, most))
        elif parts:
            yield parts
            parts = []


def _alternatives(piece: str, most: int) -> list[str]:
    if piece[0] not in "[]":
        return [piece]
    found: list[str] = []
    for item in piece[1:-1].split(","):
        match = re.fullmatch(r"([0-9]{1,18})(?:-([0-9]{1,18}))?", item)
        low, high = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
        if not match or low > high:
            raise ValueError("is not a nodelist like n[1-2],m5: start the task with srun")
        if len(found) + high - low >= most:
            raise ValueError(f"names more nodes than the {most:,} tasks a cluster can have: ask for fewer")
        found += [str(number).zfill(len(match[1])) for number in range(low, high + 1)]
    return found
