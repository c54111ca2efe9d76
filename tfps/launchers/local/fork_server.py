"""The process that the tasks of this machine are forked from: ``multiprocessing``'s fork server, with TensorFlow.

TensorFlow is imported there once, which takes seconds. Whoever waits for it can do other things, and leave: the fork
server ends with its parent, also while it imports (``forkserver_preload``).
"""

import contextlib
import multiprocessing
import os
import tempfile
import threading
from collections.abc import Iterator
from multiprocessing import forkserver, util
from pathlib import Path

from tfps.errors import ConfigError, StorageError
from tfps.launchers.local import task_process
from tfps.report import make_dir, temporary_directory

_LONGEST_TEMPDIR = 60  # bytes; the fork server's socket is in it, whose path has 107 at most
_SHORT_TEMPDIRS = ("/tmp", "/var/tmp", "/dev/shm")  # noqa: S108  the directory in it is made by mkdtemp


class ForkServer:
    """The fork server of this process.

    Args:
        log: Where TensorFlow's words go as it is imported.

    Attributes:
        context: What makes processes of it.
    """

    def __init__(self, log: Path) -> None:
        self._log = log
        self.context = multiprocessing.get_context("forkserver")
        self._ready = threading.Event()
        self._has_ended = False

    def start(self) -> None:
        """Start it, and return at once.

        Raises:
            StorageError: If the log cannot be written, or there is no directory for temporary files.
        """
        make_dir(self._log.parent)
        self.context.set_forkserver_preload(task_process.PRELOAD)
        with _standard_error_to(self._log), _short_tempdir():
            forkserver.ensure_running()
        _keep_reachable()
        threading.Thread(target=self._wait, daemon=True).start()

    def _wait(self) -> None:
        """Run in a thread: start a process that does nothing, for which the fork server must have imported all."""
        try:
            process = self.context.Process(target=int, daemon=True)
            process.start()
            process.join()
        except (EOFError, OSError):
            self._has_ended = True
        self._ready.set()

    def is_ready(self, within_secs: float) -> bool:
        """Wait a while for it; return whether it has imported TensorFlow.

        Raises:
            ConfigError: If it could not.
        """
        ready = self._ready.wait(within_secs)
        if self._has_ended:
            raise self.ended()
        return ready

    def ended(self) -> ConfigError:
        """Return what there is to say of a fork server that has ended."""
        return ConfigError(f"TensorFlow cannot be imported: {_last_line(self._log)} (all of it is in {self._log}).")


def _last_line(log: Path) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").split("\n")
    return next((line for line in reversed(lines) if line.strip()), "it says nothing").rstrip(".")


def _keep_reachable() -> None:
    """Let the fork server be reached when its socket has been deleted, as by what cleans directories of old files."""
    server = vars(forkserver)["_forkserver"]
    address = Path(server._forkserver_address)
    if hasattr(os, "O_PATH") and address.is_socket() and address.parts[1] != "proc":
        held = Path(f"/proc/self/fd/{os.open(address, os.O_PATH | os.O_CLOEXEC)}")
        server._forkserver_address = str(held) if held.is_socket() else str(address)
        util.Finalize(None, _make_again, args=(address.parent,), exitpriority=-99)  # it is removed at -100


def _make_again(directory: Path) -> None:
    with contextlib.suppress(OSError):
        directory.mkdir(parents=True, exist_ok=True)


@contextlib.contextmanager
def _standard_error_to(path: Path) -> Iterator[None]:
    """Let processes started inside write their standard error to a file.

    Raises:
        StorageError: If it cannot be written.
    """
    try:
        opened = open(path, "ab")  # noqa: SIM115  closed below
    except OSError as error:
        raise StorageError(f"--model_dir: {path} cannot be written: {error.strerror}.") from None
    with opened as file:
        saved = os.dup(2)
        os.dup2(file.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(saved, 2)
            os.close(saved)


@contextlib.contextmanager
def _short_tempdir() -> Iterator[None]:
    """Let ``multiprocessing`` make its directory where a socket's path is short enough, if ``TMPDIR`` is too long."""
    before = temporary_directory()
    short = (path for path in _SHORT_TEMPDIRS if os.access(path, os.W_OK | os.X_OK))
    if len(os.fsencode(before)) > _LONGEST_TEMPDIR:
        tempfile.tempdir = next(short, before)
    try:
        yield
    finally:
        tempfile.tempdir = before
