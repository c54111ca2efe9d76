"""Asynchronous training: apply each worker's gradient when it arrives. ``async_step`` has the operations."""

import importlib
from collections.abc import Collection, Sequence
from typing import ClassVar

from tfps.config.job_config import JobConfig
from tfps.modes.base import Mode, ModeContext, Step
from tfps.tf_types import Optimizer, Tensor, Variable


class AsyncMode(Mode):
    """No worker waits for another: k gradients make k updates, one by one, and may be stale."""

    name: ClassVar[str] = "async"
    is_blocking: ClassVar[bool] = False
    flags: ClassVar[Collection[str]] = ("staleness_lr", "delay_compensation", "data_policy")

    def validate(self, config: JobConfig, num_workers: int) -> Sequence[str]:
        """Return an error for an optimizer whose change of the parameters is not proportional to the learning rate."""
        del num_workers
        if not (config.staleness_lr and config.optimizer == "ftrl"):
            return ()
        why = "FTRL computes whole parameters with the rate, so a smaller rate for one update would shrink them"
        return [f"--staleness_lr=1 is not for --optimizer=ftrl: {why}. Leave one of them out."]

    def build_step(self, optimizer: Optimizer, loss: Tensor, global_step: Variable, context: ModeContext) -> Step:
        """Build the step of ``async_step``. Its tickets number the updates of the job, starting at 0."""
        step: Step = importlib.import_module("tfps.modes.async_step").build(optimizer, loss, global_step, context)
        return step
