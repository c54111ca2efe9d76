"""Checkpoints in TensorFlow's own format: ``MODEL_DIR/model.ckpt-STEP``, plain variable names, the last five kept.

Every TensorFlow can read them (``tf.train.load_checkpoint``), whatever the number of PS: slices of a split variable are
stored under one name. ``sharded_saver`` describes which task writes the values, and ``publish`` how a checkpoint is
published whole.
"""

import contextlib
import logging
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import tensorflow.compat.v1 as tf

from tfps.errors import DivergedError, StorageError
from tfps.runtime.checkpoint import finder, publish
from tfps.runtime.checkpoint.directory import list_checkpoints, step_in
from tfps.runtime.checkpoint.manifest import MANIFEST, file_of, index_hash, partial_updates, problem
from tfps.runtime.checkpoint.ownership import Ownership
from tfps.runtime.checkpoint.restore import check_is_of_job, message_of, restore_or_damage
from tfps.runtime.checkpoint.sharded_saver import LOST, SaveResult, ShardedSaver
from tfps.runtime.graph.passes.snapshot import Snapshot
from tfps.storage import CHECKPOINT_NAME, JobDirectory
from tfps.tf_types import Session

_KEEP = 5
_AGAIN_SECS = 0.5

log = logging.getLogger(__name__)


class Saver(Protocol):
    """What writes and reads the values of checkpoints where they are not the variables of a graph."""

    def look(self, session: Session) -> SaveResult:
        """Check the values as ``save`` does, and write nothing."""

    def save(self, session: Session, path: str) -> SaveResult:
        """Write a checkpoint."""

    def restored(self, session: Session, path: str) -> str | None:
        """Read a checkpoint; return why that is impossible if it is damaged."""


class CheckpointManager:
    """Save a training session regularly. Only the chief has one. Make it while the training graph is the default one.

    Args:
        model_dir: The directory to save in; ``None`` to save nothing.
        every_secs: Seconds between two saves.
        snapshot: The variables' values; by default all are read as they are, while no update arrives.
        owner: Knows whether the directory still belongs to this chief.
        remedy: What to try if a variable is not finite.
        saver: Writes and reads the values; by default those of the default graph's variables.

    Attributes:
        newest: The newest known checkpoint; not read yet if it is from an earlier run.
        found_partial: How many partial updates the checkpoint held from which the run has started; see ``manifest``.
        saves: The number of saves that have begun.
    """

    def __init__(
        self,
        model_dir: str | None,
        every_secs: float,
        snapshot: Snapshot | None = None,
        owner: Ownership | None = None,
        remedy: str = "try a smaller learning rate",
        saver: Saver | None = None,
    ) -> None:
        self._dir, self._every_secs, self._owner, self._remedy = model_dir, every_secs, owner, remedy
        self._next = time.monotonic() + every_secs
        self._is_lost = False
        self.saves = 0
        self.found_partial, self._counts_partial = 0, snapshot is not None and snapshot.counts_partial
        self._savers = saver or ShardedSaver(snapshot)
        self._one_at_a_time = threading.Lock()
        self._intact: dict[str, bool] = {}
        self._indexes: dict[str, str] = {}  # hashes, by which a checkpoint of another run is known
        self._consistent: set[str] = set()  # in other checkpoints, some variables may be of an earlier step
        self.newest = next(reversed(list_checkpoints(model_dir)), None)

    @property
    def others(self) -> Sequence[str]:
        """The checkpoints in the directory that were neither saved here nor tried by ``resume``."""
        return [path for path in list_checkpoints(self._dir) if path not in self._intact or self._is_replaced(path)]

    def _is_replaced(self, path: str) -> bool:
        """Return whether an intact checkpoint has become one of other values."""
        is_intact = self._intact.get(path, False)  # another thread may have deleted it since
        return is_intact and self._indexes.get(path) != index_hash(path)

    def _check_claim(self) -> None:
        if self._owner:
            self._owner.check()
            self._owner.check_run()

    def make_due(self) -> None:
        """Make the next save due now, because the directory was lost; any thread may call this, also during a save."""
        self._is_lost = True

    def restore_latest(self, session: Session) -> str | None:
        """Give the variables the values of the newest intact checkpoint; return its path, ``None`` if there is none.

        Raises:
            CheckpointError: If it is another model's, or if there are checkpoints and none is intact.
        """
        self.newest, damaged = None, {}
        if self._dir:
            with contextlib.suppress(OSError):  # the next save tries again, and reports it
                publish.recover_staging(self._dir)
        finder.warn_about_state_file(self._dir)
        for path in reversed(list_checkpoints(self._dir)):
            why = self._tried(session, path)
            if why is not None:
                time.sleep(_AGAIN_SECS)  # a file that is unreadable for a moment is not damaged
                why = self._tried(session, path)
            self._intact[path] = why is None
            if why is None:
                self.newest, self._indexes[path] = path, index_hash(path)
                self.found_partial = partial_updates(path)
                self._consistent.add(path)
                return path
            damaged[path] = why
            finder.warn_about_damage(path, why)
        if damaged:
            raise finder.no_intact_checkpoint(self._dir, damaged)
        return None

    def _tried(self, session: Session, path: str) -> str | None:
        """Restore a checkpoint; return why that is impossible."""
        why = problem(path, read_data=False) or self._restored(session, path)
        return why and (problem(path) or why)  # the manifest names the damaged file, TensorFlow may not

    def _restored(self, session: Session, path: str) -> str | None:
        if isinstance(self._savers, ShardedSaver):
            why = restore_or_damage(session, path, self._savers)
            if why is None:
                check_is_of_job(path)
            return why
        return self._savers.restored(session, path)

    @property
    def is_saving(self) -> bool:
        """Whether a save is under way; any thread may ask."""
        return self._one_at_a_time.locked()

    @property
    def is_due(self) -> bool:
        """Whether it is time to save."""
        return self._is_lost or time.monotonic() >= self._next

    def try_save(self, session: Session, step: int, at_rest: bool = True) -> None:
        """Save; if that fails, log it and continue training, with the last checkpoint still there."""
        self._is_lost = False  # a loss from now on may take what this saves
        try:
            self.save(session, step, at_rest)
        except StorageError as error:
            wait_secs = 0 if self._is_lost else self._every_secs
            log.info("%s Training continues; the next attempt is in %g s.", error, wait_secs)
        self._next = time.monotonic() + self._every_secs

    def save(self, session: Session, step: int, at_rest: bool = True) -> int:
        """Save the variables as ``model.ckpt-STEP``, unless the present step is saved already; return the step saved.

        Args:
            session: The chief's session, or a similar one.
            step: The present step. The checkpoint has that of its values, which may be a later one.
            at_rest: Whether no step is taken during the save. Otherwise the checkpoint may lack, on some PS, updates
                that are on their way, and the same step may be saved again at rest.

        Raises:
            DivergedError: If a variable holds NaN or Inf. Nothing is saved, and the last good checkpoint stays.
            StorageError: If the directory cannot be written.
        """
        with self._one_at_a_time:
            self.saves += 1
            if not self._dir:
                return self._checked(self._savers.look(session)).step
            if self._is_saved(path := JobDirectory(self._dir).checkpoint(step)):
                publish.mend_state(self._kept(path))
                return step
            try:
                self._save_or_explain(session, path, at_rest)
            except StorageError:
                if not self._is_lost:
                    raise
                self._is_lost = False
                self._save_or_explain(session, path, at_rest)  # in the directory that was made again
            log.info("saved %s", self.newest)
            return step_in(self.newest or "")

    def _save_or_explain(self, session: Session, path: str, at_rest: bool) -> None:
        try:
            self._save(session, str(Path(path).parent), at_rest)
        except LOST:
            raise
        except (OSError, ValueError, tf.errors.OpError) as error:
            self._check_claim()  # another chief may have removed the files
            raise StorageError(f"--model_dir: {path} cannot be written: {message_of(error).rstrip('.')}.") from None

    def _is_saved(self, path: str) -> bool:
        """Return whether a checkpoint exists, is intact, and has all updates of its step."""
        is_own = path in self._consistent and self._intact[path] and not self._is_replaced(path)
        return is_own and problem(path, read_data=False) is None

    def _save(self, session: Session, model_dir: str, at_rest: bool) -> None:
        """Save under the step of the saved values, as training may continue; then delete old checkpoints.

        Raises:
            StorageError: If the directory cannot be written. If only the state file cannot, the checkpoint is there.
        """
        self._check_claim()
        staged = publish.stage(model_dir)
        try:
            saved = self._checked(self._savers.save(session, str(staged / CHECKPOINT_NAME)))
            path = JobDirectory(model_dir).checkpoint(saved.step)
            kept = self._kept(path)
            self._check_claim()
            partial = saved.partial_updates + (0 if self._counts_partial else self.found_partial)
            problem_of_state = _published(staged, path, kept, partial)
        finally:
            publish.discard_staging(staged)
        self.newest, self._intact[path], self._indexes[path] = path, True, index_hash(path)
        self._consistent.discard(path)
        if at_rest:
            self._consistent.add(path)
        self._delete_before(kept[0], model_dir)
        if problem_of_state:
            raise problem_of_state

    def _delete_before(self, first: str, model_dir: str) -> None:
        """Delete the checkpoints before a step, but not those of a program that writes no manifests."""
        for old in list_checkpoints(model_dir):
            with contextlib.suppress(OSError):  # one checkpoint too many is no failure
                if step_in(old) < step_in(first) and file_of(old, MANIFEST).exists():
                    publish.remove(old)
                    self._intact.pop(old, None)
                    self._consistent.discard(old)

    def _kept(self, path: str) -> Sequence[str]:
        """Return the checkpoints to keep, of which the last is the new ``path``; damaged ones do not count."""
        step = step_in(path)
        earlier = [old for old in list_checkpoints(self._dir) if step_in(old) < step]
        return [*[old for old in earlier if self._intact.get(old, True)][1 - _KEEP :], path]

    def _checked(self, saved: SaveResult) -> SaveResult:
        """Return ``saved``; raise ``DivergedError`` if a variable is not finite, as the loss may not show that yet."""
        if saved.broken:
            raise DivergedError(f"{saved.broken[0]} holds NaN or Inf at step {saved.step}: {self._remedy}.")
        return saved


def _published(staged: Path, path: str, kept: Sequence[str], partial_updates: int) -> StorageError | None:
    """Publish a checkpoint; return why its state file could not be written, if so."""
    try:
        publish.publish(staged, path, kept, partial_updates)
    except StorageError as error:
        return error
    return None
