"""Write and read the values of a checkpoint: each PS its own, or the chief those of all.

If the hosts share ``--model_dir``, the values need not go to the chief over the network. Each PS writes a shard (a
separate data file) at the same time, and the last one makes one index for all (``tf.train.Saver(sharded=True)``). The
chief reads the files once, for their checksums. Each save checks that all share the directory: every PS has to find in
a file what the chief wrote there. If one does not, or the chief does not find all that the PS have written, the chief
saves alone. Readers cannot tell which task wrote a checkpoint.
"""

import contextlib
import logging
import re
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import tensorflow.compat.v1 as tf

from tfps.runtime.checkpoint.manifest import problem
from tfps.runtime.graph.passes.snapshot import Snapshot
from tfps.storage import open_file, read_file
from tfps.text import brief
from tfps.tf_types import Saver, Session, Tensor

# Times alone would not do: a machine that stands still for seconds lets them pass without a look at any moment.
_TRIES, _TRIES_SECS = 30, 3.0  # at least; for finding a moment at which all PS have the same updates
_STUCK_LOOKS, _STUCK_SECS = 10, 1.0  # an update that is partial in all of these stays so, because its worker is lost
_PAUSE_SECS = 0.01
_NOT_ONE_STEP = "tfps: some PS lack some updates"

LOST = (tf.errors.UnavailableError, tf.errors.AbortedError, tf.errors.CancelledError)  # from a PS, not from storage

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class SaveResult:
    """The result of a save, or of checking the variables.

    Attributes:
        step: The global step.
        broken: The names of variables that hold NaN, or an Inf that they may not hold.
        partial_updates: How many updates are in some of the values and not in others.
    """

    step: int
    broken: Sequence[str]
    partial_updates: int


class _Stuck:
    """Find the workers with an update that is on some PS and not on others, and stays so."""

    def __init__(self) -> None:
        self._seen: dict[tuple[int, bytes], tuple[float, int]] = {}  # the time of the first look, and how many since

    def look(self, counts: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
        """Add the counts of updates, int64 [PS, 2, n]; return bool [n], whether an update is stuck."""
        now = time.monotonic()
        keys = [(index, counts[:, :, index].tobytes()) for index in range(counts.shape[2])]
        found = {key: self._seen.get(key, (now, 0)) for key in keys}
        self._seen = {key: (since, looks + 1) for key, (since, looks) in found.items()}
        stays = np.array([now - since > _STUCK_SECS and looks >= _STUCK_LOOKS for since, looks in found.values()], bool)
        is_uneven: npt.NDArray[np.bool_] = (counts != counts[:1]).any(axis=(0, 1))
        return stays & is_uneven


class ShardedSaver:
    """Write and read the variables of a graph. Make it while that graph is the default one.

    Args:
        snapshot: The variables' values.
    """

    def __init__(self, snapshot: Snapshot | None = None) -> None:
        self._snapshot = snapshot = snapshot or Snapshot()
        uneven = ~snapshot.same_updates
        self._may_be_uneven = tf.placeholder_with_default(tf.zeros_like(uneven), [None], "may_be_uneven")
        right = tf.raw_ops.Assert(condition=~tf.reduce_any(uneven & ~self._may_be_uneven), data=[_NOT_ONE_STEP])
        self._counts, self._stuck = snapshot.counts, _Stuck()
        builder = snapshot.builder([right])
        self._by_chief = tf.train.Saver(snapshot.saveables, builder=builder)
        self._by_ps = tf.train.Saver(snapshot.saveables, sharded=True, builder=builder)
        self._look = {
            "step": snapshot.step,
            "broken": dict(snapshot.broken),
            "partial_updates": snapshot.partial_updates,
            "reads": snapshot.reads,
        }
        self._file = tf.placeholder(tf.string, [], "checkpoint_file")
        self._found = [_read_on(device, self._file) for device in sorted({v.device for v in tf.global_variables()})]
        self._logged = ""  # why the chief saved alone, the last time

    def look(self, session: Session) -> SaveResult:
        """Check the variables as ``save`` does, and write nothing."""
        return _saved(session.run(self._look))

    def save(self, session: Session, path: str) -> SaveResult:
        """Write a checkpoint of one moment on each PS, and of the same updates on all PS if that is possible.

        Args:
            session: One that reaches every PS.
            path: The checkpoint, without a suffix, in a directory that holds nothing else.

        Returns:
            The step and what was found in the written values.

        Raises:
            tf.errors.OpError: If saving fails.
            OSError: If saving fails.
        """
        word = Path(path).with_name("word")
        word.write_text(word.parent.name)
        saved = self._saved_by_ps(session, path) if self._is_shared(session, word) else None
        return saved or self._save(session, self._by_chief, path)

    def _save(self, session: Session, saver: Saver, path: str) -> SaveResult:
        names = saver.saver_def
        fetches = {"path": names.save_tensor_name, **self._look}
        deadline = time.monotonic() + _TRIES_SECS
        feed: dict[Tensor, object] = {names.filename_tensor_name: path}
        tried = 0
        while True:
            try:
                with _storage_told_apart(path):
                    return _saved(session.run(fetches, feed))
            except tf.errors.InvalidArgumentError as error:
                if _NOT_ONE_STEP not in error.message:
                    raise
            time.sleep(_PAUSE_SECS)
            found = self._stuck.look(session.run(self._counts))
            tried += 1
            is_late = time.monotonic() >= deadline and tried >= _TRIES
            feed[self._may_be_uneven] = np.ones_like(found) if is_late else found

    def _saved_by_ps(self, session: Session, path: str) -> SaveResult | None:
        try:
            saved = self._save(session, self._by_ps, path)
            why = problem(path) or _unreadable(path)
        except LOST:
            raise
        except tf.errors.OpError as error:
            why = brief(error)
        if why is None:
            return saved
        kind = re.sub(r"/\S*", "", why)  # the names of files differ in each save
        (log.debug if kind == self._logged else log.info)("the chief saves, because a PS cannot: %s", why)
        self._logged = kind
        _clear(path)
        return None

    def restore(self, session: Session, path: str) -> None:
        """Read a checkpoint, regardless of which task has written it.

        Raises:
            tf.errors.OpError: If reading fails.
            ValueError: If there is no checkpoint.
        """
        why = ""
        if self._is_shared(session, Path(f"{path}.index")):
            try:
                with _storage_told_apart(path):
                    self._by_ps.restore(session, path)
                return
            except LOST:
                raise
            except tf.errors.OpError as error:
                why = brief(error)
        self._by_chief.restore(session, path)
        if why:  # where the chief cannot read it either, that is the error
            log.info("the chief has read %s, because a PS cannot: %s", path, why)

    def _is_shared(self, session: Session, file: Path) -> bool:
        """Return whether every PS finds the same contents in a file as this task."""
        try:
            with _storage_told_apart(str(file)):
                here, found = read_file(file), session.run(self._found, {self._file: str(file)})
        except LOST:
            raise
        except (tf.errors.OpError, OSError):
            return False
        return all(there == here for there in found)


@contextlib.contextmanager
def _storage_told_apart(path: str) -> Iterator[None]:
    """Let an error of ``LOST`` that names a file be an ``UnknownError``, as TensorFlow's other errors of storage are.

    TensorFlow gives ``ESTALE`` the code ``ABORTED``, and ``ENOLCK`` and ``ENETUNREACH`` the code ``UNAVAILABLE``
    (``IOErrorToErrorCode`` in tsl's errors.cc), but their texts have the path of the file.
    """
    try:
        yield
    except LOST as error:
        if path not in error.message:
            raise
        raise tf.errors.UnknownError(error.node_def, error.op, error.message) from None


def _read_on(device: str, file: Tensor) -> Tensor:
    with tf.device(device):
        return tf.io.read_file(file)


def _saved(values: Mapping[str, Any]) -> SaveResult:
    """Return the result that the values of ``ShardedSaver._look`` show."""
    flagged = [pair for names, flags in values["broken"].items() for pair in zip(names, flags, strict=True)]
    broken = [name for name, is_broken in flagged if is_broken]
    return SaveResult(int(values["step"]), broken, int(values["partial_updates"]))


def _unreadable(path: str) -> str | None:
    """Return which file of a checkpoint cannot be read here, and why; ``None`` if all can."""
    try:
        for file in _files(path):
            open_file(file).close()
    except OSError as error:
        return f"{Path(error.filename).name} cannot be read: {error.strerror}"
    return None


def _clear(path: str) -> None:
    """Delete the files of a checkpoint, and the directory in which TensorFlow writes them first."""
    for file in _files(path):
        file.unlink(missing_ok=True)
    shutil.rmtree(f"{path}_temp", ignore_errors=True)


def _files(path: str) -> list[Path]:
    return list(Path(path).parent.glob(f"{Path(path).name}.*"))
