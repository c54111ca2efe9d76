"""Read a checkpoint into a graph. TensorFlow reads any, whichever program or task has written it."""

import contextlib
import logging
import os
import re
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Protocol

import tensorflow.compat.v1 as tf

from tfps.cluster.rendezvous import first_few
from tfps.config.launch_protocol import HAS_RECORD
from tfps.errors import CheckpointError
from tfps.runtime.checkpoint.directory import step_in
from tfps.runtime.checkpoint.manifest import problem
from tfps.runtime.checkpoint.sharded_saver import LOST
from tfps.storage import temporary_directory
from tfps.text import brief, show
from tfps.tf_types import Graph, Session

OF_SERVICE = "tfps/service"
"""What the checkpoints of a parameter service have beside the values."""
_SHOWN = 3  # differences that an error names
_UNREADABLE = (tf.errors.OpError, ValueError, IndexError)  # IndexError: a file that was cut short

log = logging.getLogger(__name__)


class MisfitError(CheckpointError):
    """The variables of a checkpoint differ from the model's."""


class Restorer(Protocol):
    """Gives the variables of a graph the values of a checkpoint: ``ShardedSaver``, or ``tf.train.Saver``."""

    def restore(self, session: Session, path: str, /) -> None:
        """Read a checkpoint."""


def step_of(path: str) -> int:
    """Return the global step at which a checkpoint was saved."""
    try:
        return _step_of(path)
    except _UNREADABLE as error:
        raise CheckpointError(f"checkpoint {path} cannot be read: {problem(path) or message_of(error)}") from None


def _step_of(path: str) -> int:
    with _no_pattern(path) as plain:
        return int(tf.train.load_variable(plain, "global_step"))


def report_no_checkpoint(model_dir: str | None) -> None:
    """Log that training begins at step 0, and a warning if an earlier process of this task has trained."""
    log.info("no %s: training begins at step 0", f"checkpoint in {model_dir}" if model_dir else "--model_dir")
    if model_dir and HAS_RECORD in os.environ:
        log.warning("the chief restarted, and --model_dir holds no checkpoint: steps that were taken before are lost.")


def check_name(path: str, step: int) -> None:
    """Check that a checkpoint is of the step in its name, because saving and deleting rely on the name.

    Raises:
        CheckpointError: If it is not.
    """
    if step != step_in(path):
        raise CheckpointError(
            f"--model_dir: {path} holds step {step}, not the step in its name: rename it, or move it away."
        )


@contextlib.contextmanager
def _no_pattern(path: str) -> Iterator[str]:
    """Yield a path by which TensorFlow finds a checkpoint: it reads ``*``, ``?`` and ``[`` in a path as a pattern."""
    folder, name = os.path.split(path)
    if not re.search(r"[*?\[\\]", folder):
        yield path
        return
    with tempfile.TemporaryDirectory(dir=temporary_directory()) as made:
        link = Path(made) / "model_dir"
        link.symlink_to(Path(folder).resolve())
        yield str(link / name)


def restore(session: Session, path: str, saver: Restorer) -> None:
    """Give the saved variables of a graph the values of a checkpoint.

    Raises:
        CheckpointError: If it is damaged.
        MisfitError: If its variables, shapes or types differ from the model's.
    """
    if why := restore_or_damage(session, path, saver):
        raise CheckpointError(f"checkpoint {path} is damaged: {why}. Give another one with --checkpoint_path.")


def restore_or_damage(session: Session, path: str, saver: Restorer) -> str | None:
    """Restore a checkpoint; return why that is impossible if it is damaged.

    Raises:
        MisfitError: If its variables, shapes or types differ from the model's.
    """
    try:
        with _no_pattern(path) as plain:
            misfit = _misfit(session.graph, plain)
            if not misfit:
                saver.restore(session, plain)
    except (tf.errors.InvalidArgumentError, ValueError) as error:
        misfit = message_of(error).rstrip(".")
    except LOST:
        raise
    except (tf.errors.OpError, OSError) as error:
        return message_of(error).rstrip(".")
    if misfit:
        raise MisfitError(
            f"checkpoint {path} does not fit the model: {misfit}. "
            "Give the flags it was trained with, or another --model_dir."
        )
    return None


def check_is_of_job(path: str) -> None:
    """Check that a checkpoint is one of a training job, to go on from: a service could not go on from the next one.

    Raises:
        CheckpointError: If a parameter service has saved it.
        tf.errors.OpError: If it is damaged.
    """
    with _no_pattern(path) as plain:
        if tf.train.load_checkpoint(plain).has_tensor(OF_SERVICE):
            raise CheckpointError(
                f"checkpoint {path} is one of a parameter service, and not of a training job: give another --model_dir."
            )


def shapes_in(path: str) -> Mapping[str, Sequence[int]]:
    """Return the shapes of the variables in a checkpoint by name, with those of an optimizer.

    Raises:
        CheckpointError: If it cannot be read, as when the running job has deleted it.
    """
    try:
        with _no_pattern(path) as plain:
            found: Mapping[str, Sequence[int]] = tf.train.load_checkpoint(plain).get_variable_to_shape_map()
            return found
    except _UNREADABLE as error:
        raise CheckpointError(f"checkpoint {path} cannot be read: {message_of(error)}") from None


def _misfit(graph: Graph, path: str) -> str:
    """Return how a graph's variables differ from a checkpoint's; empty if they do not.

    TensorFlow restores another shape without error, and its error of another type names no variable.
    """
    reader = tf.train.load_checkpoint(path)
    saved, types = reader.get_variable_to_shape_map(), reader.get_variable_to_dtype_map()
    missing, other = [], []
    for variable in graph.get_collection(tf.GraphKeys.GLOBAL_VARIABLES):
        split = variable._get_save_slice_info()
        name, shape = (split.full_name, split.full_shape) if split else (variable.op.name, variable.shape)
        if name not in saved:
            missing.append(name)
        elif not tf.TensorShape(shape).is_compatible_with(saved[name]):  # the model may leave a size open
            other.append(f"{name} has shape {saved[name]} in it, {tf.TensorShape(shape).as_list()} in the model")
        elif types[name] != variable.dtype.base_dtype:
            other.append(f"{name} has type {types[name].name} in it, {variable.dtype.base_dtype.name} in the model")
    return "; ".join([*([f"it has no {first_few(missing, _SHOWN)}"] if missing else []), *other[:_SHOWN]])


def message_of(error: Exception) -> str:
    """Return the first sentence of a TensorFlow error, or what the system says, with the paths."""
    if isinstance(error, OSError) and error.strerror:
        paths = [show(str(path), 300) for path in (error.filename, error.filename2) if path is not None]
        return f"{error.strerror}: {' -> '.join(paths)}" if paths else error.strerror
    return show(brief(error).split("[[")[0].strip(), 300).strip("'\"")
