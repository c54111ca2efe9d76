"""A job that Docker runs. All queries go to Docker, by the labels of its containers: nobody has to keep its file."""

import atexit
import json
import queue
import re
import subprocess
import threading
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from tfps.cluster.spec import Task
from tfps.errors import ConfigError, JobNotFoundError, PlatformError
from tfps.jobs.causes import by_cause
from tfps.jobs.events import LogLine
from tfps.jobs.handle import CANCELLED, FAILED, PENDING, RUNNING, SUCCEEDED, UNKNOWN, Status, SubmittedJob, TaskStatus
from tfps.launchers.common import client
from tfps.text import show
from tfps.timeouts import CLIENT_SECS, CONTAINER_STOP_SECS

PROJECT = "com.docker.compose.project"  # the label that Compose sets on everything that it creates from a file
TASK = "tfps.task"  # the label of a task's container

_LOOK_SECS = 0.5
_STATES = {
    "created": PENDING,
    "running": RUNNING,
    "paused": RUNNING,
    "restarting": RUNNING,
    "exited": FAILED,
    "dead": FAILED,
}


def docker_client() -> str:
    """Return the path of Docker's client.

    Raises:
        ClientMissingError: If it is not installed.
    """
    return client.require_tool("docker", "see https://docs.docker.com/engine/install")


def ask_docker(*arguments: str, timeout_secs: float | None = CLIENT_SECS) -> str:
    """Return the output of ``docker``.

    Raises:
        PlatformError: If it fails, in its own words.
    """
    return client.run_client([docker_client(), *arguments], timeout_secs=timeout_secs)


class DockerJob(SubmittedJob):
    """The containers of a job, found by the name of their project."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._last: Status | None = None

    @property
    def handle(self) -> str:
        """``compose:NAME``."""
        return f"compose:{self._name}"

    def status(self) -> Status:
        """Ask Docker for the job's status; a job that was there before, and is gone, is cancelled.

        Raises:
            PlatformError: If it does not answer, or knows no such job.
        """
        try:
            found = self._containers()
        except JobNotFoundError:
            if self._last is None:
                raise
            gone = replace(self._last, state=CANCELLED, reason="removed")
            return self._last if self._last.ended else gone
        known = json.loads(ask_docker("inspect", *found.values()))
        tasks = {Task.parse(each["Config"]["Labels"][TASK]): _task_status(each) for each in known}
        self._last = _job_status(dict(sorted(tasks.items())))
        return self._last

    def logs(self, task: Task | None, follow: bool) -> Iterator[LogLine]:
        """Yield the lines of all tasks, or only of ``task``; with ``follow``, until they have ended and do not restart.

        Raises:
            ConfigError: If the job has no such task.
            PlatformError: If Docker does not answer, or knows no such job.
        """
        known = self._containers()
        if task is not None and task not in known:
            raise ConfigError(f"{self.handle} has no task {task}: it has {', '.join(map(str, known))}.")
        chosen = known if task is None else {task: known[task]}
        return _Tail(chosen).lines() if follow else _said(chosen)

    def cancel(self) -> None:
        """Stop the tasks, which save, and remove their containers and their network; volumes stay.

        Raises:
            PlatformError: If Docker does not answer, or knows no such job.
        """
        known, problems = self._containers().values(), list[str]()
        for step in (lambda: ask_docker("stop", f"--time={CONTAINER_STOP_SECS}", *known), self.remove):
            try:
                step()
            except PlatformError as error:  # one failure does not keep the rest from going
                problems += error.problems
        if problems:
            raise PlatformError(
                [*problems, f"{self.handle} is asked to stop, but not all of it has gone: cancel it again."]
            )

    def remove(self) -> None:
        """Remove containers and network immediately."""
        mine = f"--filter=label={PROJECT}={self._name}"
        if left := ask_docker("ps", "--all", "--quiet", mine, f"--filter=label={TASK}").split():
            ask_docker("rm", "--force", "--volumes", *left)  # only volumes without a name
        if networks := ask_docker("network", "ls", "--quiet", mine).split():
            ask_docker("network", "rm", *networks)

    def _containers(self) -> Mapping[Task, str]:
        """Return the container of each task."""
        mine = f"--filter=label={PROJECT}={self._name}", f"--filter=label={TASK}"
        form = f"--format={{{{.ID}}}} {{{{.Label {json.dumps(TASK)}}}}}"
        found = [line.split() for line in ask_docker("ps", "--all", "--no-trunc", *mine, form).splitlines()]
        if not found:
            raise JobNotFoundError(f"{show(self.handle)} is not known to Docker: it was cancelled, or runs elsewhere.")
        return dict(sorted((Task.parse(task), container) for container, task in found))


def _said(containers: Mapping[Task, str]) -> Iterator[LogLine]:
    for task, container in containers.items():
        yield from (LogLine(task, text) for text in client.lines([docker_client(), "logs", container]))


def _task_status(known: Mapping[str, Any]) -> TaskStatus:
    """Return the status of a task from the output of ``docker inspect``."""
    now = known["State"]
    code = now["ExitCode"] if now["Status"] in ("exited", "dead", "restarting") else None
    state = _STATES.get(now["Status"], UNKNOWN)
    if state == FAILED and not now["Error"]:
        state = {0: SUCCEEDED, 143: CANCELLED}.get(now["ExitCode"], FAILED)
    plain = now["Status"] in ("running", "exited")
    reasons = ["" if plain else now["Status"], "OOMKilled" if now["OOMKilled"] else "", now["Error"]]
    where = known["Name"].removeprefix("/")
    return TaskStatus(state, code, known["RestartCount"], where, ", ".join(reason for reason in reasons if reason))


def _job_status(tasks: Mapping[Task, TaskStatus]) -> Status:
    """Return the status of a job: it runs as long as a task does, unless a task has a final failure."""
    failed = [task for task, known in tasks.items() if known.state in (FAILED, CANCELLED)]
    ended = min(failed, key=lambda task: by_cause(task, tasks[task].exit_code), default=None)
    reason = "" if ended is None else f"{ended} ended with exit code {tasks[ended].exit_code}"
    if any(known.state == FAILED and (known.exit_code or 0) < 128 for known in tasks.values()):
        return Status(FAILED, tasks, reason)  # the others may still wait for that task
    states = [known.state for known in tasks.values()]
    order = (RUNNING, PENDING, UNKNOWN, FAILED, CANCELLED, SUCCEEDED)
    return Status(next(state for state in order if state in states), tasks, reason)


class _Tail:
    """The output of containers, followed across their restarts, where Docker's own following ends."""

    def __init__(self, containers: Mapping[Task, str]) -> None:
        self._containers = containers
        self._said: queue.Queue[LogLine | Exception | None] = queue.Queue()
        self._clients: dict[Task, subprocess.Popen[str]] = {}
        self._over = threading.Event()

    def lines(self) -> Iterator[LogLine]:
        """Yield the lines as they arrive, until all containers have ended for good."""
        atexit.register(self._end)
        for task in self._containers:
            threading.Thread(target=self._follow, args=(task,), daemon=True).start()
        try:
            left = len(self._containers)
            while left:
                said = self._said.get()
                if isinstance(said, Exception):
                    raise said
                left -= said is None
                yield from [said] if said else []
        finally:
            self._end()
            atexit.unregister(self._end)

    def _follow(self, task: Task) -> None:
        """Run in a thread: pass on the output of a container, then an end mark once it has ended for good."""
        last = ""
        try:
            live = True
            while live and not self._over.is_set():
                live = self._is_live(task)
                last = self._read(task, last, live)
                self._over.wait(_LOOK_SECS if live else 0.0)
            self._said.put(None)
        except Exception as error:
            self._said.put(error)

    def _is_live(self, task: Task) -> bool:
        """Return whether a container may print more."""
        state = ask_docker("ps", "--all", f"--filter=id={self._containers[task]}", "--format={{.State}}").strip()
        return state not in ("exited", "dead", "")

    def _read(self, task: Task, last: str, live: bool) -> str:
        """Pass on a container's lines after the time ``last``; return the time of the last line."""
        options = [*(["--follow"] if live else []), *([f"--since={last}"] if last else [])]
        argv = [docker_client(), "logs", "--timestamps", *options, self._containers[task]]
        with subprocess.Popen(
            argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace", start_new_session=True
        ) as self._clients[task]:
            for line in self._clients[task].stdout or ():
                when, _, text = line.rstrip("\n").partition(" ")
                if re.match(r"\d{4}-", when) and when > last:  # --since repeats the line of that time
                    last = when
                    self._said.put(LogLine(task, text))
        return last

    def _end(self) -> None:
        """Stop the clients, which otherwise run as long as the containers."""
        self._over.set()
        for client_ in self._clients.values():
            client_.terminate()
