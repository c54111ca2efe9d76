"""Checkpoints in TensorFlow's own format: ``MODEL_DIR/model.ckpt-STEP``, plain variable names, the last five kept.

Any TensorFlow reads them (``tf.train.load_checkpoint``), whatever the number of PS: slices of a split variable are
stored under its one name.
"""

import logging
import time
from pathlib import Path
from typing import Any

import tensorflow.compat.v1 as tf

from tfps.config import show
from tfps.errors import CheckpointError, StorageError
from tfps.runtime.model_dir import existing

_KEEP = 5

log = logging.getLogger(__name__)


def step_of(path: str) -> int:
    """Return the global step that a checkpoint was saved at."""
    try:
        return int(tf.train.load_variable(path, "global_step"))
    except (tf.errors.OpError, ValueError) as error:
        raise CheckpointError(f"checkpoint {path} cannot be read: {_message(error)}") from None


def restore(session: Any, path: str, saver: Any) -> None:
    """Give the saved variables of a graph a checkpoint's values.

    Raises:
        CheckpointError: If it is damaged, or holds other variables or shapes than the model's.
    """
    try:
        saver.restore(session, path)
    except (tf.errors.NotFoundError, tf.errors.InvalidArgumentError, ValueError) as error:
        raise CheckpointError(
            f"checkpoint {path} does not fit the model: {_message(error)} "
            "Give the flags it was trained with, or another --model_dir."
        ) from None
    except (tf.errors.DataLossError, tf.errors.OutOfRangeError, tf.errors.UnknownError) as error:
        raise CheckpointError(f"checkpoint {path} is damaged: {_message(error)}") from None


def _message(error: Exception) -> str:
    """Return the first sentence of a TensorFlow error."""
    text = str(getattr(error, "message", error)).strip().splitlines()[0]
    return show(text.split("\n")[0].split("[[")[0].strip(), 300).strip("'\"")


class Checkpoints:
    """Saves a training session now and then; the chief has one. Make it while the training graph is the default."""

    def __init__(self, model_dir: str | None, every_secs: float) -> None:
        self._dir = model_dir
        self._every_secs = every_secs
        self._next = time.monotonic() + every_secs
        self.saver = tf.train.Saver(max_to_keep=_KEEP, save_relative_paths=True)
        earlier = existing(model_dir)
        self.saver.recover_last_checkpoints(earlier)  # what earlier runs left counts among those that are kept
        self.newest = earlier[-1] if earlier else None

    @property
    def due(self) -> bool:
        """Whether it is time to save."""
        return time.monotonic() >= self._next

    def try_save(self, session: Any, global_step: Any) -> None:
        """Save; a failure is told and training goes on, with the last checkpoint still there."""
        try:
            self.save(session, global_step)
        except StorageError as error:
            log.info("%s Training goes on; the next try is in %g s.", error, self._every_secs)
        self._next = time.monotonic() + self._every_secs

    def save(self, session: Any, global_step: Any) -> int:
        """Save the variables as ``model.ckpt-STEP``, unless that step is saved already; returns the step.

        Raises:
            StorageError: If the directory cannot be written.
        """
        step = int(session.run(global_step))
        if not self._dir:
            return step
        path = str(Path(self._dir) / f"model.ckpt-{step}")
        if path == self.newest:
            return step
        try:
            self.newest = self.saver.save(session, str(Path(self._dir) / "model.ckpt"), step, write_meta_graph=False)
        except _STORAGE_ERRORS as error:
            raise StorageError(f"--model_dir: {path} cannot be written: {_message(error)}") from None
        log.info("saved %s", self.newest)
        return step


_STORAGE_ERRORS = (
    OSError,
    ValueError,
    tf.errors.NotFoundError,
    tf.errors.PermissionDeniedError,
    tf.errors.ResourceExhaustedError,
    tf.errors.FailedPreconditionError,
    tf.errors.UnknownError,
    tf.errors.InternalError,
)
