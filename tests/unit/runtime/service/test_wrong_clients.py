"""Clients that break the protocol: only they get an error, and no server begins again."""

import json
import socket
import struct
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from support.service import FIRST, ONES, Running, service

from tfps.client import receive
from tfps.client.client import Client
from tfps.client.connection import Connection, Identity
from tfps.client.message import Array
from tfps.errors import NotReadyError, ServiceError
from tfps.runtime.service.pushes import Rules


def _dense(values: dict[str, Array]) -> dict[str, Array]:
    return {f"d/{name}": value for name, value in values.items()}


def _parts(ps: Client, values: dict[str, Array]) -> list[dict[str, Array]]:
    return ps._servers._parts(_dense(values))


def _connections(running: Running, client: str) -> list[Connection]:
    return [Connection(address, Identity(client, 0, "", "test"), 10, 5) for address in running.addresses]


def _is_as_before(running: Running, ps: Client, generation: str, step: int) -> None:
    assert running.first.now.generation == generation
    assert {float(number) for value in ps.pull().values() for number in value.flat} == {-float(step)}
    assert ps.push(ONES) == step + 1


@pytest.mark.parametrize("named", [["1"], ["2"], ["1", "2"], ["3"], ["0"], ["-1"]])
def test_a_part_that_was_not_staged(named: list[str]) -> None:
    """Is an error of the client that names it, and of nobody else."""
    with service(3) as running, running.client() as ps:
        ps.init(FIRST)
        ps.push(ONES)
        generation = running.first.now.generation
        first, one, two = _connections(running, "wrong")
        parts = _parts(ps, ONES)
        if named == ["1", "2"]:
            one.request("stage", parts[1], push="1")
        with pytest.raises(ServiceError, match=r"stage all parts|the other servers are 1 to 2"):
            first.request(
                "push",
                parts[0],
                push="1",
                servers=json.dumps(dict.fromkeys(named, generation)),
                generation=generation,
                step="1",
            )
        _is_as_before(running, ps, generation, 1)
        for connection in (first, one, two):
            connection.close()


@pytest.mark.parametrize("num_ps", [1, 2])
def test_a_client_that_was_interrupted_pushes_again(num_ps: int) -> None:
    """In sync its first push still waits; its second one takes no part away from it."""
    with service(num_ps, Rules("sync", 2)) as running, running.client(1) as ps:
        ps.init(FIRST)
        ps.pull()
        generation = running.first.now.generation

        def push(number: int) -> Any:
            connections = _connections(running, "interrupted")
            parts, servers = _parts(ps, ONES), {}
            if num_ps == 2:
                connections[1].request("stage", parts[1], push=str(number))
                servers = {"1": generation}
            said = {"push": str(number), "servers": json.dumps(servers), "generation": generation, "step": "0"}
            return connections[0].request("push", parts[0], **said).metadata["applied"]

        with ThreadPoolExecutor() as pool:
            pushes = []
            for number in (1, 2):
                pushes.append(pool.submit(push, number))
                deadline = time.monotonic() + 20
                while len(running.first._sequencer._waiting) < number:
                    assert time.monotonic() < deadline
                    time.sleep(0.01)
            assert ps.push(ONES) == 1
            assert [each.result(20) for each in pushes] == ["1", "0"]
        assert running.first.now.generation == generation
        assert {float(number) for value in ps.pull().values() for number in value.flat} == {-1.0}
        assert running.first._staged.held("interrupted") == []


def test_first_values_that_were_not_announced() -> None:
    """A server takes no other ones, and another client can give them then."""
    with service(2) as running, running.client() as ps:
        first, one = _connections(running, "wrong")
        specs = {name: [value.dtype.name, list(value.shape)] for name, value in FIRST.items()}
        answer = first.request("begin_init", specs=json.dumps(specs)).metadata
        places = {name: place for name, (_, _, place, _) in json.loads(answer["parameters"]).items()}
        own = [_dense({name: FIRST[name] for name in FIRST if places[name] == index}) for index in (0, 1)]
        for index, connection in enumerate((first, one)):
            wrong = {name: np.zeros([1000, 1000]) for name in own[index]}
            for given in (wrong, {}, {**own[index], "d/other": np.zeros(3)}):
                with pytest.raises(ServiceError, match="expected"):
                    connection.request("init", given, giver=answer["giver"])
            with pytest.raises(NotReadyError):
                connection.request("init", own[index], giver="another")
            with pytest.raises(ServiceError, match="NaN"):
                connection.request("init", {n: v + np.nan for n, v in own[index].items()}, giver=answer["giver"])
        with pytest.raises(NotReadyError):
            first.request("end_init", giver=answer["giver"])
        waiting = threading.Thread(target=ps.init, args=(FIRST,))
        waiting.start()
        first.drop()
        waiting.join(20)
        assert ps.push(ONES) == 1
        assert set(ps.pull()) == set(FIRST)


def test_a_push_while_the_one_before_is_applied(monkeypatch: pytest.MonkeyPatch) -> None:
    """As after an interruption: its request to keep a part takes none away from the update that is being made."""
    with service(2) as running, running.client() as ps:
        ps.init(FIRST)
        generation, held = running.first.now.generation, threading.Event()
        request = Connection.request

        def late(self: Connection, method: str, *args: Any, **said: str) -> Any:
            if method == "apply" and not held.is_set():
                assert held.wait(20)  # until the next push has let the other server keep its part
            answer = request(self, method, *args, **said)
            if method == "hold" and json.loads(said["push"])[1] == 2:
                held.set()
            return answer

        monkeypatch.setattr(Connection, "request", late)

        def push(number: int) -> Any:
            first, one = _connections(running, "interrupted")
            parts = _parts(ps, ONES)
            one.request("stage", parts[1], push=str(number))
            said = {"push": str(number), "servers": json.dumps({"1": generation}), "generation": generation}
            answer = first.request("push", parts[0], step="0", **said).metadata
            first.close()
            one.close()
            return answer["applied"]

        with ThreadPoolExecutor() as pool:
            pushes = [pool.submit(push, 1)]
            while not running.first._sequencer.under_way("interrupted"):
                time.sleep(0.01)
            pushes.append(pool.submit(push, 2))
            assert [each.result(30) for each in pushes] == ["1", "1"]
        monkeypatch.undo()
        assert held.is_set()
        _is_as_before(running, ps, generation, 2)


@pytest.mark.parametrize("dtype", [np.int32, np.uint8, np.uint64, np.float32])
def test_ids_of_another_dtype(dtype: Any) -> None:
    """Are refused before anything begins again, in a push and in a pull."""
    with service() as running, running.client() as ps:
        ps.init(FIRST)
        ps.push(ONES)
        generation = running.first.now.generation
        [first] = _connections(running, "wrong")
        rows = {"i/w": np.array([1], dtype), "r/w": np.ones([1, 3], np.float32)}
        with pytest.raises(ServiceError, match=r"w: expected ids as int64 \[n\], given"):
            first.request("push", rows, push="1", servers="{}", generation=generation, step="1")
        with pytest.raises(ServiceError, match="pull_rows takes ids: int64"):
            first.request("pull_rows", {"ids": np.array([1], dtype)}, name="w")
        first.close()
        _is_as_before(running, ps, generation, 1)


def test_more_rows_than_there_can_be() -> None:
    """Are refused before they are made, and nobody waits."""
    with service() as running, running.client() as ps:
        ps.init({"wide": np.zeros([2, 100_000], np.float32)})
        assert ps.pull_rows("wide", [0] * 30).shape == (30, 100_000)
        with pytest.raises(ServiceError, match="wide: 40,000,000,000 bytes of rows are too many at a time"):
            ps.pull_rows("wide", np.zeros(100_000, np.int64))


@pytest.mark.parametrize("name", ["\ud800", "a\udfff"])
def test_a_name_that_is_no_text(name: str) -> None:
    """Could never be saved: client and server refuse it."""
    with service() as running, running.client() as ps:
        [first] = _connections(running, "wrong")
        with pytest.raises(ServiceError, match="it is no Unicode text"):
            first.request("begin_init", specs=json.dumps({name: ["float32", [1]]}))
        first.close()
        with pytest.raises(ServiceError, match="it is no Unicode text"):
            ps.init({name: np.zeros(1)})


def _hello(**said: str) -> dict[str, str]:
    known = {"method": "hello", "protocol": "1", "client": "x", "worker": "0", "token": "", "release": "test"}
    return {"__metadata__": {**known, **said}}  # type: ignore[dict-item]


def _answer_to(running: Running, content: bytes) -> dict[str, str] | None:
    """Return what the first server answers to a header; ``None`` if it closes the connection."""
    host, port = running.addresses[0].split(":")
    with socket.create_connection((host, int(port)), timeout=20) as raw:
        raw.sendall(struct.pack("<Q", len(content)) + content)
        try:
            answer = receive.receive(raw)
        except OSError:
            return None
    return dict(answer.metadata) if answer else None


@pytest.mark.parametrize(
    ("said", "problem"),
    [
        ({"token": "\ud800"}, "the token is wrong"),
        ({"worker": "9" * 5000}, "the index of a worker"),
        ({"worker": "\u0663"}, "the index of a worker"),
        ({"client": "ps/0"}, "cannot have the name of the first server"),
        ({"client": ""}, "a client has a name"),
        ({"protocol": "7"}, "the client speaks protocol 7"),
    ],
)
def test_a_hello_that_is_refused(said: dict[str, str], problem: str, caplog: pytest.LogCaptureFixture) -> None:
    """Gets an answer that says why, and the log no traceback."""
    with service() as running, running.client() as ps:
        answer = _answer_to(running, json.dumps(_hello(**said)).encode())
        assert answer
        assert problem in answer["message"]
        assert "Traceback" not in caplog.text
        ps.init(FIRST)


def test_a_hello_is_small() -> None:
    """Who has not said the token gets no memory for a large one."""
    with service() as running, running.client() as ps:
        assert _answer_to(running, json.dumps(_hello(release="x" * 100_000)).encode()) is None
        ps.init(FIRST)
