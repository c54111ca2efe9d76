"""The program inside a job of a batch scheduler: it starts the tasks on the job's hosts and follows them to their end.

The job's script runs it, as ``python -m tfps.launchers.common.batch_driver SPEC JOB_ID HOSTS``. ``HOSTS`` has a host
for each task, the parameter servers first, in the form of the scheduler's own node file: a host appears once per task.
If all are the same host, it is the script's own, and the driver starts the tasks directly. If there are several, the
scheduler's ``remote`` command (``pbs_tmrsh``, ``blaunch``) starts each task, so that the scheduler accounts for it and
ends it with the job. The arguments of that command contain no characters that are special to a shell: some of these
commands pass their arguments to a shell, and some do not.

The first task that fails ends the job. SIGTERM and SIGINT are passed on, and the tasks save. The driver writes what
happens in the format of ``job_files``. All hosts must see the same files.
"""

import base64
import collections
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType

from tfps.cluster.spec import Cluster, Task, hosts_flags
from tfps.errors import ConfigError, StoppedError
from tfps.launchers.common.job_files import Files, JobRecord
from tfps.timeouts import KILL_AFTER_SECS

_LOOK_SECS = 0.1
_ME = "tfps.launchers.common.batch_driver"


@dataclass(frozen=True)
class Spec:
    """A job as the driver needs it: everything except its id and its hosts, which the scheduler picks.

    Attributes:
        prefix: The first part of the files' names: the launcher's name.
        logs: The directory of the files.
        roles: Number of tasks of each role, the parameter servers first.
        command: The command of each task, without the flags that describe the cluster.
        directory: The tasks' working directory.
        remote: The scheduler's command that starts a task on another of the job's hosts; the host's name follows.
        port_base: Port of the first task on each host; ``None`` for one that depends on the job's id.
    """

    prefix: str
    logs: str
    roles: Mapping[str, int]
    command: Sequence[str]
    directory: str
    remote: Sequence[str] = ()
    port_base: int | None = None

    def to_json(self) -> str:
        """Return the specification as one argument."""
        return json.dumps(asdict(self))


def cluster_on(hosts: Sequence[str], roles: Mapping[str, int], port_base: int) -> Cluster:
    """Return the cluster with its tasks on ``hosts``, in order; the k-th task on a host listens on the k-th port.

    Raises:
        ConfigError: If there are fewer hosts than tasks.
    """
    if len(hosts) < sum(roles.values()):
        raise ConfigError(
            f"the scheduler gave {len(hosts)} places, {' '.join(hosts)}, for {sum(roles.values())} tasks."
        )
    slots: collections.Counter[str] = collections.Counter()
    addresses = []
    for host in hosts[: sum(roles.values())]:
        addresses.append(f"{host}:{port_base + slots[host]}")
        slots[host] += 1
    num_ps = roles.get("ps", 0)
    return Cluster(tuple(addresses[:num_ps]), tuple(addresses[num_ps:]))


def port_of(job_id: str) -> int:
    """Return the port of the first task on a host; jobs with near ids get ports 864 apart, all below 32768."""
    digits = "".join(letter for letter in job_id.partition(".")[0] if letter.isdigit())
    return 8888 + int(digits or 0) * 727 % 1400 * 16


class Driver:
    """The tasks of a job, by their processes on this host: the tasks themselves, or the remote commands."""

    def __init__(self, spec: Spec, job_id: str, hosts: Sequence[str]) -> None:
        self._spec, self._job_id = spec, job_id
        self._files = Files(spec.logs, spec.roles, spec.prefix)
        port = port_of(job_id) if spec.port_base is None else spec.port_base
        self._cluster = cluster_on(hosts, spec.roles, port)
        self._hosts = {task: self._cluster.address(task).rpartition(":")[0] for task in self._cluster.tasks()}
        if len(set(self._hosts.values())) > 1 and not spec.remote:
            raise ConfigError("the job has several hosts, but its launcher can start tasks on one alone.")
        self._record = JobRecord({}, [], "", "")
        self._processes: dict[Task, subprocess.Popen[bytes]] = {}
        self._kill_at: float | None = None
        self._stop_requested = False

    def run(self) -> int:
        """Run the tasks; return the job's exit code: that of the task that made it fail, or 143 if it was stopped."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)
        path = self._files.of_job(self._job_id)
        # A roles line comes before every run line, so each run line has a line end before it.
        runs = path.read_text(errors="replace").count("\nrun ") if path.is_file() else 0
        self._say("roles " + " ".join(f"{role} {count}" for role, count in self._spec.roles.items()))
        self._say(f"run {runs}")
        for task in self._cluster.tasks():
            if not self._stop_requested:
                self._processes[task] = self._start(task)
                self._say(f"{task} started on {self._hosts[task]}")
        self._see_through()
        code = self._exit_code()
        self._say(f"ended with exit code {code}")
        return code

    def _see_through(self) -> None:
        """Wait until all tasks have ended; kill those that still run 12 s after they were asked to end."""
        left = dict(self._processes)
        while left:
            for task in [task for task, process in left.items() if process.poll() is not None]:
                self._take_end(task, left.pop(task).returncode)
            if self._kill_at and time.monotonic() > self._kill_at:
                self._signal(signal.SIGKILL)
            time.sleep(_LOOK_SECS)

    def _exit_code(self) -> int:
        cause = self._record.cause()
        code = (self._record.tasks[cause[0]].exit_code or 0) if cause else 0
        # The job was not stopped if all its tasks finished first.
        was_stopped = self._stop_requested and (code or not self._processes)
        return StoppedError.exit_code if was_stopped else code

    def _start(self, task: Task) -> "subprocess.Popen[bytes]":
        me = (f"--job_name={task.job}", f"--task_index={task.index}")
        argv = [*self._spec.command, *hosts_flags(self._cluster), *me]
        log = str(self._files.of_task(self._job_id, task))
        if len(set(self._hosts.values())) > 1:
            return subprocess.Popen(
                [*self._spec.remote, self._hosts[task], *remote_command(argv, self._spec.directory, log)],
                stdin=subprocess.DEVNULL,
            )
        with open(log, "ab") as file:
            return subprocess.Popen(
                argv, cwd=self._spec.directory, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT
            )

    def _take_end(self, task: Task, code: int) -> None:
        self._say(f"{task} ended with {code if code >= 0 else 128 - code} on {self._hosts[task]}")
        if code:
            self._end()

    def _say(self, line: str) -> None:
        """Write a line into the job's file, and process it here as well; a full disk ends no job."""
        self._record.take(line)
        try:
            with open(self._files.of_job(self._job_id), "a", encoding="utf-8") as file:
                file.write(f"{line}\n")
        except OSError as error:
            with contextlib.suppress(OSError):  # the error output can be on the same disk
                print(f"warning: {line!r} is not written: {error}; the job goes on.", file=sys.stderr, flush=True)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        del number, frame
        self._stop_requested = True
        self._end()

    def _end(self) -> None:
        """Ask every task to save and end; later calls do nothing."""
        if self._kill_at is None:
            self._kill_at = time.monotonic() + KILL_AFTER_SECS
            self._signal(signal.SIGTERM)

    def _signal(self, number: int) -> None:
        for process in self._processes.values():
            if process.poll() is None:
                process.send_signal(number)


def remote_command(argv: Sequence[str], directory: str, log: str) -> Sequence[str]:
    """Return a command for another host that runs ``argv`` there, in words that a shell does not change."""
    encoded = base64.urlsafe_b64encode(json.dumps([list(argv), directory, log]).encode()).decode()
    return (sys.executable, "-m", _ME, encoded)


def _be(encoded: str) -> None:
    """Replace this process with the command that ``remote_command`` got; its output goes to its log."""
    argv, directory, log = json.loads(base64.urlsafe_b64decode(encoded))
    os.chdir(directory)
    with open(log, "ab") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.execvp(argv[0], argv)  # noqa: S606


def main(argv: Sequence[str]) -> int:
    """Run a job, or become one of its tasks; return the exit code."""
    if len(argv) == 1:
        _be(argv[0])
    spec, job_id, hosts = argv
    Path(json.loads(spec)["logs"]).mkdir(parents=True, exist_ok=True)
    try:
        return Driver(Spec(**json.loads(spec)), job_id, hosts.split()).run()
    except ConfigError as error:
        print(f"error: {error}", flush=True)
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
