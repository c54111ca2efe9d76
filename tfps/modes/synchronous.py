"""Synchronous training: an update combines the gradients of all workers. ``sync.step`` has the operations."""

import importlib
from collections.abc import Sequence
from typing import ClassVar

from tfps.config.job_config import JobConfig
from tfps.modes.base import Mode, ModeContext, Step
from tfps.text import plural
from tfps.tf_types import Optimizer, Tensor, Variable

_LEAST = {"median": 3, "trimmed_mean": 3, "krum": 5}  # with fewer gradients it could leave out no broken one


class SyncMode(Mode):
    """Workers wait for one another: the gradients of all of them, or of all but some, make one update."""

    name: ClassVar[str] = "sync"
    is_blocking: ClassVar[bool] = True
    flags = ("backup_workers", "aggregate", "data_policy")

    def gradients_per_update(self, config: JobConfig, num_workers: int) -> int:
        """Return the number of workers without those that an update does not wait for."""
        return max(1, num_workers - self.spare_workers(config))

    def spare_workers(self, config: JobConfig) -> int:
        """Return the number of backup workers."""
        return config.backup_workers or 0

    def validate(self, config: JobConfig, num_workers: int) -> Sequence[str]:
        """Return an error if an update would have too few gradients."""
        spare = self.spare_workers(config)
        given, left = f"--backup_workers={spare}", num_workers - spare
        if left < 1:
            allows = f"allows at most {num_workers - 1}, so that an update has a gradient"
            fix = f"a job of {plural(num_workers, 'worker')} {allows}: give fewer, or --num_workers={spare + 1} or more"
            return [f"{given} is too large: {fix}."]
        if config.data_policy and spare:
            why = "batches would be left out, and no checkpoint could tell which"
            return [f"--data_policy={config.data_policy} is not for {given}: {why}. Leave one of them out."]
        least = _LEAST.get(config.aggregate or "mean", 1)
        if left < least:
            has = f"an update has {plural(left, 'gradient')}" + (f" with {given}" if spare else "")
            fix = f"add workers, --num_workers={least + spare} or more"
            return [f"--aggregate={config.aggregate} needs {least} gradients or more, and {has}: {fix}."]
        return []

    def build_step(self, optimizer: Optimizer, loss: Tensor, global_step: Variable, context: ModeContext) -> Step:
        """Build the step of ``sync.step``. Its tickets are the tokens of the protocol."""
        step: Step = importlib.import_module("tfps.modes.sync.step").build(optimizer, loss, global_step, context)
        return step
