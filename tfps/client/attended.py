"""Run a command of ``tfps`` that ends when the process that has started it ends, or closes its standard input."""

import os
import runpy
import signal
import sys
import threading


def _end_with_input() -> None:
    """Run in a thread: wait for the end of standard input, then ask this process to stop."""
    while os.read(0, 1 << 16):
        pass
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    threading.Thread(target=_end_with_input, daemon=True).start()
    sys.argv[0] = "tfps"
    runpy.run_module("tfps", run_name="__main__", alter_sys=True)
