"""ZeroMQ: a router that hands messages to a few threads; a message is three frames: token, name, array.

It has no TLS: where the others encrypt with it, this one does with CURVE, its own protocol.
"""

import threading
from pathlib import Path

import numpy as np
import zmq

from wires.security import Security
from wires.store import Array, Store

_THREADS = 4


def _public_key(security: Security) -> Path:
    return security.directory / "zeromq.key"


def serve(port: int, security: Security) -> None:
    """Serve for ever."""
    store, context = Store(), zmq.Context()
    clients, workers = context.socket(zmq.ROUTER), context.socket(zmq.DEALER)
    if security.is_encrypted:
        public, clients.curve_secretkey = zmq.curve_keypair()
        clients.curve_server = True
        _public_key(security).write_bytes(public)
    clients.bind(f"tcp://127.0.0.1:{port}")
    workers.bind("inproc://workers")

    def work() -> None:
        server = context.socket(zmq.REP)
        server.connect("inproc://workers")
        while True:
            token, name, body = server.recv_multipart(copy=False)
            assert bytes(token.buffer).decode() == security.token
            array = np.frombuffer(body.buffer, np.float32)
            server.send(store.push_pull(bytes(name.buffer).decode(), array), copy=False)

    for _ in range(_THREADS):
        threading.Thread(target=work, daemon=True).start()
    zmq.proxy(clients, workers)


class Client:
    """One connection."""

    def __init__(self, port: int, security: Security) -> None:
        self._token, self._socket = security.token.encode(), zmq.Context.instance().socket(zmq.REQ)
        if security.is_encrypted:
            self._socket.curve_publickey, self._socket.curve_secretkey = zmq.curve_keypair()
            self._socket.curve_serverkey = _public_key(security).read_bytes()
        self._socket.connect(f"tcp://127.0.0.1:{port}")

    def push_pull(self, name: str, array: Array) -> Array:
        """Send an array, and return the sum."""
        self._socket.send_multipart([self._token, name.encode(), array], copy=False)
        return np.frombuffer(self._socket.recv(copy=False).buffer, np.float32)
