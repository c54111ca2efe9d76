"""Checkpoints in TensorFlow's own format: ``MODEL_DIR/model.ckpt-STEP``, plain variable names, the last five kept.

Any TensorFlow reads them (``tf.train.load_checkpoint``), whatever the number of PS: slices of a split variable are
stored under its one name.
"""

import logging
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow.compat.v1 as tf

from tfps.config import show
from tfps.errors import CheckpointError, DivergedError, StorageError
from tfps.report import brief
from tfps.runtime.model_dir import existing

_KEEP = 5
_LOST = (tf.errors.UnavailableError, tf.errors.AbortedError, tf.errors.CancelledError)  # errors of a PS, not of storage

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
        misfits = _misfits(session.graph, path)
        if not misfits:
            saver.restore(session, path)
    except (tf.errors.InvalidArgumentError, ValueError) as error:
        misfits = [_message(error)]
    except _LOST:
        raise
    except tf.errors.OpError as error:
        raise CheckpointError(
            f"checkpoint {path} is damaged: {_message(error)}. Delete its files to go on from the one before."
        ) from None
    if misfits:
        raise CheckpointError(
            f"checkpoint {path} does not fit the model: {misfits[0]} "
            "Give the flags it was trained with, or another --model_dir."
        )


def _misfits(graph: Any, path: str) -> list[str]:
    """Return how a graph's variables differ from a checkpoint's; to restore another shape would be no error."""
    saved = tf.train.load_checkpoint(path).get_variable_to_shape_map()
    found = []
    for variable in graph.get_collection(tf.GraphKeys.GLOBAL_VARIABLES):
        split = variable._get_save_slice_info()
        name, shape = (split.full_name, split.full_shape) if split else (variable.op.name, variable.shape.as_list())
        if name not in saved:
            found.append(f"it has no {name}.")
        elif list(shape) != saved[name]:
            found.append(f"{name} has shape {saved[name]} in it, {list(shape)} in the model.")
    return found


def _message(error: Exception) -> str:
    """Return the first sentence of a TensorFlow error."""
    return show(brief(error).split("[[")[0].strip(), 300).strip("'\"")


class Checkpoints:
    """Saves a training session now and then; the chief has one. Make it while the training graph is the default."""

    def __init__(self, model_dir: str | None, every_secs: float) -> None:
        self._dir = model_dir
        self._every_secs = every_secs
        self._next = time.monotonic() + every_secs
        self.saver = tf.train.Saver(max_to_keep=_KEEP, save_relative_paths=True)
        self._sums = _sums(tf.global_variables())
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
            DivergedError: If a variable holds NaN or Inf: nothing is saved, and the last good checkpoint stays.
            StorageError: If the directory cannot be written.
        """
        step = self._finite_step(session, global_step)
        if not self._dir:
            return step
        path = str(Path(self._dir) / f"model.ckpt-{step}")
        if path == self.newest:
            return step
        try:
            self.newest = self.saver.save(session, str(Path(self._dir) / "model.ckpt"), step, write_meta_graph=False)
        except _LOST:
            raise
        except (OSError, ValueError, tf.errors.OpError) as error:
            raise StorageError(f"--model_dir: {path} cannot be written: {_message(error)}") from None
        log.info("saved %s", self.newest)
        return step

    def _finite_step(self, session: Any, global_step: Any) -> int:
        """Return the global step at which all variables are finite; the loss may not tell yet that they are not."""
        sums, step = session.run([self._sums, global_step])
        broken = [name for name, value in sums.items() if not np.isfinite(value)]
        if broken:
            raise DivergedError(f"{broken[0]} holds NaN or Inf at step {step}: try a smaller --learning_rate.")
        return int(step)


def _sums(variables: Sequence[Any]) -> dict[str, Any]:
    """Return the sum of each variable of floats, by its name: where the variable is not finite, nor is its sum."""
    sums = {}
    for variable in variables:
        if variable.dtype.is_floating:
            with tf.device(variable.device):
                wide = tf.float64 if variable.dtype.base_dtype == tf.float64 else tf.float32
                sums[variable.op.name] = tf.reduce_sum(tf.cast(variable, wide))
    return sums
