"""Convert a checkpoint to a SavedModel, for plain ``tf.saved_model.load`` and for TensorFlow Serving."""

import contextlib
import os
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path

import tensorflow.compat.v1 as tf

from tfps.config.job_config import JobConfig
from tfps.errors import CheckpointError, StorageError
from tfps.models.model import Model
from tfps.models.spec import ModeKeys
from tfps.runtime.checkpoint import restore
from tfps.runtime.graph import serving
from tfps.runtime.graph.checks import model_check, variable_check
from tfps.storage import JobDirectory
from tfps.text import brief, show


def saved_model(config: JobConfig, model: Model, path: str, export_dir: str | None = None) -> Path:
    """Write a SavedModel with the signature ``serving_default``: features in, predictions out.

    Args:
        config: The job.
        model: The model; its evaluation input gives the names, types and shapes of the features.
        path: The checkpoint.
        export_dir: The directory to write, by default ``MODEL_DIR/export/STEP``.

    Returns:
        The directory written.

    Raises:
        CheckpointError: If the checkpoint does not fit the model.
        ModelError: If the model cannot be served, or its prediction uses a variable that training has not.
        StorageError: If the directory exists or cannot be written.
    """
    directory = Path(export_dir or JobDirectory(Path(path).parent).export(restore.step_of(path)))
    _check_new(directory, export_dir is not None)
    built, inputs, outputs = serving.prediction(config, model)
    with built.as_default():
        start = serving.initializer(outputs)  # a checkpoint has neither local variables nor tables
    with built.as_default(), tf.Session() as session:
        try:
            restore.restore(session, path, tf.train.Saver())
        except CheckpointError:
            model_check.explain_misfit(config, model, ModeKeys.PREDICT, built)
            raise
        variable_check.check_numbers(model, ModeKeys.PREDICT, built, restore.shapes_in(path))
        session.run(start)
        try:
            with _whole_or_not(directory) as staged:
                tf.saved_model.simple_save(session, str(staged), inputs, outputs, legacy_init_op=start)
        except (OSError, tf.errors.OpError) as error:
            why = show(brief(error), 300)
            raise StorageError(f"--export_dir={directory} cannot be written: {why}") from None
    return directory


def _check_new(directory: Path, is_given: bool) -> None:
    """Check that a directory does not exist, or is empty."""
    try:
        if directory.exists() and not (directory.is_dir() and not any(directory.iterdir())):
            name, fix = ("--export_dir=", "give a new one") if is_given else ("", "delete it, or give --export_dir")
            raise StorageError(f"{name}{directory} exists and is not empty: {fix}.")
    except OSError as error:
        raise StorageError(f"--export_dir={directory} cannot be read: {error.strerror}.") from None


@contextlib.contextmanager
def _whole_or_not(directory: Path) -> Iterator[Path]:
    """Yield a path next to a directory; rename it to that directory if the context succeeds, and delete it if not."""
    directory.parent.mkdir(parents=True, exist_ok=True)
    staged = directory.parent / f".{directory.name}.{uuid.uuid4().hex}"
    try:
        yield staged
        os.replace(staged, directory)  # the directory is empty, if it exists
    finally:
        shutil.rmtree(staged, ignore_errors=True)
