"""Clients that break the protocol: only they get an error, and no server begins again."""

import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from support.service import FIRST, ONES, Running, service

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
