"""A cut network: the kernel drops or refuses what goes to and from one task, in the harness's own namespace.

So the tasks keep their addresses, and the cut hits connections that are open as well as new ones.
"""

import contextlib
import re
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence

import proc
from attempt import Attempt

# By kind of cut, what is done with the packets to the PS, and with those from it: among these are the resets.
_DROP, _RESET = ("DROP",), ("REJECT", "--reject-with", "tcp-reset")
KINDS = {"dropped": (_DROP, _DROP), "dropped one way": (_DROP, ()), "reset": (_RESET, ())}
_PROOF_SECS = 0.5


def cut(kind: str, secs: float, victim: str = "ps/1") -> Callable[[Attempt], None]:
    """Return the fault of a task that nobody reaches for some seconds: a PS, or a worker where it is called, too."""

    def act(run: Attempt) -> None:
        run.start(restarts=10)
        run.saved()
        with broken(run, victim, kind):
            time.sleep(secs)
        run.healed()
        run.recover()
        run.note("tasks were started again" if any(map(run.job.restarts, run.job.names)) else "")
        run.finish()

    return act


@contextlib.contextmanager
def broken(run: Attempt, victim: str, kind: str) -> Iterator[None]:
    """Cut a task off inside.

    Raises:
        NotInjectedError: If it is not: the port answers, or no packet was hit.
    """
    port = run.job.port(victim)
    rules = _rules(port, kind)
    with run.fault(victim):
        _apply("-A", rules)
    try:
        _prove(port, ConnectionRefusedError if kind == "reset" else TimeoutError)
        yield
        if not _packets_hit():
            raise proc.NotInjectedError("no packet was dropped")
    finally:
        _apply("-D", rules)


def free(port: int) -> None:
    """Take a port from the process that listens on it, with all connections that were made to it.

    Raises:
        NotInjectedError: If it is still taken.
    """
    subprocess.run(["ss", "-K", "-a", f"sport = :{port} or dport = :{port}"], check=False, capture_output=True)
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as tried:
        tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            tried.bind(("127.0.0.1", port))
        except OSError as error:
            raise proc.NotInjectedError(f"port {port} is still taken: {error.strerror}") from None


def _rules(port: int, kind: str) -> list[list[str]]:
    to_ps, from_ps = KINDS[kind]
    ways = (("--dport", to_ps), ("--sport", from_ps))
    return [["INPUT", "-p", "tcp", side, str(port), "-j", *target] for side, target in ways if target]


def _apply(change: str, rules: Sequence[Sequence[str]]) -> None:
    for rule in rules:
        subprocess.run(["iptables", "-w", change, *rule], check=True, capture_output=True)


def _prove(port: int, expected: type[OSError]) -> None:
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=_PROOF_SECS):
            pass
    except expected:
        return
    raise proc.NotInjectedError(f"port {port} can still be reached")


def _packets_hit() -> bool:
    """Return whether every rule has met packets."""
    argv = ["iptables", "-w", "-L", "INPUT", "-v", "-n", "-x"]
    result = subprocess.run(argv, check=True, capture_output=True, text=True)
    counts = re.findall(r"^\s+(\d+)\s+\d+\s+(?:DROP|REJECT)", result.stdout, re.MULTILINE)
    return bool(counts) and all(int(count) for count in counts)
