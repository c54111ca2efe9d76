"""Every kind of fault, once: the short set of what ``scripts/faults`` does again and again."""

import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
from support.processes import REPO, environment

SHORT = {  # some in the mode in which they are harder
    "async": (
        *("worker_killed", "chief_killed_saving", "fast_ps_killed", "ps_killed_saving", "cut_reset_5s", "disk_full"),
        *("save_killed", "two_signals", "uneven_data", "nan_worker"),
    ),
    "sync": (
        *("worker_killed", "fast_ps_killed", "ps_killed_saving", "ps_and_worker_killed", "other_mode", "ckpt_flipped"),
        *("launcher_killed", "one_step", "uneven_data", "exit_zero"),
    ),
    "allreduce": ("no_ps_worker_killed", "no_ps_chief_killed", "no_ps_cut_reset_5s"),
    "gossip": ("no_ps_worker_killed", "no_ps_chief_killed"),
    "ssp": ("worker_killed", "ps_killed"),
    "backup": ("worker_killed", "chief_killed"),
    "local": ("worker_killed", "chief_killed", "ps_killed"),
}


@pytest.fixture(scope="module")
def reported(tmp_path_factory: pytest.TempPathFactory) -> Mapping[tuple[str, str], str]:
    """Run the faults, three jobs at a time; return what is reported of each, by its name and mode."""
    return {
        (name, mode): line
        for mode, names in SHORT.items()
        for line in _run(mode, names, tmp_path_factory.mktemp("out"))
        for _, name, *_ in [line.split()]
    }


def _run(mode: str, names: Sequence[str], out: Path) -> list[str]:
    command = [
        *("scripts/faults", "--program=tfps", "--repeat=1", "--at_once=3", f"--mode={mode}", f"--out={out}"),
        "--time_scale=3",  # a slow machine is no failure; the table is for times
    ]
    ended = subprocess.run(
        [*command, *(f"--fault={name}" for name in names)],
        cwd=REPO,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=1500,
        check=False,
    )
    lines = [line for line in ended.stdout.splitlines() if " tfps " in line]
    assert len(lines) == len(names), ended.stdout + ended.stderr
    return lines


@pytest.mark.timeout(3100)  # the first one's, which waits for all
@pytest.mark.parametrize(("mode", "fault"), [(mode, fault) for mode, names in SHORT.items() for fault in names])
def test_a_fault_is_survived(reported: Mapping[tuple[str, str], str], fault: str, mode: str) -> None:
    """It happens, and what ``harness/faults.py`` says comes of it; no process is left."""
    assert reported[fault, mode].split()[5] == "ok", reported[fault, mode]


@pytest.mark.slow
@pytest.mark.timeout(1600)
def test_faults_of_a_service_are_survived(tmp_path: Path) -> None:
    """What ``scripts/faults --service`` does again and again, some of it once."""
    faults = [f"--fault={name}" for name in ("client_killed", "ps_killed", "ps_restarted", "cut_reset_3s", "garbage")]
    command = [
        "scripts/faults",
        "--service",
        "--repeat=1",
        "--at_once=2",
        "--time_scale=3",
        f"--out={tmp_path}",
        *faults,
    ]
    ended = subprocess.run(
        command, cwd=REPO, env=environment(), capture_output=True, text=True, timeout=1500, check=False
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert ended.stdout.count("outcome=ok") == 2 * len(faults)
