"""One run of a fault of a parameter service: two servers under ``tfps launch --serve``, and two clients that push.

What comes of it is counted in the parameters, and in what each client has written down of its pushes.
"""

import itertools
import math
import multiprocessing
import re
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import job
import proc
from pushing_client import DENSE, Own, push_until
from result import TFPS

MODES = {"async": [], "sync": ["--num_workers=2", "--aggregate=sum", "--worker_timeout_secs=5"], "ssp": []}
CLIENTS, SLOTS, PORT, _DISK_MB = 2, 64, 2222, 64
_RESUMED, _SAVED = re.compile(r"resumed from \S*model\.ckpt-(\d+)"), re.compile(r"saved \S*model\.ckpt-(\d+)")
_POLL_SECS, _PUSH_SECS, _BETWEEN_SECS, _PATIENCE_SECS, _LEFT_SECS = 0.02, 0.01, 0.3, 300.0, 10.0
FLAGS = ["--optimizer=sgd", "--learning_rate=1", "--save_checkpoint_secs=1", "--steps_to_validate=1"]


class BrokenError(Exception):
    """Something is not as it has to be."""


@dataclass
class Pushes:
    """What a client has written down: pushes begun, and step and time of those that were applied; others dropped."""

    begun: int
    applied: Sequence[tuple[int, float]]
    dropped: int

    @property
    def pending(self) -> int:
        """How many were begun of which nothing is known."""
        return self.begun - len(self.applied) - self.dropped


@dataclass
class Run:
    """A service and its clients.

    Attributes:
        mode: Its mode.
        directory: Of all that it leaves.
        scale: A factor of all time limits.
        at: When the fault happened.
        since: When its cause was gone.
        loses: Whether a server was lost without having saved.
        base: The step of the checkpoint that it has resumed from then, and ``counts`` in it.
    """

    mode: str
    directory: Path
    scale: float = 1.0
    lines: list[tuple[float, str]] = field(default_factory=list)
    clients: list[BaseProcess] = field(default_factory=list)
    live: dict[int, int] = field(default_factory=dict)
    at: float = 0.0
    since: float = 0.0
    loses: bool = False
    base: tuple[int, Any] = 0, None
    hosts: str = f"127.0.0.1:{PORT},127.0.0.1:{PORT + 1}"

    def __post_init__(self) -> None:
        self.model_dir, self._before = self.directory / "m", proc.every()
        self._context = multiprocessing.get_context("forkserver")
        self.over = self._context.Event()

    def start(self) -> None:
        """Start the servers."""
        flags = [f"--mode={self.mode}", "--num_ps=2", f"--port_base={PORT}", f"--model_dir={self.model_dir}"]
        argv = ["launch", "--serve", *flags, *FLAGS, *MODES[self.mode]]
        self._launcher, said = job._forked(TFPS, argv)
        threading.Thread(target=self._read, args=(said,), daemon=True).start()

    def _read(self, said: int) -> None:
        with open(said, errors="replace") as stream:
            for text in stream:
                self.lines.append((time.monotonic(), text.rstrip("\n")))

    def until(self, holds: Callable[[], bool], what: str, secs: float = 60.0) -> None:
        """Wait until something holds.

        Raises:
            BrokenError: If it does not in time, or the service ends.
        """
        deadline = time.monotonic() + secs * self.scale
        while not holds():
            if time.monotonic() > deadline:
                raise BrokenError(f"waited in vain for {what}")
            time.sleep(_POLL_SECS)

    def begin(self) -> None:
        """Start the servers and the clients, and wait until all push and there is a checkpoint."""
        self.model_dir.mkdir()
        subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={_DISK_MB}m", "none", self.model_dir], check=True)
        self.start()
        for worker in range(CLIENTS):
            self.start_client(worker)
        self.until(lambda: len(self._said(_SAVED)) > 1, "two checkpoints")
        self.go_on()

    def start_client(self, worker: int) -> None:
        """Start a client, of its own number in ``counts``."""
        slot = len(self.clients)
        own = Own(self.hosts, worker, slot, SLOTS, self._journal(slot), _PATIENCE_SECS, _PUSH_SECS, pulls=True)
        self.clients.append(self._context.Process(target=push_until, args=(self.over, own)))
        self.clients[-1].start()
        self.live[worker] = slot

    def _journal(self, slot: int) -> Path:
        return self.directory / f"{slot}.txt"

    def pushes(self, slot: int) -> Pushes:
        """Return what a client has written down."""
        lines = self._journal(slot).read_text().splitlines() if self._journal(slot).exists() else []
        applied = [(int(words[1]), float(words[2])) for line in lines if (words := line.split())[0] == "d"]
        return Pushes(lines.count("b"), applied, lines.count("x"))

    def kill_client(self, worker: int) -> bool:
        """Kill a client; return whether that was in a push."""
        process = self.clients[self.live[worker]]
        assert process.pid
        proc.kill([process.pid])
        process.join()
        return self.pushes(self.live[worker]).pending == 1

    def server(self, index: int) -> int:
        """Return the process of a server: that which listens."""
        found = subprocess.run(
            ["ss", "-Hltnp", f"sport = :{PORT + index}"], check=True, capture_output=True, text=True
        ).stdout
        pids = re.findall(r"pid=(\d+)", found)
        if not pids:
            raise proc.NotInjectedError(f"nobody listens as ps/{index}")
        return int(pids[0])

    def fault(self, loses: bool = False) -> None:
        """Note that the fault happens now."""
        self.at = self.since = time.monotonic()
        self.loses = loses

    def healed(self) -> None:
        """Note that its cause is gone."""
        self.since = time.monotonic()

    def go_on(self, secs: float = 60.0) -> float:
        """Wait until every live client has had a push applied from now on; return when."""
        now = time.monotonic()
        self.until(lambda: self._all_pushed(now) < math.inf, "a push of every client", secs)
        return self._all_pushed(now)

    def _all_pushed(self, since: float) -> float:
        """Return when every live client had had a push applied since a moment."""
        firsts = []
        for slot in self.live.values():
            firsts.append(min((at for _, at in self.pushes(slot).applied if at > since), default=math.inf))
        return max(firsts)

    def pause(self, until: float) -> float:
        """Return the longest time without a push of anybody from the fault on."""
        times = sorted(at for slot in range(len(self.clients)) for _, at in self.pushes(slot).applied)
        inside = [self.at, *(at for at in times if self.at < at <= until), until]
        return max(b - a for a, b in itertools.pairwise(inside))

    def stop(self) -> int:
        """Stop the service with SIGTERM, and return its exit code; the clients end."""
        assert self._launcher.pid
        proc.send(self._launcher.pid, 15)
        self._launcher.join(60 * self.scale)
        if self._launcher.exitcode is None:
            raise BrokenError("it does not end after SIGTERM")
        return self._launcher.exitcode

    def close(self) -> int:
        """End all that runs; return how many processes of the service were left."""
        pids = {process.pid for process in self.clients if process.pid}
        left = proc.wait_gone(proc.every() - self._before - pids, _LEFT_SECS * self.scale)
        proc.end(proc.every() - self._before)
        for process in self.clients:
            process.join()
        subprocess.run(["umount", "--lazy", self.model_dir], check=False, capture_output=True)
        return len(left)

    def has_said(self, pattern: str, after: float) -> bool:
        """Return whether a line that matches was said after a moment."""
        return any(at > after and re.search(pattern, text) for at, text in list(self.lines))

    def _said(self, what: re.Pattern[str], before: float = math.inf, after: float = -math.inf) -> list[int]:
        return [int(match[1]) for at, text in list(self.lines) if after < at < before and (match := what.search(text))]

    def keep_resumed(self) -> None:
        """Wait until the service has resumed, and note what is in the checkpoint that it has resumed from."""
        self.until(lambda: bool(self._said(_RESUMED, after=self.at)), "a checkpoint to resume from")
        step = self._said(_RESUMED, after=self.at)[0]
        kept = self.directory / "kept"
        kept.mkdir()
        for path in self.model_dir.glob(f"model.ckpt-{step}.*"):  # before it makes room for later ones
            shutil.copy(path, kept)
        self.base = step, _values(kept)[step]["counts"]

    def check(self) -> int:
        """Return how many updates were lost; the service has ended.

        Raises:
            BrokenError: If a push is missing, or was applied twice, or was lost though it was saved.
        """
        saved = _values(self.model_dir)
        for step, values in saved.items():
            self._check_whole(step, values)
        last = saved[max(saved)]["counts"]
        if not self.loses:
            self._check_counts(last, 0 * last, -math.inf)
            return 0
        step, base = self.base
        if step < max(self._said(_SAVED, self.at)):
            raise BrokenError(f"resumed from {step}, and {max(self._said(_SAVED, self.at))} was saved")
        edge = self.at + _BETWEEN_SECS
        self._check_counts(last, base, edge)
        before = sum(at <= edge for slot in range(len(self.clients)) for _, at in self.pushes(slot).applied)
        return max(0, before - int(base.sum()))

    def _check_whole(self, step: int, values: Any) -> None:
        size = CLIENTS if self.mode == "sync" else 1
        found = {float(number) for name in DENSE for number in values[name]} | {float(values["counts"].sum())}
        if found != {float(size * step)}:
            raise BrokenError(f"checkpoint {step} holds {sorted(found)}, and not {size * step}")

    def _check_counts(self, last: Any, base: Any, edge: float) -> None:
        """Compare what each client has written down since a moment with what was counted since."""
        for slot in range(len(self.clients)):
            own = self.pushes(slot)
            noted = sum(at > edge for _, at in own.applied)
            counted = int(last[slot] - base[slot])
            known = 1 if edge > 0 else 0  # one that was under way at the edge may be in the checkpoint
            if not noted - known <= counted <= noted + own.pending or own.pending > 1:
                raise BrokenError(f"client {slot}: {noted} pushes applied, {own.pending} unknown, {counted} counted")


def _values(model_dir: Path) -> Any:
    """Return what is in each checkpoint, by step; TensorFlow reads it in a process of its own."""
    ours, theirs = multiprocessing.get_context("forkserver").Pipe(duplex=False)
    process = multiprocessing.get_context("forkserver").Process(target=_read_values, args=(model_dir, theirs))
    process.start()
    theirs.close()
    found = ours.recv()
    process.join()
    return found


def _read_values(model_dir: Path, pipe: Connection) -> None:
    import tensorflow as tf  # noqa: PLC0415  here it costs nothing

    found = {}
    for index in model_dir.glob("model.ckpt-*.index"):
        reader = tf.train.load_checkpoint(str(index.with_suffix("")))
        found[int(reader.get_tensor("global_step"))] = {name: reader.get_tensor(name) for name in (*DENSE, "counts")}
    pipe.send(found)
