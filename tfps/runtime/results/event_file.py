"""Event files, which TensorBoard reads."""

import contextlib
import logging
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

import tensorflow.compat.v1 as tf

from tfps.text import brief
from tfps.tf_types import FileWriter

log = logging.getLogger(__name__)


class EventFile:
    """Write scalars to a new file.

    Args:
        directory: The directory of the file; ``None`` to write nothing.

    If writing fails, at the start or later, it logs that once and writes nothing more. The job does not end for it.
    """

    def __init__(self, directory: Path | None) -> None:
        self._writer: FileWriter = None
        if directory:
            with self._or_without(), tf.Graph().as_default():  # the writer cannot be created in eager mode
                # The file name has a time in seconds; without the suffix, chief and evaluator could share a file.
                self._writer = tf.summary.FileWriter(str(directory), filename_suffix=f".{os.getpid()}")

    def start(self, step: int) -> None:
        """Write that training starts from a global step: TensorBoard drops what earlier files have beyond it.

        A job that goes back to a checkpoint takes steps again; ``SummarySaverHook`` writes the same
        (training/basic_session_run_hooks.py).
        """
        if self._writer is None:
            return
        with self._or_without():
            self._writer.add_session_log(tf.SessionLog(status=tf.SessionLog.START), step + 1)
            self._writer.flush()

    def write(self, step: int, values: Mapping[str, object], merged: bytes | None = None) -> None:
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
        """Run the writing code of the context; log a failure, and stop writing."""
        try:
            yield
        except Exception as error:  # of any class: for a file that is too large, it is an IndexError
            why = brief(error).rstrip(".")
            log.info("--model_dir: the event file cannot be written: %s. The job continues without it.", why)
            self._writer = None
