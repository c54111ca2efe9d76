"""One server of a parameter service: what it answers to each request. ``listener`` has the connections.

The first server decides about updates, parameters and checkpoints (``first_server``). For an update it tells the others
which pushes it has, and each applies its parts of them. With two servers::

    client          stage: part of ps/1 --> ps/1            push: part of ps/0 --> ps/0
    ps/0 to ps/1    apply: update 7 is of these pushes
    ps/0            applies its own parts, and answers the clients: step 7
"""

import json
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from tfps import errors
from tfps.client.message import Array, Header, Message, TensorSpec
from tfps.client.servers import DENSE
from tfps.errors import NotReadyError, ServiceError, TfpsError
from tfps.modes.sync import krum
from tfps.runtime.service.gradients import Part, check_ids, check_rows, dense_in, part_of, push_id, push_ids
from tfps.runtime.service.placement import FirstValues, check_finite, specs_of
from tfps.runtime.service.pushes import PushId, check_terms
from tfps.runtime.service.session import FIRST_SERVER, Session
from tfps.runtime.service.staged import StagedParts
from tfps.runtime.service.store import Store
from tfps.runtime.service.versions import Version, Versions, version_in
from tfps.text import show

_FATAL = (errors.ConfigError, errors.CheckpointError, errors.DivergedError, errors.StorageError, ServiceError)
_NO_PARAMETERS = "the service has no parameters yet: call init with their first values."


class Server:
    """A server that follows the first one.

    Args:
        index: Its index.
        store: Its parameters.
        num_ps: The number of servers.
        terms: What all servers have to agree on, as JSON: values by name.

    Attributes:
        index: See there.
        run: The identity of the run, for clients; empty until the first server has told it.
        is_over: Whether the first server has said that the service is over.
        error: Why it has failed for good; ``None`` if it has not.
    """

    def __init__(self, index: int, store: Store, num_ps: int = 1, terms: str = "{}") -> None:
        self.index, self.run, self._terms = index, "", terms
        self.is_over = False
        self.error: TfpsError | None = None
        self._store, self._num_ps = store, num_ps
        self._versions = Versions(store, is_alone=num_ps == 1)
        self._staged: StagedParts[Part] = StagedParts()
        self._sessions: Counter[str] = Counter()
        self._lock = threading.Lock()
        self._first_values, self._has_first_values = FirstValues(), False
        self._snapshot: tuple[Version, Mapping[str, Array]] = Version(), {}
        self._is_stopping = False
        self._methods: dict[str, Callable[[Message, Session], Message]] = {
            **{"status": self._status, "init": self._init, "pull": self._pull, "read": self._read},
            **{"pull_rows": self._pull_rows, "stage": self._stage},
        }
        self._methods_of_first: Mapping[str, Callable[[Message, Session], Message]] = {
            **{"begin": self._begin, "end_init": self._end_init, "apply": self._apply},
            **{"snapshot": self._take_snapshot, "state": self._state, "forget": self._forget_snapshot},
            **{"end": self._end, "expect": self._expect, "hold": self._hold, "distances": self._distances},
        }

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

    @property
    def has_first(self) -> bool:
        """Whether the first server is connected."""
        return FIRST_SERVER in self._sessions

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
            raise ServiceError(f"{show(method)} is no request of this release.")
        if method == "init":
            self._check_first_values(header)
        elif method in ("push", "stage"):
            self._check_gradients(header.tensors)
        elif method == "pull_rows":
            check_ids(header.tensors)
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
        if any(not name.startswith(DENSE) for name in header.tensors):
            raise ServiceError("init takes arrays by name, as d/NAME.")
        self._first_values.check(header.metadata.get("giver", ""), dense_in(header.tensors))

    def _check_gradients(self, tensors: Mapping[str, TensorSpec]) -> None:
        """Check what is announced of gradients; of rows, that they are no more than can be meant."""
        self._check_ready()
        self._store.check_announced(dense_in(tensors))
        check_rows(tensors, self._store.specs)

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
        return Message({**self._about(self._versions.now), "task": f"ps/{self.index}", "num_ps": str(self._num_ps)})

    @staticmethod
    def _about(now: Version) -> dict[str, str]:
        return {"step": str(now.step), "generation": now.generation}

    def _init(self, request: Message, session: Session) -> Message:
        del session
        giver, values = request.metadata["giver"], dense_in(request.tensors)

        def take() -> None:
            if self._has_first_values:
                raise NotReadyError("other first values came before.")
            self._first_values.check(giver, {name: TensorSpec.of(value) for name, value in values.items()})
            self._store.create(values)
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

    def _begin(self, request: Message, session: Session) -> Message:
        """Begin a generation with the values of a checkpoint, or with none."""
        del session
        check_terms(f"ps/{self.index}", json.loads(request.metadata["terms"]), json.loads(self._terms))
        names = json.loads(request.metadata["names"])
        self.begin(version_in(request.metadata), request.metadata["run"], names, dense_in(request.tensors))
        return Message({})

    def begin(self, now: Version, run: str, names: Sequence[str] | None, state: Mapping[str, Array]) -> None:
        """Begin a generation.

        Args:
            now: Its name, and the number of the last update.
            run: The identity of the run.
            names: The parameters of this server, which are in ``state`` by name; ``None`` if clients have to give them.
            state: The values of parameters and slots.
        """

        def take() -> None:
            self._staged.clear()
            self._store.restore(names or [], state)
            self._has_first_values, self._first_values = names is not None, FirstValues()

        self.run = run
        self._versions.begin(now, take)

    def _expect(self, request: Message, session: Session) -> Message:
        """Wait for the first values of a client, which has said of each what it is."""
        del session
        said, specs = request.metadata, specs_of(request.metadata["specs"])
        self._versions.at_rest(lambda: self._first_values.expect(said["giver"], specs), said["generation"])
        return Message({})

    def _hold(self, request: Message, session: Session) -> Message:
        """Keep the part of a push that the first server is about to decide about."""
        del session
        client, number, *others = json.loads(request.metadata["push"])
        held = PushId(client, number)
        self._versions.at_rest(lambda: self._staged.hold(held, others), request.metadata["generation"])
        return Message({})

    def _apply(self, request: Message, session: Session) -> Message:
        """Make an update; do nothing if it was made, and the first server asks again."""
        del session
        said, now = request.metadata, version_in(request.metadata)
        pushes, left_out, count = push_ids(said["pushes"]), push_ids(said["left_out"]), int(said["count"])
        self._versions.update(now, lambda: self._store.update(self._staged.take(pushes, left_out), count))
        return Message({})

    def _distances(self, request: Message, session: Session) -> Message:
        """Return the squared distances between the parts of pushes: of ``null``, which has none here, as of zeros."""
        del session
        pushes = [each and PushId(*each) for each in json.loads(request.metadata["pushes"])]
        return Message({}, {"distances": self._distances_of(pushes, request.metadata["generation"])})

    def _distances_of(self, pushes: Sequence[PushId | None], generation: str) -> Array:
        _, parts = self._versions.at_rest(lambda: [self._staged.part(one) if one else {} for one in pushes], generation)
        return krum.squared_distances(parts)

    def _take_snapshot(self, request: Message, session: Session) -> Message:
        del request, session
        self._snapshot = self._versions.at_rest(self._store.state)
        return Message(self._about(self._snapshot[0]))

    def _state(self, request: Message, session: Session) -> Message:
        """Return the snapshot of a moment, until another one is taken.

        Raises:
            NotReadyError: If it is not here: this server was started again since.
        """
        del session
        taken, values = self._snapshot
        if taken != version_in(request.metadata):
            raise NotReadyError("the snapshot is lost.")
        return Message({}, {DENSE + name: value for name, value in values.items()})

    def _forget_snapshot(self, request: Message, session: Session) -> Message:
        del request, session
        self._snapshot = Version(), {}
        return Message({})

    def _end(self, request: Message, session: Session) -> Message:
        del session
        if code := int(request.metadata.get("code", "0")):
            kind = next((each for each in _FATAL if each.exit_code == code), TfpsError)
            self.error = kind(f"ps/0 has failed: {request.metadata['message']}")
        self.is_over = True
        return Message({})
