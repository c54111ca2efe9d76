"""Tasks that are lost and started again one by one, as platforms do it: the job goes on, and ends as it would have."""

import json
import signal
from pathlib import Path

import pytest
from support.processes import POWERS, load_variable, slow, summary
from support.restarting_platform import platform

STEPS = {"async": 1_000, "sync": 500}  # at 10 ms each
DIVERGING = POWERS.replace('weight * features["x"]', 'tf.square(weight * features["x"] + 1.0) * 100.0')


@pytest.mark.parametrize("mode", STEPS)
@pytest.mark.parametrize("lost", ["worker/1", "worker/0", "ps/1"])
def test_a_killed_task_that_is_started_again(tmp_path: Path, mode: str, lost: str) -> None:
    """Whichever task is killed in training, the job takes all its steps, no task hangs, and all end with 0."""
    steps = STEPS[mode]
    flags = (f"--mode={mode}", f"--max_steps={steps}", "--start_timeout_secs=60")
    with platform(tmp_path, 2, 2, *flags, model=slow(0.01, until=tmp_path / "go", batch=400)) as job:
        job.tasks["worker/0"].wait_for("saved ", 120)
        _spoil_record(tmp_path / "m", is_gone=lost == "worker/1")
        killed = job.tasks[lost]
        killed.signal(signal.SIGKILL)
        (tmp_path / "go").touch()
        assert killed.wait(100) == -signal.SIGKILL
        assert set(job.wait(180).values()) == {0}, job.said()
        reported = summary(tmp_path / "m")
        assert (reported["status"], reported["global_step"]) == ("done", steps)
        assert json.loads((tmp_path / "m" / "job.json").read_text())["launch"] is None, "the chief writes it again"
        assert job.starts[lost] >= 2
        if lost != "ps/1" and "no answer for" not in job.said():  # a slow machine starts a new one too late for others
            others = {name: count for name, count in job.starts.items() if name != lost}
            assert set(others.values()) == {1}, "a worker alone can be replaced"
            assert ("continuing from step" in job.said()) == (lost == "worker/0")
            assert ("all workers continue from step" in job.said()) == (mode == "sync")
        if mode == "sync":
            assert load_variable(tmp_path / "m", "weight") == -1.5 * steps, "each update is the exact mean"


def _spoil_record(model_dir: Path, is_gone: bool) -> None:
    """Remove ``job.json``, or make it that of the same run under another launcher."""
    file = model_dir / "job.json"
    record = json.loads(file.read_text())
    file.unlink()
    if not is_gone:
        file.write_text(json.dumps({**record, "launch": "another"}))


def test_a_task_that_comes_after_the_end(tmp_path: Path) -> None:
    """A worker that is lost at the very end and started again when all have left ends with 0, and soon."""
    with platform(tmp_path, 1, 2, "--max_steps=100") as job:
        assert set(job.wait(120).values()) == {0}
        late = job.start("worker/1")
        try:
            assert late.wait(120) == 0
            assert "the job has already ended" in late.output()
        finally:
            late.end()


@pytest.mark.parametrize("mode", STEPS)
def test_a_job_that_fails_for_good_keeps_no_ps(tmp_path: Path, mode: str) -> None:
    """When the loss diverges no task is started again in vain: the worker that saw it and the PS end with 66."""
    flags = (f"--mode={mode}", "--max_steps=1000000", "--start_timeout_secs=60")
    with platform(tmp_path, 2, 1, *flags, model=DIVERGING) as job:
        assert job.wait(90) == {"ps/0": 66, "ps/1": 66, "worker/0": 66}, job.said()
        assert "ps-0-1.out:" in job.said()
        assert "worker/0 has failed with exit code 66" in job.said()
