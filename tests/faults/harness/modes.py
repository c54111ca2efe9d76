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
        mean_within: By how much such a mean may differ: mixing rounds it, and a step of one worker is 1/3 or more.
        round_steps: The steps of a round, which are taken again where a round is; no update is lost then.
    """

    flags: Flags
    size: Size = field(default_factory=Size)
    waits: bool = True
    means: bool = True
    mean_within: float = 0.0
    round_steps: int = 0


MODES: Mapping[str, ModeUnderTest] = {
    "async": ModeUnderTest({"mode": "async"}, waits=False, means=False),
    "sync": ModeUnderTest({"mode": "sync"}),
    "ssp": ModeUnderTest({"mode": "ssp", "staleness": 3}, waits=False, means=False),
    "backup": ModeUnderTest({"mode": "sync", "backup_workers": 1}, Size(2, 3), means=False),
    "allreduce": ModeUnderTest({"mode": "allreduce"}, Size(0, 2)),
    "local": ModeUnderTest({"mode": "local", "sync_every": 5}, round_steps=5),
    "gossip": ModeUnderTest(
        {"mode": "gossip", "topology": "ring", "collect_every": 5}, Size(0, 3), mean_within=0.1, round_steps=5
    ),
}
