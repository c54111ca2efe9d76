"""``tfps help``: a list, a page, a command's flags."""

import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest
from support.processes import REPO, TFPS, environment, run_tfps

from tfps.cli import help as help_command
from tfps.cli import main
from tfps.cli.registry import COMMANDS
from tfps.launchers.registry import LAUNCHERS
from tfps.modes.registry import MODES

DOCS = REPO / "tfps" / "docs"


def test_the_list_has_every_command_and_page(capsys: pytest.CaptureFixture[str]) -> None:
    """``tfps help`` lists each command with its summary and each page with what is on it."""
    assert main.main(["help"]) == 0
    lines = capsys.readouterr().out.splitlines()
    for name, command in COMMANDS.items():
        assert f"  {name:<8} {command.summary}" in lines
    pages = [line.split()[0] for line in lines[lines.index('Pages, for "tfps help PAGE":') + 1 :]]
    assert sorted(pages) == sorted(file.stem for file in DOCS.glob("*.md"))
    assert (
        f"  {'modes':<16} async, sync, ssp, local, allreduce, gossip: their arithmetic, and which one to use" in lines
    )


def test_no_page_has_the_name_of_a_command() -> None:
    """A name is a page or a command, so nothing hides behind the other; an alias leads to a page and hides none."""
    pages = set(help_command.page_summaries())
    assert pages == {file.stem for file in DOCS.glob("*.md")}
    assert not pages & {*COMMANDS, "help", "version"}
    assert set(help_command.ALIASES.values()) <= pages
    assert not set(help_command.ALIASES) & {*pages, *COMMANDS}


@pytest.mark.parametrize("platform", ["local", *LAUNCHERS])
def test_every_platform_has_a_page(platform: str) -> None:
    """What ``--to`` takes can be given to ``tfps help``."""
    assert help_command.read_page(platform).startswith("# ")


@pytest.mark.parametrize("mode", [mode for mode in MODES.builtin if mode != "local"])
def test_every_mode_leads_to_its_section(mode: str) -> None:
    """What ``--mode`` takes can be given to ``tfps help``, which says from which page the text is."""
    first, *rest = help_command.read_page(mode).splitlines()
    assert first == f"## {mode}"
    assert rest.pop() == f"This is the section {mode} of the page modes: tfps help modes shows all of it."
    assert len("\n".join(rest)) > 200
    assert "\n".join(rest).strip() in (DOCS / "modes.md").read_text()
    assert not [line for line in rest if line.startswith("## ")]


def test_the_mode_local_is_found() -> None:
    """``local`` is the page of this machine, which says where the mode is; the mode's other names lead to it."""
    assert "`tfps help modes`" in help_command.read_page("local").partition("\n\n")[2].partition("\n\n")[0]
    assert help_command.read_page("fedavg").startswith("## local\n")


@pytest.mark.parametrize("word", ["--staleness", "--staleness=3", "-staleness"])
def test_a_flag_has_its_line(capsys: pytest.CaptureFixture[str], word: str) -> None:
    """``tfps help --FLAG`` shows what the page of flags says, and which commands take it."""
    assert main.main(["help", word]) == 0
    line, owners = capsys.readouterr().out.splitlines()
    assert line.startswith("--staleness: ssp: how many steps")
    assert f"| `--staleness` | {line.partition(': ')[2]} |" in (DOCS / "flags.md").read_text()
    assert owners == "Taken by tfps run, tfps launch, tfps submit, tfps plan, tfps doctor."


def test_a_flag_that_does_not_exist(capsys: pytest.CaptureFixture[str]) -> None:
    """It is exit code 2, with the nearest flag; ``--help`` itself is the list of commands."""
    assert main.main(["help", "--stalenes"]) == 2
    said = "error: --stalenes is not a known flag. Did you mean --staleness? Run tfps help flags for a list.\n"
    assert capsys.readouterr() == ("", said)
    assert main.main(["help", "--help"]) == 0
    assert capsys.readouterr().out.rstrip() == help_command.usage()


def test_a_page_that_is_piped_is_plain(tmp_path: Path) -> None:
    """``tfps help PAGE`` writes the file as it is, starts no pager, and does not import TensorFlow."""
    (tmp_path / "tensorflow").mkdir()
    (tmp_path / "tensorflow" / "__init__.py").write_text("raise SystemExit('imported')\n")
    path = f"{tmp_path}{os.pathsep}{REPO}"
    ended = run_tfps("help", "models", cwd=tmp_path, PAGER="false", PYTHONPATH=path)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert ended.stdout == (DOCS / "models.md").read_text()


def test_a_terminal_has_a_pager(tmp_path: Path) -> None:
    """On a terminal the page goes through the user's pager."""
    terminal, end = pty.openpty()
    pager = f"{sys.executable} -c \"import sys; open('seen', 'w').write(sys.stdin.read())\""
    command = [*TFPS, "help", "glossary"]
    env = environment(PAGER=pager, MANPAGER=pager, TERM="xterm")
    try:
        ended = subprocess.run(command, cwd=tmp_path, stdin=end, stdout=end, env=env, timeout=60, check=False)
    finally:
        os.close(end)
        os.close(terminal)
    assert ended.returncode == 0
    assert (tmp_path / "seen").read_text() == (DOCS / "glossary.md").read_text()


@pytest.mark.parametrize(
    ("name", "hint"),
    [("modls", " Did you mean models?"), ("lanch", " Did you mean launch?"), ("zzz", "")],
)
def test_a_wrong_page(capsys: pytest.CaptureFixture[str], name: str, hint: str) -> None:
    """A name that is neither a page nor a command is exit code 2, with the nearest name."""
    assert main.main(["help", name]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err == f"error: {name} is neither a page nor a command of tfps.{hint} Run tfps help for a list.\n"


def test_two_names(capsys: pytest.CaptureFixture[str]) -> None:
    """``tfps help`` takes one name."""
    assert main.main(["help", "models", "modes"]) == 2
    assert capsys.readouterr().err == "error: tfps help takes one name, not 2: 'models modes'.\n"


def test_help_shows_no_default_where_the_jobs_own_values_hold() -> None:
    """``tfps eval`` and ``tfps export`` take what is not given from ``job.json``."""
    of_batches = {name for name, command in COMMANDS.items() if "batch_size" in command.flags}
    shown = {name for name in of_batches if "(default 128)" in help_command.command_help(name)}
    assert of_batches - shown == {"eval", "export"}
    assert "(default: the newest)" in help_command.command_help("eval")
