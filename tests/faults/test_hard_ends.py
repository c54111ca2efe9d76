"""Tasks that end before their work has ended, and jobs that are asked twice to end: real processes."""

import re
import signal
import time
from pathlib import Path

import pytest
from support.processes import PATIENT, POWERS, Process, load_variable, processes, run_tfps, slow, summary, wait_gone

MODEL = """
import os, sys
import numpy as np
import tensorflow.compat.v1 as tf
import tfps

def act(worker, n):
    if (worker, n) == (1, 20) and not os.path.exists({once!r}):
        {act}
    return np.float32(1)

def input_fn(mode, params, input_context):
    if mode == "eval":
        return None
    worker = input_context.input_pipeline_id
    def value(n):
        x = tf.numpy_function(lambda n: act(worker, int(n)), [n], tf.float32)
        return {{"x": tf.ensure_shape(x, [])}}, 0.0
    return tf.data.Dataset.range(10**9).map(value)

def model_fn(features, labels, mode, params):
    weight = tf.get_variable("weight", [], initializer=tf.zeros_initializer())
    return tfps.ModelSpec(loss=-weight * features["x"], optimizer=tf.train.GradientDescentOptimizer(1.0))
"""


def model(tmp_path: Path, act: str, once: str = "never") -> str:
    """Write a model whose worker 1 does something at its 20th batch, once or always; returns the flag for it."""
    path = tmp_path / "acting.py"
    path.write_text(MODEL.format(act=act, once=str(tmp_path / once)))
    return f"--model={path}"


@pytest.mark.parametrize("mode", ["async", "sync"])
def test_a_task_that_exits_with_0_too_early_is_lost(tmp_path: Path, mode: str) -> None:
    """A worker that something ends with code 0 is started again; where it always ends so, the job ends with 170."""
    flags = [f"--model_dir={tmp_path / 'm'}", "--max_steps=1000000", f"--mode={mode}", "--max_restarts=1"]
    ended = run_tfps("launch", model(tmp_path, "os._exit(0)"), *flags)
    assert ended.returncode == 170, ended.stdout + ended.stderr
    assert "worker/1 | restarted after exit code 0 before it was done (1 of 1)" in ended.stdout
    assert "error: worker/1: ended with exit code 0 before it was done" in ended.stderr
    assert summary(tmp_path / "m")["tasks"]["worker/1"]["exit_code"] == 170


def test_a_task_that_exits_with_0_once_costs_no_step(tmp_path: Path) -> None:
    """The job goes on when such a worker is back, and comes to its last step."""
    act = f"open({str(tmp_path / 'did')!r}, 'w').close(); os._exit(0)"
    flags = [f"--model_dir={tmp_path / 'm'}", "--max_steps=100", "--mode=sync"]
    ended = run_tfps("launch", model(tmp_path, act, "did"), *flags)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert load_variable(tmp_path / "m", "weight") == 100


def test_a_model_that_calls_sys_exit_has_not_done_its_job(tmp_path: Path) -> None:
    """``sys.exit()`` in a model is no success, but the model's mistake, reported with its line."""
    path = tmp_path / "leaving.py"
    function = "def {}(*_):\n    made = sys.exit(0)\n    return made\n"
    path.write_text(f"import sys\n{function.format('input_fn')}{function.format('model_fn')}")
    ended = run_tfps("launch", f"--model={path}", f"--model_dir={tmp_path / 'm'}", "--max_restarts=0")
    assert ended.returncode == 2, ended.stdout + ended.stderr
    assert f"{path}, line 3: SystemExit: 0" in ended.stderr


def test_much_output_without_an_end_of_line_stalls_nothing(tmp_path: Path) -> None:
    """A task that writes 30 MB without a newline is read as fast as it writes."""
    act = f"open({str(tmp_path / 'did')!r}, 'w').close(); os.write(1, b'x' * 30_000_000)"
    flags = [f"--model_dir={tmp_path / 'm'}", "--max_steps=100", "--mode=sync"]
    with processes() as started:
        started.append(Process(tmp_path / "out", "launch", model(tmp_path, act, "did"), *flags))
        assert started[0].wait(60) == 0, started[0].output()[-1000:]
        assert started[0].output().count("x") >= 30_000_000


def test_an_exit_hook_that_blocks_keeps_no_task(tmp_path: Path) -> None:
    """The job ends in time, and well, although a hook of the model's never returns."""
    act = f"open({str(tmp_path / 'did')!r}, 'w').close(); __import__('atexit').register(__import__('time').sleep, 1000)"
    flags = [f"--model_dir={tmp_path / 'm'}", "--max_steps=100", "--mode=sync"]
    ended = run_tfps("launch", model(tmp_path, act, "did"), *flags)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert (tmp_path / "did").exists()


def test_a_process_that_a_model_forked_ends_with_its_task(tmp_path: Path) -> None:
    """Nothing of a job runs on after it, what its model started and left behind included."""
    act = f"open({str(tmp_path / 'did')!r}, 'w').write(str(os.fork() or __import__('time').sleep(1000)))"
    flags = [f"--model_dir={tmp_path / 'm'}", "--max_steps=100", "--mode=sync"]
    ended = run_tfps("launch", model(tmp_path, act, "did"), *flags)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    wait_gone([int((tmp_path / "did").read_text())], 10)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_two_signals_at_once_are_one(tmp_path: Path, number: int) -> None:
    """The job saves, and what is said is on the disk: the same flags go on from there."""
    flags = [f"--model_dir={tmp_path / 'm'}", "--max_steps=1000000", "--save_checkpoint_secs=1000"]
    with processes() as started:
        job = Process(tmp_path / "out", "launch", *flags, **PATIENT)
        started.append(job)
        job.wait_for_step(100, 60)
        job.signal(number)
        time.sleep(0.05)
        job.signal(number)
        assert job.wait(100) == 143
    reported = re.search(r"stopped at step (\d+); .* resume from (\S+)\.\n", job.output())
    assert reported, job.output()
    assert reported[2] == f"{tmp_path / 'm'}/model.ckpt-{reported[1]}"
    assert load_variable(tmp_path / "m", "global_step") == int(reported[1]) > 0


def test_where_nothing_is_saved_nothing_else_is_said(tmp_path: Path) -> None:
    """A job that is killed by a second thought says that there is no checkpoint."""
    slow = f"open({str(tmp_path / 'did')!r}, 'w').close(); __import__('time').sleep(60)"
    flags = [f"--model_dir={tmp_path / 'm'}", "--max_steps=1000", "--mode=sync", "--save_checkpoint_secs=1000"]
    with processes() as started:
        job = Process(tmp_path / "out", "launch", model(tmp_path, slow, "did"), *flags)
        started.append(job)
        job.wait_for_step(1, 60)
        deadline = time.monotonic() + 100
        while not (tmp_path / "did").exists():
            assert time.monotonic() < deadline
            time.sleep(0.05)
        job.signal(signal.SIGINT)
        time.sleep(2.5)
        job.signal(signal.SIGINT)
        assert job.wait(100) == 143
    assert "nothing was saved" in job.output() or "resume from" in job.output()
    assert ("nothing was saved" in job.output()) == (not list((tmp_path / "m").glob("model.ckpt-*.index")))


FAILING = """
import time

import numpy as np
import tensorflow.compat.v1 as tf
import tfps


def input_fn(mode, params, input_context):
    def example(number):
        time.sleep(0.05)
        if number == 60 and input_context.input_pipeline_id:
            raise ValueError("a bad row")
        return np.float32(1)

    data = tf.data.Dataset.range(10**6).map(lambda n: tf.numpy_function(example, [n], tf.float32))
    return None if mode == "eval" else data.map(lambda x: (tf.ensure_shape(x, []), 0.0))


def model_fn(features, labels, mode, params):
    weight = tf.get_variable("weight", [], initializer=tf.zeros_initializer())
    return tfps.ModelSpec(loss=-weight * features, optimizer=tf.train.GradientDescentOptimizer(1.0))
"""


@pytest.mark.parametrize("mode", ["async", "sync"])
def test_when_one_worker_fails_the_chief_saves(tmp_path: Path, mode: str) -> None:
    """A row that worker 1 cannot read ends the job with 65. The steps of all until then are saved."""
    (tmp_path / "model.py").write_text(FAILING)
    flags = ("--num_ps=2", "--max_steps=1000", "--save_checkpoint_secs=600", f"--mode={mode}")
    flags = (f"--model={tmp_path / 'model.py'}", f"--model_dir={tmp_path / 'm'}", *flags)
    result = run_tfps("launch", *flags, **PATIENT)
    assert result.returncode == 65, result.stderr
    assert "a bad row" in result.stderr
    checkpoint = summary(tmp_path / "m")["checkpoint"]
    assert load_variable(checkpoint, "weight") == load_variable(checkpoint, "global_step") >= 50


TAKES_OVER = """
import signal, sys
for number in (signal.SIGTERM, signal.SIGINT):
    signal.signal(number, signal.SIG_IGN)

class Tee:
    def __init__(self, stream):
        self.stream = stream

    def write(self, text):
        return self.stream.write(text)

sys.stdout = Tee(sys.stdout)
"""


@pytest.mark.parametrize("is_stopped", [False, True])
def test_a_model_that_takes_over_signals_and_output_is_trained_and_saved(tmp_path: Path, is_stopped: bool) -> None:
    """What it or a library does at import costs neither the state at a stop nor the end of a job."""
    path = tmp_path / "slow.py"
    path.write_text(TAKES_OVER + (slow(0.02) if is_stopped else POWERS))
    flags = (f"--model={path}", f"--model_dir={tmp_path / 'm'}", "--save_checkpoint_secs=1000")
    with processes() as started:
        job = Process(tmp_path / "out", "launch", *flags, f"--max_steps={100_000 if is_stopped else 20}")
        started.append(job)
        if is_stopped:
            job.wait_for_step(20, 90)
            job.signal(signal.SIGTERM)
        assert job.wait(100) == (143 if is_stopped else 0), job.output()
    assert "the model's handlers of SIGTERM, SIGINT are not used" in job.output()
    reported = summary(tmp_path / "m")
    assert reported["status"] == ("stopped" if is_stopped else "done")
    assert reported["global_step"] >= 20
    assert load_variable(tmp_path / "m", "global_step") == reported["global_step"]
