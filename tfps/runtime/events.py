"""Event files, which TensorBoard reads."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tensorflow.compat.v1 as tf


class EventFile:
    """Writes scalars to ``MODEL_DIR`` or a folder in it; nothing without a ``--model_dir``."""

    def __init__(self, model_dir: str | None, folder: str = "") -> None:
        with tf.Graph().as_default():  # the writer refuses to be made in eager mode
            self._writer = tf.summary.FileWriter(str(Path(model_dir) / folder)) if model_dir else None

    def write(self, step: int, values: Mapping[str, Any], merged: bytes | None = None) -> None:
        """Write the scalars among ``values``, and the model's own merged summary, at a global step."""
        if self._writer is None:
            return
        if merged is not None:
            self._writer.add_summary(merged, step)
        scalars = [tf.Summary.Value(tag=k, simple_value=v) for k, v in values.items() if isinstance(v, (int, float))]
        self._writer.add_summary(tf.Summary(value=scalars), step)
        self._writer.flush()
