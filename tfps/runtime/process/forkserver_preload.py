"""The first import of the fork server of ``tfps launch``: TensorFlow, once for all tasks.

The fork server notices the end of its parent only after all imports, so a thread watches the parent until then. The
fork server ignores signals to the whole group, because its parent ends it. SIGTERM is blocked rather than ignored: one
that is sent to a task before that has set itself up waits until then, and is not lost.
"""

import os
import signal
import threading

from tfps.config.launch_protocol import FORK_SERVER_PARENT
from tfps.runtime.process import (
    process_identity,  # noqa: F401  it notes when it was imported: before TensorFlow
    tensorflow_import,
)

_LOOK_EVERY_SECS = 0.2


def _end_with_parent(parent: int, over: threading.Event) -> None:
    while not over.wait(_LOOK_EVERY_SECS):
        if os.getppid() != parent:
            os._exit(1)


def _load() -> None:
    over = threading.Event()
    # The parent may have ended before this line, so it has left its own process id.
    parent = int(os.environ.pop(FORK_SERVER_PARENT, os.getppid()))
    watch = threading.Thread(target=_end_with_parent, args=(parent, over))
    watch.start()
    try:
        tensorflow_import.load()
    finally:
        over.set()
        watch.join()  # a process with Python threads must not fork


for _number in (signal.SIGINT, signal.SIGHUP):
    signal.signal(_number, signal.SIG_IGN)
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
_load()
