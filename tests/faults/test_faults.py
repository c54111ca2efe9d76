"""Every kind of fault, once in each mode: the short set of what ``scripts/faults`` does again and again."""

import subprocess
from collections.abc import Mapping

import pytest
from support.processes import REPO, environment

SHORT = (
    *("worker_killed", "chief_killed_saving", "fast_ps_killed", "ps_killed_saving", "ps_and_worker_killed"),
    *("cut_reset_5s", "other_mode", "disk_full", "save_killed", "ckpt_flipped", "two_signals", "launcher_killed"),
    *("one_step", "uneven_data", "nan_worker", "exit_zero"),
)
MODES = ("async", "sync")


@pytest.fixture(scope="module")
def reported(tmp_path_factory: pytest.TempPathFactory) -> Mapping[tuple[str, str], str]:
    """Run the faults, three jobs at a time; return what is reported of each, by its name and mode."""
    command = [
        "scripts/faults",
        "--program=tfps",
        "--repeat=1",
        "--at_once=3",
        "--time_scale=3",  # a slow machine is no failure; the table is for times
        f"--out={tmp_path_factory.mktemp('out')}",
    ]
    ended = subprocess.run(
        [*command, *(f"--fault={name}" for name in SHORT)],
        cwd=REPO,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=1500,
        check=False,
    )
    lines = [line for line in ended.stdout.splitlines() if " tfps " in line]
    assert len(lines) == len(SHORT) * len(MODES), ended.stdout + ended.stderr
    return {(name, mode): line for line in lines for _, name, mode in [line.split()[:3]]}


@pytest.mark.timeout(1600)  # the first one's, which waits for all
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("fault", SHORT)
def test_a_fault_is_survived(reported: Mapping[tuple[str, str], str], fault: str, mode: str) -> None:
    """It happens, and what ``harness/faults.py`` says comes of it; no process is left."""
    assert reported[fault, mode].split()[5] == "ok", reported[fault, mode]
