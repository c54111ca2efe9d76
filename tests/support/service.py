"""A parameter service in the process of the test: clients on real connections."""

import contextlib
import socket
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from tfps.client.client import Client, connect
from tfps.client.connection import Connection, Identity
from tfps.errors import ServiceEndedError
from tfps.runtime.service.first_server import FirstServer
from tfps.runtime.service.listener import Listener
from tfps.runtime.service.pushes import Rules
from tfps.runtime.service.server import Server
from tfps.runtime.service.session import FIRST_SERVER
from tfps.runtime.service.store import Store

FIRST = {"w": np.zeros([4, 3], np.float32), "b": np.zeros(3, np.float32), "c": np.zeros([], np.float64)}
ONES = {name: np.ones_like(value) for name, value in FIRST.items()}


class Running:
    """A service of some servers."""

    def __init__(
        self, num_ps: int, rules: Rules, token: str, retry_secs: float, terms: Sequence[str], **options: Any
    ) -> None:
        sockets = [socket.create_server(("127.0.0.1", 0), backlog=128) for _ in range(num_ps)]
        self.addresses = [f"127.0.0.1:{each.getsockname()[1]}" for each in sockets]
        self._own, self._retry_secs = Identity(FIRST_SERVER, 0, token, "test"), retry_secs
        self.others = self.connections()
        terms = terms or ["{}"] * num_ps
        self.first = FirstServer(Store(**options), rules, self.others, terms[0])
        self.followers = [Server(index, Store(**options), num_ps, terms[index]) for index in range(1, num_ps)]
        self.listeners = []
        for server, each in zip([self.first, *self.followers], sockets, strict=True):
            self.listeners.append(Listener(server, each, token))
            self.listeners[-1].start()

    def connections(self) -> list[Connection]:
        """Return new connections of the first server to the others."""
        return [Connection(address, self._own, 10, self._retry_secs) for address in self.addresses[1:]]

    @property
    def hosts(self) -> str:
        """The addresses."""
        return ",".join(self.addresses)

    def client(self, worker: int = 0, **options: Any) -> Client:
        """Return a new client."""
        return connect(self.hosts, worker=worker, **{"start_timeout_secs": 20, "retry_secs": 20, **options})

    def close(self) -> None:
        """End it."""
        self.first.end(ServiceEndedError("over."))
        for listener in self.listeners:
            listener.close()
        for other in self.others:
            other.close()


@contextlib.contextmanager
def service(
    num_ps: int = 1,
    rules: Rules | None = None,
    token: str = "",
    retry_secs: float = 10.0,
    terms: Sequence[str] = (),
    **options: Any,
) -> Iterator[Running]:
    """Run a service; SGD of rate 1, so that each gradient is subtracted."""
    given = {"optimizer": "sgd", "learning_rate": 1.0, **options}
    running = Running(num_ps, rules or Rules(), token, retry_secs, terms, **given)
    try:
        running.first.restart(None)
        yield running
    finally:
        running.close()


def together(*acts: Callable[[], Any]) -> list[Any]:
    """Do things at the same time; return what each returns."""
    with ThreadPoolExecutor(len(acts)) as pool:
        return [future.result(60) for future in [pool.submit(act) for act in acts]]
