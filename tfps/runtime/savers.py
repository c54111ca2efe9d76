"""Who writes the values of a checkpoint, and who reads them: each PS its own, or the chief those of all.

Where the hosts share ``--model_dir`` the values need not go to the chief over the network: each PS writes a shard (a
data file of its own), all at the same time, and the last of them makes one index of theirs
(``tf.train.Saver(sharded=True)``); the chief reads the files once, for their checksums. That all share the directory is
seen anew each time: every PS has to find in a file what the chief finds there. Where one does not, or the chief finds
not all that the PS have written, the chief does it alone. To who reads it, who wrote a checkpoint makes no difference.
"""

import logging
import shutil
from pathlib import Path
from typing import Any

import tensorflow.compat.v1 as tf

from tfps.report import brief
from tfps.runtime.manifest import problem

LOST = (tf.errors.UnavailableError, tf.errors.AbortedError, tf.errors.CancelledError)  # errors of a PS, not of storage

log = logging.getLogger(__name__)


class Savers:
    """Write and read the variables of a graph. Make it while that is the default."""

    def __init__(self) -> None:
        self._by_chief, self._by_ps = tf.train.Saver(), tf.train.Saver(sharded=True)
        self._file = tf.placeholder(tf.string, [], "checkpoint_file")
        self._found = [_read_on(device, self._file) for device in sorted({v.device for v in tf.global_variables()})]
        self._told = ""

    def save(self, session: Any, path: str) -> None:
        """Write a checkpoint.

        Args:
            session: One that reaches every PS.
            path: The checkpoint, without a suffix, in a directory of its own.

        Raises:
            tf.errors.OpError: If that fails.
            OSError: Likewise.
        """
        word = Path(path).with_name("word")
        word.write_text(word.parent.name)
        if not self._is_shared(session, word) or not self._saved_by_ps(session, path):
            _save(session, self._by_chief, path)

    def _saved_by_ps(self, session: Any, path: str) -> bool:
        try:
            _save(session, self._by_ps, path)
            why = problem(path) or _unreadable(path)
        except LOST:
            raise
        except tf.errors.OpError as error:
            why = brief(error)
        if why is None:
            return True
        (log.debug if why == self._told else log.info)("the chief saves, as a PS cannot: %s", why)
        self._told = why
        _clear(path)
        return False

    def restore(self, session: Any, path: str) -> None:
        """Read a checkpoint, whoever has written it.

        Raises:
            tf.errors.OpError: If that fails.
            ValueError: If there is none.
        """
        if self._is_shared(session, Path(f"{path}.index")):
            try:
                self._by_ps.restore(session, path)
                return
            except LOST:
                raise
            except tf.errors.OpError as error:
                log.info("the chief reads %s, as a PS cannot: %s", path, brief(error))
        self._by_chief.restore(session, path)

    def _is_shared(self, session: Any, file: Path) -> bool:
        """Tell whether every PS finds a file as it is here."""
        try:
            here, found = file.read_bytes(), session.run(self._found, {self._file: str(file)})
        except LOST:
            raise
        except (tf.errors.OpError, OSError):
            return False
        return all(there == here for there in found)


def _read_on(device: str, file: Any) -> Any:
    with tf.device(device):
        return tf.io.read_file(file)


def _save(session: Any, saver: Any, path: str) -> None:
    names = saver.saver_def
    session.run(names.save_tensor_name, {names.filename_tensor_name: path})


def _unreadable(path: str) -> str | None:
    """Return which file of a checkpoint cannot be read here, and why, if there is one."""
    try:
        for file in _files(path):
            file.open("rb").close()
    except OSError as error:
        return f"{Path(error.filename).name} cannot be read: {error.strerror}"
    return None


def _clear(path: str) -> None:
    """Delete what is there of a checkpoint, which TensorFlow writes aside first."""
    for file in _files(path):
        file.unlink(missing_ok=True)
    shutil.rmtree(f"{path}_temp", ignore_errors=True)


def _files(path: str) -> list[Path]:
    return list(Path(path).parent.glob(f"{Path(path).name}.*"))
