"""What a task of ``tfps launch`` does in its process, forked from the fork server, before it is ``tfps run FLAGS``."""

import contextlib
import multiprocessing
import os
import runpy
import signal
import sys
import threading
import time
from multiprocessing.connection import Connection

from tfps.config.job_config import STARTED_AGAIN

PRELOAD = [
    "tfps.runtime.process.forkserver_preload",
    "tfps.runtime.training.worker",
    "tfps.runtime.training.parameter_server",
    "tfps.models.mnist",
    "tfps.models.linear",
]
BUILT, SIGNED_OFF = b"B", b"D"
SIGNS = "TFPS_SIGNS"  # environment variable: the file descriptor that these are written to
_SIGN_SECS, _MOST_SECS = 1.0, 10.0


def task_main(argv: list[str], launcher: Connection, sign: Connection, again: bool = False) -> None:
    """Be the command ``tfps run ARGV``.

    Args:
        argv: Its flags.
        launcher: Where its output goes; the launcher's end is closed when that ends.
        sign: Gets a byte a second while Python runs here, ``BUILT`` when a worker has built its graph, and
            ``SIGNED_OFF`` when the task has come to its end.
        again: Whether it takes the place of one that was lost.
    """
    multiprocessing.current_process().daemon = False  # a model may have processes of its own, as a pool's
    for ignored in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(ignored, signal.SIG_DFL)
    os.setsid()  # Ctrl-C is for the launcher, which ends the tasks in order
    for number in (1, 2):
        os.dup2(launcher.fileno(), number)
    threading.Thread(target=_end_with, args=(launcher,), daemon=True).start()
    threading.Thread(target=_give_signs, args=(sign,), daemon=True).start()
    sys.stdout, sys.stderr = (
        os.fdopen(number, "w", buffering=1, encoding="utf-8", errors="backslashreplace", closefd=False)
        for number in (1, 2)
    )
    os.environ[SIGNS] = str(sign.fileno())  # an exit by anything else than the task's end says nothing there
    os.environ.update({STARTED_AGAIN: "1"} if again else {})
    for name in [n for n in os.environ if n == "TF_CONFIG" or n.startswith("SLURM_")]:
        del os.environ[name]
    sys.argv = ["tfps", "run", *argv]
    runpy.run_module("tfps", run_name="__main__")


def _end_with(launcher: Connection) -> None:
    """Wait for the launcher's end of the connection to close, which is all that it ever does; then end in order.

    Nobody is there to kill what does not, as a model's module that blocks while it is imported.
    """
    with contextlib.suppress(OSError):
        os.read(launcher.fileno(), 1)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(_MOST_SECS)
    os.killpg(0, signal.SIGKILL)  # this process, and what the model has started


def _give_signs(sign: Connection) -> None:
    with contextlib.suppress(OSError):
        while True:
            os.write(sign.fileno(), b".")
            time.sleep(_SIGN_SECS)
