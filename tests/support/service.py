"""A parameter service in the process of the test: clients on real connections."""

import contextlib
import socket
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np

from tfps.client.client import Client
from tfps.client.connect import connect
from tfps.client.connection import Connection, Identity
from tfps.errors import ServiceEndedError
from tfps.runtime.service.first_server import FirstServer
from tfps.runtime.service.following_server import FollowingServer
from tfps.runtime.service.listener import Listener
from tfps.runtime.service.parameters.store import Store
from tfps.runtime.service.pushes import Rules
from tfps.runtime.service.service_task import Encryption
from tfps.runtime.service.session import FIRST_SERVER

FIRST = {"w": np.zeros([4, 3], np.float32), "b": np.zeros(3, np.float32), "c": np.zeros([], np.float64)}
ONES = {name: np.ones_like(value) for name, value in FIRST.items()}


PLAIN = Encryption()


@dataclass(frozen=True)
class Wire:
    """How the servers and clients of a service talk.

    Attributes:
        token: The secret.
        retry_secs: How long the first server tries to reach another one again.
        encryption: How to encrypt.
        via: Returns for the address of a server the one that is used, as of a proxy.
    """

    token: str = ""
    retry_secs: float = 10.0
    encryption: Encryption = PLAIN
    via: Callable[[str], str] = str


class Running:
    """A service of some servers."""

    def __init__(self, num_ps: int, rules: Rules, terms: Sequence[str], wire: Wire, **options: Any) -> None:
        sockets = [socket.create_server(("127.0.0.1", 0), backlog=128) for _ in range(num_ps)]
        self.addresses = [wire.via(f"127.0.0.1:{each.getsockname()[1]}") for each in sockets]
        self._own, self._wire = Identity(FIRST_SERVER, 0, wire.token, "test"), wire
        self.others = self.connections()
        terms = terms or ["{}"] * num_ps
        self.first = FirstServer(Store(**options), rules, self.others, terms[0])
        self.followers = [FollowingServer(index, Store(**options), num_ps, terms[index]) for index in range(1, num_ps)]
        self.listeners = []
        for server, each in zip([self.first, *self.followers], sockets, strict=True):
            self.listeners.append(Listener(server, each, wire.token, wire.encryption.own))
            self.listeners[-1].start()

    def connections(self) -> list[Connection]:
        """Return new connections of the first server to the others."""
        secs, tls = self._wire.retry_secs, self._wire.encryption.to_others
        return [Connection(address, self._own, 10, secs, tls) for address in self.addresses[1:]]

    @property
    def hosts(self) -> str:
        """The addresses."""
        return ",".join(self.addresses)

    def client(self, worker: int = 0, **options: Any) -> Client:
        """Return a new client."""
        secs = {"start_timeout_secs": 20, "retry_secs": 20}
        return connect(self.hosts, worker=worker, **{**secs, "tls": self._wire.encryption.to_others, **options})

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
    wire: Wire | None = None,
    **options: Any,
) -> Iterator[Running]:
    """Run a service; SGD of rate 1, so that each gradient is subtracted."""
    given = {"optimizer": "sgd", "learning_rate": 1.0, **options}
    running = Running(num_ps, rules or Rules(), terms, wire or Wire(token, retry_secs), **given)
    try:
        running.first.restart(None)
        yield running
    finally:
        running.close()


def together(*acts: Callable[[], Any]) -> list[Any]:
    """Do things at the same time; return what each returns."""
    with ThreadPoolExecutor(len(acts)) as pool:
        return [future.result(60) for future in [pool.submit(act) for act in acts]]
