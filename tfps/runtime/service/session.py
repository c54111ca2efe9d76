"""The connection of a client, as a server sees it. Does not import TensorFlow."""

import select
import socket
from dataclasses import dataclass

FIRST_SERVER = "ps/0"
"""What the first server says of itself to the others, instead of the name of a client."""


@dataclass
class Session:
    """A connection of a client, as the server sees it.

    Attributes:
        client: The client.
        worker: The index of its worker.
        connection: The connection.
        has_left: Whether the client has said that it is done.
    """

    client: str = ""
    worker: int = 0
    connection: socket.socket | None = None
    has_left: bool = False

    def is_closed(self) -> bool:
        """Return whether the client is gone while it waits for an answer, when it has nothing to say."""
        try:
            poll = select.poll()
            if self.connection:
                poll.register(self.connection, select.POLLIN)
            return bool(poll.poll(0))
        except (OSError, ValueError):  # closed here, too
            return True
