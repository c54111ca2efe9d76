"""The servers that follow, as the first one asks them."""

import contextlib
import json
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from tfps.client.connection import Connection
from tfps.client.message import Array, Message, TensorSpec
from tfps.client.servers import DENSE
from tfps.errors import NotReadyError, PeerLostError, ServiceError, TfpsError
from tfps.runtime.service.gradients import named
from tfps.runtime.service.placement import specs_as_text
from tfps.runtime.service.pushes import RESTARTING, Push, PushId


class Followers:
    """The servers that follow.

    Args:
        connections: The connections to them, in their order: to ps/1, ps/2 and so on.
    """

    def __init__(self, connections: Sequence[Connection]) -> None:
        self._connections = connections
        self._pool = ThreadPoolExecutor(max(1, len(connections)), thread_name_prefix="followers")

    def __len__(self) -> int:
        return len(self._connections)

    def dismiss(self, error: TfpsError | None) -> None:
        """Let them end, as the service is over, or has failed for good."""
        said = {"code": str(error.exit_code), "message": str(error)} if error else {}
        for connection in self._connections:
            with contextlib.suppress(TfpsError):
                connection.request("end", {}, **said)

    def begin(
        self,
        index: int,
        specs: Mapping[str, TensorSpec] | None,
        values: Mapping[str, Array],
        said: Mapping[str, str],
    ) -> None:
        """Let one begin a generation with the values of its parameters and slots, or with none."""
        text = "" if specs is None else specs_as_text(specs)
        self._connections[index - 1].request("begin", named(values, specs or {}), specs=text, **said)

    def expect(self, index: int, giver: str, specs: Mapping[str, TensorSpec], generation: str) -> None:
        """Tell one what the client that gives the first values has said of them."""
        self._connections[index - 1].request("expect", giver=giver, specs=specs_as_text(specs), generation=generation)

    def all(self, method: str, **said: str) -> Sequence["Future[Message]"]:
        """Send a request to all at the same time; return the futures of the answers."""
        return [self._pool.submit(each.request, method, {}, **said) for each in self._connections]

    def hold(
        self,
        push: PushId,
        under_way: Sequence[int],
        indices: Sequence[int],
        generation: str,
        is_known: Callable[[], bool],
    ) -> None:
        """Let some keep their parts of a push.

        Args:
            push: The push.
            under_way: The numbers of all pushes of its client whose parts an update may want.
            indices: The servers.
            generation: The generation.
            is_known: Returns whether the push waits, or was decided: its parts may be in an update already.

        Raises:
            ServiceError: If there is no such server, or it has no part.
            NotReadyError: If one is lost.
        """
        if any(not 0 < index <= len(self) for index in indices):
            raise ServiceError(f"push {push.number}: the other servers are 1 to {len(self)}, given {indices}.")
        text = json.dumps([push.client, push.number, *under_way])
        for index in indices:
            try:
                self._connections[index - 1].request("hold", push=text, generation=generation)
            except PeerLostError:
                raise NotReadyError(RESTARTING) from None
            except ServiceError:
                if not is_known():
                    raise

    def apply(
        self, pushes: Sequence[Push], left_out: Sequence[Push], about: Mapping[str, str]
    ) -> Sequence["Future[Message]"]:
        """Let all make an update of their parts of some pushes, and forget those of others; return the futures."""
        count = str(len(pushes))
        return [
            self._pool.submit(
                connection.request,
                "apply",
                {},
                **{
                    "pushes": _own_parts(pushes, index),
                    "left_out": _own_parts(left_out, index),
                    "count": count,
                    **about,
                },
            )
            for index, connection in enumerate(self._connections, 1)
        ]

    def distances(self, pushes: Sequence[Push], generation: str) -> Sequence["Future[Message]"]:
        """Ask all for the squared distances between their parts of some pushes; return the futures."""
        asked = []
        for index, connection in enumerate(self._connections, 1):
            parts = [[push.id.client, push.id.number] if index in push.servers else None for push in pushes]
            said = {"pushes": json.dumps(parts), "generation": generation}
            asked.append(self._pool.submit(connection.request, "distances", {}, **said))
        return asked

    def state(self, index: int, about: Mapping[str, str]) -> Mapping[str, Array]:
        """Return what one has of a snapshot: on a connection of its own, as updates go on meanwhile."""
        own = self._connections[index - 1].another()
        try:
            tensors = own.request("state", {}, **about).tensors
        finally:
            own.close()
        return {name[len(DENSE) :]: array for name, array in tensors.items()}

    def generations(self, watches: Sequence[Connection]) -> Sequence[str]:
        """Return in which generation each is.

        Args:
            watches: Connections to them, of their own: a request on another one may be under way.

        Raises:
            PeerLostError: If one does not answer for long, or is that of another service.
        """
        try:
            return list(self._pool.map(lambda watch: watch.request("status").metadata["generation"], watches))
        except ServiceError as error:
            raise PeerLostError(f"a server of the service is another one: {error}") from None


def _own_parts(pushes: Sequence[Push], server: int) -> str:
    return json.dumps([[push.id.client, push.id.number] for push in pushes if server in push.servers])
