"""``tfps launch``: a whole cluster on this machine, from one command to its report."""

import os
import pty
import re
import resource
import signal
import socket
import subprocess
import sys
import termios
import time
from pathlib import Path
from unittest import mock

import pytest
from support.processes import (
    POWERS,
    REPO,
    TFPS,
    Process,
    children_of,
    environment,
    processes,
    run_tfps,
    slow,
    summary,
    wait_gone,
)

from tfps.cluster.spec import Task
from tfps.config.job_config import JobConfig
from tfps.launchers.local.job import LocalJob
from tfps.launchers.local.plan import Plan


def test_a_mistake_in_the_users_model_shows_the_users_line_once(tmp_path: Path) -> None:
    """A model that fails as it is built is exit 2, with the user's own line, reported once and without a traceback."""
    model = tmp_path / "mine.py"
    model.write_text(POWERS.replace("loss = weight *", "loss = weihgt *"))
    ended = run_tfps("launch", f"--model={model}", f"--model_dir={tmp_path / 'm'}")
    assert ended.returncode == 2
    line = 1 + model.read_text().splitlines().index('    loss = weihgt * features["x"]')
    assert f"{model}, line {line}: NameError" in ended.stderr
    assert 'loss = weihgt * features["x"]' in ended.stderr
    assert (ended.stdout + ended.stderr).count("NameError") == 1
    assert [log.name for log in (tmp_path / "m" / "logs").glob("*-*.log")] == ["worker-0.log"], "there was a cluster"
    assert "Traceback" not in ended.stdout + ended.stderr
    assert summary(tmp_path / "m")["exit_code"] == 2


# POWERS, whose both functions append the params that a port of a TF1 script branches on to a file in --data_dir.
BRANCHES = f"""{POWERS}
from pathlib import Path

def noted(function):
    def call(*args):
        params, mode = (args[1], args[0]) if function.__name__ == "input_fn" else (args[3], args[2])
        with Path(params["data_dir"], mode).open("a") as file:
            print(*(params[name] for name in ("issync", "num_ps", "num_workers")), file=file)
        return function(*args)
    return call

first, model_fn = noted(input_fn), noted(model_fn)

def input_fn(mode, params, input_context):
    return first("train", params, input_context).take(2) if mode == "eval" else first(mode, params, input_context)
"""


def test_params_have_the_mode_and_the_size_in_every_command(tmp_path: Path) -> None:
    """``params["issync"]`` is what the mode is, and the sizes are the cluster's, in tasks, plan, eval and export."""
    noted, model_dir = tmp_path / "noted", tmp_path / "m"
    (tmp_path / "model.py").write_text(BRANCHES)
    noted.mkdir()
    flags = (f"--model={tmp_path / 'model.py'}", f"--data_dir={noted}")
    size = ("--num_ps=1", "--num_workers=2", "--mode=sync")
    for command in (
        ("launch", *flags, *size, "--max_steps=2", f"--model_dir={model_dir}"),
        ("plan", *flags, *size),
        ("eval", f"--model_dir={model_dir}"),
        ("export", f"--model_dir={model_dir}"),
    ):
        done = run_tfps(*command, timeout=120)
        assert done.returncode == 0, done.stderr
        reported = {line for file in noted.iterdir() for line in file.read_text().splitlines()}
        assert reported == {"True 1 2"}, command
        for file in noted.iterdir():
            file.unlink()


def test_a_model_may_have_processes_of_its_own(tmp_path: Path) -> None:
    """What reads its data with a pool of processes does so under ``tfps launch`` too."""
    pool = "import multiprocessing\npool = multiprocessing.get_context('fork').Pool(2)\n"
    pool += "values = pool.map(float, '12')\npool.close()\npool.join()\n"  # Python may hang where a pool is left open
    model = tmp_path / "mine.py"
    model.write_text(pool + POWERS)
    ended = run_tfps("launch", f"--model={model}", f"--model_dir={tmp_path / 'm'}", "--max_steps=4")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert summary(tmp_path / "m")["global_step"] == 4


BLOCKING = """
import os, signal, sys
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGCHLD, signal.SIGTERM])
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
"""


@pytest.mark.slow
def test_signals_that_the_caller_has_blocked_are_taken(tmp_path: Path) -> None:
    """Without SIGCHLD, the fork server would not know that a task has ended."""
    flags = ["launch", "--model=linear", "--max_steps=5", f"--model_dir={tmp_path / 'm'}"]
    command = [sys.executable, "-c", BLOCKING, *TFPS[1:], *flags]
    ended = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=300, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert summary(tmp_path / "m")["global_step"] == 5


@pytest.mark.slow
def test_a_model_may_close_standard_output(tmp_path: Path) -> None:
    """That is the model's own: the job ends, and saves, as it would otherwise."""
    model = tmp_path / "mine.py"
    model.write_text("import sys\nsys.stdout.close()\n" + POWERS)
    ended = run_tfps("launch", f"--model={model}", f"--model_dir={tmp_path / 'm'}", "--max_steps=4")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert summary(tmp_path / "m")["checkpoint"].endswith("model.ckpt-4")


def test_a_model_dir_that_is_a_file_is_74(tmp_path: Path) -> None:
    """``--model_dir`` that cannot be a directory is reported as such, and nothing is started."""
    (tmp_path / "file").touch()
    task = ("run", "--ps_hosts=127.0.0.1:1", "--worker_hosts=127.0.0.1:9", "--job_name=worker", "--task_index=0")
    fix = "give a directory that you can write"
    for command, given, reported in (
        (
            ["launch"],
            tmp_path / "file",
            f"--model_dir: {tmp_path / 'file' / 'logs'} cannot be made (Not a directory): {fix}.",
        ),
        (["launch"], tmp_path / ("x" * 300), f"--model_dir: {tmp_path / ('x' * 300)}"),
        (task, "/proc/foo", f"--model_dir: /proc/foo/logs cannot be made (No such file or directory): {fix}."),
    ):
        ended = run_tfps(*command, f"--model_dir={given}")
        assert (ended.returncode, ended.stdout) == (74, "")
        assert ended.stderr.startswith(f"error: {reported}")
        assert ended.stderr.count("\n") == 1


def test_a_tensorflow_that_cannot_be_imported_is_reported(tmp_path: Path) -> None:
    """What TensorFlow's own import says is the error, whatever kind it is."""
    (tmp_path / "tensorflow").mkdir()
    (tmp_path / "tensorflow" / "__init__.py").write_text("raise TypeError('Descriptors cannot be created directly.')")
    ended = run_tfps("launch", f"--model_dir={tmp_path}/m", PYTHONPATH=f"{tmp_path}:{REPO}")
    assert ended.returncode == 2, ended.stdout + ended.stderr
    reported = "TensorFlow cannot be imported: TypeError: Descriptors cannot be created directly"
    assert ended.stderr == f"error: {reported} (all of it is in {tmp_path}/m/logs/launch.log).\n"


def test_a_diverging_job_ends_with_66(tmp_path: Path) -> None:
    """A loss that becomes NaN or Inf ends the job with 66 and names the remedy; no checkpoint of it is left."""
    ended = run_tfps("launch", "--learning_rate=1e30", "--max_steps=1000", f"--model_dir={tmp_path}")
    assert ended.returncode == 66, ended.stdout + ended.stderr
    assert "--learning_rate" in ended.stderr
    assert list(tmp_path.glob("model.ckpt-*")) == []


@pytest.mark.slow
def test_a_long_tmpdir_is_no_obstacle(tmp_path: Path) -> None:
    """The path of a socket has 107 bytes at most, and a directory for temporary files may have more."""
    long = tmp_path / ("x" * 100)
    long.mkdir()
    ended = run_tfps("launch", "--model=linear", "--max_steps=5", f"--model_dir={tmp_path / 'm'}", TMPDIR=str(long))
    assert ended.returncode == 0, ended.stdout + ended.stderr


@pytest.mark.slow
def test_a_terminal_of_ascii_alone_shows_all(tmp_path: Path) -> None:
    """What a model prints that the locale has no letters for is shown escaped, and is in the log as it is."""
    model = tmp_path / "mine.py"
    model.write_text(f"print('h\u00f6he \u2192')\n{POWERS}", encoding="utf-8")
    ascii_alone = {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}
    ended = run_tfps("launch", f"--model={model}", "--max_steps=5", f"--model_dir={tmp_path / 'm'}", **ascii_alone)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "worker/0 | h\\xf6he \\u2192\n" in ended.stdout
    assert "h\u00f6he \u2192\n" in (tmp_path / "m" / "logs" / "worker-0.log").read_text(encoding="utf-8")


@pytest.mark.slow
def test_output_that_takes_no_more_is_reported(tmp_path: Path) -> None:
    """From the start on it is 74, and nothing is started; later the job goes on, which is said once."""
    command = [*TFPS, "launch", "--model=linear", "--max_steps=300"]
    with open("/dev/full", "w") as full:
        refused = subprocess.run(
            [*command, f"--model_dir={tmp_path / 'n'}"], stdout=full, stderr=subprocess.PIPE, text=True, check=False
        )
    reported = "error: standard output cannot be written: No space left on device.\n"
    assert (refused.returncode, refused.stderr) == (74, reported)
    most = 64 << 20
    with open(tmp_path / "out", "w") as file:
        file.truncate(most - 200)
    with open(tmp_path / "out", "a") as file:
        ended = subprocess.run(
            [*command, f"--model_dir={tmp_path / 'm'}"],
            stdout=file,
            stderr=subprocess.PIPE,
            text=True,
            preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (most, most)),
            env=environment(),
            check=False,
        )
    assert (tmp_path / "out").stat().st_size == most
    assert ended.stderr == "standard output cannot be written: File too large; the job goes on without it\n"
    assert (ended.returncode, summary(tmp_path / "m")["global_step"]) == (0, 300)


def _wait_for_step(model_dir: Path, step: int, secs: float) -> None:
    """Wait for a checkpoint of some step, or of a later one."""
    deadline = time.monotonic() + secs
    while not any(int(path.stem.rpartition("-")[2]) >= step for path in model_dir.glob("model.ckpt-*.index")):
        assert time.monotonic() < deadline
        time.sleep(0.1)


@pytest.mark.parametrize("signal_sent", [pytest.param("nothing", marks=pytest.mark.slow), "SIGTERM"])
def test_a_reader_that_is_stuck_stops_no_job(tmp_path: Path, signal_sent: str) -> None:
    """What a pipe does not take is left out: the job trains to its end, and ends when it is asked to."""
    model = tmp_path / "talk.py"
    model.write_text(slow(0.01).replace("        return x", "        print('x' * 4000)\n        return x"))
    steps = 200 if signal_sent == "nothing" else 100000
    flags = (f"--model={model}", f"--model_dir={tmp_path / 'm'}", f"--max_steps={steps}", "--save_checkpoint_secs=1")
    reader, writer = os.pipe()
    with subprocess.Popen([*TFPS, "launch", *flags], stdout=writer, stderr=writer, env=environment()) as job:
        os.close(writer)
        try:
            if signal_sent == "SIGTERM":
                _wait_for_step(tmp_path / "m", 100, 300)
                job.send_signal(signal.SIGTERM)
            assert job.wait(300) == (0 if signal_sent == "nothing" else 143)
        finally:
            job.kill()
    shown = os.fdopen(reader).read()
    assert 2**15 < len(shown) < 2**17, "the pipe was full"
    assert (tmp_path / "m" / "logs" / "worker-0.log").read_text().count("x" * 4000) > 50
    assert summary(tmp_path / "m")["status"] == ("done" if signal_sent == "nothing" else "stopped")


def test_a_reader_that_continues_gets_what_it_has_missed() -> None:
    """Lines that were left out are counted, and those that follow begin at the left."""
    writes = """if True:
        import sys
        from tfps.jobs.output import Output
        output = Output()
        for number in range(40):
            output.write(f"{number} " + "x" * 4000)
        print("stuck", file=sys.stderr, flush=True)
        sys.stdin.read()
        output.write("again")
        output.close()
    """
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", writes], text=True, env=environment(), **pipes) as writer:
        assert writer.stdin is not None
        assert writer.stdout is not None
        assert writer.stderr is not None
        assert writer.stderr.readline() == "stuck\n"
        first = os.read(writer.stdout.fileno(), 2**20).decode()
        writer.stdin.close()
        *lines, missed, again = (first + writer.stdout.read()).splitlines()
        assert writer.wait(100) == 0
    whole = [line for line in lines if len(line) > 4000]
    assert [line.partition(" ")[0] for line in whole] == [str(number) for number in range(len(whole))]
    assert missed == f"({40 - len(whole)} lines left out: standard output was not read)"
    assert again == "again"


@pytest.mark.parametrize("kind", ["terminal", "socket", "pipe of one in a hurry"])
def test_who_writes_waits_for_no_other_reader_either(kind: str) -> None:
    """A terminal that is stopped, as by Ctrl-S, and a socket that nobody reads are as a full pipe."""
    hurry = "output._PATIENCE_SECS = 1000; shown.hurry(0.5)" if "hurry" in kind else ""
    writes = f"""if True:
        import sys
        from tfps.jobs import output
        shown = output.Output()
        {hurry}
        for number in range(500):
            shown.write("x" * 1000)
        shown.close()
        print("closed", file=sys.stderr, flush=True)
    """
    made = {"terminal": os.openpty, "socket": lambda: [end.detach() for end in socket.socketpair()]}
    ours, theirs = made.get(kind, os.pipe)()
    if kind == "terminal":
        termios.tcflow(theirs, termios.TCOOFF)
    with subprocess.Popen(
        [sys.executable, "-c", writes], stdout=theirs, stderr=subprocess.PIPE, text=True, env=environment()
    ) as writer:
        try:
            assert writer.communicate(timeout=100)[1] == "closed\n"
        finally:
            writer.kill()
            os.close(ours)
            os.close(theirs)


@pytest.mark.slow
def test_a_log_that_cannot_be_written_fails_no_model(tmp_path: Path) -> None:
    """What a model prints comes to the console, and the job to its end, though the disk takes none of it."""
    (tmp_path / "m" / "logs").mkdir(parents=True)
    (tmp_path / "m" / "logs" / "worker-0.log").symlink_to("/dev/full")
    model = tmp_path / "mine.py"
    printing = 'return data.map(lambda x, y: (x, tf.numpy_function(lambda y: print("took one") or y, [y], tf.float32)))'
    model.write_text(slow(0.001).replace("return data.map(slowly)", printing))
    flags = (f"--model={model}", f"--model_dir={tmp_path / 'm'}", "--num_workers=1", "--max_steps=20")
    ended = run_tfps("launch", *flags)
    assert (ended.returncode, summary(tmp_path / "m")["global_step"]) == (0, 20), ended.stdout + ended.stderr
    assert ended.stdout.count("worker/0 | took one\n") >= 20


@pytest.mark.parametrize(("line", "code"), [("", 74), ("raise ValueError('my mistake')", 2)])
def test_a_summary_that_cannot_be_written_hides_nothing(tmp_path: Path, line: str, code: int) -> None:
    """How the job has ended is said all the same, and is its exit code, but for 74 in place of 0."""
    model = tmp_path / "mine.py"
    blocked = f"import pathlib; pathlib.Path({str(tmp_path / 'm' / 'summary.json' / 'x')!r}).mkdir(parents=True)"
    model.write_text(POWERS.replace("def model_fn", f"{blocked if code == 2 else ''}\n{line}\n\ndef model_fn"))
    if code == 74:
        at_the_end = "    if mode == 'eval':\n        " + blocked.replace("parents=True", "parents=True, exist_ok=True")
        model.write_text(POWERS.replace("    weight =", f"{at_the_end}\n    weight =").replace("return None", DATA))
    ended = run_tfps("launch", f"--model={model}", f"--model_dir={tmp_path / 'm'}", "--num_workers=1", "--max_steps=5")
    assert ended.returncode == code, ended.stdout + ended.stderr
    assert "summary.json cannot be written: Is a directory" in ended.stderr
    assert ("my mistake" in ended.stderr) == (code == 2)
    assert "Traceback" not in ended.stderr


DATA = 'return tf.data.Dataset.from_tensors(({"x": 1.0}, 0.0))'


def test_without_a_directory_for_temporary_files_it_says_so(tmp_path: Path) -> None:
    """Where no file can be written at all, that is the error: no traceback."""
    ended = subprocess.run(
        [*TFPS, "launch", "--model=linear", "--max_steps=5", f"--model_dir={tmp_path / 'm'}"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0)),
        env=environment(),
        check=False,
    )
    reported = "error: no temporary file can be written: set TMPDIR to a directory where one can.\n"
    assert (ended.returncode, ended.stderr) == (74, reported)


def test_too_few_open_files_are_reported(tmp_path: Path) -> None:
    """Where no task can be started, the limit is named; nothing is left, and there is no traceback."""
    with processes() as started:
        limited = ("sh", "-c", 'ulimit -n 20 && exec "$@"', "sh")
        started.append(Process(tmp_path / "out", "launch", f"--model_dir={tmp_path / 'm'}", under=limited))
        assert started[0].wait(100) == 2
        said = started[0].output()
        assert said.endswith(" cannot be started: Too many open files: raise the limit on open files, see ulimit -n.\n")
        assert "Traceback" not in said
        wait_gone(children_of(started[0].pid), 15)


def test_a_worker_that_signs_off_as_a_ps_is_lost_comes_back_when_it_has_ended() -> None:
    """It is done and yet to end its process: nobody would miss it before its start timed out for the others."""
    tasks = [Task("ps", 0), Task("ps", 1), Task("worker", 0), Task("worker", 1)]
    job = LocalJob(Plan(JobConfig(num_ps=2, num_workers=2), dict.fromkeys(tasks, ())))
    ended = {Task("worker", 0): 0, Task("worker", 1): None}
    job._processes |= {task: mock.Mock(exitcode=code) for task, code in ended.items()}
    job._signs.signed_off |= set(ended)
    assert [line.task for line in job._recalled(Task("ps", 1))] == [Task("worker", 0)]
    [line] = job._replaced(Task("worker", 1), 0, job._lost_with.pop(Task("worker", 1)))
    assert (line.task, line.text) == (Task("worker", 1), "restarted after the loss of ps/1")
    assert all(task in job._restarts for task in ended)


def test_an_ambient_tf_config_is_not_the_launched_tasks(tmp_path: Path) -> None:
    """``launch`` makes its own cluster: a TF_CONFIG in the environment neither joins nor breaks it."""
    ended = run_tfps("launch", "--max_steps=5", f"--model_dir={tmp_path}", TF_CONFIG='{"cluster": {"ps": ["h:1"]}}')
    assert ended.returncode == 0, ended.stdout + ended.stderr


def test_on_a_terminal_there_is_a_live_view(tmp_path: Path) -> None:
    """On a terminal the steps, the loss, the speed, the time left and every task's state are drawn in place."""
    primary, secondary = pty.openpty()
    command = [*TFPS, "launch", "--max_steps=3000", f"--model_dir={tmp_path}"]
    env = environment(TERM="xterm-256color", COLUMNS="100", LINES="40")
    with subprocess.Popen(command, stdout=secondary, stderr=secondary, env=env) as process:
        os.close(secondary)
        drawn = _read_all(primary, 600)
        assert process.wait(300) == 0, drawn
    for shown in ("/3000 steps", "left", "loss 0.", "examples/s", "worker/1", "training", "done: step 3,000 after"):
        assert shown in drawn
    assert "worker/0  | step=" not in drawn


def _read_all(fd: int, secs: float) -> str:
    """Return all that is written to a terminal until it is closed."""
    data, deadline = b"", time.monotonic() + secs
    while time.monotonic() < deadline:
        try:
            data += os.read(fd, 65536)
        except OSError:
            break
    os.close(fd)
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", data.decode(errors="replace"))
