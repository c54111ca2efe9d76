"""Generate the pages that are made from the code: ``python -m tfps.cli.reference > tfps/docs/flags.md``.

Does not import TensorFlow.
"""

from collections.abc import Iterator

from tfps.cli.registry import COMMANDS
from tfps.config import command_line
from tfps.models import loader

_HEAD = """# Flags

Every flag, by group. Write `--flag=value` or `--flag value`; a dash in a name is the same as an underscore. A boolean
flag may stand alone. A flag that a command does not have is an error, as is a flag that is given twice.

This page is made from `tfps/config` by `python -m tfps.cli.reference > tfps/docs/flags.md`.
"""
_WIDE = 100_000  # columns, so that no line wraps


def flags_page() -> str:
    """Return the page of flags, as Markdown."""
    groups = dict.fromkeys(option.group for option in command_line.FLAGS.values())
    return "\n".join([_HEAD, *(line for group in groups for line in _table(group))])


def _table(group: str) -> Iterator[str]:
    """Yield the lines of one group: a heading, the commands that take it, a row for each flag."""
    yield f"## {group}"
    yield ""
    yield f"Taken by {', '.join(f'`tfps {name}`' for name in commands_with(group))}."
    yield ""
    yield "| flag | meaning |"
    yield "|---|---|"
    for name in command_line.flags_of([group]):
        yield f"| `--{name}` | {help_text(name)} |"
    yield ""


def commands_with(group: str) -> Iterator[str]:
    """Yield the names of the commands that take the flags of a group."""
    return (name for name, command in COMMANDS.items() if group in command.groups)


def help_text(name: str) -> str:
    """Return the ``--help`` text of a flag, with its choices and its default, on one line."""
    line = command_line.describe([name], {"model": tuple(loader.BUILTIN)}, _WIDE).splitlines()[-1]
    return line.partition(f"--{name}")[2].strip()


if __name__ == "__main__":
    print(flags_page(), end="")
