"""The process that forks the tasks of this machine: ``multiprocessing``'s fork server, with TensorFlow imported.

The import happens there once, and takes seconds. The parent need not wait for it, and may exit: the fork server ends
with its parent, even during the import (``forkserver_preload``).
"""

import contextlib
import multiprocessing
import os
import signal
import tempfile
import threading
import time
from collections.abc import Iterator
from multiprocessing import forkserver, util
from pathlib import Path

from tfps.config.launch_protocol import FORK_SERVER_PARENT
from tfps.errors import ConfigError, KilledError, TfpsError
from tfps.jobs.events import how_it_ended
from tfps.launchers.local import task_process
from tfps.storage import open_to_append, temporary_directory

_LONGEST_TEMPDIR = 60  # bytes; the fork server's socket is in it, with a path of at most 107
_END_SECS = 2.0  # a process whose connections are closed has ended by then
_SHORT_TEMPDIRS = ("/tmp", "/var/tmp", "/dev/shm")  # noqa: S108  mkdtemp makes the directory in it


class ForkServer:
    """The fork server of this process.

    Args:
        log: The file that gets TensorFlow's output during the import.

    Attributes:
        context: The ``multiprocessing`` context that creates processes from it.
    """

    def __init__(self, log: Path) -> None:
        self._log = log
        self.context = multiprocessing.get_context("forkserver")
        self._ready = threading.Event()
        self._has_ended = False

    def start(self) -> None:
        """Start the fork server, also again after its end, and return without waiting for the import.

        Raises:
            StorageError: If the log cannot be written, or there is no directory for temporary files.
        """
        self._ready.clear()
        self._has_ended = False
        self.context.set_forkserver_preload(task_process.PRELOAD)
        os.environ[FORK_SERVER_PARENT] = str(os.getpid())
        try:
            with _standard_error_to(self._log), _short_tempdir():
                forkserver.ensure_running()
        finally:
            del os.environ[FORK_SERVER_PARENT]
        _keep_reachable()
        threading.Thread(target=self._wait, daemon=True).start()

    def _wait(self) -> None:
        """Run in a thread: start a process that does nothing; the fork server can do that only after all imports."""
        try:
            process = self.context.Process(target=int, daemon=True)
            process.start()
            process.join()
        except (EOFError, OSError):
            self._has_ended = True
        self._ready.set()

    def is_ready(self, within_secs: float) -> bool:
        """Wait for at most this time; return whether the fork server has imported TensorFlow.

        Raises:
            ConfigError: If the import failed.
            KilledError: If a signal killed the fork server.
        """
        ready = self._ready.wait(within_secs)
        if self._has_ended:
            raise self.ended()
        return ready

    def wake(self) -> None:
        """Let the fork server go on, if something has stopped it."""
        self._signal(signal.SIGCONT)

    def kill(self) -> None:
        """Kill the fork server: it reports no ends of tasks any more; who waits for one gets an end of file."""
        self._signal(signal.SIGKILL)

    def end(self) -> None:
        """Kill the fork server when all tasks have ended, and wait: left alone it takes seconds, or stays stopped."""
        self.kill()
        _killer()

    def _signal(self, number: int) -> None:
        if pid := _pid():
            with contextlib.suppress(ProcessLookupError):  # multiprocessing has collected it meanwhile
                os.kill(pid, number)

    def ended(self) -> TfpsError:
        """Return the error for a fork server that has ended."""
        killer = _killer()
        if killer:
            return KilledError(killer, how_it_ended(-killer))
        return ConfigError(f"TensorFlow cannot be imported: {_last_line(self._log)} (all of it is in {self._log}).")


def _pid() -> int | None:
    pid: int | None = vars(forkserver)["_forkserver"]._forkserver_pid
    return pid


def _killer() -> int | None:
    """Return the signal that has killed the fork server; ``None`` if it has exited, or still runs after a while."""
    deadline = time.monotonic() + _END_SECS
    pid = _pid()
    while pid and time.monotonic() < deadline:
        # multiprocessing collects the process itself, when it starts the next one
        with contextlib.suppress(ChildProcessError):
            if ended := os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT):
                return None if ended.si_code == os.CLD_EXITED else ended.si_status
        time.sleep(0.01)
    return None


def _last_line(log: Path) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").split("\n")
    return next((line for line in reversed(lines) if line.strip()), "it says nothing").rstrip(".")


def _keep_reachable() -> None:
    """Keep the fork server reachable after its socket is deleted, for example by a cleaner of old files."""
    server = vars(forkserver)["_forkserver"]
    address = Path(server._forkserver_address)
    # /proc/self/fd/N leads to the socket even without its path.
    if hasattr(os, "O_PATH") and address.is_socket() and address.parts[1] != "proc":
        held = Path(f"/proc/self/fd/{os.open(address, os.O_PATH | os.O_CLOEXEC)}")
        server._forkserver_address = str(held) if held.is_socket() else str(address)
        util.Finalize(None, _make_again, args=(address.parent,), exitpriority=-99)  # multiprocessing removes it at -100


def _make_again(directory: Path) -> None:
    with contextlib.suppress(OSError):
        directory.mkdir(parents=True, exist_ok=True)


@contextlib.contextmanager
def _standard_error_to(path: Path) -> Iterator[None]:
    """Send the standard error of processes started inside to a file.

    Raises:
        StorageError: If the file cannot be written.
    """
    with open_to_append(path) as file:
        saved = os.dup(2)
        os.dup2(file.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(saved, 2)
            os.close(saved)


@contextlib.contextmanager
def _short_tempdir() -> Iterator[None]:
    """Make ``multiprocessing`` use a directory with a short enough path for a socket, if ``TMPDIR`` is too long."""
    before = temporary_directory()
    short = (path for path in _SHORT_TEMPDIRS if os.access(path, os.W_OK | os.X_OK))
    if len(os.fsencode(before)) > _LONGEST_TEMPDIR:
        tempfile.tempdir = next(short, before)
    try:
        yield
    finally:
        tempfile.tempdir = before
