"""Checkpoints in TensorFlow's own format: ``MODEL_DIR/model.ckpt-STEP``, plain variable names, the last five kept.

Every TensorFlow can read them (``tf.train.load_checkpoint``), whatever the number of PS: slices of a split variable are
stored under one name. ``sharded_saver`` describes which task writes the values, and ``directory`` how a checkpoint is
published whole.
"""

import contextlib
import logging
import os
import re
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import tensorflow.compat.v1 as tf

from tfps.errors import CheckpointError, DivergedError, StorageError
from tfps.runtime.checkpoint import directory
from tfps.runtime.checkpoint.manifest import problem
from tfps.runtime.checkpoint.ownership import Ownership
from tfps.runtime.checkpoint.sharded_saver import LOST, SaveResult, ShardedSaver
from tfps.runtime.graph.passes.snapshot import Snapshot
from tfps.storage import temporary_directory
from tfps.text import brief, show
from tfps.tf_types import Graph, Session, Variable

_KEEP = 5
_AGAIN_SECS = 0.5

log = logging.getLogger(__name__)


def step_of(path: str) -> int:
    """Return the global step at which a checkpoint was saved."""
    try:
        return _step_of(path)
    except (tf.errors.OpError, ValueError) as error:
        raise CheckpointError(f"checkpoint {path} cannot be read: {_message(error)}") from None


def _step_of(path: str) -> int:
    with _no_pattern(path) as plain:
        return int(tf.train.load_variable(plain, "global_step"))


def check_name(path: str, step: int) -> None:
    """Check that a checkpoint is of the step in its name, because saving and deleting rely on the name.

    Raises:
        CheckpointError: If it is not.
    """
    if step != directory.step_in(path):
        told = f"{path} is of step {step}, not of the one in its name: give it its name back, or move it away."
        raise CheckpointError(f"--model_dir: {told}")


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


def restore(session: Session, path: str, saver: Any) -> None:
    """Give the saved variables of a graph the values of a checkpoint.

    Raises:
        CheckpointError: If it is damaged, or its variables or shapes differ from the model's.
    """
    if why := _damage(session, path, saver):
        raise CheckpointError(f"checkpoint {path} is damaged: {why}. Give another one: --checkpoint_path.")


def _damage(session: Session, path: str, saver: Any) -> str | None:
    """Restore a checkpoint; return why that is impossible if it is damaged."""
    try:
        with _no_pattern(path) as plain:
            misfits = _misfits(session.graph, plain)
            if not misfits:
                saver.restore(session, plain)
    except (tf.errors.InvalidArgumentError, ValueError) as error:
        misfits = [_message(error)]
    except LOST:
        raise
    except (tf.errors.OpError, OSError) as error:
        return _message(error).rstrip(".")
    if misfits:
        raise CheckpointError(
            f"checkpoint {path} does not fit the model: {misfits[0]} "
            "Give the flags it was trained with, or another --model_dir."
        )
    return None


def _misfits(graph: Graph, path: str) -> list[str]:
    """Return how a graph's variables differ from a checkpoint's; TensorFlow restores another shape without error."""
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


class CheckpointManager:
    """Save a training session regularly. Only the chief has one. Make it while the training graph is the default one.

    Args:
        model_dir: The directory to save in; ``None`` to save nothing.
        every_secs: Seconds between two saves.
        snapshot: The variables' values; by default all are read as they are, while no update arrives.
        owner: Knows whether the directory still belongs to this chief.

    Attributes:
        newest: The newest known checkpoint; not read yet if it is from an earlier run.
    """

    def __init__(
        self, model_dir: str | None, every_secs: float, snapshot: Snapshot | None = None, owner: Ownership | None = None
    ) -> None:
        self._dir, self._every_secs, self._owner = model_dir, every_secs, owner
        self._next = time.monotonic() + every_secs
        self._savers = ShardedSaver(snapshot)
        self._one_at_a_time = threading.Lock()
        self._whole: dict[str, bool] = {}
        self._at_rest: set[str] = set()  # in other checkpoints, some variables may be of an earlier step
        self.newest = next(reversed(directory.list_checkpoints(model_dir)), None)

    @property
    def others(self) -> Sequence[str]:
        """The checkpoints in the directory that were neither saved here nor tried by ``resume``."""
        return [path for path in directory.list_checkpoints(self._dir) if path not in self._whole]

    def _check_claim(self) -> None:
        if self._owner:
            self._owner.check()

    def make_due(self) -> None:
        """Make the next save due now."""
        self._next = 0.0

    def resume(self, session: Session) -> str | None:
        """Give the variables the values of the newest intact checkpoint; return its path, ``None`` if there is none.

        Raises:
            CheckpointError: If it is another model's, or if there are checkpoints and none is intact.
        """
        self.newest, damaged = None, {}
        if self._dir:
            with contextlib.suppress(OSError):  # the next save tries again, and reports it
                directory.recover_staging(self._dir)
        directory.warn_about_state_file(self._dir)
        for path in reversed(directory.list_checkpoints(self._dir)):
            why = self._tried(session, path)
            if why is not None:
                time.sleep(_AGAIN_SECS)  # a file that is unreadable for a moment is not damaged
                why = self._tried(session, path)
            self._whole[path] = why is None
            if why is None:
                self.newest = path
                self._at_rest.add(path)
                return path
            damaged[path] = why
            directory.warn_about_damage(path, why)
        if damaged:
            raise directory.no_intact_checkpoint(self._dir, damaged)
        return None

    def _tried(self, session: Session, path: str) -> str | None:
        """Restore a checkpoint; return why that is impossible."""
        why = problem(path, read_data=False) or _damage(session, path, self._savers)
        return why and (problem(path) or why)  # the manifest names the damaged file, TensorFlow may not

    @property
    def due(self) -> bool:
        """Whether it is time to save."""
        return time.monotonic() >= self._next

    def try_save(self, session: Session, global_step: Variable, at_rest: bool = True) -> None:
        """Save; if that fails, log it and continue training, with the last checkpoint still there."""
        try:
            self.save(session, global_step, at_rest)
        except StorageError as error:
            log.info("%s Training goes on; the next try is in %g s.", error, self._every_secs)
        self._next = time.monotonic() + self._every_secs

    def save(self, session: Session, global_step: Variable, at_rest: bool = True) -> int:
        """Save the variables as ``model.ckpt-STEP``, unless that step is saved already; return the step.

        Args:
            session: The chief's session, or a similar one.
            global_step: The variable that holds the step.
            at_rest: Whether no step is taken during the save. Otherwise the checkpoint may lack, on some PS, updates
                that are on their way, and the same step may be saved again at rest.

        Raises:
            DivergedError: If a variable holds NaN or Inf. Nothing is saved, and the last good checkpoint stays.
            StorageError: If the directory cannot be written.
        """
        with self._one_at_a_time:
            step = int(session.run(global_step))
            if not self._dir:
                return _checked(self._savers.look(session)).step
            if self._is_saved(path := directory.path_of(self._dir, step)):
                directory.mend_state(self._kept(path))
                return step
            try:
                self._save(session, self._dir, at_rest)
            except LOST:
                raise
            except (OSError, ValueError, tf.errors.OpError) as error:
                self._check_claim()  # another chief may have removed the files
                raise StorageError(f"--model_dir: {path} cannot be written: {_message(error)}") from None
            log.info("saved %s", self.newest)
            return directory.step_in(self.newest or "")

    def _is_saved(self, path: str) -> bool:
        """Return whether a checkpoint exists, is intact, and has all updates of its step."""
        return path in self._at_rest and self._whole[path] and problem(path, read_data=False) is None

    def _save(self, session: Session, model_dir: str, at_rest: bool) -> None:
        """Save under the step of the saved values, as training may continue; then delete old checkpoints.

        Raises:
            StorageError: If the directory cannot be written. If only the state file cannot, the checkpoint is there.
        """
        self._check_claim()
        staged = directory.stage(model_dir)
        try:
            saved = _checked(self._savers.save(session, str(staged / directory.BASE)))
            path = directory.path_of(model_dir, saved.step)
            kept = self._kept(path)
            self._check_claim()
            problem_of_state = _published(staged, path, kept, saved.partial_updates)
        finally:
            directory.discard_staging(staged)
        self.newest, self._whole[path] = path, True
        self._at_rest.discard(path)
        if at_rest:
            self._at_rest.add(path)
        self._delete_before(kept[0], model_dir)
        if problem_of_state:
            raise problem_of_state

    def _delete_before(self, first: str, model_dir: str) -> None:
        for old in directory.list_checkpoints(model_dir):
            if directory.step_in(old) < directory.step_in(first):
                with contextlib.suppress(OSError):  # one checkpoint too many is no failure
                    directory.remove(old)
                    self._whole.pop(old, None)
                    self._at_rest.discard(old)

    def _kept(self, path: str) -> Sequence[str]:
        """Return the checkpoints to keep, of which the last is the new ``path``; damaged ones do not count."""
        step = directory.step_in(path)
        earlier = [old for old in directory.list_checkpoints(self._dir) if directory.step_in(old) < step]
        return [*[old for old in earlier if self._whole.get(old, True)][1 - _KEEP :], path]


def _published(staged: Path, path: str, kept: Sequence[str], partial_updates: int) -> StorageError | None:
    """Publish a checkpoint; return why its state file could not be written, if so."""
    try:
        directory.publish(staged, path, kept, partial_updates)
    except StorageError as error:
        return error
    return None


def _checked(saved: SaveResult) -> SaveResult:
    """Return ``saved``; raise ``DivergedError`` if a variable is not finite, as the loss may not show that yet."""
    if saved.broken:
        raise DivergedError(f"{saved.broken[0]} holds NaN or Inf at step {saved.step}: try a smaller --learning_rate.")
    return saved
