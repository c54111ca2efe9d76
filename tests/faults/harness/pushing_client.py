"""A client process that pushes until it is told to end, and writes down each push that it begins and that returns."""

import contextlib
import os
import time
from dataclasses import dataclass
from multiprocessing.synchronize import Event
from pathlib import Path

import numpy as np

from tfps.client.connect import connect
from tfps.errors import ServiceEndedError

DENSE = ("a", "b")


@dataclass(frozen=True)
class Own:
    """What a client needs to know.

    Attributes:
        hosts: The addresses of the servers.
        worker: The index of its worker.
        slot: Its own number in ``counts``.
        slots: How many numbers that has.
        journal: The file in which it writes down its pushes.
        patience_secs: How long it waits for servers.
        pause_secs: How long it rests after a push.
        pulls: Whether it pulls before each push, as sync needs.
    """

    hosts: str
    worker: int
    slot: int
    slots: int
    journal: Path
    patience_secs: float
    pause_secs: float = 0.0
    pulls: bool = False


def push_until(over: Event, own: Own) -> None:
    """Push: each adds 1 to all numbers of ``a`` and ``b``, and to the own one of ``counts``.

    The journal has a line for each push that begins, ``b``, for each that was applied, ``d STEP SECONDS``, by the clock
    that does not jump, and for each that was dropped, ``x``.
    """
    gradients = {name: -np.ones(5, np.float32) for name in DENSE}
    gradients["counts"] = -np.eye(1, own.slots, own.slot, dtype=np.float32)[0]
    file = os.open(own.journal, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    secs = own.patience_secs
    with (
        contextlib.suppress(ServiceEndedError),
        connect(own.hosts, worker=own.worker, start_timeout_secs=secs, retry_secs=secs) as ps,
    ):
        ps.init({name: np.zeros_like(value) for name, value in gradients.items()})
        while not over.is_set():
            if own.pulls:
                ps.pull()
            dropped = ps.dropped
            os.write(file, b"b\n")
            step = ps.push(gradients)
            os.write(file, b"x\n" if ps.dropped > dropped else f"d {step} {time.monotonic()}\n".encode())
            time.sleep(own.pause_secs)
