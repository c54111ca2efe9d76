"""Launchers of batch schedulers, which are all alike: ``qsub``, ``bsub`` and similar take a script and print an id.

The division of labor is PSI/J's (``psij.executors.batch``): a launcher of one scheduler builds its commands and parses
their output, and this module does the rest. The script runs a driver (``batch_driver``), which starts the tasks on the
job's hosts. The driver writes the tasks' states and lines into the job's ``--model_dir`` (``job_files``). So a job's
handle contains that directory, ``pbs:4711.server@/shared/runs/mnist``; all machines must see it under this path.
"""

import abc
import re
import shlex
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from tfps.cluster.spec import Task
from tfps.errors import ConfigError, JobNotFoundError, PlatformError, StoppedError
from tfps.jobs.events import LogLine
from tfps.jobs.handle import CANCELLED, FAILED, SUCCEEDED, UNKNOWN, Status, SubmittedJob
from tfps.jobs.spec import Job
from tfps.launchers.base import Launcher
from tfps.launchers.common import client
from tfps.launchers.common.batch_driver import Spec
from tfps.launchers.common.job_files import Files, JobRecord, follow_lines, with_tasks
from tfps.storage import JobDirectory, make_dir
from tfps.text import show
from tfps.timeouts import CANCEL_SECS

_POLL_SECS = 0.5


@dataclass(frozen=True)
class BatchPlan:
    """The script of a job, and the place of its files."""

    text: str
    files: Files
    is_printed_only: ClassVar[bool] = False

    def __str__(self) -> str:
        return self.text


class BatchLauncher(Launcher[BatchPlan]):
    """A batch scheduler. A subclass builds and parses its scheduler's commands; see ``tests/support/pbs_launcher.py``.

    Attributes:
        states: The job state for each of the scheduler's states; a missing one is ``UNKNOWN``.
        no_such_job: A regular expression for the error of the status command about a job that it does not know.
        to_get_it: How to get the scheduler's commands.

    Example, with the states from ``tfps.jobs.handle``::

        class PbsLauncher(BatchLauncher):
            name = "pbs"
            features = frozenset({"ports", "queues"})
            states = {"Q": PENDING, "R": RUNNING}
            no_such_job = "Unknown Job Id"

            def script(self, job: Job) -> str:
                body = self.body(job, "$PBS_JOBID", '$(cat "$PBS_NODEFILE")')
                return os.linesep.join(["#!/bin/bash", f"#PBS -N {job.name}", body])

            def submit_command(self) -> Sequence[str]:
                return ["qsub"]

            def parse_job_id(self, output: str) -> str:
                return output.strip()

            def status_command(self, job_id: str) -> Sequence[str]:
                return ["qstat", "-f", job_id]

            def parse_status(self, output: str) -> Status:
                return Status(self.state_of(output.partition("job_state = ")[2][:1]))

            def cancel_command(self, job_id: str) -> Sequence[str]:
                return ["qdel", job_id]
    """

    states: ClassVar[Mapping[str, str]]
    no_such_job: ClassVar[str]
    to_get_it: ClassVar[str] = "use a login node of the cluster"

    @abc.abstractmethod
    def script(self, job: Job) -> str:
        """Return the job's script: the scheduler's directives, then ``body``.

        Raises:
                ConfigError: If the scheduler would refuse the value of a flag.
        """

    @abc.abstractmethod
    def submit_command(self) -> Sequence[str]:
        """Return the command that reads a script from its standard input and submits it."""

    @abc.abstractmethod
    def parse_job_id(self, output: str) -> str:
        """Return the job's id from the output of the submit command; empty if there is none."""

    @abc.abstractmethod
    def status_command(self, job_id: str) -> Sequence[str]:
        """Return the command that prints the state of a job, even after the job has ended."""

    @abc.abstractmethod
    def parse_status(self, output: str) -> Status:
        """Return the job's state from the output of the status command, and the reason in the scheduler's words.

        Raises:
            JobNotFoundError: If the command succeeded, but its output says that there is no such job.
        """

    @abc.abstractmethod
    def cancel_command(self, job_id: str) -> Sequence[str]:
        """Return the command that sends SIGTERM to a job's processes and, after a while, SIGKILL."""

    def state_of(self, word: str) -> str:
        """Return the job state for the scheduler's word."""
        return self.states.get(word, UNKNOWN)

    def body(self, job: Job, job_id: str, hosts: str, remote: Sequence[str] = ()) -> str:
        """Return the end of a script: the lines that run the tasks.

        Args:
            job: The job.
            job_id: Shell expression for the job's id: ``$PBS_JOBID``.
            hosts: Shell expression for the hosts, one per task, separated by white space, the parameter servers first:
                ``$(cat "$PBS_NODEFILE")``.
            remote: The command that starts a task on another of the job's hosts; without it, the script must request
                all its places on one host.
        """
        files = self._files(job)
        spec = Spec(
            self.name, files.logs, files.roles, job.command(), job.directory, tuple(remote), job.config.port_base
        )
        logs, out = shlex.quote(files.logs), f'{shlex.quote(f"{files.logs}/{self.name}-")}"{job_id}".out'
        driver = shlex.join([job.python, "-m", "tfps.launchers.common.batch_driver", spec.to_json()])
        return (
            f"mkdir -p -- {logs} && exec >>{out} 2>&1 || exit 74\n"
            f"cd -- {shlex.quote(job.directory)} || exit 2\n"
            "unset TF_CONFIG\n"
            "export PYTHONUNBUFFERED=1\n"
            f'exec {driver} "{job_id}" "{hosts}"'
        )

    def _files(self, job: Job) -> Files:
        model_dir = job.config.model_dir or str(Path(job.directory, "runs", job.name))
        if "://" in model_dir:
            raise ConfigError(
                f"--model_dir={show(model_dir)} has no place for logs: give a directory that all hosts see."
            )
        return Files(str(JobDirectory(model_dir).logs), {role.name: role.replicas for role in job.roles}, self.name)

    def plan(self, job: Job) -> BatchPlan:
        """Return the script of a job.

        Raises:
                ConfigError: If the scheduler would refuse the value of a flag, or ``--model_dir`` is a URL.
        """
        return BatchPlan(self.script(job).rstrip("\n"), self._files(job))

    def submit(self, plan: BatchPlan) -> "BatchJob":
        """Submit a job.

        Raises:
            PlatformError: If the scheduler's commands are not installed, or it does not answer, or refuses the job.
            StorageError: If ``--model_dir`` cannot be written.
        """
        argv = self.submit_command()
        client.require_tool(argv[0], self.to_get_it)
        make_dir(Path(plan.files.logs))
        answer = client.run_client(argv, str(plan))
        job_id = self.parse_job_id(answer)
        if not job_id:
            raise PlatformError(f"{argv[0]} did not print a job id: {show(answer.strip())}.")
        roles = " ".join(f"{role} {count}" for role, count in plan.files.roles.items())
        append(plan.files.of_job(job_id), f"roles {roles}")  # the job may have to wait for long
        return BatchJob(self, job_id, plan.files)

    def find(self, job_id: str) -> "BatchJob":
        """Return the job of a handle.

        Raises:
            ConfigError: If the handle is not ``NAME:ID@DIRECTORY``.
            PlatformError: If that directory has no files of such a job, or the scheduler's commands are not installed.
        """
        id_, _, directory = job_id.partition("@")
        if not re.fullmatch(r"\w[\w.\[\]-]*", id_) or not directory.startswith("/"):
            raise ConfigError(
                f"{self.name}:{show(job_id)} is not a job handle: write {self.name}:ID@DIRECTORY, "
                "as tfps submit printed it."
            )
        client.require_tool(self.status_command(id_)[0], self.to_get_it)
        return BatchJob(self, id_, self._known_files(id_, Path(directory)))

    def _known_files(self, job_id: str, directory: Path) -> Files:
        """Return the files of a job, with its number of tasks as the job's own file has it."""
        logs = JobDirectory(directory).logs
        path = Files(str(logs), {}, self.name).of_job(job_id)
        text = path.read_text(errors="replace") if path.is_file() else ""
        match = re.search(r"^roles (?=\w)(?:ps (\d+))? ?(?:worker (\d+))?$", text, re.MULTILINE)
        if not match:
            raise JobNotFoundError(f"{self.name}:{job_id}: {path} does not exist, or lists no tasks: check the handle.")
        return Files(str(logs), {"ps": int(match[1] or 0), "worker": int(match[2] or 0)}, self.name)


def append(path: Path, line: str) -> None:
    """Add a line to a file that the job itself may also write to."""
    with open(path, "a", encoding="utf-8") as file:
        file.write(f"{line}\n")


class BatchJob(SubmittedJob):
    """A job in a batch scheduler."""

    def __init__(self, launcher: BatchLauncher, job_id: str, files: Files) -> None:
        self._launcher, self._id, self._files = launcher, job_id, files
        self._was_known = False  # to the scheduler, at any time before

    @property
    def handle(self) -> str:
        """``NAME:ID@DIRECTORY``."""
        return f"{self._launcher.name}:{self._id}@{Path(self._files.logs).parent}"

    def status(self) -> Status:
        """Ask the scheduler for the job's state, and read the tasks' states from the job's files.

        Raises:
            PlatformError: If the scheduler does not answer.
        """
        whole, record = self._ask(), self._files.record(self._id)
        self._was_known = self._was_known or whole is not None
        if whole is None:
            whole = _by_files(record)
            if whole.state == UNKNOWN and self._was_known:  # the scheduler will not list it again
                whole = Status(FAILED, reason="the scheduler has ended it, and its files do not tell how")
        elif whole.state == FAILED and (record.cancelled or record.over == str(StoppedError.exit_code)):
            whole = Status(CANCELLED, reason=whole.reason)
        return with_tasks(whole, record, self._files.tasks(), record.runs)

    def _ask(self) -> Status | None:
        """Return the scheduler's status of the job; ``None`` if it does not know the job, or no longer does."""
        try:
            return self._launcher.parse_status(client.run_client(self._launcher.status_command(self._id)))
        except JobNotFoundError:
            return None
        except PlatformError as error:
            if re.search(self._launcher.no_such_job, str(error)):
                return None
            raise

    def logs(self, task: Task | None, follow: bool) -> Iterator[LogLine]:
        """Yield the lines of the tasks, from all runs of a job that was requeued.

        Raises:
            ConfigError: If the job has no such task.
            PlatformError: If the scheduler does not answer.
        """
        yield from follow_lines(self._files.readers(self._id, task), follow, self._has_ended)

    def _has_ended(self) -> bool:
        status = self.status()
        return status.ended or status.state == UNKNOWN

    def cancel(self) -> None:
        """Ask the scheduler to end the job, so that its tasks save, and wait until it has ended.

        Raises:
            PlatformError: If the scheduler does not answer, or does not end the job.
        """
        if self._has_ended():
            return
        append(self._files.of_job(self._id), "cancelled")
        client.run_client(self._launcher.cancel_command(self._id))
        deadline = time.monotonic() + CANCEL_SECS
        while not self._has_ended():
            if time.monotonic() > deadline:
                raise PlatformError(f"{self.handle} has not ended {CANCEL_SECS:g} s after it was asked to stop.")
            time.sleep(_POLL_SECS)


def _by_files(record: JobRecord) -> Status:
    """Return the state of a job that the scheduler no longer knows, from the job's files."""
    if record.over:
        states = {"0": SUCCEEDED, str(StoppedError.exit_code): CANCELLED}
        return Status(states.get(record.over, FAILED), reason="" if record.over == "0" else f"exit code {record.over}")
    if record.cancelled:
        return Status(CANCELLED)
    return Status(UNKNOWN, reason="the scheduler does not know the job any more, and its files do not tell its end")
