"""Event files, which TensorBoard reads."""

import contextlib
import logging
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import tensorflow.compat.v1 as tf

from tfps.report import brief

log = logging.getLogger(__name__)


class EventFile:
    """Writes scalars to ``MODEL_DIR`` or a folder in it; nothing without a ``--model_dir``.

    Where that fails, from the start or later, it is told once and nothing more is written: no job ends for it.
    """

    def __init__(self, model_dir: str | None, folder: str = "") -> None:
        self._writer: Any = None
        if model_dir:
            with self._or_without(), tf.Graph().as_default():  # the writer refuses to be made in eager mode
                # Its name has a time in seconds: chief and evaluator would write over each other's.
                self._writer = tf.summary.FileWriter(str(Path(model_dir) / folder), filename_suffix=f".{os.getpid()}")

    def write(self, step: int, values: Mapping[str, Any], merged: bytes | None = None) -> None:
        """Write the scalars among ``values``, and the model's own merged summary, at a global step."""
        if self._writer is None:
            return
        scalars = [tf.Summary.Value(tag=k, simple_value=v) for k, v in values.items() if isinstance(v, (int, float))]
        with self._or_without():
            if merged is not None:
                self._writer.add_summary(merged, step)
            self._writer.add_summary(tf.Summary(value=scalars), step)
            self._writer.flush()

    @contextlib.contextmanager
    def _or_without(self) -> Iterator[None]:
        """Write; a failure is told, and is the last."""
        try:
            yield
        except Exception as error:  # of any class: a file that is too large is an IndexError
            why = brief(error).rstrip(".")
            log.info("--model_dir: the event file cannot be written: %s. The job goes on without it.", why)
            self._writer = None
