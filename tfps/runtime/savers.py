"""Who writes the values of a checkpoint, and who reads them: each PS its own, or the chief those of all.

Where the hosts share ``--model_dir`` the values need not pass through the chief: each PS writes a shard (a data file of
its own), all at the same time, and the last of them makes one index of theirs (``tf.train.Saver(sharded=True)``). That
they do share it is seen anew each time: every PS has to find in a file what the chief finds there. A PS that does not,
or that may not write, leaves it to the chief. To whoever reads such a checkpoint its files make no difference.
"""

import logging
from pathlib import Path
from typing import Any

import tensorflow.compat.v1 as tf

from tfps.report import brief

LOST = (tf.errors.UnavailableError, tf.errors.AbortedError, tf.errors.CancelledError)  # errors of a PS, not of storage

log = logging.getLogger(__name__)


class Savers:
    """Write and read the variables of a graph. Make it while that is the default."""

    def __init__(self) -> None:
        self._by_chief, self._by_ps = tf.train.Saver(), tf.train.Saver(sharded=True)
        self._file = tf.placeholder(tf.string, [], "checkpoint_file")
        self._found = [_read_on(device, self._file) for device in sorted({v.device for v in tf.global_variables()})]
        self._told = False

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
        except LOST:
            raise
        except tf.errors.OpError as error:
            (log.debug if self._told else log.info)("the chief saves, as a PS cannot: %s", brief(error))
            self._told = True
            for left in Path(path).parent.glob(f"{Path(path).name}.*"):
                left.unlink()
            return False
        return True

    def restore(self, session: Any, path: str) -> None:
        """Read a checkpoint, whoever has written it.

        Raises:
            tf.errors.OpError: If that fails.
            OSError: If there is none.
        """
        by_ps = self._is_shared(session, Path(f"{path}.index"))
        (self._by_ps if by_ps else self._by_chief).restore(session, path)

    def _is_shared(self, session: Any, file: Path) -> bool:
        """Tell whether every PS finds a file as it is here."""
        try:
            found = session.run(self._found, {self._file: str(file)})
        except LOST:
            raise
        except tf.errors.OpError:
            return False
        here = file.read_bytes()
        return all(there == here for there in found)


def _read_on(device: str, file: Any) -> Any:
    with tf.device(device):
        return tf.io.read_file(file)


def _save(session: Any, saver: Any, path: str) -> None:
    names = saver.saver_def
    session.run(names.save_tensor_name, {names.filename_tensor_name: path})
