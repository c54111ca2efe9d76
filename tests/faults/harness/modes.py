"""The modes that faults happen to: the flags of each, the size of its job, and what its checkpoints hold."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from job import Flags, Size


@dataclass(frozen=True)
class ModeUnderTest:
    """A mode with its flags.

    Attributes:
        flags: What it is started with.
        size: How many tasks its job has, unless a fault has its own.
        waits: Whether workers wait for one another in each step, so that each update is whole.
        means: Whether each update is the mean of all workers' gradients.
        round_steps: The steps of a round, which are taken again where a round is; no update is lost then.
    """

    flags: Flags
    size: Size = field(default_factory=Size)
    waits: bool = True
    means: bool = True
    round_steps: int = 0


MODES: Mapping[str, ModeUnderTest] = {
    "async": ModeUnderTest({"mode": "async"}, waits=False, means=False),
    "sync": ModeUnderTest({"mode": "sync"}),
    "ssp": ModeUnderTest({"mode": "ssp", "staleness": 3}, waits=False, means=False),
    "backup": ModeUnderTest({"mode": "sync", "backup_workers": 1}, Size(2, 3), means=False),
    "allreduce": ModeUnderTest({"mode": "allreduce"}, Size(0, 2)),
    "local": ModeUnderTest({"mode": "local", "sync_every": 5}, round_steps=5),
}
