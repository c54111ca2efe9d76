"""The table of launchers: those that are built in, and those that other distributions offer."""

import os
from pathlib import Path

import pytest
from support.distributions import install
from support.processes import REPO, run_tfps

from tfps.config.command_line import FLAGS
from tfps.errors import ConfigError
from tfps.launchers.registry import LAUNCHERS

ECHO = """
import shlex
from dataclasses import dataclass
from typing import ClassVar

from tfps.jobs.spec import Job
from tfps.launchers.base import Launcher

@dataclass(frozen=True)
class ScriptPlan:
    job: Job
    is_printed_only: ClassVar[bool] = True

    def __str__(self):
        return f"exec {shlex.join(self.job.command())}"

class EchoLauncher(Launcher[ScriptPlan]):
    name = "echo"
    features = frozenset({"queues"})

    def plan(self, job):
        return ScriptPlan(job)

    def submit(self, plan):
        raise NotImplementedError

    def find(self, job_id):
        raise NotImplementedError

class Half(Launcher[ScriptPlan]):
    name = "half"

    def plan(self, job):
        return ScriptPlan(job)
"""


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a directory that modules are imported from, with a module of launchers."""
    (tmp_path / "echo_launcher.py").write_text(ECHO)
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


@pytest.mark.parametrize("name", LAUNCHERS)
def test_a_built_in_launcher_has_its_names(name: str) -> None:
    """Each launcher is made without arguments, has the name of its line, and has only features that a flag is for."""
    launcher = LAUNCHERS.load(name)
    assert launcher.name == name
    assert launcher.features <= {option.feature for option in FLAGS.values()}


def test_what_is_installed_is_a_choice(site: Path) -> None:
    """The names of offered launchers come after the built-in ones; a launcher of another group is none."""
    install(site, "tfps-echo", "echo = echo_launcher:EchoLauncher")
    install(site, "other", "another = echo_launcher:EchoLauncher", group="other.launchers")
    assert list(LAUNCHERS) == [*LAUNCHERS.builtin, "echo"]
    assert "echo" in LAUNCHERS
    assert "another" not in LAUNCHERS
    assert len(LAUNCHERS) == len(LAUNCHERS.builtin) + 1
    assert LAUNCHERS.load("echo").features == {"queues"}


def test_the_command_line_takes_what_is_installed(site: Path) -> None:
    """``--help`` lists an offered launcher, ``--to`` takes it with its own flags alone, and a handle may name it."""
    install(site, "tfps-echo", "echo = echo_launcher:EchoLauncher")
    env = {"PYTHONPATH": f"{site}{os.pathsep}{REPO}"}
    assert "slurm, echo" in " ".join(run_tfps("submit", "--help", **env).stdout.split())
    planned = run_tfps("submit", "--to=echo", "--model=mnist", "--num_workers=3", "--queue=a", "--name=n", **env)
    assert (planned.returncode, planned.stderr) == (0, "nothing was started, as --to=echo only prints.\n")
    assert planned.stdout.startswith("exec ")
    assert "--model=mnist" in planned.stdout
    refused = run_tfps("submit", "--to=echo", "--model=mnist", "--ssh=1", **env)
    assert (refused.returncode, refused.stdout) == (2, "")
    assert refused.stderr == "error: --ssh is not supported with --to=echo: leave it out.\n"
    assert "is not a job handle" not in run_tfps("status", "echo:1", **env).stderr


@pytest.mark.parametrize(
    ("point", "reported"),
    [
        ("bad = no_such_module:Launcher", "cannot be imported: ModuleNotFoundError: No module named 'no_such_module'"),
        ("bad = echo_launcher:Missing", "cannot be imported: AttributeError"),
        ("bad = echo_launcher:ScriptPlan", "is no subclass of tfps.launchers.base.Launcher"),
        ("bad = echo_launcher:shlex", "is no subclass of tfps.launchers.base.Launcher"),
        ("half = echo_launcher:Half", "lacks find, submit."),
        ("bad = echo_launcher:EchoLauncher", "has another name, 'echo': handles and summaries have that."),
    ],
)
def test_what_is_no_launcher_names_its_distribution(site: Path, point: str, reported: str) -> None:
    """The error of a bad entry point names the distribution that offers it; its name is a choice still."""
    install(site, "tfps-bad", point)
    name = point.partition(" ")[0]
    assert name in LAUNCHERS
    with pytest.raises(ConfigError, match=r"of the distribution tfps-bad 1\.2, (echo|no)_") as error:
        LAUNCHERS.load(name)
    assert reported in str(error.value)


def test_no_launcher_takes_another_ones_name(site: Path) -> None:
    """A built-in launcher's name that a distribution offers, too, is refused, and one that two offer; no other is."""
    install(site, "tfps-mine", "slurm = echo_launcher:EchoLauncher", "echo = echo_launcher:EchoLauncher")
    install(site, "tfps-too", "echo = echo_launcher:EchoLauncher")
    assert list(LAUNCHERS).count("slurm") == 1
    with pytest.raises(ConfigError, match="tfps itself and the distribution tfps-mine"):
        LAUNCHERS.load("slurm")
    with pytest.raises(ConfigError, match=r"tfps-mine 1\.2, the distribution tfps-too 1\.2 offer"):
        LAUNCHERS.load("echo")
    assert LAUNCHERS.load("ray").name == "ray"


def test_a_task_does_not_read_what_is_installed(site: Path) -> None:
    """``tfps run`` asks no distribution for launchers: a broken one does not keep a task from its start."""
    install(site, "tfps-bad", "bad = no_such_module:Launcher")
    (site / "sitecustomize.py").write_text(
        "from importlib import metadata\n"
        "def entry_points(**kw):\n"
        "    assert kw.get('group') != 'tfps.launchers', 'read'\n"
        "    return []\n"
        "metadata.entry_points = entry_points\n"
    )
    env = {"PYTHONPATH": f"{site}{os.pathsep}{REPO}"}
    assert "--job_name is missing" in run_tfps("run", "--ps_hosts=a:1", "--worker_hosts=b:1", **env).stderr
    assert "AssertionError: read" in run_tfps("submit", "--to=echo", **env).stderr
