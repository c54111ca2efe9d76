"""Tasks that are lost at the end of a job, and started again one by one: every step is taken, and none twice."""

import signal
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from support.processes import PATIENCE, Process, load_variable, summary
from support.restarting_platform import Platform, platform

# Each update subtracts 1, and each evaluated value is the variable. Element n of a worker's input waits while the file
# hold-INDEX is in --data_dir and n is at least the number in it, a step while hold-step-INDEX is, and an evaluation
# while hold-eval is.
HELD = """
import pathlib
import time
import tensorflow.compat.v1 as tf
import tfps

def held(directory, name, element):
    file = pathlib.Path(directory) / f"hold-{name}"
    try:
        while element >= int(file.read_text() or 0):
            time.sleep(0.05)
    except FileNotFoundError:  # perhaps just now
        pass
    return element

def input_fn(mode, params, input_context):
    index = input_context.input_pipeline_id
    count = 1 if mode == "eval" else SIZES[index]
    name = "eval" if mode == "eval" else index
    wait = lambda n: tf.numpy_function(lambda n: held(params["data_dir"], name, n), [n], tf.int64)
    x = lambda n: tf.cast(tf.ensure_shape(wait(n), []), tf.float32)
    return tf.data.Dataset.range(count).map(lambda n: ({"x": x(n), "name": f"step-{name}"}, 0.0))

def model_fn(features, labels, mode, params):
    weight = tf.get_variable("weight", [], initializer=tf.zeros_initializer())
    wait = lambda name, x: held(params["data_dir"], name.decode(), x)
    x = tf.ensure_shape(tf.numpy_function(wait, [features["name"], features["x"]], tf.float32), [])
    loss = weight + 0.0 * x
    kept = tf.metrics.mean(loss)
    return tfps.ModelSpec(loss=loss, optimizer=tf.train.GradientDescentOptimizer(1.0), eval_metric_ops={"kept": kept})
"""
KILL, TERM = signal.SIGKILL, signal.SIGTERM


def _flags(directory: Path, *flags: str, **held: str) -> Sequence[str]:
    for name, text in held.items():
        _hold(directory, name, text)
    one = ("--steps_per_run=1", "--runs_in_flight=1", "--steps_to_validate=1", "--start_timeout_secs=60")
    return (f"--data_dir={directory}", *one, *flags)


def _hold(directory: Path, name: str, text: str = "") -> None:
    part = directory / f"{name}.part"
    part.write_text(text)
    part.rename(directory / f"hold-{name.removeprefix('w')}")


def _let_go(directory: Path, name: str) -> None:
    (directory / f"hold-{name}").unlink()


def _model(*sizes: int) -> str:
    return f"SIZES = {sizes}\n{HELD}"


def _wait_for_reports(task: Process, count: int) -> None:
    """Wait until a worker has reported so many steps."""
    deadline = time.monotonic() + 60 * PATIENCE
    while task.output().count("step=") < count:
        assert time.monotonic() < deadline, task.output()
        time.sleep(0.05)


def _check_updates(job: Platform, model_dir: Path, updates: int, codes: Sequence[int] = (0,)) -> None:
    """Wait for the end, and check how many updates the weight had, as it was saved and as it was evaluated."""
    assert set(job.wait(180).values()) == set(codes), job.said()
    reported = summary(model_dir)
    assert (reported["status"], reported["global_step"]) == ("done", updates), job.said()
    assert load_variable(model_dir, "weight") == -updates
    assert reported["eval"]["kept"] == -updates


@pytest.mark.parametrize(
    ("mode", "num_workers", "faults"),
    [("async", 1, (KILL, KILL)), ("async", 2, (KILL, KILL)), ("async", 2, (TERM, KILL)), ("sync", 1, (KILL, KILL))],
)
def test_a_chief_lost_in_the_evaluation_trains_no_more(
    tmp_path: Path, mode: str, num_workers: int, faults: Sequence[signal.Signals]
) -> None:
    """Where all input had ended before, its replacements evaluate and end the job, and read no input again."""
    flags = _flags(tmp_path, f"--mode={mode}", "--max_steps=1000", eval="")
    with platform(tmp_path, 1, num_workers, *flags, model=_model(25, 25)) as job:
        for count, fault in enumerate(faults, 1):
            chief = job.wait_for_start("worker/0", count)
            chief.wait_for("evaluating at step", 120)
            chief.signal(fault)
        job.wait_for_start("worker/0", len(faults) + 1).wait_for("evaluating at step", 120)
        _let_go(tmp_path, "eval")
        _check_updates(job, tmp_path / "m", 25 * (num_workers if mode == "async" else 1))
        assert job.starts["worker/0"] == len(faults) + 1


@pytest.mark.parametrize(("fault", "pause_secs"), [(TERM, 0.0), (KILL, 4.0)])
def test_the_end_waits_for_the_replacement_of_a_lost_worker(
    tmp_path: Path, fault: signal.Signals, pause_secs: float
) -> None:
    """In async, what is left of the input of a worker that is stopped or lost is used before the evaluation."""
    flags = _flags(tmp_path, "--max_steps=1000", w1="5")
    with platform(tmp_path, 1, 2, *flags, model=_model(10, 25)) as job:
        job.pause_secs = pause_secs
        job.tasks["worker/0"].wait_for("the input has ended", 120)
        _wait_for_reports(job.tasks["worker/1"], 5)
        job.tasks["worker/1"].signal(fault)
        job.wait_for_start("worker/1", 2)
        job.abandoned.add("worker/1")  # once is enough
        _let_go(tmp_path, "1")
        _check_updates(job, tmp_path / "m", 10 + 5 + 25)
        assert "the job ends without" not in job.said()


def test_the_end_does_not_wait_for_ever_for_a_lost_worker(tmp_path: Path) -> None:
    """Nobody starts it again: the job ends with what it has, and says whom it lacks."""
    flags = _flags(tmp_path, "--max_steps=1000", w1="5")
    with platform(tmp_path, 1, 2, *flags, model=_model(10, 25)) as job:
        job.abandoned.add("worker/1")
        job.tasks["worker/0"].wait_for("the input has ended", 120)
        _wait_for_reports(job.tasks["worker/1"], 5)
        job.tasks["worker/1"].signal(KILL)
        _check_updates(job, tmp_path / "m", 10 + 5, codes=(0, -KILL))
        assert "the job ends without worker/1: gone, and not replaced" in job.said()


def test_a_worker_that_comes_back_in_the_evaluation_trains_no_more(tmp_path: Path) -> None:
    """The variables that are evaluated are those that are saved, though its input would go on."""
    flags = _flags(tmp_path, "--max_steps=1000", w1="5", eval="")
    with platform(tmp_path, 1, 2, *flags, model=_model(10, 25)) as job:
        job.abandoned.add("worker/1")
        job.tasks["worker/0"].wait_for("the input has ended", 120)
        _wait_for_reports(job.tasks["worker/1"], 5)
        job.tasks["worker/1"].signal(KILL)
        job.tasks["worker/0"].wait_for("evaluating at step", 120)
        _let_go(tmp_path, "1")
        late = job.start("worker/1")
        try:
            assert late.wait(120) == 0, late.output()
            _let_go(tmp_path, "eval")
            _check_updates(job, tmp_path / "m", 10 + 5, codes=(0, -KILL))
        finally:
            late.end()


def test_one_last_step_is_taken_by_one_worker(tmp_path: Path) -> None:
    """A worker that comes back leaves the step that it was lost with to the one that takes it."""
    flags = _flags(tmp_path, "--max_steps=4", w0="1")
    _hold(tmp_path, "step-1")
    with platform(tmp_path, 1, 2, *flags, model=_model(100, 100)) as job:
        job.tasks["worker/0"].wait_for("step=1", 120)  # it holds the ticket of another one
        _let_go(tmp_path, "step-1")
        job.tasks["worker/1"].wait_for("step=3", 120)
        _hold(tmp_path, "step-1")
        job.tasks["worker/0"].signal(TERM)
        back = job.wait_for_start("worker/0", 2)
        _let_go(tmp_path, "0")
        back.wait_for("training: ", 120)
        with pytest.raises(AssertionError, match="still running"):
            back.wait(5)
        _let_go(tmp_path, "step-1")
        _check_updates(job, tmp_path / "m", 4)


def test_a_worker_lost_after_another_ones_input_has_ended(tmp_path: Path) -> None:
    """In sync, nothing is left to train then: its replacement leaves, and interrupts nobody."""
    flags = _flags(tmp_path, "--mode=sync", "--max_steps=1000", w1="10", eval="")
    with platform(tmp_path, 1, 2, *flags, model=_model(10, 20)) as job:
        job.tasks["worker/0"].wait_for("the input has ended", 120)
        job.tasks["worker/1"].signal(KILL)
        _let_go(tmp_path, "1")
        job.wait_for_start("worker/1", 2).wait_for("training: ", 120)
        _let_go(tmp_path, "eval")
        _check_updates(job, tmp_path / "m", 10)
        assert job.starts["worker/0"] == 1, "the chief goes on"


@pytest.mark.parametrize(
    ("lost", "sizes"),
    [
        ([["worker/1"]], (100, 100)),
        ([["worker/0"]], (100, 100)),
        ([["worker/0", "worker/1"]], (100, 100)),
        ([["worker/1"], ["worker/1"]], (100, 100)),
        ([["worker/1"]], (100, 12)),
    ],
)
def test_each_worker_of_sync_has_taken_each_step(
    tmp_path: Path, lost: Sequence[Sequence[str]], sizes: Sequence[int]
) -> None:
    """Lost right after steps that no heartbeat has told of, also in a job that ends with a worker's input."""
    updates, held = min(24, 5 * len(lost) + sizes[1]), max(lost[0])
    flags = _flags(tmp_path, "--mode=sync", "--max_steps=24", **{held.replace("worker/", "w"): "5"})
    with platform(tmp_path, 1, 2, *flags, model=_model(*sizes)) as job:
        for count, names in enumerate(lost, 1):
            for name in ("worker/0", "worker/1"):
                _wait_for_reports(job.wait_for_start(name, count if name in names else 1), 5)
            for name in names:
                job.tasks[name].signal(KILL)
            job.wait_for_start(held, count + 1)
        _let_go(tmp_path, held.removeprefix("worker/"))
        _check_updates(job, tmp_path / "m", updates)
        steps = {name: of["steps"] for name, of in summary(tmp_path / "m")["tasks"].items() if "steps" in of}
        assert steps == {"worker/0": updates, "worker/1": updates}
        assert job.said().count(f"done: {updates} steps of this worker") == 2


@pytest.mark.parametrize("mode", ["async", "sync"])
@pytest.mark.parametrize("lost", ["worker/0", "worker/1"])
def test_what_a_lost_worker_skipped_is_counted(tmp_path: Path, mode: str, lost: str) -> None:
    """It said so as it was stopped; its replacement skips the same batches again."""
    updates, sizes, index = 20, (10, 10) if mode == "async" else (100, 100), lost.removeprefix("worker/")
    flags = (f"--mode={mode}", f"--max_steps={1000 if mode == 'async' else updates}", "--on_nan=skip")
    bad = _model(*sizes).replace('"x": x(n)', '"x": tf.where(tf.equal(n, 2), math.nan, x(n))')
    with platform(tmp_path, 1, 2, *_flags(tmp_path, *flags, **{f"w{index}": "3"}), model=f"import math\n{bad}") as job:
        job.tasks[lost].wait_for("skipped a batch", 120)  # its third one; then it waits
        job.tasks[lost].signal(TERM)
        job.wait_for_start(lost, 2)
        _let_go(tmp_path, index)
        _check_updates(job, tmp_path / "m", updates)
        assert summary(tmp_path / "m")["batches_skipped"] == job.said().count("skipped a batch") == 3
