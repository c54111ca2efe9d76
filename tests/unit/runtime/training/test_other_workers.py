"""Who takes the last steps of an async job, when other workers left theirs, and who took none."""

import functools
import logging
from collections.abc import Sequence
from typing import Any, cast

import pytest

from tfps.cluster.spec import Cluster, Task
from tfps.config.job_config import JobConfig
from tfps.modes.registry import mode_of
from tfps.runtime.coordination.job_state import JobState, Phase
from tfps.runtime.training.other_workers import OtherWorkers

CLUSTER = Cluster(("p:1",), ("w:1", "w:2"))


class Phases:
    """The phases on the PS, others at each read."""

    def __init__(self, *reads: Sequence[int]) -> None:
        self._reads = list(reads)

    def read(self, session: Any) -> tuple[Sequence[int], Any]:
        """Return the phases of this read; the last ones stay."""
        del session
        return self._reads.pop(0) if len(self._reads) > 1 else self._reads[0], None


def may_take(index: int, *reads: Sequence[int]) -> bool:
    """Return whether a worker may take the remaining steps where all others answer."""
    state = cast(JobState, Phases(*reads))
    others = OtherWorkers(CLUSTER, Task("worker", index), state, lambda tasks, _: not tasks, None)
    return others.let_this_one(None)


@pytest.mark.parametrize(
    "reads",
    [
        [(Phase.IDLE, Phase.IDLE)],
        [(Phase.RUNNING, Phase.IDLE)],
        [(Phase.RUNNING, Phase.IDLE), (Phase.IDLE, Phase.IDLE)],
    ],
)
def test_two_workers_never_take_one_step(reads: list[Sequence[int]]) -> None:
    """A worker that ends its own steps while another looks is not missed: it comes first, and takes the last step."""
    assert not may_take(1, *reads)
    assert may_take(0, (Phase.IDLE, Phase.IDLE))


@pytest.mark.parametrize(
    ("flags", "steps", "said"),
    [
        ({}, [7, 7], ""),
        ({}, [7, 0], "worker/1 took no step: no batch was left for it, or the others were faster"),
        ({}, [0, 7, 0], "worker/0, worker/2 took no step: no batch was left for them, or the others were faster"),
        (
            {"mode": "local", "worker_fraction": 0.25},
            [7, 0, 7, 7],
            "worker/1 took no step: it was not drawn for a round (--worker_fraction=0.25)",
        ),
        (
            {"mode": "local", "worker_fraction": 0.25},
            [0, 7, 0, 7],
            "worker/0, worker/2 took no step: they were not drawn for a round (--worker_fraction=0.25)",
        ),
        (
            {"mode": "local", "worker_fraction": 0.9},
            [7, 0],
            "worker/1 took no step: no batch was left for it, or the others were faster",
        ),
    ],
)
def test_the_log_says_why_a_worker_took_no_step(
    flags: dict[str, Any], steps: Sequence[int], said: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The mode knows the reason; a fraction that is rounded up to all workers draws each of them."""
    config, cluster = JobConfig(**flags), Cluster(("p:1",), tuple(f"w:{index}" for index in range(len(steps))))
    others = OtherWorkers(cluster, Task("worker", 0), cast(JobState, Phases([])), lambda tasks, _: not tasks, None)
    with caplog.at_level(logging.INFO):
        others.report_idle(steps, functools.partial(mode_of(config).why_idle, config, len(steps)))
    assert [record.getMessage() for record in caplog.records] == ([said] if said else [])
