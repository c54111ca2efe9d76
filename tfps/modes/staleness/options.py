"""The options of ``--mode=async`` for stale gradients, as one optimizer that a step applies its gradients with."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import tensorflow.compat.v1 as tf

from tfps.config.job_config import JobConfig
from tfps.modes.staleness import learning_rate
from tfps.modes.staleness.compensation import DelayCompensation
from tfps.modes.staleness.learning_rate import StalenessRate
from tfps.tf_types import Gradient, Operation, Optimizer, Variable


@dataclass(frozen=True)
class Options:
    """What the options add to a step.

    Attributes:
        optimizer: Applies gradients; the given one if there are no options.
        init: Operations to run before any step.
        finish: Function to call when all graph passes are done; ``None`` without options.
    """

    optimizer: Optimizer
    init: Sequence[Operation] = ()
    finish: Callable[[], None] | None = None


def of(config: JobConfig, optimizer: Optimizer, pairs: Sequence[tuple[Gradient, Variable]]) -> Options:
    """Return what the options of a job add.

    Args:
        config: The job.
        optimizer: The optimizer, with tfps's own checks.
        pairs: Gradients and variables, as its ``compute_gradients`` returns them.

    Raises:
        ValueError: If the change of the parameters by the optimizer is not known to be proportional to its rate, and
            ``--staleness_lr`` is given.
    """
    parts: list[DelayCompensation | StalenessRate] = []
    init: Sequence[Operation] = ()
    if config.delay_compensation is not None:
        parts.append(DelayCompensation(optimizer, config.delay_compensation))
    if config.staleness_lr:
        learning_rate.check(optimizer)
        rate = StalenessRate(parts[-1] if parts else optimizer, pairs)
        parts.append(rate)
        init = [rate.init]
    if not parts:
        return Options(optimizer)
    gates = [(one.values if isinstance(one, tf.IndexedSlices) else one).op for one, _ in pairs]

    def finish() -> None:
        for part in parts:
            part.finish(gates)

    return Options(parts[-1], init, finish)
