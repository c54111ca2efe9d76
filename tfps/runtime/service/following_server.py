"""A server that follows the first one: what the first server asks of the others."""

import json
from collections.abc import Mapping

from tfps import errors
from tfps.client.message import Array, Message
from tfps.client.servers import DENSE
from tfps.errors import NotReadyError, ServiceError, TfpsError
from tfps.runtime.service.gradients import arrays_in, push_ids
from tfps.runtime.service.parameters.store import Store
from tfps.runtime.service.parameters.versions import Version, version_in
from tfps.runtime.service.placement import specs_of
from tfps.runtime.service.pushes import PushId, check_terms
from tfps.runtime.service.server import Server
from tfps.runtime.service.session import FIRST_SERVER, Session

_FATAL = (errors.ConfigError, errors.CheckpointError, errors.DivergedError, errors.StorageError, ServiceError)


class FollowingServer(Server):
    """A server that follows the first one.

    Args:
        index: Its index.
        store: Its parameters.
        num_ps: The number of servers.
        terms: What all servers have to agree on, as JSON: values by name.

    Attributes:
        is_over: Whether the first server has said that the service is over.
        error: Why it has failed for good; ``None`` if it has not.
    """

    def __init__(self, index: int, store: Store, num_ps: int, terms: str = "{}") -> None:
        super().__init__(index, store, num_ps, terms)
        self.is_over = False
        self.error: TfpsError | None = None
        self._snapshot: tuple[Version, Mapping[str, Array]] = Version(), {}
        self._methods_of_first = {
            **{"begin": self._begin, "end_init": self._end_init, "apply": self._apply},
            **{"snapshot": self._take_snapshot, "state": self._state, "forget": self._forget_snapshot},
            **{"end": self._end, "expect": self._expect, "hold": self._hold, "distances": self._distances},
        }

    @property
    def has_first(self) -> bool:
        """Whether the first server is connected."""
        return FIRST_SERVER in self._sessions

    def _begin(self, request: Message, session: Session) -> Message:
        """Begin a generation with the values of a checkpoint, or with none."""
        del session
        check_terms(f"ps/{self.index}", json.loads(request.metadata["terms"]), json.loads(self._terms))
        said = request.metadata["specs"]
        specs = specs_of(said) if said else None
        self.begin(version_in(request.metadata), request.metadata["run"], specs, arrays_in(request.tensors))
        return Message({})

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
