"""The first server of a parameter service: decides about updates and parameters, and lets all servers begin again.

A *generation* is the time from a begin to the loss of a server. Each begins with the values of the newest checkpoint,
on all servers: the others may have lost theirs, or may have made updates that the lost one had not.
"""

import json
import logging
import threading
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial

from tfps.client.connection import Connection
from tfps.client.message import Array, Message, TensorSpec
from tfps.client.servers import DENSE
from tfps.errors import NotReadyError, TfpsError
from tfps.modes.sync import krum
from tfps.runtime.checkpoint.restore import OF_SERVICE
from tfps.runtime.service.followers import Followers
from tfps.runtime.service.gradients import part_of, push_id
from tfps.runtime.service.parameters.store import Store
from tfps.runtime.service.parameters.versions import Checkpoint, Snapshot, Version
from tfps.runtime.service.placement import Placement, check_names, specs_of
from tfps.runtime.service.pushes import RESTARTING, Push, PushId, Rules, State
from tfps.runtime.service.sequencer import Sequencer
from tfps.runtime.service.server import Server
from tfps.runtime.service.session import Session
from tfps.runtime.service.staged import StagedParts

RESERVED = ABOUT, STEP = OF_SERVICE, "global_step"
"""The names of what a checkpoint has beside parameters and the optimizer's variables."""
_LONGEST_WAIT_SECS = 3600.0

log = logging.getLogger(__name__)


class FirstServer(Server):
    """The first server.

    Args:
        store: Its parameters.
        rules: When an update is made.
        others: The connections to the others, in their order.
        terms: What all servers have to agree on, as JSON.
    """

    def __init__(self, store: Store, rules: Rules, others: Sequence[Connection] = (), terms: str = "{}") -> None:
        super().__init__(0, store, 1 + len(others), terms)
        self._followers = Followers(others)
        self._placement = Placement(1 + len(others), rules.stall_timeout_secs)
        self._sequencer = Sequencer(rules, self._make)
        self._staged = StagedParts(self._sequencer.has)
        self._forming = threading.Lock()
        self._methods |= {
            **{"describe": self._describe, "begin_init": self._begin_init, "end_init": self._finish_init},
            **{"push": self._push, "wait": self._wait},
        }

    @property
    def now(self) -> Version:
        """The generation, and the number of the last update."""
        return self._versions.now

    @property
    def has_parameters(self) -> bool:
        """Whether clients or a checkpoint have given parameters."""
        return self._placement.is_ready

    @property
    def specs(self) -> Mapping[str, TensorSpec]:
        """The parameters of all servers, by name."""
        return self._placement.specs

    def dropped(self) -> Mapping[int, int]:
        """Return by worker how many of its pushes came too late."""
        return self._sequencer.dropped()

    def joined(self, session: Session) -> None:
        """Note that a client has connected."""
        super().joined(session)
        self._sequencer.connected(session.worker, 1)

    def left(self, session: Session) -> None:
        """Note that a connection has ended."""
        super().left(session)
        self._sequencer.connected(session.worker, -1)
        self._placement.leave(session)
        if session.has_left:
            self._sequencer.leave(session.worker)

    def end(self, error: TfpsError) -> None:
        """Let all pushes that wait, and later ones, end with an error."""
        self.stop()
        self._sequencer.fail(error)

    def dismiss_others(self, error: TfpsError | None = None) -> None:
        """Let the other servers end, as the service is over, or has failed for good."""
        self._followers.dismiss(error)

    def restart(self, checkpoint: Checkpoint | None) -> None:
        """Begin a generation on all servers, with the values of a checkpoint, or with none.

        Raises:
            ClusterFormError: If another server is not there in time.
            PeerLostError: If another server is lost.
        """
        with self._forming:
            self._versions.suspend()
            state = checkpoint.state if checkpoint else State()
            now = Version(uuid.uuid4().hex, state.step)
            self._sequencer.restart(state, now.generation)
            self._placement.restart(checkpoint.specs if checkpoint else None)
            run = checkpoint.run if checkpoint else self.run or uuid.uuid4().hex
            for index in range(1, self._num_ps):
                said = {"run": run, "terms": self._terms, **self._about(now)}
                self._followers.begin(index, *self._values(checkpoint, index), said)
            self.begin(now, run, *self._values(checkpoint, 0))

    def _values(
        self, checkpoint: Checkpoint | None, index: int
    ) -> tuple[Mapping[str, TensorSpec] | None, Mapping[str, Array]]:
        """Return the parameters of a server, and the values of these and of their slots."""
        if checkpoint is None:
            return None, {}
        specs = self._placement.specs_of_server(index)
        return specs, checkpoint.read(list(specs))

    @contextmanager
    def snapshot(self) -> Iterator[Snapshot]:
        """Return a context with the values of one moment, while which lasts no generation begins.

        Raises:
            NotReadyError: If the service begins again.
        """
        with self._forming:
            with self._sequencer.paused() as state:
                generation = self.now.generation
                asked = self._followers.all("snapshot")
                now, own = self._versions.at_rest(self._store.state)
                answers = [future.result().metadata for future in asked]
            if any((each["generation"], each["step"]) != (generation, str(now.step)) for each in answers):
                raise NotReadyError(RESTARTING)
            about = self._about(now)
            parts: list[Callable[[], Mapping[str, Array]]] = [lambda: own]
            parts += [partial(self._followers.state, index, about) for index in range(1, self._num_ps)]
            yield Snapshot(self.run, state, dict(self._placement.specs), parts)
            for future in self._followers.all("forget"):
                future.result()

    def _check_ready(self) -> None:
        self._versions.at_rest(lambda: None)
        self._placement.check_ready()

    def _status(self, request: Message, session: Session) -> Message:
        answer = super()._status(request, session)
        return Message({**answer.metadata, "dropped": json.dumps(self.dropped())})

    def _describe(self, request: Message, session: Session) -> Message:
        del request, session
        self._check_ready()
        return Message({"parameters": self._placement.described()})

    def _begin_init(self, request: Message, session: Session) -> Message:
        self._versions.at_rest(lambda: None)
        specs, (slots, own) = specs_of(request.metadata["specs"]), self._store.reserved()
        check_names(specs, slots, [*own, *RESERVED])
        giver = self._placement.begin(specs, session, session.is_closed)
        if giver:
            self._let_expect(giver)
        return Message({"giver": giver, "parameters": self._placement.described()})

    def _let_expect(self, giver: str) -> None:
        """Tell all servers what the client that gives the first values has said of them."""
        generation = self.now.generation
        for index in range(1, self._num_ps):
            self._followers.expect(index, giver, self._placement.specs_of_server(index), generation)
        self._first_values.expect(giver, self._placement.specs_of_server(0))

    def _finish_init(self, request: Message, session: Session) -> Message:
        """Let all servers keep the first values that a client has given."""
        giver = request.metadata["giver"]
        self._placement.check_giver(giver)
        for future in self._followers.all("end_init", giver=giver):
            future.result()
        self._end_init(request, session)
        self._placement.end(giver)
        return Message({})

    def _push(self, request: Message, session: Session) -> Message:
        said, part = request.metadata, part_of(request)
        self._store.check(part)
        push, servers = push_id(request, session), json.loads(said["servers"])
        now, end_use = self._versions.at_rest(lambda: self._staged.use(push, part))
        generation = now.generation
        try:
            if any(other != generation for other in servers.values()):
                raise NotReadyError(RESTARTING)  # parts of it are of another generation
            others = self._hold_parts(push, servers, generation)
            computed = int(said["step"]), said["generation"]
            outcome = self._sequencer.push(Push(push, session.worker, *computed, generation, others), session.is_closed)
        finally:
            end_use()
        made = {"made": str(outcome.step), "applied": str(int(outcome.is_applied))}
        if "pull" not in said:
            return Message({**self._about(Version(generation, outcome.step)), **made})
        now, values = self._versions.read(json.loads(said["pull"]))
        return Message({**self._about(now), **made}, {DENSE + name: value for name, value in values.items()})

    def _hold_parts(self, push: PushId, servers: Iterable[str], generation: str) -> Sequence[int]:
        """Let other servers keep the parts of a push, and return their indices.

        Raises:
            ServiceError: If there is no such server, or it has no part.
        """
        indices = [int(index) for index in servers]
        if indices:
            under_way = sorted({*self._staged.held(push.client), *self._sequencer.under_way(push.client)})
            self._followers.hold(push, under_way, indices, generation, lambda: self._sequencer.knows(push))
        return indices

    def _make(self, number: int, pushes: Sequence[Push]) -> None:
        """Make an update on all servers; the sequencer calls it."""
        now = Version(self.now.generation, number)
        try:
            chosen, left_out = self._chosen(pushes, now.generation)
            told = self._followers.apply(chosen, left_out, self._about(now))
            own, others = ([push.id for push in each] for each in (chosen, left_out))
            self._versions.update(now, lambda: self._store.update(self._staged.take(own, others)))
            for future in told:
                future.result()
        except Exception as error:
            self._versions.suspend()  # whoever watches lets the servers begin again
            log.info("update %d was not made on all servers: %s: %s", number, type(error).__name__, error)
            raise NotReadyError(RESTARTING) from None

    def _chosen(self, pushes: Sequence[Push], generation: str) -> tuple[Sequence[Push], Sequence[Push]]:
        """Return the pushes that are applied, and those that are left out: with Krum, all but one."""
        if not self._store.selects:
            return pushes, []
        asked = self._followers.distances(pushes, generation)
        distances = self._distances_of([push.id for push in pushes], generation)
        for future in asked:
            distances = distances + future.result().tensors["distances"]
        index = krum.selected(distances)
        return [pushes[index]], [*pushes[:index], *pushes[index + 1 :]]

    def _wait(self, request: Message, session: Session) -> Message:
        secs = min(float(request.metadata["secs"]), _LONGEST_WAIT_SECS)
        self._sequencer.wait(int(request.metadata["step"]), secs, session.is_closed)
        return Message(self._about(self.now))

    def is_whole(self, watches: Sequence[Connection]) -> bool:
        """Return whether all servers are of the present generation.

        Args:
            watches: Connections to the others, of their own: a request on another one may be under way.

        Raises:
            PeerLostError: If another server does not answer for long.
        """
        found = self._followers.generations(watches) if self.now.generation else [""]
        return all(generation == self.now.generation for generation in found) and bool(self.now.generation)
