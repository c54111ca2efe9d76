"""Stale synchronous parallel: async with a bound on how far a worker gets ahead. ``ssp_step`` has the operations."""

import importlib
from collections.abc import Collection, Mapping
from typing import ClassVar

from tfps.config.job_config import JobConfig
from tfps.modes.base import Mode, ModeContext, Step
from tfps.tf_types import Optimizer, Tensor, Variable

DEFAULT_STALENESS = 3


class SspMode(Mode):
    """As async, but a worker begins a step only if it is at most ``--staleness`` steps ahead of the slowest one."""

    name: ClassVar[str] = "ssp"
    is_blocking: ClassVar[bool] = False
    flags: ClassVar[Collection[str]] = ("staleness", "data_policy")

    def defaults(self, config: JobConfig) -> Mapping[str, object]:
        """Return the values of flags that are shown with the mode if they are not given."""
        del config
        return {"staleness": DEFAULT_STALENESS}

    @property
    def can_overlap(self) -> bool:
        """Return ``False``: whether a step may begin is known when the one before has ended."""
        return False

    def build_step(self, optimizer: Optimizer, loss: Tensor, global_step: Variable, context: ModeContext) -> Step:
        """Build the step of ``ssp_step``. Its tickets number the updates of the job, starting at 0."""
        step: Step = importlib.import_module("tfps.modes.ssp_step").build(
            optimizer, loss, global_step, context, staleness_of(context.config)
        )
        return step


def staleness_of(config: JobConfig) -> int:
    """Return ``--staleness``, or its default."""
    return DEFAULT_STALENESS if config.staleness is None else config.staleness
