"""A launcher for IBM Spectrum LSF, outside the package: what ``BatchLauncher`` leaves to write.

Each task is a slot. A job that got slots on several hosts starts its tasks there with LSF's own ``blaunch``. LSF leaves
``LSB_HOSTS`` out where it would be too long; the file that ``LSB_DJOB_HOSTFILE`` names has the same hosts. What a task
may use is the queue's: ``--worker_cpu`` and its like are refused, as sites count slots in different ways.
"""

import re
from collections.abc import Sequence

from tfps.errors import ConfigError, JobNotFoundError
from tfps.jobs.handle import CANCELLED, FAILED, PENDING, RUNNING, SUCCEEDED, UNKNOWN, Status
from tfps.jobs.spec import Job
from tfps.launchers.common.batch import BatchLauncher
from tfps.text import show


class LsfLauncher(BatchLauncher):
    """LSF, by ``bsub``, ``bjobs`` and ``bkill``."""

    name = "lsf"
    features = frozenset({"ports", "queues"})
    states = {  # noqa: RUF012  bjobs(1)
        "PEND": PENDING,
        "PROV": PENDING,
        "PSUSP": PENDING,
        "WAIT": PENDING,
        "RUN": RUNNING,
        "USUSP": RUNNING,
        "SSUSP": RUNNING,
        "DONE": SUCCEEDED,
        "EXIT": FAILED,
        "UNKWN": UNKNOWN,
        "ZOMBI": UNKNOWN,
    }
    no_such_job = "is not found"

    def script(self, job: Job) -> str:
        """Return the script."""
        queue = job.options.queue
        if queue is not None and not re.fullmatch(r"[\w.-]+", queue):
            raise ConfigError(f"--queue={show(queue)} is not the name of a queue: bqueues lists them.")
        options = [
            f"-J {job.name}",
            f"-n {len(job.tasks())}",
            "-o /dev/null",
            "-r",
            *([f"-q {queue}"] if queue else []),
        ]
        directives = "\n".join(f"#BSUB {option}" for option in options)
        hosts = '${LSB_HOSTS:-$(cat "$LSB_DJOB_HOSTFILE")}'
        body = self.body(job, "$LSB_JOBID", hosts, remote=["blaunch"])
        return f"#!/bin/bash\n# Written by tfps. To submit it: bsub < FILE\n{directives}\n\n{body}"

    def submit_command(self) -> Sequence[str]:
        """Return the command that reads a script."""
        return ["bsub"]

    def parse_job_id(self, output: str) -> str:
        """Return the id in ``Job <4711> is submitted to queue <normal>.``."""
        match = re.search(r"Job <(\d+)> is submitted", output)
        return match[1] if match else ""

    def status_command(self, job_id: str) -> Sequence[str]:
        """Return the command that prints a job's state."""
        return ["bjobs", "-noheader", "-o", "stat exit_code exit_reason delimiter='|'", job_id]

    def parse_status(self, output: str) -> Status:
        """Return the state; bjobs may say of an unknown job without failing that it is not found."""
        if not (match := re.search(r"^(\w+)\|([^|]*)\|(.*)$", output, re.MULTILINE)):
            raise JobNotFoundError(output.strip())
        state = self.state_of(match[1])
        by_owner = state == FAILED and match[3].startswith(("TERM_OWNER", "TERM_REMOVE"))
        words = [f"exit code {match[2]}" if match[2].isdigit() else "", match[3].strip("- ")]
        reason = ", ".join(word for word in words if word) if state == FAILED else ""
        return Status(CANCELLED if by_owner else state, reason=reason)

    def cancel_command(self, job_id: str) -> Sequence[str]:
        """Return the command that sends SIGINT, SIGTERM, and SIGKILL after JOB_TERMINATE_INTERVAL, 10 s."""
        return ["bkill", job_id]
