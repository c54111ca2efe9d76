"""A launcher for OpenPBS and PBS Professional, outside the package: what ``BatchLauncher`` leaves to write.

Each task is a chunk of its own, the parameter servers' first, which is the order of the lines in ``$PBS_NODEFILE``. A
job that got chunks on several hosts starts its tasks there with PBS's own ``pbs_tmrsh``, through the task manager that
``pbsdsh`` uses, too: so PBS accounts for them, and ends them with the job. ``qstat -x`` knows a job after its end where
the server keeps a history (``job_history_enable``); else the job's files tell how it ended.
"""

import math
import re
from collections.abc import Iterator, Sequence

from tfps.errors import ConfigError
from tfps.jobs.handle import CANCELLED, FAILED, PENDING, RUNNING, SUCCEEDED, Status
from tfps.jobs.spec import Job, Role
from tfps.launchers.common.batch import BatchLauncher
from tfps.text import show


class PbsLauncher(BatchLauncher):
    """PBS, by ``qsub``, ``qstat`` and ``qdel``."""

    name = "pbs"
    features = frozenset({"ports", "queues", "resources"})
    states = {  # noqa: RUF012  qstat(1B)
        "Q": PENDING,
        "H": PENDING,
        "W": PENDING,
        "T": PENDING,
        "M": PENDING,
        "R": RUNNING,
        "E": RUNNING,  # it ends
        "S": RUNNING,
        "U": RUNNING,
        "B": RUNNING,
        "F": FAILED,  # unless its exit status tells better
    }
    no_such_job = "Unknown Job Id|Job has finished"

    def script(self, job: Job) -> str:
        """Return the script."""
        queue = job.options.queue
        if queue is not None and not re.fullmatch(r"[A-Za-z][\w.-]*(@[\w.-]+)?", queue):
            raise ConfigError(f"--queue={show(queue)} is not the name of a queue: qstat -Q lists them.")
        options = "\n".join(f"#PBS {option}" for option in _options(job))
        body = self.body(job, "$PBS_JOBID", '$(cat "$PBS_NODEFILE")', remote=["pbs_tmrsh"])
        return f"#!/bin/bash\n# Written by tfps. To submit it: qsub FILE\n{options}\n\n{body}"

    def submit_command(self) -> Sequence[str]:
        """Return the command that reads a script."""
        return ["qsub"]

    def parse_job_id(self, output: str) -> str:
        """Return the id: qsub prints nothing else."""
        match = re.search(r"^\d+[\w.\[\]-]*$", output, re.MULTILINE)
        return match[0] if match else ""

    def status_command(self, job_id: str) -> Sequence[str]:
        """Return the command that prints a job's attributes."""
        return ["qstat", "-x", "-f", job_id]

    def parse_status(self, output: str) -> Status:
        """Return the state by the attributes."""
        found = dict(re.findall(r"^ +(\w+) = (.*)$", output.replace("\n\t", ""), re.MULTILINE))
        state, code = self.state_of(found.get("job_state", "")), found.get("Exit_status")
        if state == FAILED:
            state = CANCELLED if code is None else SUCCEEDED if code == "0" else FAILED  # it never ran; it was deleted
        reason = f"exit status {code}" if state == FAILED else found.get("comment", "") if state == PENDING else ""
        return Status(state, reason=reason)

    def cancel_command(self, job_id: str) -> Sequence[str]:
        """Return the command that sends SIGTERM, and SIGKILL after the queue's ``kill_delay``."""
        return ["qdel", job_id]


def _options(job: Job) -> Iterator[str]:
    yield from (f"-N {job.name}", "-S /bin/bash", "-V", "-r y", "-j oe", "-o /dev/null")
    yield f"-l select={'+'.join(_chunks(role) for role in job.roles)}"
    yield from [f"-q {job.options.queue}"] if job.options.queue else []


def _chunks(role: Role) -> str:
    """Return what the tasks of a role ask for; each has one line in the node file (mpiprocs)."""
    asked = [str(role.replicas), f"ncpus={math.ceil(role.cpu or 1)}", "mpiprocs=1"]
    asked += [f"mem={math.ceil(role.memory_bytes / 2**20)}mb"] if role.memory_bytes else []
    return ":".join([*asked, *([f"ngpus={role.gpu}"] if role.gpu else [])])
