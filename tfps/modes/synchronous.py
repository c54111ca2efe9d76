"""Synchronous training: an update is the mean of all workers' gradients. ``sync_step`` has the operations."""

import importlib
from typing import ClassVar

from tfps.modes.base import Mode, ModeContext, Step
from tfps.tf_types import Optimizer, Tensor, Variable


class SyncMode(Mode):
    """Workers wait for one another: N gradients, one per worker, make one update with their mean."""

    name: ClassVar[str] = "sync"
    is_blocking: ClassVar[bool] = True

    def gradients_per_update(self, num_workers: int) -> int:
        """Return the number of workers: an update has one gradient of each."""
        return num_workers

    def build_step(self, optimizer: Optimizer, loss: Tensor, global_step: Variable, context: ModeContext) -> Step:
        """Build the step of ``sync_step``. Its tickets are the tokens of the protocol."""
        step: Step = importlib.import_module("tfps.modes.sync_step").build(optimizer, loss, global_step, context)
        return step
