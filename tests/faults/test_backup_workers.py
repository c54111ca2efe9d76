"""A job with a backup worker whose worker is lost: the others need it for no update."""

import os
import signal
from pathlib import Path

import pytest
from support.processes import by_hand, children_of, load_variable, session_leaders, slow, summary

FLAGS = ("--mode=sync", "--backup_workers=1", "--max_steps=300", "--steps_to_validate=10", "--stall_timeout_secs=20")


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_lost_worker_holds_nobody(tmp_path: Path, how: signal.Signals) -> None:
    """Killed or frozen, and never replaced: the others end at ``max_steps``, with two gradients in each update."""
    model = tmp_path / "slow.py"
    model.write_text(slow(0.05))
    with by_hand(tmp_path, 1, 3, *FLAGS, f"--model={model}", f"--model_dir={tmp_path / 'm'}") as tasks:
        tasks["worker/0"].wait_for_step(30, 100)
        tasks["worker/2"].signal(how)
        assert tasks["worker/0"].wait(100) == 0
        assert tasks["worker/1"].wait(30) == 0
    reported = summary(tmp_path / "m")
    assert reported["global_step"] == 300
    steps = [reported["tasks"][f"worker/{index}"]["steps"] for index in range(3)]
    assert sum(steps) == 600
    assert steps[2] < 100
    assert load_variable(tmp_path / "m", "weight") == -sum(2**i * taken for i, taken in enumerate(steps)) / 2


def test_a_worker_that_is_replaced_takes_part_again(tmp_path: Path) -> None:
    """All go on together, no step is lost, and each update has two gradients."""
    model = tmp_path / "slow.py"
    model.write_text(slow(0.05))
    flags = (*FLAGS, f"--model={model}", f"--model_dir={tmp_path / 'm'}", "--max_restarts=1")
    with by_hand(tmp_path, 1, 3, *flags) as tasks:
        tasks["worker/0"].wait_for_step(30, 100)
        [child] = session_leaders(children_of(tasks["worker/2"].pid))
        os.kill(child, signal.SIGKILL)
        assert [tasks[f"worker/{index}"].wait(100) for index in range(3)] == [0, 0, 0]
    reported = summary(tmp_path / "m")
    assert reported["global_step"] == 300
    steps = [reported["tasks"][f"worker/{index}"]["steps"] for index in range(3)]
    assert sum(steps) == 600
    assert load_variable(tmp_path / "m", "weight") == -sum(2**i * taken for i, taken in enumerate(steps)) / 2
