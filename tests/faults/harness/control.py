"""What a model learns while it trains, through files in its ``--data_dir``; the input of all models here comes by it.

    hurry        steps take no time any more, so that a job comes to its end
    step_secs    how long a step takes until then
    stuck        the next input takes a minute
    nan-ME       one input of worker ME is NaN; then the file is called nan-ME.sent
    crash-ME     worker ME dies of SIGSEGV when it asks for its tenth input
    exit-ME      worker ME ends with exit code 0 when it asks for its next input; then the file is called exit-ME.done
    ends-ME      how many inputs worker ME has

Imports nothing of tfps or TensorFlow: the classic script uses it, too.
"""

import os
import signal
import sys
import time
from pathlib import Path

STEP_SECS = 0.1
_CRASH_AT = 10
LAST_WORDS = "the table of users is broken"


class Control:
    """The files in one directory, as one worker sees them."""

    def __init__(self, directory: str, worker: int) -> None:
        self._dir, self._worker = Path(directory), worker
        file = self._dir / "step_secs"
        self._step_secs = float(file.read_text()) if file.exists() else STEP_SECS
        self._asked = 0

    def batches(self) -> int:
        """Return how many inputs this worker has."""
        file = self._dir / f"ends-{self._worker}"
        return int(file.read_text()) if file.exists() else 10**9

    def wait(self) -> None:
        """Take as long as a step does."""
        self._asked += 1
        if not (self._dir / "hurry").exists():
            time.sleep(self._step_secs)
        if (self._dir / "stuck").exists():
            time.sleep(60)
        leave = self._dir / f"exit-{self._worker}"
        if leave.exists():
            leave.rename(f"{leave}.done")
            os._exit(0)
        if self._asked >= _CRASH_AT and (self._dir / f"crash-{self._worker}").exists():
            print(LAST_WORDS, file=sys.__stderr__, flush=True)
            os.kill(os.getpid(), signal.SIGSEGV)

    def value(self) -> float:
        """Return the next input, after as long as a step takes: 2 to the power of the worker's index, or NaN."""
        self.wait()
        bad = self._dir / f"nan-{self._worker}"
        if bad.exists():
            bad.rename(f"{bad}.sent")
            return float("nan")
        return 2.0**self._worker
