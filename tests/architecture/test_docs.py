"""The README and the pages say what the code does: each command, flag, link, exit code and field in them exists."""

import ast
import dataclasses
import inspect
import re
import shlex
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import pytest
from support.processes import REPO, run_tfps, summary

import tfps
from tfps import errors
from tfps.cli import help as help_command
from tfps.cli import main, reference
from tfps.cli.registry import COMMANDS
from tfps.config import command_line
from tfps.launchers.registry import LAUNCHERS
from tfps.models import loader, static_check
from tfps.modes.registry import MODES
from tfps.optimizers.registry import OPTIMIZERS

DOCS = REPO / "tfps" / "docs"
PAGES = sorted(DOCS.glob("*.md"))
FILES = [REPO / "README.md", REPO / "CONTRIBUTING.md", *PAGES]
CODE = {"sh", "python", "text"}
PREFIX = ("tfps", "python -m tfps", "srun -n4 tfps")  # how a command of ours begins
# Flags of other programs that the pages name.
FOREIGN = {"flag", "help", "mem", "repeat", "at_once", "program", "seed", "add", "soak", "minutes", "parsable"}
FOREIGN |= {"network"}
PLACEHOLDERS = {"--max_restarts=N"}


def name_of(file: Path) -> str:
    """Return how a test names a page."""
    return file.name


class Block(NamedTuple):
    """A block of code in a page."""

    language: str
    text: str


def blocks(file: Path) -> list[Block]:
    """Return the blocks of code of a page; those inside a list are indented."""
    found = re.findall(r"^( *)```(\w*)\n(.*?)^\1```$", file.read_text(), re.MULTILINE | re.DOTALL)
    return [Block(language, re.sub(f"(?m)^{indent}", "", text)) for indent, language, text in found]


def prose(file: Path) -> str:
    """Return a page without its blocks of code."""
    return re.sub(r"^( *)```\w*\n.*?^\1```$", "", file.read_text(), flags=re.MULTILINE | re.DOTALL)


def commands(file: Path) -> Iterator[Sequence[str]]:
    """Yield the words after ``tfps`` of each command in a page: lines of ``sh`` blocks, and code that is in a line."""
    lines = [line for block in blocks(file) if block.language == "sh" for line in block.text.splitlines()]
    inline = [" ".join(code.split()) for code in re.findall(r"(?<!`)`([^`]+)`(?!`)", prose(file))]
    for line in [*lines, *(code for code in inline if "PAGE" not in code and "COMMAND" not in code)]:
        for prefix in PREFIX:
            if line.startswith(f"{prefix} "):
                yield arguments(line.removeprefix(prefix))


def arguments(line: str) -> Sequence[str]:
    """Return the words of a shell line up to a comment, a pipe or a redirection."""
    words = shlex.shlex(line, posix=True, punctuation_chars=True)
    words.whitespace_split = True
    found: list[str] = []
    for word in words:
        if set(word) <= set("|<>&;"):
            break
        found.append(word)
    return found


ALL_COMMANDS = sorted({(file.name, *words) for file in FILES for words in commands(file)})
DRY_RUNS = [words for words in ALL_COMMANDS if "--dry_run" in words and any(word.startswith("--to=") for word in words)]


@pytest.mark.parametrize("words", ALL_COMMANDS, ids=" ".join)
def test_commands_parse(words: Sequence[str]) -> None:
    """Each command is one of tfps, and the real parser takes its flags and their values."""
    _, *argv = words
    name, *rest = argv if not argv[0].startswith("-") else ["run", *argv]
    if name == "help":
        assert all(page in COMMANDS or help_command.read_page(page) for page in rest)
        return
    flags = [word for word in rest if word.startswith("-") and word not in PLACEHOLDERS]
    handles = [word for word in rest if not word.startswith("-")]
    assert len(handles) <= (1 if COMMANDS[name].argument else 0)
    if flags != ["--help"]:
        parsed = command_line.parse(flags, COMMANDS[name].flags)
        assert dict(parsed.problems) == {}
        assert parsed.config.model in (*loader.BUILTIN, "model.py")


@pytest.mark.parametrize("words", DRY_RUNS, ids=" ".join)
def test_dry_runs_run(
    words: Sequence[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each command with ``--dry_run`` prints a plan."""
    (tmp_path / "model.py").write_text(example())
    monkeypatch.chdir(tmp_path)
    assert main.main(words[1:]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert "tfps" in out


@pytest.mark.parametrize("file", FILES, ids=name_of)
def test_other_commands_are_right(file: Path) -> None:
    """A line of an ``sh`` block that is no command of tfps is one of a few kinds, of which all parts exist."""
    extras = re.findall(
        r"^(\w+) = \[", (REPO / "pyproject.toml").read_text().partition("optional-dep")[2], re.MULTILINE
    )
    harness = (REPO / "tests/faults/harness/main.py").read_text()
    image = f"docker build -t tfps:{tfps.__version__} -f docker/Dockerfile ."
    for line in (line for block in blocks(file) if block.language == "sh" for line in block.text.splitlines()):
        if line.startswith(tuple(f"{prefix} " for prefix in PREFIX)):
            continue
        if match := re.fullmatch(r"pip install '\.\[(\w+)\]'", line):
            assert match[1] in extras
        elif match := re.fullmatch(r"(scripts/\w+|\.ci/run)(?: (.*))?", line):
            assert (REPO / match[1]).is_file()
            flags = re.findall(r"--\w+", match[2] or "") if match[1] == "scripts/faults" else []
            assert [flag for flag in flags if f'"{flag}"' not in harness] == []
        else:
            assert line in (image, "python -m tfps.cli.reference > tfps/docs/flags.md")


def test_there_are_commands_to_check() -> None:
    """The README and the pages have many, of every command, and a dry run for every platform."""
    names = {words[1] for words in ALL_COMMANDS}
    assert names >= set(COMMANDS)
    dry = {word for words in DRY_RUNS for word in words}
    assert dry >= {f"--to={platform}" for platform in LAUNCHERS}


@pytest.mark.parametrize("file", FILES, ids=name_of)
def test_blocks_are_of_a_known_language(file: Path) -> None:
    """A block is commands (sh), code (python) or output (text); what is in a python block compiles."""
    for block in blocks(file):
        assert block.language in CODE
        if block.language == "python":
            ast.parse(block.text)
    assert file.read_text().count("```") == 2 * len(blocks(file))


@pytest.mark.parametrize("file", FILES, ids=name_of)
def test_mentions_no_flag_that_is_not(file: Path) -> None:
    """A page names no flag that tfps, or a program of the list above, does not have."""
    mentioned = set(re.findall(r"(?<![\w-])--([a-z_]+)\b(?!-)", file.read_text()))
    assert mentioned - set(command_line.FLAGS) - FOREIGN == set()


@pytest.mark.parametrize("file", [*FILES, REPO / "CHANGELOG.md"], ids=name_of)
def test_links_lead_somewhere(file: Path) -> None:
    """Each relative link is a file of the repository, and what is after # is a heading there."""
    for link in re.findall(r"\]\(([^)\s]+)\)", prose(file)):
        if "://" in link:
            continue
        path, _, anchor = link.partition("#")
        target = (file.parent / path).resolve() if path else file
        assert target.is_file(), link
        assert not anchor or anchor in anchors(target), link


def anchors(file: Path) -> set[str]:
    """Return what a link to a heading of a page can end with."""
    headings = re.findall(r"^#+ (.+)$", prose(file), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("file", PAGES, ids=name_of)
def test_pages_can_be_found(file: Path) -> None:
    """Each page begins with a heading, is in the index, and no line of its prose is too long for a terminal."""
    text = file.read_text()
    assert text.startswith("# ")
    assert text.endswith("\n")
    assert file.stem in help_command.page_summaries()
    wide = [line for line in prose(file).splitlines() if len(line) > 125 and not line.startswith(("|", "- ["))]
    assert wide == []


def test_scripts_are_there() -> None:
    """The scripts that are named exist."""
    named = {name for file in FILES for name in re.findall(r"(?<![\w/])scripts/[\w/.]*\w", file.read_text())}
    assert {"scripts/demo", "scripts/test"} <= named
    assert [name for name in named if not (REPO / name).exists()] == []


@pytest.mark.parametrize("script", ["scripts/demo", "scripts/test"])
def test_readme_has_the_set_up_commands(script: str) -> None:
    """People and machines find the two commands that set up everything, each on its own line of the README."""
    assert script in [line for block in blocks(REPO / "README.md") for line in block.text.splitlines()]


@pytest.mark.parametrize(
    ("given", "passed"),
    [
        ([], ["--model=mnist", "--num_ps=1", "--num_workers=2", "--max_steps=400"]),
        (["--num_ps=2"], ["--model=mnist", "--num_workers=2", "--max_steps=400", "--num_ps=2"]),
        (["--max-steps", "100", "-model=m.py"], ["--num_ps=1", "--num_workers=2", "--max-steps", "100", "-model=m.py"]),
        (
            ["--model_dir=a --model=b", "--seed=1"],
            [
                *("--model=mnist", "--num_ps=1", "--num_workers=2", "--max_steps=400"),
                "--model_dir=a --model=b",
                "--seed=1",
            ],
        ),
        (
            ["--num_workers=1", "--max_steps=5", "--model=linear", "--num_ps=2"],
            ["--num_workers=1", "--max_steps=5", "--model=linear", "--num_ps=2"],
        ),
    ],
)
def test_the_demo_passes_flags_on(tmp_path: Path, given: list[str], passed: list[str]) -> None:
    """Those of its user take the place of its own: a flag that is given twice is an error."""
    scripts, programs = tmp_path / "scripts", tmp_path / ".venv" / "bin"
    scripts.mkdir()
    programs.mkdir(parents=True)
    (scripts / "demo").write_bytes((REPO / "scripts" / "demo").read_bytes())
    for program, does in ((scripts / "venv", ""), (programs / "tfps", "printf '%s\\n' \"$@\"\n")):
        program.write_text(f"#!/bin/sh\n{does}")
        program.chmod(0o755)
    shown = subprocess.run(["bash", scripts / "demo", *given], capture_output=True, text=True, check=True)
    assert shown.stdout.splitlines() == ["launch", *passed]
    assert dict(command_line.parse(passed, COMMANDS["launch"].flags).problems) == {}


def test_the_page_of_flags_is_made_from_the_flags() -> None:
    """Each flag has its row, with the help, the choices and the default that ``--help`` shows.

    To make the page: python -m tfps.cli.reference > tfps/docs/flags.md
    """
    page = (DOCS / "flags.md").read_text()
    assert page == reference.flags_page()
    rows = re.findall(r"^\| `--(\w+)` \| .+ \|$", page, re.MULTILINE)
    assert sorted(rows) == sorted(command_line.FLAGS)


def test_every_exit_code_is_on_its_page() -> None:
    """Each class in ``tfps/errors.py`` has a row with its exit code, and each row is a class's."""
    rows = re.findall(r"^\| (\d+) \| `(\w+)` \|", (DOCS / "exit-codes.md").read_text(), re.MULTILINE)
    classes = [kind for _, kind in inspect.getmembers(errors, inspect.isclass) if issubclass(kind, tfps.TfpsError)]
    assert sorted(rows) == sorted((str(kind.exit_code), kind.__name__) for kind in classes)


def test_every_code_has_a_remedy() -> None:
    """Each exit code that a task ends with has its heading in the page on troubleshooting."""
    reported = set(re.findall(r"^## Exit code (\d+)", (DOCS / "troubleshooting.md").read_text(), re.MULTILINE))
    codes = {
        str(kind.exit_code) for _, kind in inspect.getmembers(errors, inspect.isclass) if hasattr(kind, "exit_code")
    }
    assert reported == codes - {"1", "128"}


def test_every_part_of_the_contract_is_in_models() -> None:
    """Each field of ``ModelSpec``, mode, parameter of the functions, optimizer and built-in model is on the page."""
    page = (DOCS / "models.md").read_text()
    fields = [field.name for field in dataclasses.fields(tfps.ModelSpec)]
    assert re.findall(r"^\| `(\w+)` \| .+ \| .+ \|$", page.partition("## ModelSpec")[2], re.MULTILINE)[
        : len(fields)
    ] == (fields)
    modes = [f"tfps.ModeKeys.{name}" for name in vars(tfps.ModeKeys) if name.isupper()]
    parameters = {parameter for signature in static_check.SIGNATURES.values() for parameter in signature}
    for name in (*modes, *parameters, *OPTIMIZERS, *loader.BUILTIN):
        assert re.search(rf"[`\[]{re.escape(name)}[`\]]", page), name


@pytest.mark.parametrize("mode", MODES)
def test_every_mode_has_its_section(mode: str) -> None:
    """The page on modes has a heading for each."""
    assert f"\n## {mode}\n" in (DOCS / "modes.md").read_text()


@pytest.mark.parametrize("platform", LAUNCHERS)
def test_every_platform_has_its_row(platform: str) -> None:
    """The index of platforms has a row for each value of ``--to``, with a link to its page; so has the README."""
    page = help_command.ALIASES.get(platform, platform)
    assert f"| [{page}]({page}.md) | `{platform}` |" in (DOCS / "platforms.md").read_text()
    readme = (REPO / "README.md").read_text()
    assert f"(tfps/docs/{page}.md)" in readme
    assert f"--to={platform}" in readme


def example() -> str:
    """Return the model of the quickstart, which is the README's, too."""
    [readme] = [block.text for block in blocks(REPO / "README.md") if block.language == "python"]
    [page] = [block.text for block in blocks(DOCS / "quickstart.md") if block.language == "python"]
    assert page == readme
    return readme


def test_the_example_trains(tmp_path: Path) -> None:
    """The README's own model trains and learns, by the README's command as it stands."""
    (tmp_path / "model.py").write_text(example())
    [train] = [words for words in commands(REPO / "README.md") if "--model=model.py" in words]
    ended = run_tfps(*train, cwd=tmp_path, timeout=280)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert summary(tmp_path / "runs" / "signs")["eval"]["accuracy"] > 0.9
