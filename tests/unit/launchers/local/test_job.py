"""A job on this machine, asked to stop while it starts a task."""

from pathlib import Path
from typing import Any

import pytest

from tfps.cluster.ports import held_ports
from tfps.cluster.spec import Cluster, Task, hosts_flags
from tfps.config.job_config import JobConfig
from tfps.jobs.events import TaskExited
from tfps.launchers.local.job import LocalJob, Plan


def test_a_stop_while_a_task_is_forked_reaches_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A signal's handler may run at any moment, also when a task runs that is not listed yet: it ends as the others."""
    ps, forked = Task("ps", 0), LocalJob._forked

    def stopped_meanwhile(job: LocalJob, task: Task) -> Any:
        made = forked(job, task)
        job.cancel()
        return made

    monkeypatch.setattr(LocalJob, "_forked", stopped_meanwhile)
    with held_ports(2) as (one, other):
        cluster = Cluster((f"127.0.0.1:{one}",), (f"127.0.0.1:{other}",))
        argv = ["--model=linear", f"--model_dir={tmp_path}", "--job_name=ps", "--task_index=0", *hosts_flags(cluster)]
        job = LocalJob(Plan(JobConfig(model="linear", model_dir=str(tmp_path)), {ps: argv}))
        [ended] = [event for event in job.events() if isinstance(event, TaskExited)]
    assert ended.exit_code in (-15, 143), "it was not killed"
