"""Slurm's data about its nodes and a job, and the job's own files, because Slurm keeps no state of each task."""

import contextlib
import re
import shlex
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from tfps.cluster.spec import Task
from tfps.errors import JobNotFoundError, PlatformError
from tfps.jobs.events import LogLine
from tfps.jobs.handle import CANCELLED, FAILED, PENDING, RUNNING, SUCCEEDED, UNKNOWN, Status, SubmittedJob
from tfps.launchers.common import client
from tfps.launchers.common.job_files import Files, JobRecord, follow_lines, with_tasks
from tfps.timeouts import SLURM_STOP_SECS

_POLL_SECS = 0.5
_STATES = {  # Slurm's states; the others are failures
    "PENDING": PENDING,
    "CONFIGURING": PENDING,
    "REQUEUED": PENDING,
    "REQUEUE_HOLD": PENDING,
    "REQUEUE_FED": PENDING,
    "RUNNING": RUNNING,
    "COMPLETING": RUNNING,  # not over yet: a requeued job is also COMPLETING first
    "SUSPENDED": RUNNING,
    "STOPPED": RUNNING,
    "STAGE_OUT": RUNNING,
    "SIGNALING": RUNNING,
    "RESIZING": RUNNING,
    "COMPLETED": SUCCEEDED,
    "CANCELLED": CANCELLED,
}


@dataclass(frozen=True)
class Node:
    """The resources of a node, used or not."""

    cpus: int
    memory_mb: int
    gpus: int

    def room(self, cpus: int, memory_mb: int, gpus: int) -> int:
        """Return the number of tasks of this size that fit on the empty node."""
        if memory_mb > self.memory_mb:
            return 0
        return min(self.cpus // cpus, self.gpus // gpus if gpus else self.cpus)  # not all sites count memory


def check_up() -> None:
    """Check that slurmctld answers: most of Slurm's commands take long to give up on it.

    Raises:
        PlatformError: If it does not.
    """
    try:
        client.run_client(["scontrol", "ping"])
    except PlatformError as error:
        raise PlatformError([line for line in error.problems if not line.endswith("*")]) from None


def partitions(names: str | None) -> Mapping[str, Sequence[Node]]:
    """Return the nodes of partitions, by default of the default one; nothing if one shares CPUs among jobs.

    Args:
        names: The partitions, separated by commas.

    Raises:
        PlatformError: If Slurm does not report them.
    """
    which = [f"--partition={names}"] if names else []
    answer = client.run_client(["sinfo", "--noheader", "--Node", "--format=%c|%m|%G|%P|%h", *which])
    rows = [line.split("|") for line in answer.splitlines() if line.count("|") == 4]
    if any(row[4].startswith(("FORCE", "YES")) for row in rows):
        return {}
    found: dict[str, list[Node]] = {}
    for cpus, memory, gpus, name, _ in rows:
        if names or name.endswith("*"):
            count = sum(map(int, re.findall(r"gpu:(?:[^:,(]+:)?(\d+)", gpus)))
            found.setdefault(name.rstrip("*"), []).append(Node(int(cpus), int(memory.rstrip("+")), count))
    return found


def ask(job_id: str) -> Mapping[str, str] | None:
    """Return Slurm's record of a job; ``None`` if it has forgotten the job, or never had it.

    Raises:
        PlatformError: If Slurm does not answer.
    """
    try:
        answer = client.run_client(["scontrol", "show", "job", "--oneliner", job_id])
    except PlatformError as error:
        if "Invalid job id" not in str(error):
            raise
        return _accounted(job_id)
    # The first component of a heterogeneous job comes first; texts of users come after the fields that are read here.
    found: dict[str, str] = {}
    for name, value in re.findall(r"(\w+)=(\S*)", answer.partition("\n")[0]):
        found.setdefault(name, value)
    return found


def _accounted(job_id: str) -> Mapping[str, str] | None:
    """Return the accounting's record of a job, if the site has accounting."""
    if shutil.which("sacct") is None:
        return None
    asked = ["--noheader", "--parsable2", "--allocations", f"--jobs={job_id}", "--format=State,ExitCode"]
    try:
        rows = client.run_client(["sacct", *asked]).splitlines()
    except PlatformError:
        return None
    state, _, code = rows[0].partition("|") if rows else ("", "", "")
    return {"JobState": state.split()[0], "ExitCode": code} if state.strip() else None


def files_of(job_id: str) -> Files | None:
    """Return the files of a job, from its script; ``None`` if Slurm has forgotten the job.

    Raises:
        PlatformError: If Slurm does not answer, or tfps did not write that script.
    """
    script = client.run_client(["scontrol", "write", "batch_script", job_id, "-"])
    if not script:
        return None
    match = re.search(r"^roles='(\w+) (\d+)(?: (\w+) (\d+))?'\n", script, re.MULTILINE)
    if not match:
        raise foreign(job_id)
    words = shlex.shlex(script[match.end() :], posix=True)
    words.whitespace_split, words.commenters = True, ""
    roles = {name: int(count) for name, count in ((match[1], match[2]), (match[3], match[4])) if name}
    return Files(next(words).partition("=")[2], roles, "slurm")


def foreign(job_id: str) -> JobNotFoundError:
    """Return the error for a job that tfps did not submit."""
    return JobNotFoundError(
        f"slurm:{job_id} is another program's job: tfps has not submitted it. squeue --me lists yours."
    )


def unknown_job_status(job_id: str) -> Status:
    """Return the status of a job that Slurm does not know.

    Raises:
        JobNotFoundError: If there has never been such a job.
    """
    config = client.run_client(["scontrol", "show", "config"])
    following = re.search(r"^NEXT_JOB_ID\s*=\s*(\d+)", config, re.MULTILINE)
    if following and int(job_id) >= int(following[1]):
        raise JobNotFoundError(f"slurm:{job_id}: Slurm has had no such job yet; its next is {following[1]}.")
    kept = re.search(r"^MinJobAge\s*=\s*(.*)", config, re.MULTILINE)
    age = kept[1].strip() if kept else "a while"
    return Status(UNKNOWN, reason=f"Slurm forgets a job {age} after its end; see logs and summary.json in --model_dir")


def status(job_id: str, known: Mapping[str, str] | None, files: Files | None) -> Status:
    """Return the status of a job, from Slurm's record and from the job's files."""
    record = files.record(job_id) if files else JobRecord({}, [], "", "")
    if known is None:  # then the script's last line decides
        known = {"JobState": "" if not record.over else "FAILED" if int(record.over) else "COMPLETED"}
    slurm = known["JobState"]
    state = _STATES.get(slurm, FAILED) if slurm else UNKNOWN
    whole = Status(state, reason=_reason(slurm, known, record))
    return with_tasks(whole, record, files.tasks() if files else [], int(known.get("Restarts", 0)))


def _reason(slurm: str, known: Mapping[str, str], record: JobRecord) -> str:
    """Return the reason for a job's state, in Slurm's words."""
    words = [] if _STATES.get(slurm) == slurm or slurm in ("COMPLETED", "FAILED") else [slurm]
    reason = known.get("Reason", "None")
    words += [reason] if reason != "None" else []
    words += [f"until {known['EligibleTime']}"] if reason == "BeginTime" else []
    code, _, number = known.get("ExitCode", "0:0").partition(":")
    words += [f"exit code {code}"] if code != "0" else [f"signal {number}"] if number not in ("", "0") else []
    failed = _STATES.get(slurm, FAILED) == FAILED and record.error and not record.failed
    return ", ".join([*words, *([record.error] if failed else [])])


class SlurmJob(SubmittedJob):
    """A job in Slurm."""

    def __init__(self, job_id: str, files: Files | None = None) -> None:
        self._id = job_id
        self._known = files

    @property
    def handle(self) -> str:
        """``slurm:ID``, the argument of ``tfps status``."""
        return f"slurm:{self._id}"

    @property
    def _files(self) -> Files | None:
        """The job's files, read from its script as long as Slurm keeps that."""
        if self._known is None:
            self._known = files_of(self._id)
        return self._known

    def status(self) -> Status:
        """Ask Slurm for the job's state, and read the tasks' states from the logs.

        Raises:
            PlatformError: If Slurm does not answer, or has never had such a job.
        """
        check_up()
        known, files = ask(self._id), self._files
        if known is None and files is None:
            return unknown_job_status(self._id)
        self._check_ours(known, files)
        return status(self._id, known, files)

    def _check_ours(self, known: Mapping[str, str] | None, files: Files | None) -> None:
        """Refuse a job that slurmctld has without a script: salloc or srun made it."""
        if files is None and known is not None and "JobId" in known:
            raise foreign(self._id)

    def logs(self, task: Task | None, follow: bool) -> Iterator[LogLine]:
        """Yield the lines of the tasks, from all runs of a job that was requeued.

        Raises:
            ConfigError: If the job has no such task.
            PlatformError: If Slurm does not answer, or has no such job.
        """
        check_up()
        files = self._files
        if files is None:
            self._check_ours(ask(self._id), files)
            raise JobNotFoundError(f"{self.handle}: {unknown_job_status(self._id).reason}.")
        readers = files.readers(self._id, task)
        yield from follow_lines(readers, follow, lambda: self.status().ended)

    def cancel(self) -> None:
        """Ask the tasks to save and end, then end the job; a job that waits is ended immediately.

        Raises:
            PlatformError: If Slurm does not answer, or has no such job.
        """
        state = self.status().state
        if state == RUNNING:
            self._ask_to_save()
        if state in (PENDING, RUNNING) and self.status().state in (PENDING, RUNNING):
            client.run_client(["scancel", self._id])

    def _ask_to_save(self) -> None:
        """Signal the reason to the script, then the end to the tasks; when they have ended, the script ends the job."""
        for whom in (["--batch", "--signal=USR1"], ["--signal=TERM"]):
            with contextlib.suppress(PlatformError):  # the job may have ended in between
                client.run_client(["scancel", *whom, self._id])
        until = time.monotonic() + SLURM_STOP_SECS
        while self.status().state == RUNNING and time.monotonic() < until:
            time.sleep(_POLL_SECS)
