"""A task of a job on Ray: an actor that holds the task's address, and runs the task in a separate process.

TensorFlow's server cannot be stopped, so the restart of a task needs a new process; the actor, and with it the address,
stays. The process runs under a small shell, which reads the actor's end of a pipe. When the pipe ends, on purpose or
with the actor, the driver or the node's Ray, the shell stops the task in order. So nothing is left behind.
"""

import contextlib
import os
import queue
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Sequence

import ray

from tfps.cluster.ports import held_ports
from tfps.timeouts import KILL_AFTER_SECS, RAY_ACTOR_END_SECS

# The task's input is empty; the shell reads the pipe only to see its end.
_KEEPER = (
    'exec 3<&0; "$@" </dev/null 3<&- & task=$!; '
    "(cat <&3; kill -TERM $task; "
    f"for second in {' '.join(map(str, range(1, int(KILL_AFTER_SECS) + 1)))}; do sleep 1; kill -0 $task || exit; done; "
    "kill -KILL $task) >/dev/null 2>&1 & "
    "reader=$!; exec 3<&-; wait $task; code=$?; kill $reader; exit $code"
)
_LAST_WORDS_SECS = 2.0  # a process that a task left behind may hold its output open


class RayTask:
    """The actor. Two of its calls can run at the same time: ``stop`` comes while ``read`` waits."""

    def __init__(self) -> None:
        """Pick a port and hold it."""
        self._held = contextlib.ExitStack()
        [self._port] = self._held.enter_context(held_ports(1))
        self._said: queue.Queue[str | int] = queue.Queue()
        self._process: subprocess.Popen[str] | None = None

    def place(self) -> tuple[str, str]:
        """Return the task's address for the other tasks, and the id of its node."""
        ip = ray.util.get_node_ip_address()
        host = f"[{ip}]" if ":" in ip else ip
        return f"{host}:{self._port}", ray.get_runtime_context().get_node_id()

    def start(self, argv: Sequence[str], directory: str) -> None:
        """Start the task's process.

        Raises:
            OSError: If there is no such directory here.
        """
        _wait_until_free(self._port)
        self._process = subprocess.Popen(
            ["sh", "-c", _KEEPER, "tfps", *argv],
            cwd=directory,
            env={name: value for name, value in os.environ.items() if name != "TF_CONFIG"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            encoding="utf-8",
            errors="replace",
            start_new_session=True,  # Ray kills a worker's process group with the worker, which leaves no time to save
        )
        threading.Thread(target=self._see_through, args=(self._process,), daemon=True).start()

    def _see_through(self, process: "subprocess.Popen[str]") -> None:
        """Run in a thread: pass on the lines of the process, then its exit code."""
        reader = threading.Thread(target=self._listen, args=(process,), daemon=True)
        reader.start()
        code = process.wait()
        if code < 0:  # the shell was killed: its task still has the address
            _end_group(process.pid)
        reader.join(_LAST_WORDS_SECS)
        self._said.put(code if code >= 0 else 128 - code)

    def _listen(self, process: "subprocess.Popen[str]") -> None:
        assert process.stdout is not None
        for line in process.stdout:
            self._said.put(line.rstrip("\n"))

    def read(self, secs: float, most: int = 1000) -> tuple[list[str], int | None]:
        """Return the task's new lines, after at most ``secs``, and its exit code once it has ended."""
        lines: list[str] = []
        until = time.monotonic() + secs
        with contextlib.suppress(queue.Empty):
            while len(lines) < most:
                said = self._said.get(timeout=0.01 if lines else max(until - time.monotonic(), 0.01))
                if isinstance(said, int):
                    return lines, said
                lines.append(said)
        return lines, None

    def stop(self) -> None:
        """Ask the task to save and end, and wait until it has; its shell kills it after ``KILL_AFTER_SECS``."""
        if self._process is not None:
            assert self._process.stdin is not None
            self._process.stdin.close()
            self._process.wait()


def _end_group(group: int) -> None:
    """Stop the processes of a group that has lost its first one: in order, then by force."""
    for number, secs in ((signal.SIGTERM, RAY_ACTOR_END_SECS), (signal.SIGKILL, _LAST_WORDS_SECS)):
        deadline = time.monotonic() + secs
        try:
            os.killpg(group, number)
            while time.monotonic() < deadline:
                time.sleep(0.1)
                os.killpg(group, 0)
        except ProcessLookupError:
            return


def _wait_until_free(port: int) -> None:
    """Wait until nobody listens on a port: a task whose supervisor was killed ends too, but saves first."""
    deadline = time.monotonic() + RAY_ACTOR_END_SECS
    while time.monotonic() < deadline:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1.0).close()
        except OSError:
            return
        time.sleep(0.1)
