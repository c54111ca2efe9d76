"""Tasks that are lost and started again one by one, as platforms do it: the job goes on, and ends as it would have."""

import contextlib
import json
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.processes import PATIENCE, POWERS, Process, load_variable, slow, summary

from tfps.cluster.ports import held_ports

STEPS = {"async": 1_000, "sync": 500}  # at 10 ms each: it is far from its end when a task is killed
DIVERGING = POWERS.replace('weight * features["x"]', 'tf.square(weight * features["x"] + 1.0) * 100.0')


class Platform:
    """Starts every task of a cluster, and again those that end with a code from 128 up or by a signal."""

    def __init__(self, directory: Path, ports: list[int], num_ps: int, flags: list[str]) -> None:
        hosts = [f"127.0.0.1:{port}" for port in ports]
        self._cluster = [f"--ps_hosts={','.join(hosts[:num_ps])}", f"--worker_hosts={','.join(hosts[num_ps:])}", *flags]
        self._directory = directory
        ps, workers = [f"ps/{i}" for i in range(num_ps)], [f"worker/{i}" for i in range(len(hosts) - num_ps)]
        self.starts = dict.fromkeys([*ps, *workers], 0)
        self.tasks = {name: self._start(name) for name in self.starts}
        self.codes: dict[str, int] = {}
        self._over = False
        self._keeper = threading.Thread(target=self._keep, daemon=True)
        self._keeper.start()

    def _start(self, name: str) -> Process:
        job, index = name.split("/")
        self.starts[name] += 1
        output = self._directory / f"{job}-{index}-{self.starts[name]}.out"
        return Process(output, *self._cluster, f"--job_name={job}", f"--task_index={index}")

    def _keep(self) -> None:
        while not self._over and len(self.codes) < len(self.tasks):
            for name, task in self.tasks.items():
                code = task.poll()
                if code is None or name in self.codes:
                    continue
                if (code < 0 or code >= 128) and self.starts[name] < 12:
                    self.tasks[name] = self._start(name)
                else:
                    self.codes[name] = code
            time.sleep(0.1)

    def wait(self, secs: float) -> dict[str, int]:
        """Return every task's last exit code."""
        self._keeper.join(secs * PATIENCE)
        assert not self._keeper.is_alive(), f"not over after {secs} s: {self.codes}, {self.starts}\n{self.said()}"
        return self.codes

    def said(self) -> str:
        """Return what all tasks have said."""
        return "\n".join(f"{path.name}:\n{path.read_text()}" for path in sorted(self._directory.glob("*.out")))

    def end(self) -> None:
        """End what runs."""
        self._over = True
        self._keeper.join(10)
        for task in self.tasks.values():
            task.end()


@contextlib.contextmanager
def platform(directory: Path, num_ps: int, num_workers: int, *flags: str, model: str = POWERS) -> Iterator[Platform]:
    """Run a cluster under such a platform."""
    file = directory / "model.py"
    file.write_text(model)
    given = [f"--model={file}", f"--model_dir={directory / 'm'}", "--save_checkpoint_secs=1", *flags]
    with held_ports(num_ps + num_workers) as ports:
        running = Platform(directory, ports, num_ps, given)
        try:
            yield running
        finally:
            running.end()


@pytest.mark.parametrize("mode", STEPS)
@pytest.mark.parametrize("lost", ["worker/1", "worker/0", "ps/1"])
def test_a_killed_task_that_is_started_again(tmp_path: Path, mode: str, lost: str) -> None:
    """Whichever task is killed in training, the job takes all its steps, no task hangs, and all end with 0."""
    steps = STEPS[mode]
    flags = (f"--mode={mode}", f"--max_steps={steps}", "--start_timeout_secs=60")
    with platform(tmp_path, 2, 2, *flags, model=slow(0.01)) as job:
        job.tasks["worker/0"].wait_for("saved ", 120)
        _spoil_record(tmp_path / "m", is_gone=lost == "worker/1")
        killed = job.tasks[lost]
        killed.signal(signal.SIGKILL)
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
        late = job._start("worker/1")
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


ENDING = """
import time
import tensorflow.compat.v1 as tf
import tfps

def input_fn(mode, params, input_context):
    return tf.data.Dataset.range(25).map(lambda one: ({"x": tf.cast(one, tf.float32)}, 0.0))

def slow(y):
    time.sleep(0.4)
    return y

def model_fn(features, labels, mode, params):
    weight = tf.get_variable("weight", [], initializer=tf.zeros_initializer())
    loss = weight + 0.0 * features["x"]
    kept = tf.metrics.mean(tf.py_func(slow, [loss], tf.float32))
    return tfps.ModelSpec(loss=loss, optimizer=tf.train.GradientDescentOptimizer(1.0), eval_metric_ops={"kept": kept})
"""


@pytest.mark.parametrize("num_workers", [1, 2])
def test_a_chief_that_is_lost_in_the_evaluation_takes_no_more_steps(tmp_path: Path, num_workers: int) -> None:
    """Where all input had ended before, its replacement evaluates and ends the job, and reads no input again."""
    with platform(tmp_path, 1, num_workers, "--max_steps=1000", "--start_timeout_secs=60", model=ENDING) as job:
        chief = job.tasks["worker/0"]
        chief.wait_for("evaluating at step", 120)
        chief.signal(signal.SIGKILL)
        assert set(job.wait(180).values()) == {0}, job.said()
        assert job.starts["worker/0"] == 2
    reported = summary(tmp_path / "m")
    assert (reported["status"], reported["global_step"]) == ("done", 25 * num_workers)
    assert load_variable(tmp_path / "m", "weight") == -25 * num_workers
