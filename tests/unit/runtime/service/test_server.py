"""A whole service in this process: clients on real connections, against arithmetic by hand."""

import contextlib
import os
import pickle
import random
import socket
import struct
import threading
import time
from collections.abc import Callable
from concurrent.futures import CancelledError, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FuturesTimeoutError
from typing import Any
from unittest import mock

import numpy as np
import pytest
from support.service import FIRST, ONES, service, together

from tfps.client import connection, receive, servers
from tfps.client import message as messages
from tfps.client.client import Client
from tfps.client.connect import connect
from tfps.client.message import Header, Message, TensorSpec
from tfps.client.progress import Progress
from tfps.client.push_future import PushFuture
from tfps.errors import ConfigError, PeerLostError, ProtocolError, ServiceEndedError, ServiceError
from tfps.runtime.service.parameters.store import Store
from tfps.runtime.service.parameters.versions import Version
from tfps.runtime.service.pushes import Rules
from tfps.runtime.service.server import Server
from tfps.runtime.service.session import Session


@pytest.mark.parametrize("num_ps", [1, 2, 3])
def test_what_is_pushed_is_applied(num_ps: int) -> None:
    """A push of some parameters, of all, and of rows; each answer has the number of updates."""
    with service(num_ps) as running, running.client() as ps:
        ps.init(FIRST)
        assert ps.push(ONES) == 1
        assert ps.push({"b": np.array([1, 2, 3], np.float32)}) == 2
        assert ps.push_rows("w", [3, 0, 3], np.ones([3, 3], np.float32)) == 3
        found = ps.push_pull({"c": 2.0})
        np.testing.assert_array_equal(found["w"], [[-2] * 3, [-1] * 3, [-1] * 3, [-3] * 3])
        np.testing.assert_array_equal(found["b"], [-2, -3, -4])
        assert found["c"] == -3
        np.testing.assert_array_equal(ps.pull_rows("w", [3, 3, 0]), [[-3] * 3, [-3] * 3, [-2] * 3])
        assert ps.step == 4
        assert set(ps.pull(["b"])) == {"b"}


@pytest.mark.parametrize("num_ps", [1, 2])
def test_the_first_values_count(num_ps: int) -> None:
    """All clients give some at the same time: there is one set of values, whole, and nobody's is mixed."""
    with service(num_ps) as running, contextlib.ExitStack() as stack:
        clients = [stack.enter_context(running.client()) for _ in range(8)]
        values = [{name: np.full_like(value, index) for name, value in FIRST.items()} for index in range(8)]
        together(*(lambda c=client, v=value: c.init(v) for client, value in zip(clients, values, strict=True)))
        found = [client.pull() for client in clients]
        numbers = {float(value.flat[0]) for each in found for value in each.values()}
        assert len(numbers) == 1
        assert all((value == value.flat[0]).all() for each in found for value in each.values())


@pytest.mark.parametrize("num_ps", [1, 3])
def test_a_pull_is_of_one_step(num_ps: int) -> None:
    """Each push raises all parameters, on all servers, by the same: no pull has two that differ."""
    with service(num_ps) as running, running.client() as first:
        first.init(FIRST)
        over = threading.Event()

        def write(worker: int) -> int:
            with running.client(worker) as ps:
                for _ in range(40):
                    ps.push(ONES)
                return 40

        def read() -> int:
            with running.client() as ps:
                count = 0
                while not over.is_set():
                    values = {float(number) for value in ps.pull().values() for number in value.flat}
                    assert len(values) == 1, values
                    count += 1
                return count

        with ThreadPoolExecutor() as pool:
            reads = [pool.submit(read) for _ in range(2)]
            assert sum(together(*(lambda w=worker: write(w) for worker in range(3)))) == 120
            over.set()
            assert all(future.result(60) > 3 for future in reads)
        assert first.pull()["b"][0] == -120
        assert first.step == 120


@pytest.mark.parametrize("num_ps", [1, 2])
@pytest.mark.parametrize("aggregate", ["mean", "sum"])
def test_sync_adds_up_in_the_order_of_the_workers(num_ps: int, aggregate: str) -> None:
    """To the bit, however they arrive."""
    random_ = np.random.default_rng(1)
    given = [{n: random_.normal(size=v.shape).astype(v.dtype) for n, v in FIRST.items()} for _ in range(5)]
    with service(num_ps, Rules("sync", 5), aggregate=aggregate) as running, contextlib.ExitStack() as stack:
        clients = [stack.enter_context(running.client(worker)) for worker in range(5)]
        clients[0].init(FIRST)
        for turn in range(3):
            order = random.Random(turn).sample(range(5), 5)

            def push(worker: int, late: int) -> int:
                clients[worker].pull()
                time.sleep(0.02 * late)
                return clients[worker].push(given[worker])

            steps = together(*(lambda w=worker, p=place: push(w, p) for place, worker in enumerate(order)))
            assert steps == [turn + 1] * 5
        found = clients[0].pull()
    for name, value in FIRST.items():
        expected, total = value.copy(), given[0][name].copy()
        for each in given[1:]:
            total = total + each[name]
        total = total / total.dtype.type(5) if aggregate == "mean" else total
        for _ in range(3):
            expected = expected - total
        np.testing.assert_array_equal(found[name], expected)


def test_a_late_push_is_told_the_step() -> None:
    """With a backup worker; its gradient is in no update."""
    rules = Rules("sync", 2, backup_workers=1)
    with service(rules=rules) as running, running.client(0) as one, running.client(1) as other:
        one.init(FIRST)
        other.pull()
        one.pull()
        assert one.push(ONES) == 1
        assert other.push(ONES) == 1
        assert one.pull()["b"][0] == -1


def test_pushes_in_the_background_are_made_in_order() -> None:
    """The arrays may be written to as soon as the call returns."""
    with service() as running, running.client() as ps:
        ps.init(FIRST)
        gradient = np.ones(3, np.float32)
        futures = []
        for _ in range(5):
            futures.append(ps.push_async({"b": gradient}))
            gradient *= 2
        assert [future.result(30) for future in futures] == [1, 2, 3, 4, 5]
        assert ps.pull()["b"][0] == -31


@pytest.mark.parametrize("num_ps", [1, 2])
@pytest.mark.parametrize("seed", range(2))
def test_each_push_counts_once_though_connections_break(num_ps: int, seed: int) -> None:
    """Connections of clients are cut at random moments; what is in the parameters is counted by the parameters."""
    with service(num_ps) as running, running.client() as first:
        first.init(FIRST)
        over = threading.Event()

        def cut() -> None:
            random_ = random.Random(seed)
            while not over.is_set():
                time.sleep(0.04 * random_.random())
                listener = random_.choice(running.listeners)
                with listener._lock:
                    chosen = random_.choice(sorted(listener._open, key=id)) if listener._open else None
                if chosen:
                    with contextlib.suppress(OSError):
                        chosen.shutdown(socket.SHUT_RDWR)

        def write(worker: int) -> None:
            with running.client(worker) as ps:
                for _ in range(20):
                    ps.push(ONES)

        cutting = threading.Thread(target=cut)
        cutting.start()
        together(*(lambda w=worker: write(w) for worker in range(3)))
        over.set()
        cutting.join()
        found = first.pull()
        assert {float(number) for value in found.values() for number in value.flat} == {-60.0}


@pytest.mark.parametrize("num_ps", [1, 2])
@pytest.mark.parametrize(
    ("act", "problem"),
    [
        (lambda ps: ps.push({"x": np.ones(3)}), "x is no parameter"),
        (lambda ps: ps.push({"w": np.ones([3, 4], np.float32)}), r"w: expected float32\[4, 3\], given float32\[3, 4\]"),
        (lambda ps: ps.push({**ONES, "b": np.ones(3)}), r"b: expected float32\[3\], given float64\[3\]"),
        (lambda ps: ps.push({**ONES, "b": np.float32([1, np.nan, 1])}), "b: the gradient has NaN; it is not applied"),
        (lambda ps: ps.push_rows("w", [4], np.ones([1, 3], np.float32)), "w: id 4 is no row: there are rows 0 to 3"),
        (lambda ps: ps.pull_rows("w", [-1]), "w: id -1 is no row"),
        (lambda ps: ps.pull(["nope"]), "nope is no parameter"),
        (lambda ps: ps.init({**FIRST, "b": np.ones(4)}), r"b: expected float32\[3\], given float64\[4\]"),
        (lambda ps: ps.init({"b": FIRST["b"]}), "is missing: the service has 3 parameters"),
        (lambda ps: ps.init({**FIRST, "d": FIRST["b"]}), "d: the service has other parameters, and none of this name"),
    ],
)
def test_what_is_refused_changes_nothing(num_ps: int, act: Callable[[Client], Any], problem: str) -> None:
    """The caller gets the error, and the client goes on."""
    with service(num_ps) as running, running.client() as ps:
        ps.init(FIRST)
        with pytest.raises(ServiceError, match=problem):
            act(ps)
        assert ps.step == 0
        assert all((value == 0).all() for value in ps.pull().values())
        assert ps.push(ONES) == 1


def test_nothing_is_there_before_init() -> None:
    """The error says what to do."""
    with service() as running, running.client() as ps:
        for act in (ps.pull, lambda: ps.push({"w": 1.0})):
            with pytest.raises(ServiceError, match="has no parameters yet: call init"):
                act()


def test_a_client_that_dies_in_init_leaves_it_to_the_next() -> None:
    """It was to give the values, and is gone before it has."""
    with service() as running:
        dying = running.client()
        answer = dying._servers.first.request("begin_init", specs='{"w": ["float32", [2]]}')
        assert answer.metadata["giver"]
        with ThreadPoolExecutor() as pool, running.client() as ps:
            waiting = pool.submit(ps.init, {"w": np.ones(2, np.float32)})
            time.sleep(0.1)
            assert not waiting.done()
            dying.close()
            waiting.result(30)
            np.testing.assert_array_equal(ps.pull()["w"], [1, 1])


@pytest.mark.parametrize("token", ["wrong", "", "é"])
def test_the_token_counts(token: str) -> None:
    """A client without the right one is refused when it connects."""
    with service(token="secret") as running:
        with pytest.raises(ServiceError, match="the token is wrong"):
            running.client(token=token)
        with running.client(token="secret") as ps:
            ps.init(FIRST)


def test_the_order_of_the_servers_counts() -> None:
    """And their number."""
    with service(2) as running:
        for hosts in (running.addresses[::-1], running.addresses[:1]):
            with pytest.raises(ServiceError, match="and ps_hosts has it as ps/0 of"):
                connect(",".join(hosts))


def test_no_address_is_an_error_of_the_caller() -> None:
    """It names the variable."""
    with pytest.raises(ConfigError, match="give ps_hosts, or set TFPS_PS_HOSTS"):
        connect("")


@pytest.mark.parametrize(
    "content",
    [b"", b"GET / HTTP/1.1\r\n\r\n", b"\0" * 100, struct.pack("<Q", 1 << 40), bytes(range(256)) * 10],
)
def test_garbage_on_the_port_changes_nothing(content: bytes) -> None:
    """The connection ends, and the service goes on."""
    with service() as running, running.client() as ps:
        ps.init(FIRST)
        host, _, port = running.addresses[0].rpartition(":")
        with socket.create_connection((host, int(port)), 30) as garbage:
            garbage.settimeout(30)
            with contextlib.suppress(OSError):  # the service may have closed it
                garbage.sendall(content)
                garbage.shutdown(socket.SHUT_WR)
            with contextlib.suppress(ConnectionResetError):
                assert garbage.recv(1) == b""
        assert ps.push(ONES) == 1


def test_what_is_only_announced_takes_no_memory() -> None:
    """A push of 10 GB is refused by its header; the connection ends, as nobody wants to read so much."""
    with service() as running, running.client() as ps:
        ps.init(FIRST)
        connection = ps._servers.first._socket
        assert connection
        header = messages.encode(
            Message(
                {"method": "push", "push": "1", "step": "0", "generation": "", "servers": "{}"}, {"d/w": FIRST["w"]}
            )
        )[0]
        content = bytes(header[8:]).replace(b"[4,3]", b"[833333333,3]").replace(b"[0,48]", b"[0,9999999996]")
        connection.sendall(struct.pack("<Q", len(content)) + content)
        answer = receive.receive(connection)
        assert answer is not None
        assert answer.metadata["message"] == "w: expected float32[4, 3], given float32[833333333, 3]."
        assert connection.recv(1) == b""
        assert ps.push(ONES) == 1  # on a new connection


@pytest.mark.parametrize("metadata", [{"method": "nope"}, {"method": "push"}, {"method": "wait", "step": "x"}, {}])
def test_requests_that_cannot_be_read_are_refused(metadata: dict[str, str]) -> None:
    """And the connection goes on."""
    with service() as running, running.client() as ps:
        ps.init(FIRST)
        connection = ps._servers.first._socket
        assert connection
        messages.send(connection, Message(metadata))
        answer = receive.receive(connection)
        assert answer is not None
        assert answer.metadata["error"] in ("ServiceError", "ProtocolError")
        assert ps.push(ONES) == 1


def test_a_wait_ends_with_the_updates() -> None:
    """Of another client."""
    with service() as running, running.client() as one, running.client() as other, ThreadPoolExecutor() as pool:
        one.init(FIRST)
        waiting = pool.submit(other.wait, 2)
        assert not one.wait(2, 0.05)
        one.push(ONES)
        one.push(ONES)
        assert waiting.result(30)


def test_a_wait_is_as_long_as_asked_for() -> None:
    """Though its connections are lost, and a server waits for a shorter time."""
    with service() as running, running.client() as ps, mock.patch("tfps.client.client._WAIT_SECS", 0.05):
        ps.init(FIRST)
        over = threading.Event()

        def cut() -> None:
            while not over.wait(0.2):
                with running.listeners[0]._lock:
                    for each in running.listeners[0]._open:
                        each.shutdown(socket.SHUT_RDWR)

        cutting = threading.Thread(target=cut)
        cutting.start()
        began = time.monotonic()
        with ThreadPoolExecutor() as pool:
            waiting = pool.submit(ps.wait, 1, 3600.0)
            assert not ps.wait(1, 1.0)
            over.set()
            cutting.join()
            assert ps.push(ONES) == 1
            assert waiting.result(60)
        assert time.monotonic() - began >= 1.0


def test_a_push_in_the_background_is_of_the_parameters_of_its_call() -> None:
    """A pull between the call and the push does not make the gradient newer: in sync it is too late."""
    with service(rules=Rules("sync", 2)) as running, running.client(0) as one, running.client(1) as other:
        one.init(FIRST)
        one.pull()
        other.pull()
        seen = one._servers.progress.seen
        together(lambda: one.push(ONES), lambda: other.push({"b": [1.0, 1.0, 1.0]}))
        one.pull()
        arrays = {f"d/{name}": value for name, value in ONES.items()}
        assert one.dropped == 0
        assert one._push(arrays, seen) == 1
        assert one.dropped == 1
        assert one.step == 1


def test_plain_numbers_get_the_dtype_of_the_parameter() -> None:
    """In all ways to push."""
    with service(learning_rate=1.0) as running, running.client() as ps:
        ps.init({"w": np.zeros(2, np.float32)})
        assert ps.push({"w": [1, 2]}) == 1
        assert ps.push_async({"w": [1.0, 2.0]}).result(30) == 2
        np.testing.assert_array_equal(ps.push_pull({"w": (1, 2)})["w"], [-3, -6])
        with pytest.raises(ServiceError, match=r"w: expected float32\[2\], given float32\[3\]"):
            ps.push_async({"w": [1, 2, 3]})


@pytest.mark.parametrize("num_ps", [1, 2])
def test_a_push_and_a_pull_together(num_ps: int) -> None:
    """The parameters are those after the push, whatever others do."""
    with service(num_ps) as running, running.client(0) as one, running.client(1) as other:
        one.init(FIRST)
        over = threading.Event()

        def push() -> None:
            while not over.is_set():
                other.push(ONES)

        with ThreadPoolExecutor() as pool:
            pushing = pool.submit(push)
            last = 0.0
            for _ in range(20):
                found = {float(number) for value in one.push_pull(ONES).values() for number in value.flat}
                assert len(found) == 1
                assert min(found) < last
                last = min(found)
            over.set()
            pushing.result(60)


def test_a_wait_leaves_the_client_to_other_threads() -> None:
    """The same client pushes meanwhile; a wait for more steps than there will be ends with an error."""
    with service(rules=Rules(max_steps=2)) as running, running.client() as ps, ThreadPoolExecutor() as pool:
        ps.init(FIRST)
        waiting = pool.submit(ps.wait, 2)
        beyond = pool.submit(ps.wait, 3)
        ps.push(ONES)
        ps.push(ONES)
        assert waiting.result(30)
        with pytest.raises(ServiceEndedError, match="has come to its last step, 2"):
            beyond.result(30)


def test_an_ssp_push_that_is_made_is_answered_at_the_end() -> None:
    """Though its worker would have to wait for a slower one."""
    rules = Rules("ssp", staleness=1, max_steps=3)
    with (
        service(rules=rules) as running,
        running.client(0) as one,
        running.client(1) as other,
        ThreadPoolExecutor() as pool,
    ):
        one.init(FIRST)
        assert one.push(ONES) == 1
        waiting = pool.submit(one.push, ONES)
        time.sleep(0.2)
        assert not waiting.done()
        running.first.end(ServiceEndedError("over"))
        assert waiting.result(30) == 2
        with pytest.raises(ServiceEndedError):
            other.push(ONES)


def test_what_is_too_much_is_refused_while_it_is_sent() -> None:
    """The client learns why, and does not send it again."""
    with service() as running, running.client() as ps:
        ps.init(FIRST)
        big = {"d/w": np.zeros(80 << 20, np.float32)}
        began = time.monotonic()
        with pytest.raises(ServiceError, match=r"w: expected float32\[4, 3\], given float32"):
            ps._servers.first.request("push", big, push="1", step="0", generation="", servers="{}")
        assert time.monotonic() - began < 20
        assert ps.push(ONES) == 1


def test_an_index_in_the_environment_is_a_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the variable is named."""
    monkeypatch.setenv("TFPS_WORKER", "abc")
    with pytest.raises(ConfigError, match="TFPS_WORKER=abc is no index of a worker"):
        connect("127.0.0.1:1")


def test_a_server_that_fails_says_so() -> None:
    """The connection goes on; the client does not repeat the request."""
    with service() as running, running.client() as ps:
        ps.init(FIRST)
        with (
            mock.patch.object(running.first, "dropped", side_effect=MemoryError("no memory")),
            pytest.raises(ServiceError, match="the server failed: MemoryError: no memory"),
        ):
            ps.step  # noqa: B018


def test_an_interrupted_request_leaves_no_answer_to_the_next() -> None:
    """Ctrl-C comes between a request and its answer; the next request gets its own, and the push counts once."""
    with service() as running, running.client() as ps:
        ps.init(FIRST)
        with (
            mock.patch.object(connection, "_received", side_effect=KeyboardInterrupt),
            pytest.raises(KeyboardInterrupt),
        ):
            ps.push(ONES)
        assert ps.wait(1, 30)
        assert set(ps.pull()) == set(FIRST)
        assert ps.push(ONES) == 2
        assert ps.pull()["b"][0] == -2


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        *(({"worker": wrong}, "is no index of a worker: give 0, 1, 2") for wrong in (-1, 1.5, "1", True)),
        *(({"retry_secs": wrong}, "expected a number of seconds above 0") for wrong in (0, -1, "5", float("nan"))),
        ({"start_timeout_secs": float("inf")}, "start_timeout_secs=inf: expected a number of seconds above 0"),
        *(({"token": wrong}, "token: expected a str, given") for wrong in (5, b"x")),
        ({"tls": True}, "tls=True: give an ssl.SSLContext, or set TFPS_TLS_CA"),
    ],
)
def test_wrong_arguments_are_found_before_a_connection(given: dict[str, Any], problem: str) -> None:
    """Each is named; nobody listens at the address."""
    with pytest.raises(ConfigError, match=problem):
        connect("127.0.0.1:1", **given)


def test_a_secret_from_a_file(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its line end is not part of it; bytes that are no text are an error."""
    with service(token="abc") as running:
        monkeypatch.setenv("TFPS_TOKEN", "abc\n")
        with running.client() as ps:
            ps.init(FIRST)
        monkeypatch.setenv("TFPS_TOKEN", os.fsdecode(b"\xff"))
        with pytest.raises(ConfigError, match="TFPS_TOKEN is no UTF-8 text"):
            running.client()


@pytest.mark.parametrize("answer", [{}, {"run": "x"}, {"run": "", "task": "ps/0", "num_ps": "x"}])
def test_who_answers_is_no_service(answer: dict[str, str]) -> None:
    """That is an error of the protocol, and no traceback."""
    with socket.create_server(("127.0.0.1", 0)) as listening, ThreadPoolExecutor() as pool:

        def serve() -> None:
            raw, _ = listening.accept()
            with raw:
                receive.receive(raw)
                messages.send(raw, Message(answer))

        served = pool.submit(serve)
        with pytest.raises(ProtocolError, match="is no server of a parameter service"):
            connect(f"127.0.0.1:{listening.getsockname()[1]}")
        served.result(20)


def test_a_client_is_of_one_process() -> None:
    """A forked process would push under the same numbers, and its pushes would count as repeated ones."""
    with service() as running, running.client() as ps:
        ps.init(FIRST)
        problem = "this client is that of another process: call tfps.connect in each process"
        with mock.patch("os.getpid", return_value=-1):
            acts = (ps.pull, lambda: ps.push(ONES), lambda: ps.push_async(ONES), lambda: ps.pull_rows("w", [0]))
            for act in (*acts, lambda: ps.push_async({}), lambda: ps.step, lambda: ps.wait(1)):
                with pytest.raises(ServiceError, match=problem):
                    act()
        with pytest.raises(ServiceError, match="cannot be sent to another process"):
            pickle.dumps(ps)
        assert ps.push(ONES) == 1


@pytest.mark.parametrize("aggregate", ["mean", "sum", "median"])
@pytest.mark.parametrize("num_ps", [1, 2, 3])
def test_a_push_without_a_parameter_counts_as_zero(num_ps: int, aggregate: str) -> None:
    """Wherever the parameter is: the update is of three pushes on each server."""
    pushes = [{"w": ONES["w"]}, {"w": ONES["w"], "b": ONES["b"]}, ONES]
    with service(num_ps, Rules("sync", 3), aggregate=aggregate) as running, contextlib.ExitStack() as stack:
        clients = [stack.enter_context(running.client(worker)) for worker in range(3)]
        clients[0].init(FIRST)
        together(*(lambda c=client, p=push: c.push(p) for client, push in zip(clients, pushes, strict=True)))
        found = clients[0].pull()
    expected = {"mean": (-1.0, -2 / 3, -1 / 3), "sum": (-3.0, -2.0, -1.0), "median": (-1.0, -1.0, 0.0)}[aggregate]
    for name, value in zip("wbc", expected, strict=True):
        np.testing.assert_allclose(found[name], np.full_like(FIRST[name], value), rtol=1e-6)


@pytest.mark.parametrize("num_ps", [1, 2])
def test_an_update_that_fails_lets_the_service_begin_again(num_ps: int) -> None:
    """No server keeps half of it."""
    with service(num_ps) as running, running.client(retry_secs=0.5) as ps:
        ps.init(FIRST)
        store = running.first._store
        with mock.patch.object(store, "update", side_effect=RuntimeError("x")), pytest.raises(PeerLostError):
            ps.push(ONES)
        assert not running.first.now.generation


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        ({"": 0.0}, "'' is no name for a parameter"),
        ({"global_step": 0.0}, "global_step is no name for a parameter"),
        ({"tfps/service": 0.0}, "tfps/service is no name for a parameter"),
        ({"beta1_power": 0.0}, "beta1_power is no name for a parameter"),
        ({"w": 0.0, "w/Adam_1": 0.0}, "w/Adam_1 is no name for a parameter"),
        ({"w": np.zeros(2, np.int32)}, r"w: expected float16, float32 or float64, given int32\[2\]"),
        ({"w": np.zeros(2, np.complex64)}, "complex64"),
        ({}, "there is no parameter"),
    ],
)
def test_parameters_that_cannot_be(values: dict[str, Any], problem: str) -> None:
    """Each is refused by its name, and another client may give others."""
    with service(2, optimizer="adam") as running, running.client() as ps, running.client() as other:
        with pytest.raises(ServiceError, match=problem):
            ps.init(values)
        other.init({"w": np.zeros(2, np.float32), "w/Momentum": 1.0, "v/Adam": 1.0})
        assert other.push({"w": [1, 1]}) == 1


@pytest.mark.parametrize("ids", [[1.9], [True, False], ["a"], np.zeros(2)])
def test_ids_are_whole_numbers(ids: Any) -> None:
    """Nothing is rounded to one."""
    with service() as running, running.client() as ps:
        ps.init(FIRST)
        with pytest.raises(ServiceError, match="w: expected ids as int64"):
            ps.push_rows("w", ids, np.ones([len(ids), 3], np.float32))
        with pytest.raises(ServiceError, match="w: expected ids as int64"):
            ps.pull_rows("w", ids)
        with pytest.raises(ServiceError, match="w: expected float32, given float64"):
            ps.push_rows("w", [1], np.ones([1, 3]))
        assert ps.pull_rows("w", []).shape == (0, 3)


def test_byte_orders_are_one() -> None:
    """An array of the other one is converted."""
    with service() as running, running.client() as ps:
        ps.init({"w": np.array([1, 2], ">f4")})
        assert ps.push({"w": np.array([1, 1], ">f4")}) == 1
        np.testing.assert_array_equal(ps.pull()["w"], [0, 1])


def test_a_client_that_is_closed_says_so() -> None:
    """It does not connect again."""
    with service() as running:
        ps = running.client()
        ps.init(FIRST)
        ps.close()
        for act in (lambda: ps.push(ONES), lambda: ps.step):
            with pytest.raises(ServiceError, match="the client is closed"):
                act()


def test_an_error_in_the_block_does_not_wait_for_other_workers() -> None:
    """A push in the background that waits for another worker ends with an error."""
    with service(rules=Rules("sync", 2)) as running:
        began = time.monotonic()
        with pytest.raises(ZeroDivisionError), running.client() as ps:  # noqa: PT012
            ps.init(FIRST)
            pending = ps.push_async(ONES)
            time.sleep(0.2)
            raise ZeroDivisionError
        with pytest.raises(ServiceError, match="closed while it waited"):
            pending.result(10)
        assert time.monotonic() - began < 20


def test_threads_that_begin_together_pull_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """None of them uses what another one has learned in part."""

    def slow(*args: Any) -> TensorSpec:
        time.sleep(0.05)
        return TensorSpec(*args)

    with service(2) as running, running.client() as ps, running.client() as other:
        ps.init(FIRST)
        monkeypatch.setattr(servers, "TensorSpec", slow)

        def pull_later(secs: float) -> set[str]:
            time.sleep(secs)
            return set(other.pull())

        found = together(*(lambda secs=0.03 * index: pull_later(secs) for index in range(6)))
        assert found == [set(FIRST)] * 6


def test_the_step_waits_while_the_servers_begin_again() -> None:
    """It is never 0 in between, which programs that are run again would take for the begin."""
    with service(2) as running, running.client() as ps:
        ps.init(FIRST)
        running.first._versions.suspend()
        threading.Timer(0.5, running.first.restart, [None]).start()
        began = time.monotonic()
        assert ps.step == 0
        assert time.monotonic() - began > 0.4


def test_updates_go_on_while_a_snapshot_is_fetched() -> None:
    """The values of another server travel on a connection of their own."""
    with service(2) as running, running.client() as ps:
        ps.init(FIRST)
        entered, goes_on = threading.Event(), threading.Event()
        state = running.followers[0]._methods_of_first["state"]

        def held(*args: Any) -> Message:
            entered.set()
            assert goes_on.wait(30)
            return state(*args)

        running.followers[0]._methods_of_first |= {"state": held}

        def read() -> list[Any]:
            with running.first.snapshot() as snapshot:
                return [part() for part in snapshot.parts]

        def push() -> int:
            assert entered.wait(30)
            step = ps.push(ONES)
            goes_on.set()
            return step

        parts, step = together(read, push)
        assert step == 1
        assert {name for part in parts for name in part} == set(FIRST)
        assert all((value == 0).all() for part in parts for value in part.values())


def test_a_lost_update_is_told(caplog: pytest.LogCaptureFixture) -> None:
    """When the servers have begun again, by the client that knows of later ones."""
    with service() as running, running.client() as ps:
        ps.init(FIRST)
        for _ in range(3):
            ps.push(ONES)
        assert not caplog.text
        running.first.restart(None)
        ps.init(FIRST)
        ps.pull()
        assert "the service has begun again from a checkpoint: of 3 updates, at least 3 are lost." in caplog.text


def test_pushes_without_a_pull_are_told_in_sync(caplog: pytest.LogCaptureFixture) -> None:
    """All but the first are dropped."""
    with service(rules=Rules("sync", 2)) as running, running.client(0) as one, running.client(1) as other:
        one.init(FIRST)
        other.pull()
        for _ in range(3):
            together(lambda: one.push(ONES), lambda: other.push(ONES))
        assert (one.dropped, other.dropped, one.step) == (2, 2, 1)
        assert "Pull before each push." in caplog.text
        caplog.clear()
        for _ in range(2):
            one.pull(), other.pull()
            together(lambda: one.push(ONES), lambda: other.push(ONES))
        assert (one.dropped, other.dropped, one.step) == (2, 2, 3)
        assert not caplog.text


def test_the_end_is_told_after_the_servers_are_gone() -> None:
    """To a client that has learned of it; without a wait."""
    with service(rules=Rules(max_steps=1)) as running:
        ps = running.client(retry_secs=60)
        ps.init(FIRST)
        ps.push(ONES)
        with pytest.raises(ServiceEndedError):
            ps.push(ONES)
        for listener in running.listeners:
            listener.close()
        began = time.monotonic()
        with pytest.raises(ServiceEndedError, match="has come to its last step, 1"):
            ps.pull()
        assert time.monotonic() - began < 10


def test_a_push_in_the_background_does_not_fail_in_silence() -> None:
    """If nobody asks its future, the next push of any kind raises the error, or the end of the client."""
    wrong = {"w": np.full([4, 3], np.nan, np.float32)}
    with service() as running:
        acts: list[Callable[[Client], Any]] = [
            *(lambda ps: ps.push(ONES), lambda ps: ps.push_async(ONES), lambda ps: ps.push_pull(ONES)),
            *(lambda ps: ps.push_rows("w", [0], [[1, 1, 1]]), Client.close),
        ]
        for act in acts:
            ps = running.client()
            ps.init(FIRST)
            future = ps.push_async(wrong)
            while not future.done():
                time.sleep(0.01)
            with pytest.raises(ServiceError, match="earlier push in the background failed: w: the gradient has NaN"):
                act(ps)
            ps.close()
        with pytest.raises(ServiceError, match="background failed"), running.client() as ps:
            ps.push_async(wrong)
        with pytest.raises(ZeroDivisionError), running.client() as ps:
            1 / int(ps.push_async(wrong).cancelled())
        future = PushFuture()
        with pytest.raises(FuturesTimeoutError):
            future.result(0.01)
        future.set_exception(ServiceError("later"))
        with pytest.raises(ServiceError, match="background failed: later"):
            future.check()
        with running.client() as ps:
            with pytest.raises(ServiceError, match="w: the gradient has NaN"):
                ps.push_async(wrong).result(60)
            assert isinstance(ps.push_async(wrong).exception(60), ServiceError)
            assert ps.push(ONES) == 1


def test_pushes_that_have_not_begun_end_with_the_block() -> None:
    """As cancelled, if an error has ended it: nobody waits for them."""
    with service(rules=Rules("sync", 2)) as running:
        futures: list[Any] = []

        def fail(ps: Client) -> None:
            with ps:
                ps.init(FIRST)
                futures.extend(ps.push_async(ONES) for _ in range(3))
                while not running.first._sequencer._waiting:
                    time.sleep(0.01)
                raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            fail(running.client())
        with pytest.raises(ServiceError, match="the client was closed"):
            futures[0].result(20)
        for future in futures[1:]:
            with pytest.raises(CancelledError):
                future.result(20)


def test_a_client_that_goes_while_its_push_waits_is_no_traceback(caplog: pytest.LogCaptureFixture) -> None:
    """In the log of the server; another one takes its place."""
    caplog.set_level("INFO")
    with service(rules=Rules("sync", 2)) as running, running.client(1) as other:
        ps = running.client(0)
        ps.init(FIRST)
        future = ps.push_async(ONES)
        while not running.first._sequencer._waiting:
            time.sleep(0.01)
        ps._servers.abort()
        assert future.exception(20)
        while "the client is gone" not in caplog.text:
            time.sleep(0.01)
        assert other.push(ONES) == 1
        assert "Traceback" not in caplog.text
        ps.close()


def test_a_service_of_another_size_is_noticed() -> None:
    """Parameters may be on other servers then: what a client has learned is wrong."""
    with service(2) as running, running.client(retry_secs=5) as ps:
        ps.init(FIRST)
        running.first._num_ps = 3
        ps._servers.first.drop()
        with pytest.raises(ServiceError, match="the service was started again, with 3 servers: connect again"):
            ps.push(ONES)


def test_a_dropped_push_after_one_that_was_applied_is_no_mistake(caplog: pytest.LogCaptureFixture) -> None:
    """Though both that were dropped are of the same step: the service has begun again between."""
    progress, computed = Progress(), {"generation": "a", "step": "1"}
    for applied in "010":
        progress.pushed(Message({"applied": applied, "generation": "a", "step": "2"}), computed)
    assert (progress.dropped, caplog.text) == (2, "")
    progress.pushed(Message({"applied": "0", "generation": "a", "step": "2"}), computed)
    assert "both are of step 1. Pull before each push." in caplog.text


def test_what_was_announced_before_is_checked_again_for_other_parameters() -> None:
    """The service may begin again with other ones, while a client announces the same as before."""
    server, header = Server(1, Store()), Header({"method": "stage"}, {"d/w": TensorSpec(np.dtype(np.float32), (2,))})
    for generation, value in (("a", np.zeros(2, np.float32)), ("b", np.zeros(2, np.float32)), ("c", np.zeros(3))):
        server.begin(Version(generation), "run", {"w": TensorSpec.of(value)}, {"w": value})
        if generation < "c":
            server.accept(header, Session())
            server.accept(header, Session())
    for _ in range(2):
        with pytest.raises(ServiceError, match=r"w: expected float64\[3\], given float32\[2\]"):
            server.accept(header, Session())
