"""What Slurm knows of its nodes and of a job, and what the job's own files tell: Slurm has no word on each task."""

import re
import shlex
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tfps.errors import JobNotFoundError, PlatformError
from tfps.jobs.handle import CANCELLED, FAILED, PENDING, RUNNING, SUCCEEDED, UNKNOWN, Status
from tfps.launchers.common import client
from tfps.launchers.common.job_files import Files, Told, with_tasks

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
