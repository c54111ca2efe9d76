"""All-reduce: the workers add up their gradients in a ring, without PS. ``ring.step`` has the operations."""

import importlib
from collections.abc import Collection, Sequence
from typing import ClassVar

from tfps.config.job_config import JobConfig
from tfps.modes.base import Mode, ModeContext, Step
from tfps.tf_types import Optimizer, Tensor, Variable


class AllReduceMode(Mode):
    """Workers wait for one another, and each applies the mean of all gradients to its own copy of the variables."""

    name: ClassVar[str] = "allreduce"
    is_blocking: ClassVar[bool] = True
    trains_on_copies: ClassVar[bool] = True
    flags: ClassVar[Collection[str]] = ("data_policy",)
    uses_ps: ClassVar[bool] = False

    @property
    def may_repeat_steps(self) -> bool:
        """Return true: a step counts when the chief has taken it."""
        return True

    def gradients_per_update(self, config: JobConfig, num_workers: int) -> int:
        """Return the number of workers."""
        del config
        return num_workers

    def validate(self, config: JobConfig, num_workers: int) -> Sequence[str]:
        """Return an error for a wire format that would give each worker another mean."""
        del num_workers
        if config.wire == "bfloat16":
            return ["--wire=bfloat16 is for modes with PS, and --mode=allreduce sends sums as they are: leave it out."]
        return []

    def build_step(self, optimizer: Optimizer, loss: Tensor, global_step: Variable, context: ModeContext) -> Step:
        """Build the step of ``ring.step``. Its tickets number the steps, which all workers take together."""
        step: Step = importlib.import_module("tfps.modes.ring.step").build(optimizer, loss, global_step, context)
        return step
