"""A cut network: the kernel drops or refuses what goes to and from one PS, in the harness's own namespace.

So the tasks keep their addresses, and the cut hits connections that are open as well as new ones.
"""

import contextlib
import re
import subprocess
import time
from collections.abc import Iterator, Sequence

import proc
from attempt import Attempt
from kills import Act

# By kind of cut, what is done with the packets to the PS, and with those from it. A reset answers each with one.
_DROP, _RESET = ("DROP",), ("REJECT", "--reject-with", "tcp-reset")
KINDS = {"dropped": (_DROP, _DROP), "dropped one way": (_DROP, ()), "reset": (_RESET, _RESET)}


def cut(kind: str, secs: float) -> Act:
    """Return the fault of a PS that nobody reaches for some seconds."""

    def act(run: Attempt) -> None:
        run.start(restarts=10)
        run.saved()
        with broken(run, "ps/1", kind):
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
        NotInjectedError: If no packet was hit.
    """
    rules = _rules(run.job.port(victim), kind)
    with run.fault(victim):
        _apply("-A", rules)
    try:
        yield
        if not _packets_hit():
            raise proc.NotInjectedError("no packet was dropped")
    finally:
        _apply("-D", rules)


def _rules(port: int, kind: str) -> list[list[str]]:
    to_ps, from_ps = KINDS[kind]
    ways = (("--dport", to_ps), ("--sport", from_ps))
    return [["INPUT", "-p", "tcp", side, str(port), "-j", *target] for side, target in ways if target]


def _apply(change: str, rules: Sequence[Sequence[str]]) -> None:
    for rule in rules:
        subprocess.run(["iptables", "-w", change, *rule], check=True, capture_output=True)


def _packets_hit() -> bool:
    """Tell whether every rule has met packets."""
    argv = ["iptables", "-w", "-L", "INPUT", "-v", "-n", "-x"]
    told = subprocess.run(argv, check=True, capture_output=True, text=True)
    counts = re.findall(r"^\s+(\d+)\s+\d+\s+(?:DROP|REJECT)", told.stdout, re.MULTILINE)
    return bool(counts) and all(int(count) for count in counts)
