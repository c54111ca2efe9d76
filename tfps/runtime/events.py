"""Event files, which TensorBoard reads."""

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tensorflow.compat.v1 as tf

from tfps.report import brief

log = logging.getLogger(__name__)


class EventFile:
    """Writes scalars to ``MODEL_DIR`` or a folder in it; nothing without a ``--model_dir``."""

    def __init__(self, model_dir: str | None, folder: str = "") -> None:
        with tf.Graph().as_default():  # the writer refuses to be made in eager mode
            self._writer = tf.summary.FileWriter(str(Path(model_dir) / folder)) if model_dir else None

    def write(self, step: int, values: Mapping[str, Any], merged: bytes | None = None) -> None:
        """Write the scalars among ``values``, and the model's own merged summary, at a global step."""
        if self._writer is None:
            return
        scalars = [tf.Summary.Value(tag=k, simple_value=v) for k, v in values.items() if isinstance(v, (int, float))]
        try:
            if merged is not None:
                self._writer.add_summary(merged, step)
            self._writer.add_summary(tf.Summary(value=scalars), step)
            self._writer.flush()
        except Exception as error:  # of any class: a file that is too large is an IndexError
            log.info("--model_dir: the event file cannot be written: %s Training goes on without it.", brief(error))
            self._writer = None
