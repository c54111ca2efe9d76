"""Asynchronous training: apply each worker's gradient when it arrives. ``async_step`` has the operations."""

import importlib
from typing import ClassVar

from tfps.modes.base import Mode, ModeContext, Step
from tfps.tf_types import Optimizer, Tensor, Variable


class AsyncMode(Mode):
    """No worker waits for another: k gradients make k updates, one by one, and may be stale."""

    name: ClassVar[str] = "async"
    is_blocking: ClassVar[bool] = False

    def build_step(self, optimizer: Optimizer, loss: Tensor, global_step: Variable, context: ModeContext) -> Step:
        """Build the step of ``async_step``. Its tickets number the updates of the job, starting at 0."""
        step: Step = importlib.import_module("tfps.modes.async_step").build(optimizer, loss, global_step, context)
        return step
