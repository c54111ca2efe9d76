"""One server of a parameter service: what it answers to clients. ``listener`` has the connections.

The first server decides about updates, parameters and checkpoints (``first_server``). For an update it tells the others
which pushes it has, and each applies its parts of them. With two servers::

    client          stage: part of ps/1 --> ps/1            push: part of ps/0 --> ps/0
    ps/0 to ps/1    apply: update 7 is of these pushes
    ps/0            applies its own parts, and answers the clients: step 7
"""

import json
import math
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from tfps.client.message import Array, Header, Message, TensorSpec
from tfps.client.servers import BUFFER, DENSE
from tfps.errors import NotReadyError, ServiceError
from tfps.modes.sync import krum
from tfps.runtime.service.gradients import (
    Part,
    announced,
    arrays_in,
    buffers_in,
    check_ids,
    check_rows,
    check_wanted_rows,
    gradients_of,
    part_of,
    push_id,
)
from tfps.runtime.service.parameters.store import Store
from tfps.runtime.service.parameters.versions import Version, Versions, version_in
from tfps.runtime.service.placement import FirstValues, check_finite
from tfps.runtime.service.pushes import PushId
from tfps.runtime.service.session import FIRST_SERVER, Session
from tfps.runtime.service.staged import StagedParts
from tfps.text import show

_OF_FIRST = ("describe", "begin_init", "push", "wait")  # requests that only the first server takes
_NO_PARAMETERS = "the service has no parameters yet: call init with their first values."


class Server:
    """What all servers answer to clients.

    Args:
        index: Its index.
        store: Its parameters.
        num_ps: The number of servers.
        terms: What all servers have to agree on, as JSON: values by name.

    Attributes:
        index: See there.
        run: The identity of the run, for clients; empty until the first server has told it.
    """

    def __init__(self, index: int, store: Store, num_ps: int = 1, terms: str = "{}") -> None:
        self.index, self.run, self._terms = index, "", terms
        self._store, self._num_ps = store, num_ps
        self._versions = Versions(store, is_alone=num_ps == 1)
        self._staged: StagedParts[Part] = StagedParts()
        self._sessions: Counter[str] = Counter()
        self._lock = threading.Lock()
        self._first_values, self._has_first_values = FirstValues(), False
        self._is_stopping = False
        self._accepted: tuple[object, object] = None, None  # what was announced last, and of which parameters
        self._methods: dict[str, Callable[[Message, Session], Message]] = {
            **{"status": self._status, "init": self._init, "pull": self._pull, "read": self._read},
            **{"pull_rows": self._pull_rows, "stage": self._stage},
        }
        self._methods_of_first: Mapping[str, Callable[[Message, Session], Message]] = {}

    def joined(self, session: Session) -> None:
        """Note that a client has connected."""
        with self._lock:
            self._sessions[session.client] += 1

    def left(self, session: Session) -> None:
        """Note that a connection has ended."""
        with self._lock:
            self._sessions[session.client] -= 1
            if not self._sessions[session.client]:
                del self._sessions[session.client]
                self._staged.left(session.client)

    @property
    def num_clients(self) -> int:
        """The number of clients that are connected."""
        return len(self._sessions)

    def stop(self) -> None:
        """Let all that wait end."""
        self._is_stopping = True

    def accept(self, header: Header, session: Session) -> None:
        """Check what a request announces, before its arrays arrive.

        Raises:
            ServiceError: If the request or an array of it is not wanted.
        """
        method = header.metadata.get("method", "")
        is_of_first = method in self._methods_of_first and session.client == FIRST_SERVER
        if method not in self._methods and not is_of_first:
            advice = "send it to ps/0" if method in _OF_FIRST else "no client of this release sends it"
            raise ServiceError(f"{show(method)} is no request that ps/{self.index} takes: {advice}.")
        if method == "init":
            self._check_first_values(header)
        elif method in ("push", "stage"):
            self._check_gradients(header.tensors)
        elif method == "pull_rows":
            check_ids(header.tensors)
            self._check_wanted_rows(header)
        elif header.tensors and not is_of_first:
            raise ServiceError(f"{method} takes no arrays.")

    def answer(self, request: Message, session: Session) -> Message:
        """Return the answer to a request that was accepted.

        Raises:
            TfpsError: If it is refused, or cannot be carried out.
        """
        method = request.metadata["method"]
        known = self._methods_of_first if session.client == FIRST_SERVER else {}
        return {**self._methods, **known}[method](request, session)

    def _check_first_values(self, header: Header) -> None:
        if self._has_first_values:
            raise NotReadyError("other first values came before.")
        if any(not name.startswith((DENSE, BUFFER)) for name in header.tensors):
            raise ServiceError("init takes arrays by name, as d/NAME, or b/NAME for a buffer.")
        self._first_values.check(header.metadata.get("giver", ""), announced(header.tensors))

    def _check_gradients(self, tensors: Mapping[str, TensorSpec]) -> None:
        """Check what is announced of gradients; of rows, that they are no more than can be meant.

        A training loop announces the same again and again: its headers are kept, and so is what was accepted of them.
        """
        self._check_ready()
        if self._accepted[0] is tensors and self._accepted[1] is self._store.specs:
            return
        self._store.check_announced(announced(tensors))
        check_rows(tensors, self._store.specs)
        self._accepted = tensors, self._store.specs

    def _check_wanted_rows(self, header: Header) -> None:
        """Check how many rows a client wants: more than there can be in memory would hold up everybody."""
        self._check_ready()
        name = header.metadata.get("name", "")
        check_wanted_rows(name, self._store.specs.get(name), math.prod(header.tensors["ids"].shape))

    def _check_ready(self) -> None:
        """Check that there are parameters.

        Raises:
            NotReadyError: If the service begins again.
            ServiceError: If there are none yet.
        """
        self._versions.at_rest(lambda: None)
        if not self._has_first_values:
            raise ServiceError(_NO_PARAMETERS)

    def _status(self, request: Message, session: Session) -> Message:
        del request, session
        return Message({**self._about(self._versions.now), **self.about()})

    def about(self) -> dict[str, str]:
        """Return what a server says of itself: the run, its name, and how many servers there are."""
        return {"run": self.run, "task": f"ps/{self.index}", "num_ps": str(self._num_ps)}

    @staticmethod
    def _about(now: Version) -> dict[str, str]:
        return {"step": str(now.step), "generation": now.generation}

    def _init(self, request: Message, session: Session) -> Message:
        del session
        giver, values = request.metadata["giver"], arrays_in(request.tensors)
        buffers = buffers_in(request.tensors)

        def take() -> None:
            if self._has_first_values:
                raise NotReadyError("other first values came before.")
            self._first_values.check(
                giver, {name: TensorSpec.of(value, name in buffers) for name, value in values.items()}
            )
            self._store.create(values, buffers)
            self._first_values.got(giver)

        check_finite(values)
        self._versions.at_rest(take)
        return Message({})

    def _end_init(self, request: Message, session: Session) -> Message:
        """Keep the first values, if they are those of the client that is to give them."""
        del session

        def keep() -> None:
            self._first_values.check_complete(request.metadata["giver"])
            self._has_first_values = True

        self._versions.at_rest(keep)
        return Message({})

    def _pull(self, request: Message, session: Session) -> Message:
        del session
        self._check_ready()
        now, values = self._versions.read(json.loads(request.metadata["names"]))
        return Message(self._about(now), {DENSE + name: value for name, value in values.items()})

    def _read(self, request: Message, session: Session) -> Message:
        wanted, names = version_in(request.metadata), json.loads(request.metadata["names"])
        values = self._versions.read_at(wanted, names, lambda: self._is_stopping or session.is_closed())
        if values is None:
            return Message({**self._about(wanted), "gone": "1"})
        return Message(self._about(wanted), {DENSE + name: value for name, value in values.items()})

    def _pull_rows(self, request: Message, session: Session) -> Message:
        del session
        self._check_ready()
        name, ids = request.metadata["name"], request.tensors["ids"]
        now, rows = self._versions.at_rest(lambda: self._store.read_rows(name, ids))
        return Message(self._about(now), {"rows": rows})

    def _stage(self, request: Message, session: Session) -> Message:
        push, part = push_id(request, session), part_of(request)
        self._store.check(part)
        now, _ = self._versions.at_rest(lambda: self._staged.put(push, part))
        return Message(self._about(now))

    def begin(self, now: Version, run: str, specs: Mapping[str, TensorSpec] | None, state: Mapping[str, Array]) -> None:
        """Begin a generation.

        Args:
            now: Its name, and the number of the last update.
            run: The identity of the run.
            specs: The parameters of this server, which are in ``state`` by name; ``None`` if clients have to give them.
            state: The values of parameters and slots.
        """

        def take() -> None:
            self._staged.clear()
            self._store.restore(specs or {}, state)
            self._has_first_values, self._first_values = specs is not None, FirstValues()

        self.run = run
        self._versions.begin(now, take)

    def _distances_of(self, pushes: Sequence[PushId | None], generation: str) -> Array:
        """Return the squared distances between the gradients of pushes; ``None`` stands for one without a part here."""
        _, parts = self._versions.at_rest(lambda: [self._staged.part(one) if one else {} for one in pushes], generation)
        return krum.squared_distances([gradients_of(part) for part in parts])
