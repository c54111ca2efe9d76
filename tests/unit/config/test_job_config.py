"""The job as a value."""

import dataclasses

import pytest

from tfps.config.converters import INT64_MAX
from tfps.config.job_config import OPTIONS, JobConfig


def test_a_config_is_frozen() -> None:
    """A config cannot be changed, only copied with changes."""
    job = JobConfig()
    with pytest.raises(dataclasses.FrozenInstanceError):
        job.seed = 2  # type: ignore[misc]
    assert (job.replace(seed=2).seed, job.seed) == (2, 1)


def test_what_a_task_does_not_get() -> None:
    """A task's command line has nothing of what only those need who start it."""
    job = JobConfig(num_ps=1, num_workers=3, port_base=9000, max_restarts=3, seed=3)
    assert job.for_task(job_name="ps", task_index=2).to_argv() == ["--job_name=ps", "--task_index=2", "--seed=3"]


def test_what_a_server_of_a_service_gets() -> None:
    """The number of clients, which no address tells; no model; and no last step where there is none."""
    job = JobConfig(serve=True, model="service", num_ps=2, num_workers=3, max_steps=INT64_MAX)
    assert job.for_task(model="service").to_argv() == ["--num_workers=3", "--serve=1"]
    assert "--max_steps=1000" in job.replace(max_steps=1000).to_argv()


def test_what_all_tasks_must_agree_on() -> None:
    """With other values of these, tasks would build other graphs, end at other steps, or shard data in other orders."""
    agreed = {"model", "optimizer", "learning_rate", "max_steps", "mode", "ps_strategy", "min_slice_mb", "wire", "seed"}
    agreed |= {"backup_workers", "aggregate", "staleness", "staleness_lr", "delay_compensation", "worker_fraction"}
    agreed |= {"sync_every", "server_optimizer", "server_learning_rate", "server_momentum", "tower_updates"}
    agreed |= {"data_policy", "partition", "local_epochs", "async_rounds", "topology", "collect_every", "epochs"}
    assert {name for name, option in OPTIONS.items() if option.must_agree} == agreed
