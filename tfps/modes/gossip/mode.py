"""Gossip: workers mix their copies with those of their neighbors, without PS. ``gossip.step`` has the operations."""

import importlib
from collections.abc import Collection, Mapping, Sequence
from typing import ClassVar

from tfps.config.job_config import JobConfig
from tfps.modes.base import Mode, ModeContext, Step
from tfps.modes.gossip import topology
from tfps.modes.rounds import Rounds, Shares
from tfps.tf_types import Optimizer, Tensor, Variable

DEFAULT_COLLECT_EVERY = 100


class GossipMode(Mode):
    """Each worker trains on its own copy, and takes the weighted mean of its neighbors' copies in each step."""

    name: ClassVar[str] = "gossip"
    is_blocking: ClassVar[bool] = True
    trains_on_copies: ClassVar[bool] = True
    flags: ClassVar[Collection[str]] = ("topology", "collect_every", "data_policy")
    uses_ps: ClassVar[bool] = False

    def defaults(self, config: JobConfig) -> Mapping[str, object]:
        """Return the values of flags that are shown with the mode if they are not given."""
        del config
        return {"topology": topology.DEFAULT, "collect_every": DEFAULT_COLLECT_EVERY}

    def gradients_per_update(self, config: JobConfig, num_workers: int) -> int:
        """Return the number of workers."""
        del config
        return num_workers

    def rounds(self, config: JobConfig, num_workers: int, shares: Shares | None) -> Rounds:
        """Return the rounds, each of which ends with the mean of all copies."""
        del shares
        every = collect_every(config)
        return Rounds([every] * num_workers, f"--collect_every={every}", num_workers)

    def validate(self, config: JobConfig, num_workers: int) -> Sequence[str]:
        """Return an error for a graph that does not fit the workers, or for a wire format that it does not use."""
        problems = list(topology.problems(config.topology or topology.DEFAULT, num_workers))
        if config.wire == "bfloat16":
            problems.append(
                "--wire=bfloat16 is for modes with PS, and --mode=gossip sends copies as they are: leave it out."
            )
        return problems

    def build_step(self, optimizer: Optimizer, loss: Tensor, global_step: Variable, context: ModeContext) -> Step:
        """Build the step of ``gossip.step``. Its tickets number the steps of this worker."""
        step: Step = importlib.import_module("tfps.modes.gossip.step").build(optimizer, loss, global_step, context)
        return step


def collect_every(config: JobConfig) -> int:
    """Return ``--collect_every``, or its default."""
    return config.collect_every or DEFAULT_COLLECT_EVERY
