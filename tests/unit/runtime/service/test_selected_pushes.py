"""Krum in a service: an update is the one push that is selected over all servers, against NumPy, to the bit."""

import contextlib
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
from support.service import FIRST, Running, service, together

from tfps.client.arrays import Rows
from tfps.client.client import Client
from tfps.client.message import Message
from tfps.errors import NotReadyError
from tfps.runtime.service.checkpoints import SavedService, ServiceSaver
from tfps.runtime.service.pushes import Rules

Push = Mapping[str, Any]
SESSION: Any = None  # a service needs none


def krum(pushes: Sequence[Push], names: str = "wbc") -> int:
    """Return which push Krum selects of five, by some parameters."""
    arrays = [[np.float64(push.get(name, np.zeros_like(FIRST[name]))).ravel() for name in names] for push in pushes]
    flat = np.stack([np.concatenate(each) for each in arrays])
    distances = ((flat[:, None] - flat[None]) ** 2).sum(axis=2)
    return int(np.argmin(np.sort(distances, axis=1)[:, 1:3].sum(axis=1)))  # f = 1: the 5 - 1 - 2 nearest


def gradients(seed: int, bad: int | None = None) -> list[dict[str, Any]]:
    """Return the gradients of five workers; those of the bad one are huge."""
    random = np.random.default_rng(seed)
    given = [{name: random.normal(size=v.shape).astype(v.dtype) for name, v in FIRST.items()} for _ in range(5)]
    if bad is not None:
        given[bad] = {name: np.full_like(value, 1e30) for name, value in FIRST.items()}
    return [{name: np.asarray(value) for name, value in each.items()} for each in given]


@contextlib.contextmanager
def five(num_ps: int, spare: int = 0, **options: Any) -> Iterator[tuple[Running, list[Client]]]:
    """Run a service of five workers whose pushes make an update."""
    rules = Rules("sync", 5 + spare, backup_workers=spare)
    with service(num_ps, rules, aggregate="krum", **options) as running, contextlib.ExitStack() as stack:
        clients = [stack.enter_context(running.client(worker)) for worker in range(5 + spare)]
        clients[0].init(FIRST)
        yield running, clients


def push(clients: Sequence[Client], pushes: Sequence[Push]) -> list[int]:
    """Let each client pull, then push, all at the same time."""

    def one(client: Client, given: Push) -> int:
        client.pull()
        return client.push(given)

    return together(*(lambda c=client, p=each: one(c, p) for client, each in zip(clients, pushes, strict=True)))


def held(running: Running) -> int:
    """Return how many parts of pushes the servers have."""
    servers = [running.first, *running.followers]
    return sum(len(own) for server in servers for own in server._staged._parts.values())


def others(running: Running) -> dict[str, Any]:
    """Return what the second server does for the first one, by the name of the request."""
    methods: Any = running.followers[0]._methods_of_first
    return dict(methods)


@pytest.mark.parametrize("num_ps", [1, 2, 3])
def test_an_update_is_the_push_that_krum_selects(num_ps: int) -> None:
    """Over the parameters of all servers: those of one server alone would select others. No part of a push stays."""
    turns = [gradients(seed, bad=seed % 5 if seed > 2 else None) for seed in range(6)]
    chosen = [krum(turn) for turn in turns]
    assert len(set(chosen)) > 2
    assert all(any(krum(turn, names) != index for turn, index in zip(turns, chosen, strict=True)) for names in "wbc")
    expected = dict(FIRST)
    with five(num_ps) as (running, clients):
        for step, (turn, index) in enumerate(zip(turns, chosen, strict=True), 1):
            assert push(clients, turn) == [step] * 5
            assert held(running) == 0
            expected = {name: value - turn[index][name] for name, value in expected.items()}
            for name, value in clients[step % 5].pull().items():
                np.testing.assert_array_equal(value, expected[name])
        assert running.first.dropped() == dict.fromkeys(range(5), 0)


@pytest.mark.parametrize("num_ps", [1, 2])
def test_rows_count_as_dense_and_only_those_of_the_selected_push_are_applied(num_ps: int) -> None:
    """Ids repeat; a row that others have does not change."""
    ids = [[0, 0], [0, 0], [0, 1], [3, 3], [2, 0]]
    values = [1.0, 1.0, 1.0, 1e20, -7.0]
    given = [Rows(np.int64(own), np.full([2, 3], number, np.float32)) for own, number in zip(ids, values, strict=True)]
    dense = [{"w": np.zeros([4, 3])} for _ in given]
    for one, rows in zip(dense, given, strict=True):
        np.add.at(one["w"], rows.ids, rows.values)
    assert krum(dense) == 0
    assert krum([dense[index] for index in (4, 3, 2, 1, 0)]) == 3  # not the first one always
    with five(num_ps) as (_, clients):
        for order, step in (((0, 1, 2, 3, 4), 1), ((4, 3, 2, 1, 0), 2)):
            chosen = [given[index] for index in order]
            for client in clients:
                client.pull()
            pairs = zip(clients, chosen, strict=True)
            assert together(*(lambda c=c, g=g: c.push_rows("w", g.ids, g.values) for c, g in pairs)) == [step] * 5
        np.testing.assert_array_equal(clients[0].pull()["w"], [[-4] * 3, [0] * 3, [0] * 3, [0] * 3])


@pytest.mark.parametrize("num_ps", [1, 2])
@pytest.mark.parametrize("names", ["w", "b", ""])
def test_a_selected_push_without_a_part_on_a_server_changes_nothing_there(num_ps: int, names: str) -> None:
    """As if the service were async, and it alone were pushed: with Adam, whose powers change in each update."""
    whole = gradients(1)[0]
    lacking = {name: whole[name] for name in names}
    near = [{name: np.asarray(value + number) for name, value in lacking.items()} for number in (0, -0.01, 0.01)]
    far = [{name: np.asarray(value + 100) for name, value in whole.items()}, gradients(2, bad=0)[0]]
    options = {"optimizer": "adam", "learning_rate": 0.1}
    assert krum([*near, *far]) == 0
    with five(num_ps, **options) as (running, clients):
        assert push(clients, [*near, *far]) == [1] * 5
        assert held(running) == 0
        assert push(clients, [whole] * 5) == [2] * 5
        found = state(running)
    with service(num_ps, **options) as running, running.client() as ps:
        ps.init(FIRST)
        assert [ps.push(lacking), ps.push(whole)] == [1, 2]
        expected = state(running)
    assert found.keys() == expected.keys() > {"w", "w/Adam", "beta1_power"}
    for name, value in expected.items():
        np.testing.assert_array_equal(found[name], value, name)


def state(running: Running) -> dict[str, Any]:
    """Return all parameters and slots."""
    with running.first.snapshot() as snapshot:
        return {name: np.array(value) for part in snapshot.parts for name, value in part().items()}


def test_with_a_backup_worker_it_is_among_those_that_came_first() -> None:
    """The sixth push is dropped, although it is the nearest to the others."""
    turn = gradients(4, bad=2)
    with five(2, spare=1) as (running, clients):
        for client in clients:
            client.pull()
        first = [clients[worker] for worker in (5, 4, 3, 1, 0)]
        assert together(*(lambda c=c, p=p: c.push(p) for c, p in zip(first, reversed(turn), strict=True))) == [1] * 5
        assert held(running) == 0
        assert clients[2].push(turn[krum(turn)]) == 1
        assert running.first.dropped() == {worker: int(worker == 2) for worker in range(6)}
        for name, value in clients[2].pull().items():
            np.testing.assert_array_equal(value, FIRST[name] - turn[krum(turn)][name])


def test_pushes_that_are_sent_again_meanwhile_count_once() -> None:
    """All clients lose their connections while the servers compare: the update is the same, and there is one."""
    turn, cut = gradients(6, bad=0), []
    with five(2) as (running, clients):
        compare = others(running)["distances"]

        def compare_and_cut(request: Message, session: Any) -> Message:
            if not cut:
                for listener in running.listeners:
                    with listener._lock:
                        cut.extend(listener._open - {session.connection})
                for connection in cut:
                    with contextlib.suppress(OSError):
                        connection.shutdown(socket.SHUT_RDWR)
                time.sleep(0.5)  # clients come again
            answer: Message = compare(request, session)
            return answer

        with mock.patch.dict(running.followers[0]._methods_of_first, {"distances": compare_and_cut}):
            assert push(clients, turn) == [1] * 5
        assert len(cut) == 10
        for name, value in clients[0].pull().items():
            np.testing.assert_array_equal(value, FIRST[name] - turn[krum(turn)][name])


def _first_lost(suspend: Callable[[], None], compare: Callable[[], Message]) -> Message:
    suspend()
    return compare()


def _then_lost(suspend: Callable[[], None], compare: Callable[[], Message]) -> Message:
    answer = compare()
    suspend()
    return answer


def test_servers_compare_nothing_of_another_generation() -> None:
    """The parts are of the one that ps/0 means, or there is no answer."""
    with five(2) as (running, _):
        now, (other,) = running.first.now.generation, running.others
        assert other.request("distances", pushes="[null, null]", generation=now).tensors["distances"].shape == (2, 2)
        with pytest.raises(NotReadyError):
            other.request("distances", pushes="[null, null]", generation="another")


@pytest.mark.parametrize("lose", [_first_lost, _then_lost])
def test_a_server_that_is_lost_between_leaves_no_half_of_an_update(lose: Any, tmp_path: Path) -> None:
    """Before or after it has compared. The servers begin again, and drop these pushes, as sync does."""
    path, turn, lost = str(tmp_path / "model.ckpt"), gradients(7, bad=4), []
    with five(2) as (running, clients):
        ServiceSaver(running.first).save(SESSION, path)
        follower, compare = running.followers[0], others(running)["distances"]

        def compare_once(request: Message, session: Any) -> Message:
            if lost:
                again: Message = compare(request, session)
                return again
            lost.append(request.metadata["generation"])
            answer: Message = lose(follower._versions.suspend, lambda: compare(request, session))
            return answer

        with mock.patch.dict(follower._methods_of_first, {"distances": compare_once}), ThreadPoolExecutor() as pool:
            pushing = pool.submit(push, clients, turn)
            deadline = time.monotonic() + 20
            while running.first.now.generation and time.monotonic() < deadline:
                time.sleep(0.01)
            assert not running.first.now.generation
            running.first.restart(SavedService(path))
            assert pushing.result(30) == [0] * 5
        assert running.first.now.generation not in ("", *lost)
        assert all((value == 0).all() for value in clients[0].pull().values())
        assert push(clients, turn) == [1] * 5
        for name, value in clients[0].pull().items():
            np.testing.assert_array_equal(value, FIRST[name] - turn[krum(turn)][name])
