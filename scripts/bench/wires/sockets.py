"""Plain TCP sockets: a thread for each connection; a message is a safetensors file: header in JSON, arrays."""

import socket
import threading

import numpy as np

from tfps.client import message as messages
from tfps.client import receive
from tfps.client.message import Message
from wires.security import Security
from wires.store import Array, Store


def serve(port: int, security: Security) -> None:
    """Serve for ever."""
    store, tls = Store(), security.server_context()

    def talk(raw: socket.socket) -> None:
        raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection = tls.wrap_socket(raw, server_side=True) if tls else raw
        hello = receive.receive(connection)
        assert hello is None or hello.metadata["token"] == security.token
        while (message := receive.receive(connection)) is not None:
            [(name, array)] = message.tensors.items()
            messages.send(connection, Message({}, {name: store.push_pull(name, array)}))

    with socket.create_server(("127.0.0.1", port), backlog=128) as listener:
        while True:
            threading.Thread(target=talk, args=(listener.accept()[0],), daemon=True).start()


class Client:
    """One connection."""

    def __init__(self, port: int, security: Security) -> None:
        raw = socket.create_connection(("127.0.0.1", port))
        raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        tls = security.client_context()
        self._socket = tls.wrap_socket(raw, server_hostname="127.0.0.1") if tls else raw
        messages.send(self._socket, Message({"token": security.token}))

    def push_pull(self, name: str, array: Array) -> Array:
        """Send an array, and return the sum."""
        messages.send(self._socket, Message({}, {name: array.view(np.float32)}))
        answer = receive.receive(self._socket)
        assert answer is not None
        return answer.tensors[name]
