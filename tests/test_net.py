"""The network as it is looked at before TensorFlow does: real listeners, real ports, no servers."""

import contextlib
import logging
import socket
import threading
import time
from collections.abc import Iterator

import pytest

from tfps.cluster import Cluster, Task
from tfps.errors import ClusterFormError, ConfigError, StoppedError
from tfps.launchers.local import held_ports
from tfps.runtime import net

PS, CHIEF, WORKER = Task("ps", 0), Task("worker", 0), Task("worker", 1)


def listener() -> socket.socket:
    """Return a socket that listens on a free port of 127.0.0.1."""
    return socket.create_server(("127.0.0.1", 0))


def sharing(host: str, port: int) -> socket.socket:
    """Return a socket that is bound to a port which another holds, as TensorFlow's servers do."""
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    sock.bind((host, port))
    return sock


def address_of(sock: socket.socket) -> str:
    """Return a socket's ``host:port``."""
    host, port = sock.getsockname()[:2]
    return f"{host}:{port}"


@contextlib.contextmanager
def three(*absent: Task) -> Iterator[Cluster]:
    """Yield a cluster of a ps and two workers that all listen but ``absent``, whose ports nobody else has meanwhile."""
    with contextlib.ExitStack() as stack:
        free = iter(stack.enter_context(held_ports(3)))
        hosts = {
            task: f"127.0.0.1:{next(free)}" if task in absent else address_of(stack.enter_context(listener()))
            for task in (PS, CHIEF, WORKER)
        }
        yield Cluster((hosts[PS],), (hosts[CHIEF], hosts[WORKER]))


@contextlib.contextmanager
def blackhole() -> Iterator[str]:
    """Yield an address that swallows what is sent to it: a listener that takes nobody in and whose queue is full."""
    with contextlib.ExitStack() as stack:
        full = stack.enter_context(socket.socket())
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        for _ in range(64):
            caller = stack.enter_context(socket.socket())
            caller.settimeout(0.2)
            try:
                caller.connect(full.getsockname())
            except TimeoutError:
                yield address_of(full)
                return
        pytest.fail("64 calls to a listener that takes nobody in, and none was swallowed")


@pytest.mark.parametrize(
    ("address", "parts"),
    [
        ("h1:2222", ("h1", 2222)),
        ("10.0.0.1:1", ("10.0.0.1", 1)),
        ("[::1]:65535", ("::1", 65535)),
        ("a.b.:9", ("a.b.", 9)),
    ],
)
def test_an_address_is_host_and_port(address: str, parts: tuple[str, int]) -> None:
    """The last colon separates; an IPv6 address loses its brackets, as sockets want it."""
    assert net.split(address) == parts


def test_who_answers() -> None:
    """A listener answers, though nobody takes the call; a port that is only bound, or free, does not."""
    with listener() as up, held_ports(1) as ports:
        assert net.answers(address_of(up))
        assert not net.answers(f"127.0.0.1:{ports[0]}")
    assert not net.answers(address_of_closed())
    assert not net.answers("no-such-host.invalid:2222")


def address_of_closed() -> str:
    """Return an address on which nobody listens any more."""
    with listener() as closed:
        return address_of(closed)


def test_an_ipv6_task_answers() -> None:
    """An address in brackets is asked as IPv6."""
    try:
        up = socket.create_server(("::1", 0), family=socket.AF_INET6)
    except OSError:
        pytest.skip("this machine has no IPv6")
    with up:
        assert net.answers(f"[::1]:{up.getsockname()[1]}")


def test_a_port_that_connects_to_itself_is_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call to a free port can get that very port as its own and reach itself: nobody answers there."""
    made: list[socket.socket] = []

    def itself(address: tuple[str, int], timeout: float) -> socket.socket:
        caller = sharing(*address)
        caller.settimeout(timeout)
        caller.connect(address)
        made.append(caller)
        return caller

    monkeypatch.setattr(socket, "create_connection", itself)
    with held_ports(1) as [port]:
        assert not net.answers(f"127.0.0.1:{port}")
    assert len(made) == 1


def test_the_missing_are_those_that_do_not_answer() -> None:
    """Asked for some tasks, the absent ones are returned in the order asked, and no others are asked."""
    with three(PS, WORKER) as cluster:
        assert net.missing(cluster, [WORKER, CHIEF, PS]) == [WORKER, PS]
        assert net.missing(cluster, [CHIEF]) == []
        assert net.missing(cluster, []) == []


def test_blackholed_tasks_cost_a_second_together() -> None:
    """Eight tasks whose address swallows everything are asked at the same time, for a second each."""
    with blackhole() as address:
        cluster = Cluster((address,) * 4, (address,) * 4)
        began = time.monotonic()
        assert net.missing(cluster, cluster.tasks()) == list(cluster.tasks())
        assert time.monotonic() - began < 4


def test_all_there_is_no_wait() -> None:
    """When every other task answers, waiting ends; this task itself is not asked."""
    with three(CHIEF) as cluster:
        assert net.wait_for_peers(cluster, CHIEF, 0.0, lambda: None)


def test_a_late_task_is_waited_for(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    """A task that comes late is waited for, and after a while it is said who is missing, once."""
    monkeypatch.setattr(net, "_TELL_AFTER_SECS", 0.1)
    with held_ports(1) as [port], listener() as chief:
        cluster = Cluster((f"127.0.0.1:{port}",), (address_of(chief),))
        came = threading.Event()

        def come() -> None:
            with sharing("127.0.0.1", port) as late:
                time.sleep(0.5)
                came.set()
                late.listen()
                ended.wait(20)

        ended = threading.Event()
        thread = threading.Thread(target=come)
        thread.start()
        try:
            with caplog.at_level(logging.INFO, net.__name__):
                net.wait_for_peers(cluster, CHIEF, 20, lambda: None)
            assert came.is_set()
        finally:
            ended.set()
            thread.join()
    assert caplog.messages == [f"waiting for ps/0 (127.0.0.1:{port})"]


def test_workers_that_are_not_needed_are_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """While only workers are missing it is asked whether it goes on without them; while a PS is, it is not."""
    monkeypatch.setattr(net, "_TELL_AFTER_SECS", 0.0)
    closed = address_of_closed()
    with listener() as server:
        cluster = Cluster((address_of(server),), (closed, closed))
        assert net.wait_for_peers(cluster, CHIEF, 20, lambda: None, enough=lambda: True)
        with pytest.raises(ClusterFormError, match="no answer from worker/1"):
            net.wait_for_peers(cluster, CHIEF, 0.2, lambda: None, enough=lambda: False)
    with pytest.raises(ClusterFormError, match="no answer from ps/0"):
        net.wait_for_peers(Cluster((closed,), (closed, closed)), CHIEF, 0.2, lambda: None, enough=lambda: True)


def test_those_who_never_come_are_named() -> None:
    """After the time, an error names each missing task with its address, and the flag that says how long."""
    with three(PS, WORKER) as cluster, pytest.raises(ClusterFormError) as caught:
        net.wait_for_peers(cluster, CHIEF, 0.2, lambda: None)
    assert str(caught.value) == (
        f"the cluster did not form: no answer from ps/0 ({cluster.ps[0]}), worker/1 ({cluster.workers[1]}) within "
        "--start_timeout_secs=0.2. Start them, or correct their addresses."
    )
    assert caught.value.exit_code == 171


def test_an_unknown_host_is_said_to_be_unknown() -> None:
    """A host that has no address is told apart from one that does not answer."""
    cluster = Cluster(("no-such-host.invalid:2222",), ("127.0.0.1:1",))
    with pytest.raises(ClusterFormError, match=r"ps/0 \(no-such-host\.invalid:2222, unknown host\)"):
        net.wait_for_peers(cluster, CHIEF, 0.0, lambda: None)


def test_of_many_missing_the_first_are_named() -> None:
    """Of a hundred missing tasks ten are named and the others counted."""
    closed = address_of_closed()
    cluster = Cluster((closed,), (closed,) * 100)
    with pytest.raises(ClusterFormError, match=r"worker/1 .* worker/9 \([0-9.:]*\) and 90 more within"):
        net.wait_for_peers(cluster, CHIEF, 0.0, lambda: None)


def test_a_task_that_is_told_to_stop_does_not_wait() -> None:
    """Waiting ends with the reason to stop."""
    stopped = StoppedError("stopped by SIGTERM")
    with three(PS) as cluster, pytest.raises(StoppedError) as caught:
        net.wait_for_peers(cluster, CHIEF, 1000, lambda: stopped)
    assert caught.value is stopped


def test_peers_know_since_when_a_task_is_silent() -> None:
    """A task is lost after it has not answered for so long, counted anew when it has answered in between."""
    with three(WORKER) as cluster:
        peers = net.Peers(cluster)
        assert peers.answer(CHIEF)
        assert not peers.answer(WORKER)
        assert peers.lost([PS, CHIEF, WORKER], 0.0) == [WORKER]
        assert peers.lost([PS, CHIEF, WORKER], 1000.0) == []
        time.sleep(0.05)
        assert peers.lost([WORKER], 0.05) == [WORKER]
        host, port = net.split(cluster.address(WORKER))
        with sharing(host, port) as back:
            back.listen()
            assert peers.lost([WORKER], 0.0) == []
        assert peers.lost([WORKER], 0.05) == []


def test_a_free_port_is_fine_and_so_is_one_that_the_launcher_holds() -> None:
    """A port that nobody listens on can be used, also while ``tfps launch`` holds it for this task; it stays free."""
    with held_ports(1) as [port]:
        net.check_port(f"127.0.0.1:{port}", "--ps_hosts")
        net.check_port(f"some-name:{port}", "--ps_hosts")
    net.check_port(f"127.0.0.1:{port}", "--ps_hosts")
    with socket.create_server(("", port)):
        pass


@pytest.mark.parametrize("reuse", [False, True])
def test_a_port_that_is_listened_on_is_taken(reuse: bool) -> None:
    """A listener's port is taken, also where it would let others share it; the flag and the fix are told."""
    with socket.socket() as other:
        if reuse:
            other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        other.bind(("", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(ConfigError) as caught:
            net.check_port(f"h1:{port}", "--worker_hosts")
    assert str(caught.value) == (
        f"--worker_hosts: port {port} of h1:{port} is taken by another process: end that process or give another port."
    )


def test_a_port_that_another_holds_for_itself_is_taken() -> None:
    """A port that is bound without leave to share is taken, though nobody listens."""
    with socket.socket() as other:
        other.bind(("", 0))
        port = other.getsockname()[1]
        with pytest.raises(ConfigError, match=f"port {port} of 127.0.0.1:{port} is taken by another process"):
            net.check_port(f"127.0.0.1:{port}", "--ps_hosts")


def test_a_port_that_may_not_be_used_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the system forbids the port, its own words are shown."""

    def forbidden(self: socket.socket, address: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(socket.socket, "bind", forbidden)
    with pytest.raises(ConfigError, match="--ps_hosts: port 80 of h1:80 cannot be used: Permission denied"):
        net.check_port("h1:80", "--ps_hosts")


def test_held_ports_are_given_to_nobody_else() -> None:
    """Held ports are distinct, and none of the hundreds that the system gives to others meanwhile is one of them."""
    with held_ports(64) as mine, held_ports(64) as yours, contextlib.ExitStack() as stack:
        assert len({*mine, *yours}) == 128
        for index in range(300):
            other = stack.enter_context(socket.socket())
            if index % 2:
                other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            other.bind(("", 0))
            assert other.getsockname()[1] not in {*mine, *yours}


def test_held_ports_are_free_in_the_end() -> None:
    """Ports are held only while the context lasts."""
    with held_ports(2) as ports:
        assert [is_free(port) for port in ports] == [False, False]
    assert [is_free(port) for port in ports] == [True, True]


def is_free(port: int) -> bool:
    """Tell whether a port can be bound by one who does not share it."""
    with socket.socket() as other:
        try:
            other.bind(("", port))
        except OSError:
            return False
        return True


@pytest.mark.parametrize("name", ["no_grpc_proxy", "no_proxy"])
def test_the_clusters_hosts_go_round_the_proxy(name: str) -> None:
    """To gRPC every host of the cluster is one to reach directly, as is what was exempt before; none is told twice."""
    env = {"http_proxy": "http://proxy:3128", name: "localhost,,p0"}
    net.bypass_proxies(env, Cluster(("p0:1", "[::1]:1"), ("w0:1", "w0:2")))
    assert env["no_grpc_proxy"] == "localhost,p0,::1,w0"
    assert env["http_proxy"] == "http://proxy:3128"
