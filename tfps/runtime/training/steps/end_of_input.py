"""What the chief says when the workers' input has ended before ``--max_steps``."""

import logging

from tfps.config.job_config import JobConfig
from tfps.data.position import Position
from tfps.errors import DataError
from tfps.modes.registry import mode_of
from tfps.tf_types import Session

log = logging.getLogger(__name__)


def report(config: JobConfig, position: Position | None, session: Session, step: int, began: int) -> None:
    """Log that the input ended.

    Args:
        config: The job.
        position: The position of the job in its examples, with ``--data_policy``.
        session: A session on the chief.
        step: The global step.
        began: The global step at which this run of the job began.

    Raises:
        DataError: If the input was empty, so that no step was taken.
        PeerLostError: If examples of ``--epochs`` are unread: a worker was lost.
    """
    if config.epochs and position:
        position.report_end(session, step > began)
        return
    mode = mode_of(config)
    spare = mode.spare_workers(config)
    whose = (f"{spare + 1} workers" if spare else "a worker") if mode.is_blocking else "all workers"
    if step == began:
        raise DataError(f"the training input of {whose} is empty: input_fn(mode='train') gave no batch.")
    log.info("the input of %s has ended at step %d of --max_steps=%d", whose, step, config.max_steps)
