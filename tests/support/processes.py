"""What several tests use: tasks as real processes, ended by their id, and small user models."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from tfps.cluster.ports import held_ports

REPO = Path(__file__).parents[2]
MNIST = REPO.parent / "shared" / "data" / "mnist"
TFPS = [sys.executable, "-m", "tfps"]
PATIENCE = 3  # a time limit of a test bounds a hang, also on a machine that is slower than others by this factor
PATIENT = {"PYTHONPATH": f"{Path(__file__).parent / 'patient'}{os.pathsep}{REPO}"}  # so a task ends within 30 s
_NOTHING: Mapping[str, Sequence[str]] = MappingProxyType({})

# A model whose gradient is known: worker i pushes the gradient 2^i at every step, and a step of SGD subtracts it.
POWERS = """
import tensorflow.compat.v1 as tf
import tfps

def input_fn(mode, params, input_context):
    if mode == "eval":
        return None
    power = 2.0 ** input_context.input_pipeline_id
    return tf.data.Dataset.from_tensors(({"x": power}, 0.0)).repeat()

def model_fn(features, labels, mode, params):
    weight = tf.get_variable("weight", [], initializer=tf.zeros_initializer())
    loss = weight * features["x"]
    return tfps.ModelSpec(loss=loss, predictions={"y": loss}, optimizer=tf.train.GradientDescentOptimizer(1.0))
"""


def slow(step_secs: float, until: Path | str = "/", batch: int = 100) -> str:
    """Return POWERS, of which a step of a worker takes so long: a job lasts as long as its steps say.

    Each process of a worker waits at some batch until a file exists: a job is not through before its test is.
    """
    wait = f"""
    import os, time

    batches = []

    def wait(x):
        batches.append(x)
        while len(batches) >= {batch} and not os.path.exists({str(until)!r}):
            time.sleep(0.05)
        time.sleep({step_secs})
        return x

    slowly = lambda x, y: ({{"x": tf.ensure_shape(tf.numpy_function(wait, [x["x"]], tf.float32), [])}}, y)
    return data.map(slowly)
"""
    body, model_fn = POWERS.replace("return tf.data.Dataset", "data = tf.data.Dataset").split("\ndef model_fn")
    return f"{body}{wait}\ndef model_fn{model_fn}"


# POWERS, whose every task that loads it prints the command line as it arrived.
ECHO = f"""{POWERS}
import json, sys
print("argv", json.dumps(sys.argv))
"""

# A value that every layer between a user and a task could spoil: shells, YAML, Compose, Kubernetes, Slurm.
NASTY = 'it\'s "q" $HOME ${HOME} $(touch spoilt) `id` $$ %j %% \\n\ttab; no: {} [1e3] # & | > * ? ~ !x é\nnew line'


def golden(name: str, plan: str) -> str:
    """Return the text that is checked in for a plan; ``UPDATE_GOLDEN=1`` writes it first."""
    path = REPO / "tests" / "golden" / name
    if os.environ.get("UPDATE_GOLDEN"):
        path.write_text(f"{plan}\n")
    return path.read_text().removesuffix("\n")


def argv_of(output: str) -> list[str]:
    """Return the command line that a task with the ECHO model has printed."""
    [line] = {line.partition("argv ")[2] for line in output.splitlines() if "argv [" in line}
    argv: list[str] = json.loads(line)
    return argv


signal.signal(signal.SIGHUP, signal.SIG_DFL)  # under nohup it is ignored, also in what is started here
signal.signal(signal.SIGINT, signal.default_int_handler)  # likewise in what a script has put in the background


def environment(**changes: str) -> dict[str, str]:
    """Return this process's environment with the repository importable, and some variables changed."""
    clean = {k: v for k, v in os.environ.items() if k != "TF_CONFIG" and not k.startswith("SLURM_")}
    return {**clean, "PYTHONPATH": str(REPO), **changes}


def run_tfps(
    *args: str, timeout: float = 100, cwd: Path | None = None, **env: str
) -> "subprocess.CompletedProcess[str]":
    """Run ``tfps ARGS`` to its end; a hang is a failure."""
    return subprocess.run(
        [*TFPS, *args],
        capture_output=True,
        text=True,
        timeout=timeout * PATIENCE,
        cwd=cwd,
        env=environment(**env),
        check=False,
    )


class Process:
    """One ``tfps`` process that writes its output to a file; ``under`` is a command that starts it."""

    def __init__(
        self, output: Path, *args: str, cwd: Path | None = None, under: Sequence[str] = (), **env: str
    ) -> None:
        self._output = output
        with open(output, "wb") as file:
            self._popen = subprocess.Popen(
                [*under, *TFPS, *args],
                stdout=file,
                stderr=subprocess.STDOUT,
                cwd=cwd,
                env=environment(**env),
                start_new_session=True,
            )
        self.pid = self._popen.pid

    def output(self) -> str:
        """Return what it has said so far."""
        return self._output.read_text(errors="replace")

    def poll(self) -> int | None:
        """Return its exit code, ``None`` while it runs."""
        return self._popen.poll()

    def wait(self, secs: float) -> int:
        """Return its exit code; fails after ``secs``, with what it said."""
        try:
            return self._popen.wait(secs * PATIENCE)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still running after {secs} s; it said:\n{self.output()}") from None

    def wait_for(self, text: str, secs: float) -> None:
        """Wait until it has said ``text``."""
        self._wait_until(lambda: text in self.output(), f"say {text!r}", secs)

    def wait_for_step(self, step: int, secs: float) -> None:
        """Wait until it has reported a step, or a later one: a job's progress is reported once a second."""
        steps = lambda: map(int, re.findall(r"\bstep=(\d+)", self.output()))  # noqa: E731
        self._wait_until(lambda: max(steps(), default=-1) >= step, f"come to step {step}", secs)

    def _wait_until(self, holds: Callable[[], bool], what: str, secs: float) -> None:
        deadline, has_ended = time.monotonic() + secs * PATIENCE, False
        while not holds():
            assert not has_ended, f"ended, and did not {what}:\n{self.output()}"
            assert time.monotonic() < deadline, f"did not {what} within {secs} s:\n{self.output()}"
            time.sleep(0.05)
            has_ended = self._popen.poll() is not None  # then its last words are read once more

    def signal(self, number: int) -> None:
        """Send it a signal."""
        self._popen.send_signal(number)

    def end(self) -> None:
        """Kill it if it still runs."""
        if self._popen.poll() is None:
            self._popen.kill()
            self._popen.wait()


@contextlib.contextmanager
def processes() -> Iterator[list[Process]]:
    """Yield a list; every process in it is ended in the end."""
    started: list[Process] = []
    try:
        yield started
    finally:
        for process in started:
            process.end()


@contextlib.contextmanager
def by_hand(
    directory: Path,
    num_ps: int,
    num_workers: int,
    *flags: str,
    under: Mapping[str, Sequence[str]] = _NOTHING,
    **env: str,
) -> Iterator[dict[str, Process]]:
    """Start every task of a cluster as its own process with the classic flags, as in so many shells.

    Some are started ``under`` other commands, by their names.
    """
    with held_ports(num_ps + num_workers) as ports, processes() as started:
        hosts = [f"127.0.0.1:{port}" for port in ports]
        ps, workers = hosts[:num_ps], hosts[num_ps:]
        cluster = [f"--ps_hosts={','.join(ps)}", f"--worker_hosts={','.join(workers)}"]
        tasks: dict[str, Process] = {}
        for job, index in [("ps", i) for i in range(num_ps)] + [("worker", i) for i in range(num_workers)]:
            me = [f"--job_name={job}", f"--task_index={index}"]
            name, output = f"{job}/{index}", directory / f"{job}-{index}.out"
            tasks[name] = Process(output, *cluster, *me, *flags, under=under.get(name, ()), **env)
            started.append(tasks[f"{job}/{index}"])
        yield tasks


def children_of(pid: int) -> list[int]:
    """Return the processes below a process, at any depth."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and _parent(int(entry.name)) == pid:
            found += [int(entry.name), *children_of(int(entry.name))]
    return found


def _parent(pid: int) -> int | None:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except (OSError, IndexError, ValueError):
        return None


def alive(pids: Sequence[int]) -> list[int]:
    """Return those of some processes that still run."""
    return [pid for pid in pids if _state(pid) not in (None, "Z", "X")]


def session_leaders(pids: Sequence[int]) -> list[int]:
    """Return those of some processes that still run and lead a session of their own, as a task does."""
    return [pid for pid in alive(pids) if _session(pid) == pid]


def _session(pid: int) -> int | None:
    try:
        return os.getsid(pid)
    except ProcessLookupError:  # it has ended meanwhile
        return None


def _state(pid: int) -> str | None:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return None


def wait_gone(pids: Sequence[int], secs: float) -> None:
    """Fail if any of some processes still runs after ``secs``; kill those."""
    deadline = time.monotonic() + secs * PATIENCE
    while alive(pids) and time.monotonic() < deadline:
        time.sleep(0.05)
    left = alive(pids)
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert not left, f"still running after {secs} s: {left}"


def open_files(pid: int) -> list[str]:
    """Return what a process has open, by the kernel's names; without what it closes meanwhile.

    Raises:
        OSError: If there is no such process.
    """
    found = []
    for fd in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(FileNotFoundError):
            found.append(os.readlink(f"/proc/{pid}/fd/{fd}"))
    return found


def load_variable(model_dir: Path, name: str) -> Any:
    """Return a variable of a directory's newest checkpoint."""
    from tensorflow.python.training import checkpoint_utils  # noqa: PLC0415  most tests do without TensorFlow

    return checkpoint_utils.load_variable(str(model_dir), name)


def summary(model_dir: Path) -> dict[str, Any]:
    """Return a job's ``summary.json``."""
    reported: dict[str, Any] = json.loads((model_dir / "summary.json").read_text())
    return reported
