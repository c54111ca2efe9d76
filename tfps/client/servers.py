"""The servers of a parameter service, as a client sees them together: which has what, and reads of one step."""

import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import numpy as np

from tfps.client.background import Background
from tfps.client.connection import Connection
from tfps.client.message import Array, Message, TensorSpec
from tfps.client.progress import Progress, Seen
from tfps.errors import NotReadyError, PeerLostError, ServiceEndedError, ServiceError
from tfps.text import did_you_mean, show

DENSE, IDS, ROWS, BUFFER = "d/", "i/", "r/", "b/"
"""The beginnings of the names of arrays in a message: a dense array, the ids of rows, the rows, a buffer's value."""
_LOST_READS = 100
_FIRST_PAUSE_SECS, _LONGEST_PAUSE_SECS = 0.05, 1.0
_Found = TypeVar("_Found")


class Servers:
    """The servers.

    Args:
        connections: To each server, in their order.
        retry_secs: How long to wait for servers that begin again.

    Attributes:
        first: The connection to the first server.
        progress: What is known of the service.
    """

    def __init__(self, connections: Sequence[Connection], retry_secs: float) -> None:
        self._connections, self.first, self._retry_secs = connections, connections[0], retry_secs
        self._pool = Background(len(connections), "tfps")
        self._specs: dict[str, TensorSpec] = {}
        self._places: dict[str, int] = {}
        self._process = os.getpid()
        self.progress = Progress()
        self._ended: ServiceEndedError | None = None

    def check(self) -> None:
        """Check that all servers are those of one service, in their order.

        Raises:
            ServiceError: If they are not.
        """
        answers = self._all("status", [{}] * len(self._connections))
        for index, (connection, answer) in enumerate(zip(self._connections, answers, strict=True)):
            task, count = answer.metadata["task"], int(answer.metadata["num_ps"])
            if task != f"ps/{index}" or count != len(self._connections):
                place = f"{connection.address} is {task} of {count}"
                raise ServiceError(f"{place}, and ps_hosts has it as ps/{index} of {len(self._connections)}.")

    def abort(self) -> None:
        """Let requests that wait for an answer end with an error."""
        for connection in self._connections:
            connection.abort()

    def close(self) -> None:
        """Close the connections."""
        self._pool.shutdown()
        for connection in self._connections:
            connection.close()

    @property
    def specs(self) -> Mapping[str, TensorSpec]:
        """The parameters by name.

        Raises:
            ServiceError: If there are none yet, or another process uses the client.
        """
        self.check_process()
        if not self._specs:
            self._learn(self.until_ready(lambda: self.first.request("describe")))
        return self._specs

    def _learn(self, answer: Message) -> None:
        specs, places = {}, {}
        for name, (dtype, shape, place, is_buffer) in json.loads(answer.metadata["parameters"]).items():
            specs[name], places[name] = TensorSpec(np.dtype(dtype), tuple(shape), is_buffer), place
        self._places, self._specs = places, specs  # last what says that they are known: threads share it

    def spec(self, name: str) -> TensorSpec:
        """Return the dtype and the shape of a parameter.

        Raises:
            ServiceError: If there is none of this name.
        """
        if name not in self.specs:
            raise ServiceError(f"{show(str(name))} is no parameter.{did_you_mean(str(name), self._specs)}")
        return self._specs[name]

    def _place(self, name: str) -> int:
        self.spec(name)
        return self._places[name]

    def init(self, arrays: Mapping[str, Array]) -> None:
        """Give the parameters their first values, unless they have some. The arrays have their names in a message."""
        rows = {
            name[len(DENSE) :]: [array.dtype.name, list(array.shape), name.startswith(BUFFER)]
            for name, array in arrays.items()
        }
        text = json.dumps(rows)
        self.until_ready(lambda: self._init(text, arrays))

    def _init(self, specs: str, arrays: Mapping[str, Array]) -> None:
        answer = self.first.request("begin_init", specs=specs)
        self._learn(answer)
        if giver := answer.metadata["giver"]:
            try:
                self._all("init", self._parts(arrays), giver=giver)
                self.first.request("end_init", giver=giver)
            except BaseException:
                self.first.drop()  # so that another client can give them
                raise

    def pull(self, names: Sequence[str], into: Mapping[str, Array] | None = None) -> dict[str, Array]:
        """Return parameters by name, all of one step.

        Args:
            names: Their names.
            into: Arrays by name to receive them in; see ``receive``.
        """
        asked: dict[int, list[str]] = {}
        for name in names:
            asked.setdefault(self._place(name), []).append(name)
        texts = {index: json.dumps(own) for index, own in (asked or {0: []}).items()}
        places = _in_message(into)
        return self.until_ready(lambda: self._pulled(names, texts, places))

    def _pulled(
        self, names: Sequence[str], texts: Mapping[int, str], into: Mapping[str, Array] | None
    ) -> dict[str, Array]:
        for _ in range(_LOST_READS):
            arrays = self._read(texts, into)
            if arrays is not None:
                return {name: arrays[DENSE + name] for name in names}
        raise ServiceError("the parameters change faster than they can be read from all servers.")

    def _read(self, texts: Mapping[int, str], into: Mapping[str, Array] | None) -> Mapping[str, Array] | None:
        """Read from servers; return ``None`` if one of them has left the step of another behind.

        Raises:
            NotReadyError: If they are of different generations: some have begun again.
        """
        ask = self._connections
        answers = self._asked("pull", {index: ({}, {"names": text}) for index, text in texts.items()}, into)
        newest = max((answer.metadata for answer in answers.values()), key=lambda said: int(said["step"]))
        if any(answer.metadata["generation"] != newest["generation"] for answer in answers.values()):
            raise NotReadyError("some servers begin again from their last checkpoint.")
        seen = {"generation": newest["generation"], "step": newest["step"]}
        for index, answer in answers.items():
            if answer.metadata["step"] != seen["step"]:
                answers[index] = ask[index].request("read", {}, into, names=texts[index], **seen)
        if any(answer.metadata.get("gone") for answer in answers.values()):
            return None
        for answer in answers.values():
            self.progress.read(answer)
        return {name: array for answer in answers.values() for name, array in answer.tensors.items()}

    def pull_rows(self, name: str, ids: Array) -> Array:
        """Return rows of a parameter."""
        server = self._connections[self._place(name)]
        answer = self.until_ready(lambda: server.request("pull_rows", {"ids": ids}, name=name))
        self.progress.read(answer)
        return answer.tensors["rows"]

    def push(self, arrays: Mapping[str, Array], number: int, seen: Seen) -> int:
        """Push gradients and buffers, which have their names in a message; return the number of updates then.

        Args:
            arrays: The gradients and the values of buffers.
            number: The number of the push among those of this client.
            seen: Of which moment the parameters are that the gradients were computed with.
        """
        parts = self._parts(arrays)
        answer = self.until_ready(lambda: self._push(parts, None, push=str(number), **seen))
        return int(answer.metadata["made"])

    def push_pull(
        self, arrays: Mapping[str, Array], number: int, into: Mapping[str, Array] | None = None
    ) -> dict[str, Array]:
        """Push gradients, and return all parameters as they are then; one round trip if there is one server.

        Args:
            arrays: See ``push``.
            number: See ``push``.
            into: See ``pull``.
        """
        names = list(self.specs)
        if len(self._connections) > 1:
            self.push(arrays, number, self.progress.seen)
            return self.pull(names, into)
        said = {"push": str(number), "pull": json.dumps(names), **self.progress.seen}
        places = _in_message(into)
        answer = self.until_ready(lambda: self._push([arrays], places, **said))
        self.progress.read(answer)
        return {name: answer.tensors[DENSE + name] for name in names}

    def _push(self, parts: Sequence[Mapping[str, Array]], into: Mapping[str, Array] | None, **said: str) -> Message:
        others = [index for index, part in enumerate(parts) if part and index]
        staged = {
            str(index): self._pool.submit(self._connections[index].request, "stage", parts[index], push=said["push"])
            for index in others
        }
        generations = {index: future.result().metadata["generation"] for index, future in staged.items()}
        answer = self.first.request("push", parts[0], into, servers=json.dumps(generations), **said)
        self.progress.pushed(answer, {name: said[name] for name in ("generation", "step")})
        return answer

    def step(self) -> int:
        """Return the number of updates; wait while the servers begin again."""

        def ask() -> int:
            said = self.first.request("status").metadata
            if not said["generation"]:
                raise NotReadyError("the service begins.")
            return int(said["step"])

        return self.until_ready(ask)

    def _parts(self, arrays: Mapping[str, Array]) -> list[dict[str, Array]]:
        """Return the arrays of each server."""
        parts: list[dict[str, Array]] = [{} for _ in self._connections]
        for name, array in arrays.items():
            parts[self._place(name[len(DENSE) :])][name] = array
        return parts

    def _all(self, method: str, parts: Sequence[Mapping[str, Array]], **metadata: str) -> Sequence[Message]:
        """Send a request to each server, at the same time; return the answers."""
        return list(self._asked(method, {index: (part, metadata) for index, part in enumerate(parts)}).values())

    def _asked(
        self,
        method: str,
        requests: Mapping[int, tuple[Mapping[str, Array], Mapping[str, str]]],
        into: Mapping[str, Array] | None = None,
    ) -> dict[int, Message]:
        """Send requests to some servers, by index, at the same time; return the answers."""
        ask = self._connections
        if len(requests) == 1:
            return {index: ask[index].request(method, part, into, **said) for index, (part, said) in requests.items()}
        sent = {
            index: self._pool.submit(ask[index].request, method, part, into, **said)
            for index, (part, said) in requests.items()
        }
        return {index: future.result() for index, future in sent.items()}

    @property
    def is_own(self) -> bool:
        """Whether this process has made the connections, and was not forked from the one that has."""
        return os.getpid() == self._process

    def check_process(self) -> None:
        """Check that this process was not forked from that of the client: both would send pushes of the same numbers.

        Raises:
            ServiceError: If it was.
        """
        if not self.is_own:
            raise ServiceError("this client is that of another process: call tfps.connect in each process.")

    def until_ready(self, act: Callable[[], _Found]) -> _Found:
        """Return what a function returns; call it again while the servers begin again.

        Raises:
            PeerLostError: If they do so for longer than ``retry_secs``.
        """
        self.check_process()
        deadline, pause = time.monotonic() + self._retry_secs, _FIRST_PAUSE_SECS
        while True:
            try:
                return act()
            except ServiceEndedError as error:
                self._ended = error
                for connection in self._connections:
                    connection.retry_no_more()
                raise
            except PeerLostError:
                if self._ended:
                    raise self._ended from None
                raise
            except NotReadyError as error:
                if time.monotonic() > deadline:
                    secs = f"{self._retry_secs:g} s"
                    raise PeerLostError(f"{self.first.address}: not ready for {secs}: {error}") from None
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_SECS)


def _in_message(arrays: Mapping[str, Array] | None) -> Mapping[str, Array] | None:
    """Return arrays by the names that they have in a message."""
    return arrays and {DENSE + name: array for name, array in arrays.items()}
