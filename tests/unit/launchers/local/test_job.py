"""A job on this machine: what its tasks get from it, and a stop while it starts one."""

import multiprocessing
import os
from pathlib import Path
from typing import Any

import pytest

from tfps.cluster.ports import held_ports
from tfps.cluster.spec import Cluster, Task, hosts_flags
from tfps.config.job_config import JobConfig
from tfps.config.launch_protocol import HAS_RECORD, LAUNCH, RECORDED, STARTED_AGAIN
from tfps.jobs.events import TaskExited
from tfps.launchers.local.job import LocalJob
from tfps.launchers.local.plan import Plan
from tfps.storage import place_of


def test_a_task_that_is_started_again_knows_what_an_earlier_process_did(tmp_path: Path) -> None:
    """Whether it wrote the id of this launch to ``job.json``, which is another one for each launch."""
    chief = Task("worker", 0)
    job, other = (LocalJob(Plan(JobConfig(model="linear", model_dir=str(tmp_path)), {chief: []})) for _ in range(2))
    first = dict(job._environment(chief))
    assert set(first) == {LAUNCH}
    job._started.add(chief)
    job._signs.began(chief, os.getpid())
    assert job._environment(chief) == {**first, STARTED_AGAIN: "1"}
    life, sign = multiprocessing.Pipe(duplex=False)
    with life, sign:
        os.write(sign.fileno(), RECORDED)
        assert job._took_sign(chief, life)
    assert job._environment(chief) == {**first, STARTED_AGAIN: "1", HAS_RECORD: str(place_of(str(tmp_path)))}
    assert other._environment(chief)[LAUNCH] != first[LAUNCH]


@pytest.mark.parametrize("is_over", [False, True])
def test_a_ps_that_is_lost_after_the_chief_is_done_is_not_started_again(tmp_path: Path, is_over: bool) -> None:
    """The chief is the last to sign off: the job is over, and has not failed."""
    ps, chief = Task("ps", 0), Task("worker", 0)
    job = LocalJob(Plan(JobConfig(model="linear", model_dir=str(tmp_path)), {ps: [], chief: []}))
    job._restarts.began(ps)
    if is_over:
        job._signs.signed_off.add(chief)
    [event] = job._replaced(ps, -9, None)
    assert (event == TaskExited(ps, 0)) == is_over
    assert (ps in job._restarts) != is_over


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
