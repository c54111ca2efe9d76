"""Plain shell lines, one per task, for people who start tasks by hand or with their own tool; or over ssh.

Over ssh each task lives only as long as its connection. A small shell on the host reads the connection's input; when
that ends, because of the launcher or the network, the shell stops the task in order. So nothing is left behind.
"""

import contextlib
import os
import queue
import shlex
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

from tfps.cluster import resolver
from tfps.cluster.spec import Cluster, Task
from tfps.config.launch_protocol import TOKEN
from tfps.errors import ConfigError, PlatformError
from tfps.jobs.events import LogLine, TaskExited
from tfps.jobs.handle import RunningJob, SubmittedJob
from tfps.jobs.spec import Job
from tfps.launchers.base import ClientAddresses, Launcher
from tfps.launchers.common import client
from tfps.timeouts import KILL_AFTER_SECS, SSH_CLOSE_SECS

# BatchMode never prompts, as there may be no terminal. Users, keys and ports come from ssh's own configuration.
_SSH = ("ssh", "-T", "-o", "BatchMode=yes", "-o", "ConnectTimeout=20", "-o", "ServerAliveInterval=10")
# The task's input is empty; the shell reads the connection's input only to see its end.
_REMOTE = (
    "cd {directory} || exit; {first}exec 3<&0; {task} </dev/null 3<&- & task=$!; "
    f"(cat <&3; kill -TERM $task; sleep {KILL_AFTER_SECS:g}; kill -KILL $task) >/dev/null 2>&1 & "
    "reader=$!; wait $task; code=$?; kill $reader; exit $code"
)
_READ_TOKEN = f"IFS= read -r {TOKEN}; export {TOKEN}; "  # of a service: its secret is in no command line


@dataclass(frozen=True)
class Plan:
    """The line of each task; over ssh, the command that starts it."""

    job: Job
    hosts: Mapping[Task, str]
    argv: Mapping[Task, Sequence[str]]

    @property
    def is_printed_only(self) -> bool:
        """Whether the plan is only printed: without ``--ssh``, the user starts the tasks."""
        return not self.job.options.ssh

    def __str__(self) -> str:
        return "\n".join(self._line(task) for task in self.argv)

    def _line(self, task: Task) -> str:
        if self.job.options.ssh:
            return shlex.join(self.ssh(task))
        return f"{shlex.join(self.argv[task])}  # on {self.hosts[task]}"

    def ssh(self, task: Task) -> Sequence[str]:
        """Return the command that runs a task on its host."""
        directory, argv = shlex.quote(self.job.directory), shlex.join(self.argv[task])
        first = _READ_TOKEN if self.job.config.serve else ""
        return _ssh(self.hosts[task], _REMOTE.format(directory=directory, first=first, task=argv))


def _ssh(host: str, script: str) -> Sequence[str]:
    """Return the command that runs a shell script on a host, whatever the login shell of its user is."""
    return (*_SSH, "--", host, shlex.join(["sh", "-c", script]))


class HostsLauncher(Launcher[Plan]):
    """Hosts that the user lists: the lines are printed, or run over ssh."""

    name = "hosts"
    features = frozenset({"addresses", "ssh"})

    def plan(self, job: Job) -> Plan:
        """Return the lines of a job.

        Raises:
            ConfigError: If ``--ps_hosts`` or ``--worker_hosts`` is missing or wrong.
        """
        config, serves = job.config, job.config.serve
        given = {"ps_hosts": config.ps_hosts, "worker_hosts": config.worker_hosts}
        needed = ["ps_hosts"] if serves else [flag for flag in given if flag != "ps_hosts" or config.num_ps != 0]
        if missing := [flag for flag in needed if given[flag] is None]:
            raise ConfigError([f"--{flag} is missing: give --{flag}=host:port,host:port." for flag in missing])
        sizes = resolver.NumPs(config.num_ps, has_workers=not serves), None if serves else config.num_workers
        role = "ps" if serves else "worker"
        members, _ = resolver.resolve(config.ps_hosts, config.worker_hosts, role, 0, *sizes, {})
        hosts = {task: members.address(task).rpartition(":")[0].strip("[]") for task in members.tasks()}
        sized = replace(
            job,
            config=config.replace(
                num_ps=members.num_ps, num_workers=config.num_workers if serves else members.num_workers
            ),
            python=job.python if job.options.ssh else "python",
        )
        return Plan(sized, hosts, {task: _argv(sized, members, task) for task in members.tasks()})

    def client_addresses(self, plan: Plan) -> ClientAddresses:
        """Return the addresses that the user gave."""
        hosts = (plan.job.config.ps_hosts or "").split(",")
        return ClientAddresses(hosts, "that reach these hosts")

    def submit(self, plan: Plan) -> "SshJob":
        """Start every task over ssh.

        Raises:
            PlatformError: If ssh is not installed, or a host is unreachable or has no tfps; then no task is started.
        """
        client.require_tool("ssh", "apt-get install openssh-client")
        _check_hosts(plan)
        return SshJob(plan)

    def find(self, job_id: str) -> SubmittedJob:
        """Refuse: only the command that started a job over ssh can watch it and end it.

        Raises:
            ConfigError: Always.
        """
        raise ConfigError(f"hosts:{job_id} is not a job handle: a job over ssh ends with the command that started it.")


def _argv(job: Job, members: Cluster, task: Task) -> Sequence[str]:
    hosts = {"ps_hosts": ",".join(members.ps) or None, "worker_hosts": ",".join(members.workers) or None}
    return job.command(**hosts, job_name=task.job, task_index=task.index)


def _check_hosts(plan: Plan) -> None:
    """Log in to every host, to all in parallel, and import tfps there.

    Raises:
        PlatformError: If that fails; holds every problem of all hosts.
    """
    script = f"cd {shlex.quote(plan.job.directory)} && {shlex.quote(plan.job.python)} -c 'import tfps'"

    def problems(host: str) -> Sequence[str]:
        try:
            client.run_client(_ssh(host, script))
        except PlatformError as error:
            return [f"{host}: {problem}" for problem in error.problems[-2:]]
        return []

    with ThreadPoolExecutor(max_workers=32) as pool:
        found = [problem for of_host in pool.map(problems, dict.fromkeys(plan.hosts.values())) for problem in of_host]
    if found:
        raise PlatformError(found)


class SshJob(RunningJob):
    """The running tasks of a job, each with its connection."""

    def __init__(self, plan: Plan) -> None:
        """Start every task."""
        self._said: queue.Queue[LogLine | TaskExited] = queue.Queue()
        self._kill_at: float | None = None
        self._token = f"{os.environ.get(TOKEN, '')}\n" if plan.job.config.serve else ""
        self._connections = {task: self._start(task, plan.ssh(task)) for task in plan.argv}

    @property
    def restarts(self) -> Mapping[Task, int]:
        """Empty: the launcher restarts no task; the tasks' own commands do."""
        return {}

    def _start(self, task: Task, argv: Sequence[str]) -> "subprocess.Popen[str]":
        connection = subprocess.Popen(
            argv,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,  # Ctrl-C is for the launcher, which ends the tasks in order
        )
        threading.Thread(target=self._read, args=(task, connection), daemon=True).start()
        if self._token:
            assert connection.stdin is not None
            with contextlib.suppress(OSError):  # the connection may have ended already
                connection.stdin.write(self._token)
                connection.stdin.flush()
        return connection

    def _read(self, task: Task, connection: "subprocess.Popen[str]") -> None:
        """Run in a thread: pass on a task's lines, then its end."""
        assert connection.stdout is not None
        for line in connection.stdout:
            self._said.put(LogLine(task, line.rstrip("\n")))
        self._said.put(TaskExited(task, connection.wait()))

    def events(self, every_secs: float = 0.25) -> Iterator[LogLine | TaskExited | None]:
        """Yield the tasks' lines and ends until all have ended; ``None`` when nothing happened for a while."""
        left = len(self._connections)
        while left:
            try:
                event = self._said.get(timeout=every_secs)
            except queue.Empty:
                if self._kill_at and time.monotonic() > self._kill_at:
                    self.kill()
                yield None
                continue
            left -= isinstance(event, TaskExited)
            yield event

    def cancel(self) -> None:
        """Ask every task to save and end, by closing its connection's input; after a while its host kills it."""
        if self._kill_at is None:
            self._kill_at = time.monotonic() + SSH_CLOSE_SECS
            for connection in self._connections.values():
                assert connection.stdin is not None
                connection.stdin.close()

    def kill(self) -> None:
        """Close every connection by force."""
        for connection in self._connections.values():
            connection.kill()
