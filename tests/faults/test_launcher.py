"""``tfps launch`` whose processes are killed or asked to stop: nothing is left running, and nothing saved is lost."""

import os
import shutil
import signal
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from support.processes import (
    PATIENT,
    POWERS,
    Process,
    alive,
    children_of,
    load_variable,
    open_files,
    processes,
    run_tfps,
    slow,
    summary,
    wait_gone,
)

LONG = ("launch", "--model=linear", "--num_ps=1", "--num_workers=2", "--max_steps=1000000", "--steps_to_validate=20")

BLOCKS = """
    def wait_for_ever(step):
        import time
        while step >= 10:
            time.sleep(1)
        return step

    steps = tf.data.Dataset.range(10**9).map(lambda at: tf.numpy_function(wait_for_ever, [at], tf.int64))
    return tf.data.Dataset.zip((data, steps)).map(lambda pair, _: pair)
"""


def test_killed_half_way_it_goes_on_from_its_last_checkpoint(tmp_path: Path) -> None:
    """The launcher and all tasks killed, the same command goes on from the last checkpoint, and the summary says so."""
    model = tmp_path / "powers.py"
    model.write_text(POWERS)
    model_dir = tmp_path / "m"
    command = ("launch", f"--model={model}", f"--model_dir={model_dir}", "--save_checkpoint_secs=0.3")
    with processes() as started:
        started.append(Process(tmp_path / "out", *command, "--max_steps=1000000"))
        started[0].wait_for("saved ", 60)
        below = children_of(started[0].pid)
        started[0].signal(signal.SIGKILL)
        for pid in alive(below):
            os.kill(pid, signal.SIGKILL)
        wait_gone(below, 10)
    saved = max(int(path.stem.rpartition("-")[2]) for path in model_dir.glob("model.ckpt-*.index"))
    ended = run_tfps(*command, f"--max_steps={saved + 100}")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    reported = summary(model_dir)
    assert reported["resumed_from"] == str(model_dir / f"model.ckpt-{saved}")
    assert reported["resumed_from_step"] >= saved  # async workers go on while a checkpoint is written
    assert reported["global_step"] == saved + 100
    assert f"resumed from step {reported['resumed_from_step']:,}" in ended.stdout


def test_killed_it_can_be_started_again_at_once(tmp_path: Path) -> None:
    """The tasks of a launcher that was killed still end their step, and save: the same command waits, and goes on."""
    (tmp_path / "slow.py").write_text(slow(6.0))
    command = ("launch", f"--model={tmp_path / 'slow.py'}", f"--model_dir={tmp_path / 'm'}", "--num_workers=1")
    rarely = ("--save_checkpoint_secs=1000",)
    with processes() as started:
        started.append(Process(tmp_path / "out", *command, "--max_steps=1000000", *rarely, **PATIENT))
        started[0].wait_for_step(1, 60)
        below = children_of(started[0].pid)
        tasks = [_pid_of(task, below) for task in ("ps-0", "worker-0")]
        for pid in tasks:
            os.kill(pid, signal.SIGSTOP)  # until the next launcher has seen them
        started[0].signal(signal.SIGKILL)
        started.append(Process(tmp_path / "next", *command, "--max_steps=3", **PATIENT))
        started[1].wait_for("to end, because its launcher ended", 60)
        for pid in tasks:
            os.kill(pid, signal.SIGCONT)
        assert started[1].wait(100) == 0, started[1].output()
        wait_gone(below, 1)
    assert summary(tmp_path / "m")["resumed_from_step"] >= 1, "what the first one's tasks have saved"


COMPUTES = """
    def compute(step):
        import sys, threading, time
        if step == 50 and power == 2.0:
            ticks = []
            def tick():
                while True:
                    ticks.append(time.sleep(0.1))
            threading.Thread(target=tick, daemon=True).start()
            sys.setswitchinterval(1000)
            began = time.monotonic()
            while time.monotonic() < began + 20:
                sum(range(10**6))
            sys.setswitchinterval(0.005)
            print("computed, and let others run", len(ticks), "times")
        return step

    steps = tf.data.Dataset.range(10**9).map(lambda at: tf.numpy_function(compute, [at], tf.int64))
    return tf.data.Dataset.zip((data, steps)).map(lambda pair, _: pair)
"""

EVALUATES = """
    if mode == "eval":
        import pathlib, time

        def wait(value):
            while not pathlib.Path(params["data_dir"], "go").exists():
                time.sleep(0.1)
            return value

        data = tf.data.Dataset.from_tensors(1.0).map(lambda x: tf.numpy_function(wait, [x], tf.float32))
        return data.map(lambda x: ({"x": tf.ensure_shape(x, [])}, 0.0))
"""


@pytest.mark.parametrize("how", ["Ctrl-C", "SIGTERM to the process group", "SIGHUP to the process group"])
def test_asked_to_stop_it_stops_all_of_it_with_its_state_saved(tmp_path: Path, how: str) -> None:
    """Every task ends with 143, the chief's state is saved, no process is left, and how to go on is said."""
    with processes() as started:
        started.append(Process(tmp_path / "out", *LONG, "--issync=1", f"--model_dir={tmp_path / 'm'}", **PATIENT))
        started[0].wait_for_step(100, 60)
        below = children_of(started[0].pid)
        assert len(below) >= 4
        if how == "Ctrl-C":
            started[0].signal(signal.SIGINT)
        else:
            os.killpg(started[0].pid, signal.Signals[how.split(maxsplit=1)[0]])
        assert started[0].wait(100) == 143
        wait_gone(below, 15)
        left = summary(tmp_path / "m")
        assert f"stopped at step {left['global_step']}" in started[0].output()
    assert left["error"] == f"stopped by {'SIGINT' if how == 'Ctrl-C' else how.split(maxsplit=1)[0]}"
    assert left["status"] == "stopped"
    assert left["checkpoint"].endswith(f"-{left['global_step']}")
    assert {of["exit_code"] for of in left["tasks"].values()} == {143}
    assert "Traceback" not in "".join(path.read_text() for path in (tmp_path / "m" / "logs").iterdir())


def test_if_the_launcher_dies_its_tasks_do_too(tmp_path: Path) -> None:
    """SIGKILL to the launcher leaves no process behind after 10 s."""
    with processes() as started:
        started.append(Process(tmp_path / "out", *LONG, f"--model_dir={tmp_path / 'm'}"))
        started[0].wait_for("examples/s=", 60)
        below = children_of(started[0].pid)
        assert len(below) >= 4
        started[0].signal(signal.SIGKILL)
        wait_gone(below, 10)


def test_if_the_launcher_dies_so_do_the_processes_of_a_model(tmp_path: Path) -> None:
    """What a model has started, and nobody else knows, does not outlive its task."""
    model = tmp_path / "forks.py"
    forks = "import multiprocessing, time\nmultiprocessing.get_context('fork').Process(target=time.sleep, args=(999,))"
    model.write_text(f"{forks}.start()\n{slow(0.05)}")
    flags = (f"--model={model}", f"--model_dir={tmp_path / 'm'}", "--max_steps=1000000", "--steps_to_validate=20")
    with processes() as started:
        started.append(Process(tmp_path / "out", "launch", *flags))
        started[0].wait_for("step=", 60)
        below = children_of(started[0].pid)
        assert len(below) >= 7  # two workers of three tasks have one each
        started[0].signal(signal.SIGKILL)
        wait_gone(below, 15)


def test_if_the_launcher_dies_a_task_that_hears_nothing_does_too(tmp_path: Path) -> None:
    """A model's module that blocks while it is imported, where no signal is seen, does not outlive the launcher."""
    model = tmp_path / "blocks.py"
    model.write_text(f"import time\nprint('blocks')\ntime.sleep(1000)\n{POWERS}")
    with processes() as started:
        started.append(Process(tmp_path / "out", "launch", f"--model={model}", f"--model_dir={tmp_path / 'm'}"))
        started[0].wait_for("worker/0 | blocks", 60)
        below = children_of(started[0].pid)
        assert len(below) >= 2
        started[0].signal(signal.SIGKILL)
        wait_gone(below, 15)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_ended_while_it_imports_tensorflow_it_leaves_nothing(tmp_path: Path, number: signal.Signals) -> None:
    """The fork server does not outlive its launcher, which says what it does and listens to signals from its start."""
    with processes() as started:
        started.append(Process(tmp_path / "out", *LONG, f"--model_dir={tmp_path / 'm'}"))
        started[0].wait_for("importing TensorFlow", 60)
        below = children_of(started[0].pid)
        assert below
        started[0].signal(number)
        assert started[0].wait(100) == (-9 if number == signal.SIGKILL else 143)
        wait_gone(below, 5)
        said = started[0].output()
    assert "worker/0 |" not in said
    assert ("stopped; nothing was saved" in said) == (number != signal.SIGKILL)
    assert not list((tmp_path / "m" / "logs").glob("worker-*"))


def test_a_directory_for_temporary_files_that_is_removed_keeps_no_task_from_its_start(tmp_path: Path) -> None:
    """Cleaners of old files delete the fork server's socket: a lost task is started again all the same."""
    with processes() as started, tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as short:
        job = Process(tmp_path / "out", *LONG, f"--model_dir={tmp_path / 'm'}", TMPDIR=short)
        started.append(job)
        job.wait_for_step(50, 60)
        assert list(Path(short).glob("pymp-*/listener-*"))
        shutil.rmtree(short)
        [pid] = [pid for pid in children_of(job.pid) if _logs_to(pid, "worker-1.log")]
        os.kill(pid, signal.SIGKILL)
        job.wait_for("restarted after SIGKILL (1 of 5)", 30)
        edge = len(job.output())
        while "training: mode" not in job.output()[edge:]:
            job.wait_for_step(50, 30)
        job.signal(signal.SIGTERM)
        assert job.wait(100) == 143
    assert "Traceback" not in job.output()


def _logs_to(pid: int, name: str) -> bool:
    """Return whether a process has a task's log open."""
    try:
        return any(name in link for link in open_files(pid))
    except OSError:
        return False


def test_a_worker_that_is_gone_for_good_ends_the_job_and_is_named(tmp_path: Path) -> None:
    """A killed task that may not be started again ends the job with 170, its name and the signal; the others leave."""
    with processes() as started:
        started.append(Process(tmp_path / "out", *LONG, "--max_restarts=0", f"--model_dir={tmp_path / 'm'}"))
        started[0].wait_for("worker/1 | training", 60)
        below = children_of(started[0].pid)
        os.kill(_pid_of("worker-1", below), signal.SIGKILL)
        assert started[0].wait(100) == 170
        assert "error: worker/1 was killed by SIGKILL" in started[0].output()
        wait_gone(below, 15)
    reported = summary(tmp_path / "m")
    assert (reported["status"], reported["exit_code"], reported["tasks"]["worker/1"]["exit_code"]) == (
        "failed",
        170,
        -9,
    )


@pytest.mark.parametrize(("lost", "issync"), [("worker-1", "1"), ("worker-0", "0")])
def test_a_killed_task_is_started_again_and_no_step_is_lost(tmp_path: Path, lost: str, issync: str) -> None:
    """A worker or the chief killed: it alone is started again, the PS keep their state, and no step is lost.

    In sync each update is still the exact mean: 1.5 a step.
    """
    steps = 1_000 if issync == "1" else 2_000
    flags = (f"--issync={issync}", f"--max_steps={steps}", f"--model_dir={tmp_path / 'm'}", "--steps_per_run=4")
    with processes() as started:
        model = _slow(tmp_path, until=tmp_path / "go", batch=800)
        started.append(Process(tmp_path / "out", "launch", f"--model={model}", *flags))
        started[0].wait_for_step(steps // 2, 60)
        os.kill(_pid_of(lost, children_of(started[0].pid)), signal.SIGKILL)
        (tmp_path / "go").touch()
        assert started[0].wait(90) == 0, started[0].output()
    said, reported = started[0].output(), summary(tmp_path / "m")
    assert f"{lost.replace('-', '/')} | restarted after SIGKILL (1 of 5)" in said
    restarts = {task: of["restarts"] for task, of in reported["tasks"].items()}
    assert restarts[lost.replace("-", "/")] == 1
    assert reported["global_step"] == steps
    if "no answer for" not in said:  # a slow machine starts a new one too late for others
        assert sum(restarts.values()) == 1
        assert ("all workers continue from step" in said) == (issync == "1")
    taken = sum(reported["tasks"][f"worker/{index}"]["steps"] for index in (0, 1))
    at_once = 2 if issync == "1" else 1
    assert reported["examples_per_sec"] * reported["seconds"] == pytest.approx(
        at_once * steps, rel=1e-3
    )  # of one example each
    in_two_secs = at_once * steps / reported["seconds"]  # of one worker of the two
    assert abs(at_once * steps - taken) < 3 * in_two_secs, "those before the kill count, up to the last sign of life"
    weight = load_variable(tmp_path / "m", "weight")
    assert weight == -1.5 * steps if issync == "1" else -2 * steps <= weight <= -steps


@pytest.mark.parametrize("issync", ["1", "0"])
def test_with_a_lost_ps_all_others_begin_anew_at_once(tmp_path: Path, issync: str) -> None:
    """One of three PS killed: every task is started again, once, and the job goes on from its last checkpoint."""
    steps = 500 if issync == "1" else 1_000
    flags = (f"--issync={issync}", "--num_ps=3", f"--max_steps={steps}", f"--model_dir={tmp_path / 'm'}")
    with processes() as started:
        pace = ("--steps_per_run=4", "--save_checkpoint_secs=0.5")
        model = _slow(tmp_path, until=tmp_path / "go", batch=400)
        started.append(Process(tmp_path / "out", "launch", f"--model={model}", *flags, *pace))
        started[0].wait_for("saved ", 60)
        os.kill(_pid_of("ps-1", children_of(started[0].pid)), signal.SIGKILL)
        (tmp_path / "go").touch()
        assert started[0].wait(90) == 0, started[0].output()
    said, reported = started[0].output(), summary(tmp_path / "m")
    assert "ps/1     | restarted after SIGKILL (1 of 5)" in said
    assert "ps/0     | restarted after the loss of ps/1" in said
    assert {task: of["restarts"] for task, of in reported["tasks"].items()} == dict.fromkeys(reported["tasks"], 1)
    assert reported["tasks"]["ps/2"]["restarted_after"] == ["the loss of ps/1"]
    assert 0 < reported["resumed_from_step"] < reported["global_step"] == steps
    weight = load_variable(tmp_path / "m", "weight")
    assert weight == -1.5 * steps if issync == "1" else -2 * steps <= weight <= -steps


def test_a_frozen_task_is_named_killed_and_started_again(tmp_path: Path) -> None:
    """A stopped process (SIGSTOP) is noticed, in sync too, where everyone waits for it; the job ends well."""
    flags = ("--issync=1", "--max_steps=1000", f"--model_dir={tmp_path / 'm'}")
    with processes() as started:
        started.append(Process(tmp_path / "out", "launch", f"--model={_slow(tmp_path)}", *flags))
        started[0].wait_for("worker/1 | training", 60)
        os.kill(victim := _pid_of("worker-1", children_of(started[0].pid)), signal.SIGSTOP)
        began = time.monotonic()
        started[0].wait_for("worker/1 | stalled: no sign of life for 15 s, killed", 25)
        assert time.monotonic() - began > 10, "it was not frozen"
        assert started[0].wait(90) == 0, started[0].output()
        assert not alive([victim])
    assert summary(tmp_path / "m")["tasks"]["worker/1"]["restarts"] == 1
    assert load_variable(tmp_path / "m", "weight") == -1.5 * 1000


def test_a_task_that_computes_is_not_taken_for_frozen(tmp_path: Path) -> None:
    """A user's function that lets no other Python run for longer than a frozen task lives: nothing is restarted."""
    model, model_dir = tmp_path / "computes.py", tmp_path / "m"
    body, model_fn = POWERS.replace("return tf.data.Dataset", "data = tf.data.Dataset").split("\ndef model_fn")
    model.write_text(f"{body}{COMPUTES}\ndef model_fn{model_fn}")
    flags = ("--issync=1", "--max_steps=300", f"--model_dir={model_dir}")
    ended = run_tfps("launch", f"--model={model}", *flags, timeout=120)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    others_ran = ended.stdout.partition("computed, and let others run ")[2].split()[0]
    assert int(others_ran) < 20, "of 200 ticks: it would have given signs of life"
    assert {of["restarts"] for of in summary(model_dir)["tasks"].values()} == {0}
    assert load_variable(model_dir, "weight") == -1.5 * 300


def test_a_ps_that_is_lost_at_the_end_calls_back_who_was_done(tmp_path: Path) -> None:
    """When a PS is killed while the chief evaluates, the workers that were done come back, and the job ends well."""
    model = tmp_path / "evaluates.py"
    model.write_text(POWERS.replace('    if mode == "eval":\n        return None\n', EVALUATES))
    flags = (f"--data_dir={tmp_path}", "--max_steps=50", f"--model_dir={tmp_path / 'm'}")
    with processes() as started:
        started.append(Process(tmp_path / "out", "launch", f"--model={model}", *flags))
        started[0].wait_for("evaluating at step 50", 60)
        deadline = time.monotonic() + 100
        while any(_logs_to(pid, "worker-1.log") for pid in children_of(started[0].pid)):
            assert time.monotonic() < deadline, "worker/1 was done, and did not end"
            time.sleep(0.05)
        os.kill(_pid_of("ps-0", children_of(started[0].pid)), signal.SIGKILL)
        started[0].wait_for("worker/1 | restarted after exit code 0, with the PS that was lost", 20)
        (tmp_path / "go").touch()
        assert started[0].wait(90) == 0, started[0].output()
    reported = summary(tmp_path / "m")
    assert (reported["status"], reported["global_step"], reported["resumed_from_step"]) == ("done", 50, 50)
    assert reported["eval"]["loss"] == load_variable(tmp_path / "m", "weight")


def test_a_short_pause_is_survived(tmp_path: Path) -> None:
    """A worker that is stopped for three seconds goes on; nothing is restarted."""
    flags = ("--issync=1", "--max_steps=1000", f"--model_dir={tmp_path / 'm'}")
    with processes() as started:
        started.append(Process(tmp_path / "out", "launch", f"--model={_slow(tmp_path)}", *flags))
        started[0].wait_for("worker/1 | training", 60)
        os.kill(victim := _pid_of("worker-1", children_of(started[0].pid)), signal.SIGSTOP)
        time.sleep(3)
        before = started[0].output()
        time.sleep(0.2)
        assert before == started[0].output(), "sync went on without it: it was not stopped"
        os.kill(victim, signal.SIGCONT)
        assert started[0].wait(120) == 0, started[0].output()
    assert {of["restarts"] for of in summary(tmp_path / "m")["tasks"].values()} == {0}


def test_a_crash_loop_ends_at_the_budget(tmp_path: Path) -> None:
    """A model that kills its process whenever it is trained ends the job when it has had its restarts."""
    model = tmp_path / "crash.py"
    model.write_text(POWERS + "\nimport os, signal\nos.kill(os.getpid(), signal.SIGKILL)\n")
    ended = run_tfps(
        "launch", f"--model={model}", "--max_restarts=2", "--num_workers=1", f"--model_dir={tmp_path / 'm'}"
    )
    assert ended.returncode == 170, ended.stdout + ended.stderr
    assert "worker/0 | restarted after SIGKILL (2 of 2)" in ended.stdout
    assert "error: worker/0 was killed by SIGKILL" in ended.stderr
    assert summary(tmp_path / "m")["tasks"]["worker/0"]["restarts"] == 2


def test_a_worker_whose_input_blocks_ends_with_its_stacks_in_its_log(tmp_path: Path) -> None:
    """No step for ``--stall_timeout_secs``: 172, and the log shows the line of the user's that blocks."""
    model = tmp_path / "blocks.py"
    body, model_fn = POWERS.replace("return tf.data.Dataset", "data = tf.data.Dataset").split("\ndef model_fn")
    model.write_text(f"{body}{BLOCKS}\ndef model_fn{model_fn}")
    flags = ("--num_workers=1", "--stall_timeout_secs=10", "--max_restarts=0")
    ended = run_tfps("launch", f"--model={model}", *flags, cwd=tmp_path)
    assert ended.returncode == 172, ended.stdout + ended.stderr
    assert "the last was" in ended.stderr
    [log] = (tmp_path / "runs").glob("*/logs/worker-0.log")
    assert "in wait_for_ever" in log.read_text()


def test_a_worker_whose_model_fn_does_not_return_says_so(tmp_path: Path) -> None:
    """The other tasks have not started yet, so nothing else would tell what the job waits for."""
    model = tmp_path / "blocks.py"
    model.write_text("import time\n" + POWERS.replace("    weight =", "    time.sleep(1e6)\n    weight ="))
    with processes() as started:
        job = Process(tmp_path / "out", "launch", f"--model={model}", f"--model_dir={tmp_path / 'm'}")
        started.append(job)
        job.wait_for("worker/0 | waiting: no training graph yet for 3", 120)
        job.signal(signal.SIGTERM)
        assert job.wait(100) == 143, job.output()


def _slow(directory: Path, until: Path | str = "/", batch: int = 100) -> Path:
    model = directory / "slow.py"
    model.write_text(slow(0.01, until, batch))
    return model


def _pid_of(task: str, below: Sequence[int]) -> int:
    """Return the process that is a task, by the log that it holds open."""
    return next(pid for pid in below if _logs_to(pid, f"{task}.log"))
