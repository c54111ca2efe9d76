"""``tfps help``: the list of commands and pages, a page, a mode, a flag, or a command's flags.

The pages are the Markdown files in ``tfps/docs``, which are part of the package. ``index.md`` gives their order. Does
not import TensorFlow.
"""

import re
import shutil
import sys
import textwrap
from collections.abc import Mapping, Sequence
from importlib import resources

from tfps.cli import reference
from tfps.cli.registry import COMMANDS
from tfps.cli.run import ROLE
from tfps.config import command_line
from tfps.errors import ConfigError
from tfps.models import loader
from tfps.modes.registry import MODES
from tfps.text import did_you_mean, other_name, show

INDEX = "index"
MODES_PAGE = "modes"
HELP_FLAGS = frozenset({"-h", "--help", "-help", "--helpfull"})
ALIASES: Mapping[str, str] = {"compose": "docker", "hosts": "ssh", "tfjob": "kubeflow"}  # a platform's page, by --to
_DOCS = resources.files("tfps") / "docs"


def show_help(words: Sequence[str]) -> int:
    """Print the help for ``tfps help WORDS``; returns the exit code.

    Raises:
        ConfigError: If there is no such page, command or flag, or more than one name.
    """
    names = [word for word in words if not word.startswith("-")]
    if len(names) > 1:
        raise ConfigError(f"tfps help takes one name, not {len(names)}: {show(' '.join(names))}.")
    if not names:
        flags = [word for word in words if word not in HELP_FLAGS]
        print("\n\n".join(map(flag_help, flags)) if flags else usage() if words else f"{usage()}\n\n{_list_pages()}")
    elif names[0] in COMMANDS:
        print(command_help(names[0]))
    else:
        _print_paged(read_page(names[0]))
    return 0


def usage() -> str:
    """Return the text of ``tfps --help``, which fits on one screen."""
    commands = "\n".join(f"  {name:<8} {command.summary}" for name, command in COMMANDS.items())
    return (
        "TensorFlow 1.x-style parameter-server training, on today's TensorFlow.\n\n"
        f"usage: tfps COMMAND [--flag=value ...]\n\n{commands}\n\n"
        f"Try it:\n  {COMMANDS['launch'].example}\n\n"
        f'Without a command, tfps runs "run"; the classic command line works unchanged:\n  python -m tfps {ROLE}\n\n'
        'Run "tfps COMMAND --help" for its flags, "tfps help" for a list of pages.'
    )


def command_help(name: str) -> str:
    """Return the text of ``tfps COMMAND --help``."""
    command = COMMANDS[name]
    choices = {"model": tuple(loader.BUILTIN)}
    width = max(60, min(100, shutil.get_terminal_size((100, 24)).columns))
    flags = command_line.describe(command.flags, choices, width, command.has_defaults)
    details = textwrap.fill(command.details, width)
    return f"tfps {name}: {command.summary}\n\n{details}\n\n  {command.example}\n{flags}"


def flag_help(word: str) -> str:
    """Return what the page of flags says of a flag, and the commands that have it.

    Raises:
        ConfigError: If there is no such flag.
    """
    name = word.lstrip("-").partition("=")[0].replace("-", "_")
    if name not in command_line.FLAGS:
        hint = did_you_mean(name, command_line.FLAGS, "--")
        raise ConfigError(f"--{show(name)} is not a known flag.{hint} Run tfps help flags for a list.")
    owners = [f"tfps {command}" for command in reference.commands_with(command_line.FLAGS[name].group)]
    return f"--{name}: {reference.help_text(name)}\nTaken by {', '.join(owners)}."


def page_summaries() -> Mapping[str, str]:
    """Return each page's summary by the page's name, in the order of the index, which comes first."""
    listed = re.findall(r"^- \[[^\]]+\]\(([\w-]+)\.md\): (.+)$", _text(INDEX), re.MULTILINE)
    return {INDEX: "this list, with links", **{name: summary.replace("`", "") for name, summary in listed}}


def read_page(name: str) -> str:
    """Return a page's text; for a mode that has no page of its name, its section of the page of modes.

    Raises:
        ConfigError: If there is no page of that name.
    """
    page = ALIASES.get(name, name)
    pages = page_summaries()
    if page in pages:
        return _text(page)
    mode = other_name(name) or name
    if mode in MODES.builtin:
        return _section(MODES_PAGE, mode)
    close = did_you_mean(name, [*pages, *ALIASES, *COMMANDS, *MODES.builtin])
    shown = show(name)
    raise ConfigError(f"{shown} is neither a page nor a command of tfps.{close} Run tfps help for a list.")


def _section(page: str, heading: str) -> str:
    """Return a section of a page, and where it is from."""
    body = _text(page).partition(f"\n## {heading}\n")[2].partition("\n## ")[0].strip()
    source = f"This is the section {heading} of the page {page}: tfps help {page} shows all of it."
    return f"## {heading}\n\n{body}\n\n{source}\n"


def _list_pages() -> str:
    lines = [f"  {name:<16} {summary}" for name, summary in page_summaries().items()]
    return "\n".join(['Pages, for "tfps help PAGE":', *lines])


def _text(name: str) -> str:
    return (_DOCS / f"{name}.md").read_text(encoding="utf-8")


def _print_paged(text: str) -> None:
    """Print a text, through the user's pager if standard output is a terminal."""
    if sys.stdout.isatty():
        import pydoc  # noqa: PLC0415  other commands do not need it

        pydoc.pager(text)
    else:
        print(text, end="")
