"""Standard output of a launcher or a supervisor, whose reader may stop: no task waits for it or is lost with it."""

import contextlib
import math
import os
import select
import stat
import sys
import time

from tfps.text import plural

_PATIENCE_SECS = 2.0
_CHARACTERS = 1024  # per write: a pipe that is ready takes at least 4 KiB


class Output:
    """Lines on standard output.

    If its reader is stuck, lines are left out, and a note says so when it reads again. If nothing can be written
    any more, the job continues without output, and standard error says so once. The tasks' logs have everything.
    """

    def __init__(self) -> None:
        self._is_open = True
        self._left_out = 0
        self._is_stuck = False
        self._is_torn = False  # the reader got stuck in the middle of a line
        self._deadline = math.inf

    def hurry(self, secs: float) -> None:
        """Wait for the reader no longer than for so long from now, over all later lines."""
        self._deadline = min(self._deadline, time.monotonic() + secs)

    def write(self, text: str) -> None:
        """Write a line.

        Raises:
                BrokenPipeError: If the reader is gone.
        """
        if not self._is_open:
            return
        try:
            if self._left_out:
                note = f"({plural(self._left_out, 'line')} left out: standard output was not read)\n"
                self._left_out = 0 if self._takes() and self._write_parts(note) else self._left_out
            self._left_out += not self._write_parts(f"{text}\n")
        except BrokenPipeError:
            raise
        except OSError as error:
            self._is_open = False
            _let_go(1)
            problem = f"standard output cannot be written: {error.strerror}; the job goes on without it"
            print(problem, file=sys.stderr, flush=True)

    def close(self) -> None:
        """Make later writes not wait for a reader that is stuck."""
        if self._is_open and not self._takes():
            self._is_open = False
            with contextlib.suppress(OSError):
                if os.path.sameopenfile(1, 2):
                    _let_go(2)
            _let_go(1)

    def _write_parts(self, text: str) -> bool:
        """Write a text; return whether all of it was written."""
        whole = f"\n{text}" if self._is_torn else text
        for at in range(0, len(whole), _CHARACTERS):
            if not self._takes():
                self._is_torn = self._is_torn or at > 0
                return False
            sys.stdout.write(whole[at : at + _CHARACTERS])
            sys.stdout.flush()
        self._is_torn = False
        return True

    def _takes(self) -> bool:
        """Return whether standard output takes more; wait a little first, unless the last wait failed."""
        if _has_reader():
            patience = max(0.0, min(_PATIENCE_SECS, self._deadline - time.monotonic()))
            self._is_stuck = not select.select([], [1], [], 0.0 if self._is_stuck else patience)[1]
        return not self._is_stuck


def _has_reader() -> bool:
    """Return whether standard output is a pipe, a socket or a terminal, which can be full, or stopped by Ctrl-S."""
    try:
        mode = os.fstat(1).st_mode
        return sys.stdout.fileno() == 1 and (stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode) or os.isatty(1))
    except (OSError, ValueError):
        return False


def _let_go(descriptor: int) -> None:
    """Discard all later writes to a descriptor, and the text that is still in Python's buffer."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, descriptor)
    os.close(nowhere)
