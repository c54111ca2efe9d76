"""What runs in a forked process: ``tfps launch``, one ``tfps run``, or a task of the classic script, as if alone.

Forked from ``multiprocessing``'s fork server, which has imported TensorFlow once: a task starts in a fraction of a
second, and what restarts cost is tfps's part of it. Imports neither. What the launcher forks comes from there, too.
"""

import os
import runpy
import signal
import sys
from collections.abc import Sequence
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[2]
PEERS = ROOT / "scripts" / "bench" / "peers"
PRELOAD = [
    "tfps.runtime.process.forkserver_preload",
    "tfps.runtime.training.worker",
    "tfps.runtime.training.parameter_server",
    "tfps.models.mnist",
]


def be(program: str, argv: Sequence[str], harness: Connection) -> None:
    """Be one task, or the launcher of them all.

    Args:
        program: ``tfps`` or ``classic``.
        argv: Its arguments; tfps's begin with the verb.
        harness: Where what it says goes.
    """
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL)
    os.setsid()
    for fd in (1, 2):
        os.dup2(harness.fileno(), fd)
    harness.close()
    sys.stdout, sys.stderr = (os.fdopen(fd, "w", buffering=1, closefd=False) for fd in (1, 2))
    if program == "tfps":
        for owner in (forkserver, vars(forkserver)["_forkserver"]):
            setattr(owner, "ensure_running", lambda: None)  # noqa: B010  it runs: this was forked from it
        sys.argv = ["tfps", *argv]
        if argv[0] == "launch":
            _show_every_line()
        runpy.run_module("tfps", run_name="__main__")
    else:
        sys.argv = [program, *argv]
        sys.path.insert(0, str(PEERS))
        runpy.run_path(str(HERE / "peer.py"), run_name="__main__")


def _show_every_line() -> None:
    """Let the launcher print each task's progress, too, of which it shows the job's alone.

    The logs, which hold it, are no way to hear of it: faults fill their disk, and take their directory away.
    """
    from tfps.jobs.display import Plain  # noqa: PLC0415  tasks have no use for it

    setattr(Plain, "line", lambda shown, task, text: shown.note(f"{task!s:<8} | {text}"))  # noqa: B010
