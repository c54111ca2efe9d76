"""What Slurm knows of its nodes and of a job, and what the job's own files tell: Slurm has no word on each task."""

import contextlib
import re
import shlex
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from tfps.cluster.resolver import Task
from tfps.errors import JobNotFoundError, PlatformError
from tfps.jobs.events import LogLine
from tfps.jobs.handle import CANCELLED, FAILED, PENDING, RUNNING, SUCCEEDED, UNKNOWN, Status, SubmittedJob
from tfps.launchers.common import client
from tfps.launchers.common.job_files import Files, Told, follow_lines, with_tasks

_SAVE_SECS = 20.0  # a task ends within 10
_POLL_SECS = 0.5
_STATES = {  # Slurm's states; the others are failures
    "PENDING": PENDING,
    "CONFIGURING": PENDING,
    "REQUEUED": PENDING,
    "REQUEUE_HOLD": PENDING,
    "REQUEUE_FED": PENDING,
    "RUNNING": RUNNING,
    "COMPLETING": RUNNING,  # of it; a job that is requeued is completing first, too
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
    """What a node has, used or not."""

    cpus: int
    memory_mb: int
    gpus: int

    def room(self, cpus: int, memory_mb: int, gpus: int) -> int:
        """Return how many tasks that need so much it has room for."""
        if memory_mb > self.memory_mb:
            return 0
        return min(self.cpus // cpus, self.gpus // gpus if gpus else self.cpus)  # not all sites count memory


def check_up() -> None:
    """Ask whether slurmctld answers: most of Slurm's commands try for long to reach it.

    Raises:
        PlatformError: If it does not.
    """
    try:
        client.run_client(["scontrol", "ping"])
    except PlatformError as error:
        raise PlatformError([line for line in error.problems if not line.endswith("*")]) from None


def nodes(partition: str | None) -> Sequence[Node]:
    """Return the nodes of a partition, or of the default one; of one that shares CPUs among jobs, none.

    Raises:
        PlatformError: If Slurm does not tell.
    """
    which = [f"--partition={partition}"] if partition else []
    answer = client.run_client(["sinfo", "--noheader", "--Node", "--format=%c|%m|%G|%P|%h", *which])
    rows = [line.split("|") for line in answer.splitlines() if line.count("|") == 4]
    if any(row[4].startswith(("FORCE", "YES")) for row in rows):
        return []
    return [
        Node(int(row[0]), int(row[1].rstrip("+")), sum(map(int, re.findall(r"gpu:(?:[^:,(]+:)?(\d+)", row[2]))))
        for row in rows
        if partition or row[3].endswith("*")
    ]


def ask(job_id: str) -> Mapping[str, str] | None:
    """Return what Slurm knows of a job, or ``None`` if it has forgotten it, or never had it.

    Raises:
        PlatformError: If Slurm does not answer.
    """
    try:
        answer = client.run_client(["scontrol", "show", "job", "--oneliner", job_id])
    except PlatformError as error:
        if "Invalid job id" not in str(error):
            raise
        return _accounted(job_id)
    # The first component of a heterogeneous job comes first; users' texts are behind what is read here.
    found: dict[str, str] = {}
    for name, value in re.findall(r"(\w+)=(\S*)", answer.partition("\n")[0]):
        found.setdefault(name, value)
    return found


def _accounted(job_id: str) -> Mapping[str, str] | None:
    """Return what the accounting knows of a job, where there is any."""
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
    """Return where a job's files are, from its script; ``None`` if Slurm has forgotten it.

    Raises:
        PlatformError: If Slurm does not answer, or tfps has not written that script.
    """
    script = client.run_client(["scontrol", "write", "batch_script", job_id, "-"])
    if not script:
        return None
    match = re.search(r"^roles='(\w+) (\d+) (\w+) (\d+)'\n", script, re.MULTILINE)
    if not match:
        raise foreign(job_id)
    words = shlex.shlex(script[match.end() :], posix=True)
    words.whitespace_split, words.commenters = True, ""
    return Files(next(words).partition("=")[2], {match[1]: int(match[2]), match[3]: int(match[4])}, "slurm")


def foreign(job_id: str) -> JobNotFoundError:
    """Return the error that a job is none of tfps's."""
    return JobNotFoundError(
        f"slurm:{job_id} is another program's job: tfps has not submitted it. squeue --me lists yours."
    )


def forgotten(job_id: str) -> Status:
    """Return what can be said of a job that Slurm does not know.

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
    """Return how a job is, from what Slurm knows of it and what its files tell."""
    told = files.told(job_id) if files else Told({}, [], "", "")
    if known is None:  # the script has the last word
        known = {"JobState": "" if not told.over else "FAILED" if int(told.over) else "COMPLETED"}
    slurm = known["JobState"]
    state = _STATES.get(slurm, FAILED) if slurm else UNKNOWN
    whole = Status(state, reason=_reason(slurm, known, told))
    return with_tasks(whole, told, files.tasks() if files else [], int(known.get("Restarts", 0)))


def _reason(slurm: str, known: Mapping[str, str], told: Told) -> str:
    """Return why a job is in its state, in Slurm's words."""
    words = [] if _STATES.get(slurm) == slurm or slurm in ("COMPLETED", "FAILED") else [slurm]
    reason = known.get("Reason", "None")
    words += [reason] if reason != "None" else []
    words += [f"until {known['EligibleTime']}"] if reason == "BeginTime" else []
    code, _, number = known.get("ExitCode", "0:0").partition(":")
    words += [f"exit code {code}"] if code != "0" else [f"signal {number}"] if number not in ("", "0") else []
    failed = _STATES.get(slurm, FAILED) == FAILED and told.error and not told.failed
    return ", ".join([*words, *([told.error] if failed else [])])


class SlurmJob(SubmittedJob):
    """A job that Slurm holds."""

    def __init__(self, job_id: str, files: Files | None = None) -> None:
        self._id = job_id
        self._known = files

    @property
    def handle(self) -> str:
        """What ``tfps status`` takes."""
        return f"slurm:{self._id}"

    @property
    def _files(self) -> Files | None:
        """Where the job's files are, read from its script as long as Slurm keeps that."""
        if self._known is None:
            self._known = files_of(self._id)
        return self._known

    def status(self) -> Status:
        """Ask Slurm, and read in the logs how the tasks are.

        Raises:
            PlatformError: If Slurm does not answer, or has never had such a job.
        """
        check_up()
        known, files = ask(self._id), self._files
        if known is None and files is None:
            return forgotten(self._id)
        self._check_ours(known, files)
        return status(self._id, known, files)

    def _check_ours(self, known: Mapping[str, str] | None, files: Files | None) -> None:
        """Refuse a job that slurmctld has, but no script of it: salloc or srun made it."""
        if files is None and known is not None and "JobId" in known:
            raise foreign(self._id)

    def logs(self, task: Task | None, follow: bool) -> Iterator[LogLine]:
        """Yield what the tasks have said, in all runs of a job that was requeued.

        Raises:
            ConfigError: If the job has no such task.
            PlatformError: If Slurm does not answer, or has no such job.
        """
        check_up()
        files = self._files
        if files is None:
            self._check_ours(ask(self._id), files)
            raise JobNotFoundError(f"{self.handle}: {forgotten(self._id).reason}.")
        readers = files.readers(self._id, task)
        yield from follow_lines(readers, follow, lambda: self.status().ended)

    def cancel(self) -> None:
        """Have the tasks save and end, then end the job; one that ends by itself, or waits, is just ended.

        Raises:
            PlatformError: If Slurm does not answer, or has no such job.
        """
        state = self.status().state
        if state == RUNNING:
            self._ask_to_save()
        if state in (PENDING, RUNNING) and self.status().state in (PENDING, RUNNING):
            client.run_client(["scancel", self._id])

    def _ask_to_save(self) -> None:
        """Tell the script why, then the tasks; the script ends the job when they have ended."""
        for whom in (["--batch", "--signal=USR1"], ["--signal=TERM"]):
            with contextlib.suppress(PlatformError):  # it may just have ended
                client.run_client(["scancel", *whom, self._id])
        until = time.monotonic() + _SAVE_SECS
        while self.status().state == RUNNING and time.monotonic() < until:
            time.sleep(_POLL_SECS)
