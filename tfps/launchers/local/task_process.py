"""Prepare the process of a task of ``tfps launch``, forked from the fork server, and run ``tfps run FLAGS`` in it."""

import contextlib
import multiprocessing
import os
import runpy
import signal
import sys
import threading
import time
from collections.abc import Mapping
from multiprocessing.connection import Connection

from tfps.config.launch_protocol import ALIVE, HAS_RECORD, LAUNCH, SIGNS, STARTED_AGAIN
from tfps.timeouts import TASK_END_SECS

PRELOAD = [
    "tfps.runtime.process.forkserver_preload",
    "tfps.runtime.training.worker",
    "tfps.runtime.training.parameter_server",
    "tfps.models.mnist",
    "tfps.models.linear",
]
_SIGN_SECS = 1.0


def task_main(argv: list[str], launcher: Connection, sign: Connection, given: Mapping[str, str]) -> None:
    """Run the command ``tfps run ARGV`` in this process.

    Args:
        argv: Its flags.
        launcher: The connection for its output; its other end closes when the launcher ends.
        sign: The connection for its signs, of which it gives ``ALIVE`` every second.
        given: Variables of ``launch_protocol`` for its environment.
    """
    multiprocessing.current_process().daemon = False  # a model may have its own processes, such as a pool's
    os.setsid()  # Ctrl-C is for the launcher, which ends the tasks in order
    _take_signals()
    for number in (1, 2):
        os.dup2(launcher.fileno(), number)
    threading.Thread(target=_end_with, args=(launcher,), daemon=True).start()
    threading.Thread(target=_give_signs, args=(sign,), daemon=True).start()
    sys.stdout, sys.stderr = (
        os.fdopen(number, "w", buffering=1, encoding="utf-8", errors="backslashreplace", closefd=False)
        for number in (1, 2)
    )
    os.environ[SIGNS] = str(sign.fileno())  # only the task's regular end writes SIGNED_OFF there
    for name in (LAUNCH, STARTED_AGAIN, HAS_RECORD):  # if a task has started the launcher, they are that task's
        os.environ.pop(name, None)
    os.environ.update(given)
    os.environ.pop("TF_CONFIG", None)  # Slurm's variables stay, for the model: the flags have precedence over them
    if "numpy" in sys.modules:  # a fork copies its generator, and all tasks would draw the same numbers
        sys.modules["numpy"].random.seed()
    sys.argv = ["tfps", "run", *argv]
    runpy.run_module("tfps", run_name="__main__")


def _take_signals() -> None:
    """Take signals again, as the fork server does not; a SIGTERM that was sent since the fork arrives now."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])


def _end_with(launcher: Connection) -> None:
    """Wait until the launcher's end of the connection closes, the only thing that can happen to it; then end in order.

    Nobody else kills a process that does not end, for example in a model's module that blocks during its import.
    """
    with contextlib.suppress(OSError):
        os.read(launcher.fileno(), 1)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(TASK_END_SECS)
    os.killpg(0, signal.SIGKILL)  # this process, and those that the model has started


def _give_signs(sign: Connection) -> None:
    with contextlib.suppress(OSError):
        while True:
            os.write(sign.fileno(), ALIVE)
            time.sleep(_SIGN_SECS)
