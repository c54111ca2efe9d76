"""Who is at an address: real TensorFlow servers, and real servers of other kinds."""

import contextlib
import os
import resource
import socket
import socketserver
import threading
import time
from concurrent import futures
from types import SimpleNamespace

import pytest
from support.cluster import cluster_of, target_of, wait_until
from support.listeners import Speaker, address_of, blackhole, listener, patient_probes, serving, web_server

from tfps.cluster import probe
from tfps.cluster.addresses import split
from tfps.cluster.ports import answers, held_ports
from tfps.cluster.probe import ProbeResult
from tfps.cluster.spec import Cluster, Task


@pytest.mark.parametrize("task", [Task("ps", 0), Task("ps", 1), Task("worker", 2)])
def test_a_tensorflow_server_says_who_it_is(monkeypatch: pytest.MonkeyPatch, task: Task) -> None:
    """A real server tells its job and index, time after time, to many at once, and no connection is left open."""
    patient_probes(monkeypatch)
    address = target_of(task).removeprefix("grpc://")
    assert probe.probe_address(address) == ProbeResult(task)
    before = len(os.listdir("/proc/self/fd"))
    with futures.ThreadPoolExecutor(16) as pool:
        assert set(pool.map(probe.probe_address, [address] * 200)) == {ProbeResult(task)}
    wait_until(lambda: len(os.listdir("/proc/self/fd")) <= before)  # the server's ends too


@pytest.mark.parametrize("protocol", ["HTTP/1.0", "HTTP/1.1"])
def test_a_web_server_is_something_else(protocol: str) -> None:
    """A real HTTP server answers, but not as a task does; that is known at once."""
    with web_server(protocol) as address:
        began = time.monotonic()
        assert probe.probe_address(address, 200.0) == ProbeResult(problem=probe.OTHER)
        assert time.monotonic() - began < 100


def test_a_grpc_server_of_another_program_is_something_else() -> None:
    """A real gRPC server without TensorFlow's services is no task."""
    import grpc  # noqa: PLC0415  it comes with TensorFlow

    server = grpc.server(futures.ThreadPoolExecutor(1))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        assert probe.probe_address(f"127.0.0.1:{port}", 3.0) == ProbeResult(problem=probe.OTHER)
    finally:
        server.stop(None).wait(10)


def test_a_task_that_computes_is_busy() -> None:
    """A gRPC server sends its settings although all threads that could answer are at work; that is no other program."""

    class Settings(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            self.request.sendall(b"\0\0\6\4" + bytes(5) + b"\0\5\0\0@\0" + b"\0\0\4\x08" + bytes(5) + b"\0?\0\0")
            while self.request.recv(4096):
                pass

    with serving(socketserver.ThreadingTCPServer(("127.0.0.1", 0), Settings)) as address:
        assert probe.probe_address(address, 2.0) == ProbeResult(problem=probe.BUSY)


def test_a_server_that_hangs_up_is_something_else() -> None:
    """Who accepts a call and ends it without a word is no task."""
    with serving(socketserver.TCPServer(("127.0.0.1", 0), socketserver.BaseRequestHandler)) as address:
        assert probe.probe_address(address, 60.0) == ProbeResult(problem=probe.OTHER)


def test_a_server_that_never_answers_costs_its_time() -> None:
    """Who accepts a call and says nothing is given up after the time given, not later."""
    with listener() as mute:
        began = time.monotonic()
        assert probe.probe_address(address_of(mute), 0.5) == ProbeResult(problem=probe.UNRESPONSIVE)
        assert 0.4 < time.monotonic() - began < 60


def test_a_server_that_never_stops_talking_is_something_else() -> None:
    """Who talks on and on, but never says who it is, is given up too."""

    class Endless(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            with contextlib.suppress(OSError):
                while True:
                    self.request.sendall(b"x" * 100)
                    time.sleep(0.01)

    with serving(socketserver.ThreadingTCPServer(("127.0.0.1", 0), Endless)) as address:
        began = time.monotonic()
        assert probe.probe_address(address, 3.0) == ProbeResult(problem=probe.OTHER)
        assert time.monotonic() - began < 60


def test_nobody_is_told_by_why() -> None:
    """A free port, an unknown host and an address that swallows everything are distinguished."""
    with held_ports(1) as [port]:
        assert probe.probe_address(f"127.0.0.1:{port}") == ProbeResult(problem=probe.REFUSED)
    assert probe.probe_address("no-such-host.invalid:2222") == ProbeResult(problem=probe.UNKNOWN_HOST)
    with blackhole() as address:
        assert probe.probe_address(address, 0.5) == ProbeResult(problem=probe.SILENT)


def test_a_name_that_arrives_in_pieces_is_read() -> None:
    """An answer that is cut anywhere by the network is put together."""

    class Slow(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            self.request.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            for byte in b"/job:ps/replica:0/task:31/device":
                self.request.sendall(bytes([byte]))
                time.sleep(0.002)

    with serving(socketserver.ThreadingTCPServer(("127.0.0.1", 0), Slow)) as address:
        assert probe.probe_address(address, 60.0) == ProbeResult(Task("ps", 31))


def test_many_are_asked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three hundred silent tasks and the real ones among them take a few probes' time together."""
    real = cluster_of(2, 1)
    with listener() as mute:
        patient_probes(monkeypatch, address_of(mute))
        cluster = Cluster(real.ps, (*real.workers, *[address_of(mute)] * 300))
        began = time.monotonic()
        found = probe.probe_all(cluster, cluster.tasks())
        assert time.monotonic() - began < 100
    assert [task for task, answer in found.items() if answer.task == task] == [*cluster_of(2, 1).tasks()]
    assert sum(answer.task is None for answer in found.values()) == 300


def test_a_name_service_that_hangs_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where looking up a name blocks, the others' answers are there in time, and that task has not answered."""
    really, ask, ended, answered = socket.getaddrinfo, probe.probe_address, threading.Event(), threading.Event()

    def look_up(host: str, *args: object, **kwargs: object) -> object:
        if host == "slow":
            ended.wait(200)
        return really(host, *args, **kwargs)  # type: ignore[arg-type]

    def probe_address(address: str) -> ProbeResult:
        answer = ask(address, 60.0)
        answered.set()
        return answer

    def now() -> float:  # 99 of the 100 seconds are over once the other has answered
        return time.monotonic() + 99.0 * answered.is_set()

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    monkeypatch.setattr(probe, "probe_address", probe_address)
    with contextlib.closing(Speaker(Task("ps", 0))) as there:
        cluster = Cluster((there.address,), ("slow:2222",))
        began = time.monotonic()
        monkeypatch.setattr(probe, "time", SimpleNamespace(monotonic=now))
        found = probe.probe_all(cluster, cluster.tasks(), secs=100.0)
        assert time.monotonic() - began < 60
        ended.set()
    assert found == {
        Task("ps", 0): ProbeResult(Task("ps", 0)),
        Task("worker", 0): ProbeResult(problem=probe.SILENT),
    }


def test_a_host_of_which_one_address_is_dead_answers_at_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """As one with IPv6 that leads nowhere: each address has its share of the time."""
    really = socket.getaddrinfo
    with blackhole() as dead, contextlib.closing(Speaker(Task("worker", 0))) as there:
        places = [really(*address.rsplit(":", 1), type=socket.SOCK_STREAM)[0] for address in (dead, there.address)]
        monkeypatch.setattr(socket, "getaddrinfo", lambda *_args, **_kwargs: places)
        assert probe.probe_address("two:2222", 10.0) == ProbeResult(Task("worker", 0))


def test_a_name_that_cannot_be_looked_up_is_asked_for_where_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """An outage of the name service loses no task; one that ends meanwhile is not there, and one that moves is."""
    really = socket.getaddrinfo
    patient_probes(monkeypatch)
    with contextlib.closing(Speaker(Task("ps", 0))) as there:
        name = f"somewhere:{split(there.address)[1]}"
        monkeypatch.setattr(socket, "getaddrinfo", _no_names)
        assert probe.probe_address(name) == ProbeResult(problem=probe.UNKNOWN_HOST)
        monkeypatch.setattr(socket, "getaddrinfo", lambda _host, port, **kwargs: really("127.0.0.1", port, **kwargs))
        assert answers(name)
        monkeypatch.setattr(socket, "getaddrinfo", _no_names)
        assert answers(name)
        assert probe.probe_address(name) == ProbeResult(Task("ps", 0))
        monkeypatch.setattr(socket, "getaddrinfo", _no_such_name)
        assert not answers(name), "another task may be there by now"
        monkeypatch.setattr(socket, "getaddrinfo", _no_names)
    assert not answers(name)
    with contextlib.closing(Speaker(Task("ps", 0))) as elsewhere:
        port = split(elsewhere.address)[1]
        monkeypatch.setattr(socket, "getaddrinfo", lambda *_args, **kwargs: really("127.0.0.1", port, **kwargs))
        assert answers(name)


def _no_names(*_args: object, **_kwargs: object) -> object:
    raise socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")


def _no_such_name(*_args: object, **_kwargs: object) -> object:
    raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")


def test_a_process_without_free_files_cannot_say_that_nobody_answers() -> None:
    """That it can open no connection is a fault of its own, and no evidence against a task."""
    with contextlib.closing(Speaker(Task("ps", 0))) as there:
        assert answers(there.address)
    assert not answers(there.address)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest = os.dup(0)
    os.close(lowest)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, hard))
    try:
        found = answers(there.address)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert found
