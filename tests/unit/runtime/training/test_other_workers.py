"""Who takes the last steps of an async job, when other workers left theirs."""

from collections.abc import Sequence
from typing import Any, cast

import pytest

from tfps.cluster.spec import Cluster, Task
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
