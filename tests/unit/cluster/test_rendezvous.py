"""The network as it is looked at before TensorFlow does: real ports, and who is met there."""

import contextlib
import logging
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.cluster import cluster_of
from support.listeners import Speaker, address_of, blackhole, listener, patient_probes, web_server
from support.processes import by_hand

from tfps.cluster import addresses, ports, probe, rendezvous
from tfps.cluster.ports import held_ports
from tfps.cluster.spec import Cluster, Task
from tfps.errors import ClusterFormError, ConfigError, StoppedError

PS, CHIEF, WORKER = Task("ps", 0), Task("worker", 0), Task("worker", 1)


def sharing(host: str, port: int) -> socket.socket:
    """Return a socket that is bound to a port which another holds, as TensorFlow's servers do."""
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    sock.bind((host, port))
    return sock


@contextlib.contextmanager
def three(*absent: Task) -> Iterator[Cluster]:
    """Yield a cluster of a ps and two workers, all there but ``absent``, whose ports nobody else has meanwhile."""
    with contextlib.ExitStack() as stack:
        free = iter(stack.enter_context(held_ports(3)))
        there = {
            task: stack.enter_context(contextlib.closing(Speaker(task)))
            for task in (PS, CHIEF, WORKER)
            if task not in absent
        }
        where = {
            **{task: each.address for task, each in there.items()},
            **{t: f"127.0.0.1:{next(free)}" for t in absent},
        }
        yield Cluster((where[PS],), (where[CHIEF], where[WORKER]))


def own_clock(monkeypatch: pytest.MonkeyPatch, *events: tuple[float, Callable[[], object]]) -> Callable[[], float]:
    """Give meetings a clock that only their pauses advance, and do something at set times; probes keep the real one.

    Returns:
        A function that returns the time on that clock, which begins at 0.
    """
    now, to_come = [0.0], list(events)

    def sleep(secs: float) -> None:
        now[0] += secs
        while to_come and to_come[0][0] <= now[0]:
            to_come.pop(0)[1]()

    monkeypatch.setattr(rendezvous, "time", SimpleNamespace(monotonic=lambda: now[0], sleep=sleep))
    return lambda: now[0]


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
    assert addresses.split(address) == parts


def test_who_answers() -> None:
    """A listener answers, though nobody takes the call; a port that is only bound, or free, does not."""
    with listener() as up, held_ports(1) as [held]:
        assert ports.answers(address_of(up))
        assert not ports.answers(f"127.0.0.1:{held}")
    assert not ports.answers(address_of_closed())
    assert not ports.answers("no-such-host.invalid:2222")


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
        assert ports.answers(f"[::1]:{up.getsockname()[1]}")


def test_a_port_that_connects_to_itself_is_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call to a free port can get that very port as its own and reach itself: nobody answers there."""
    made: list[socket.socket] = []

    def itself(places: Any, timeout: float) -> socket.socket:
        address = places[0][-1]
        caller = sharing(*address)
        caller.settimeout(timeout)
        caller.connect(address)
        made.append(caller)
        return caller

    monkeypatch.setattr(probe, "_first_of", itself)
    with held_ports(1) as [port]:
        assert not ports.answers(f"127.0.0.1:{port}")
    assert len(made) == 1


def test_the_missing_are_those_that_do_not_answer() -> None:
    """Asked for some tasks, the absent ones are returned in the order asked, and no others are asked."""
    with three(PS, WORKER) as cluster:
        assert rendezvous.missing(cluster, [WORKER, CHIEF, PS]) == [WORKER, PS]
        assert rendezvous.missing(cluster, [CHIEF]) == []
        assert rendezvous.missing(cluster, []) == []


def test_blackholed_tasks_cost_a_second_together() -> None:
    """Tasks whose address swallows everything are asked at the same time, for a second each."""
    with blackhole() as address:
        cluster = Cluster((address,) * 32, (address,) * 32)
        began = time.monotonic()
        assert rendezvous.missing(cluster, cluster.tasks()) == list(cluster.tasks())
        assert time.monotonic() - began < 40


def test_all_there_is_no_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """When every other task answers, waiting ends; this task itself is not asked."""
    patient_probes(monkeypatch)
    with three(CHIEF) as cluster:
        assert rendezvous.wait_for_peers(cluster, CHIEF, 0.0, lambda: None)


def test_a_late_task_is_waited_for(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    """A task that comes late is waited for, and after a while it is said who is missing, once."""
    monkeypatch.setattr(rendezvous, "_REPORT_AFTER_SECS", 0.1)
    with held_ports(1) as [port]:
        cluster = Cluster((f"127.0.0.1:{port}",), ("127.0.0.1:1",))
        came: list[Speaker] = []
        own_clock(monkeypatch, (0.5, lambda: came.append(Speaker(PS, port))))
        with caplog.at_level(logging.INFO, rendezvous.__name__):
            assert rendezvous.wait_for_peers(cluster, CHIEF, 20, lambda: None)
        came[0].close()
    assert caplog.messages == [f"waiting for ps/0 (127.0.0.1:{port})"]


def test_workers_that_are_not_needed_are_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """While only workers are missing it is asked whether it goes on without them; while a PS is, it is not."""
    monkeypatch.setattr(rendezvous, "_REPORT_AFTER_SECS", 0.0)
    patient_probes(monkeypatch)
    closed = address_of_closed()
    with contextlib.closing(Speaker(PS)) as server:
        cluster = Cluster((server.address,), (closed, closed))
        assert rendezvous.wait_for_peers(cluster, CHIEF, 20, lambda: None, enough=lambda: True)
        with pytest.raises(ClusterFormError, match="no answer from worker/1"):
            rendezvous.wait_for_peers(cluster, CHIEF, 0.2, lambda: None, enough=lambda: False)
    with pytest.raises(ClusterFormError, match="no answer from ps/0"):
        rendezvous.wait_for_peers(Cluster((closed,), (closed, closed)), CHIEF, 0.2, lambda: None, enough=lambda: True)


def test_workers_that_are_not_needed_are_asked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A PS that is too slow to answer the first question may say later that the job goes on without them."""
    monkeypatch.setattr(rendezvous, "_REPORT_AFTER_SECS", 0.0)
    monkeypatch.setattr(rendezvous, "_ASK_AGAIN_SECS", 0.1)
    answers = iter([False, False, True])
    with contextlib.closing(Speaker(PS)) as server:
        cluster = Cluster((server.address,), (address_of_closed(), address_of_closed()))
        assert rendezvous.wait_for_peers(cluster, CHIEF, 60, lambda: None, enough=lambda: next(answers))


def test_those_who_never_come_are_named() -> None:
    """After the time, an error names each missing task with its address, and the flag that says how long."""
    with three(PS, WORKER) as cluster, pytest.raises(ClusterFormError) as caught:
        rendezvous.wait_for_peers(cluster, CHIEF, 0.2, lambda: None)
    assert str(caught.value) == (
        f"the cluster did not form: no answer from ps/0 ({cluster.ps[0]}), worker/1 ({cluster.workers[1]}) within "
        "--start_timeout_secs=0.2. Start what is missing (after the loss of a PS, also workers that had ended), or "
        "correct the addresses."
    )
    assert caught.value.exit_code == 171


def test_an_unknown_host_is_said_to_be_unknown() -> None:
    """A host that has no address is told apart from one that does not answer."""
    cluster = Cluster(("no-such-host.invalid:2222",), ("127.0.0.1:1",))
    with pytest.raises(ClusterFormError, match=r"ps/0 \(no-such-host\.invalid:2222, unknown host\)"):
        rendezvous.wait_for_peers(cluster, CHIEF, 0.0, lambda: None)


def test_of_many_missing_the_first_are_named() -> None:
    """Of a hundred missing tasks ten are named and the others counted."""
    closed = address_of_closed()
    cluster = Cluster((closed,), (closed,) * 100)
    with pytest.raises(ClusterFormError, match=r"worker/1 .* worker/9 \([0-9.:]*\) and 90 more within"):
        rendezvous.wait_for_peers(cluster, CHIEF, 0.0, lambda: None)


def test_real_servers_meet() -> None:
    """Five real servers, asked by each of them who they are, are all at their addresses."""
    cluster = cluster_of(2, 3)
    for task in cluster.tasks():
        assert rendezvous.wait_for_peers(cluster, task, 100, lambda: None)


def test_swapped_servers_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two PS in another order each is named with its address and what it says; it is exit 2, and not at once."""
    monkeypatch.setattr(rendezvous, "LEAVING_SECS", 0.5)
    patient_probes(monkeypatch)
    real = cluster_of(2, 1)
    swapped = Cluster(real.ps[::-1], real.workers)
    began = time.monotonic()
    with pytest.raises(ConfigError) as caught:
        rendezvous.wait_for_peers(swapped, CHIEF, 20, lambda: None)
    assert time.monotonic() - began > 0.5
    assert caught.value.exit_code == 2
    assert len(caught.value.problems) == 2
    assert f"--ps_hosts: ps/0 ({real.ps[1]}) says that it is ps/1: " in caught.value.problems[0]
    assert f"ps/1 ({real.ps[0]}) says that it is ps/0: " in caught.value.problems[1]


def test_another_jobs_task_is_refused_or_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker at a PS' address is named if it stays, and is no fault if it leaves and the PS comes."""
    monkeypatch.setattr(rendezvous, "LEAVING_SECS", 3.0)
    with held_ports(1) as [port]:
        cluster = Cluster((f"127.0.0.1:{port}",), ("127.0.0.1:1",))
        old, came = Speaker(Task("worker", 7), port), []

        def change() -> None:
            old.close()
            came.append(Speaker(PS, port))

        now = own_clock(monkeypatch, (1.0, change))
        assert rendezvous.wait_for_peers(cluster, CHIEF, 20, lambda: None)
        assert now() >= 1.0
        came[0].close()
    monkeypatch.setattr(rendezvous, "LEAVING_SECS", 0.3)
    with (
        contextlib.closing(Speaker(Task("worker", 7))) as stays,
        pytest.raises(ConfigError, match="says that it is work"),
    ):
        rendezvous.wait_for_peers(Cluster((stays.address,), ("127.0.0.1:1",)), CHIEF, 20, lambda: None)


@pytest.mark.parametrize("leaves", [False, True])
def test_a_wrong_task_is_no_missing_one_when_the_time_is_over(monkeypatch: pytest.MonkeyPatch, leaves: bool) -> None:
    """Another task at an address is exit 2 although it came late in the wait, or has ended first, as all of them do."""
    with contextlib.closing(Speaker(PS)) as server, held_ports(1) as [port]:
        cluster = Cluster((server.address,), ("127.0.0.1:1", f"127.0.0.1:{port}"))
        came: list[Speaker] = []

        def come() -> None:
            came.append(Speaker(CHIEF, port))

        def leave() -> None:
            came[0].close()

        own_clock(monkeypatch, (0.5, come), *([(1.5, leave)] if leaves else []))
        with pytest.raises(ConfigError) as caught:
            rendezvous.wait_for_peers(cluster, CHIEF, 2.5, lambda: None)
        leave()
    assert f"worker/1 ({cluster.workers[1]}) says that it is worker/0: it was started with" in str(caught.value)


def test_what_is_no_task_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """A listener that never answers, and one that says something else, are reported as that after the timeout: 171."""
    with listener() as mute, contextlib.closing(Speaker(PS)) as other:
        other.says = b"HTTP/1.0 400 Bad request"
        patient_probes(monkeypatch, address_of(mute))
        cluster = Cluster((address_of(mute), other.address), ("127.0.0.1:1",))
        with pytest.raises(ClusterFormError) as caught:
            rendezvous.wait_for_peers(cluster, CHIEF, 0.5, lambda: None)
    assert f"ps/0 ({cluster.ps[0]}, the process there does not answer)" in str(caught.value)
    assert f"ps/1 ({cluster.ps[1]}, another program listens there)" in str(caught.value)
    assert caught.value.exit_code == 171


def test_a_task_that_is_asked_to_stop_does_not_wait() -> None:
    """Waiting ends with the reason to stop."""
    stopped = StoppedError("stopped by SIGTERM")
    with three(PS) as cluster, pytest.raises(StoppedError) as caught:
        rendezvous.wait_for_peers(cluster, CHIEF, 1000, lambda: stopped)
    assert caught.value is stopped


def test_peers_know_since_when_a_task_is_silent() -> None:
    """A task is lost after it has not answered for so long, counted anew when it has answered in between."""
    with three(WORKER) as cluster:
        peers = rendezvous.Peers(cluster)
        assert peers.answer(CHIEF)
        assert not peers.answer(WORKER)
        assert peers.unreachable([PS, CHIEF, WORKER], 0.0) == [WORKER]
        assert peers.unreachable([PS, CHIEF, WORKER], 1000.0) == []
        time.sleep(0.05)
        assert peers.unreachable([WORKER], 0.05) == [WORKER]
        host, port = addresses.split(cluster.address(WORKER))
        with sharing(host, port) as back:
            back.listen()
            assert peers.unreachable([WORKER], 0.0) == []
        assert peers.unreachable([WORKER], 0.05) == []


def test_who_can_be_reached_and_says_nothing_is_mute(monkeypatch: pytest.MonkeyPatch) -> None:
    """A PS whose process stands still is mute after some time, and not any more when it has spoken again."""
    standing, silent = listener(), Task("ps", 1)
    with contextlib.closing(Speaker(PS)) as speaks, contextlib.closing(standing):
        cluster = Cluster((speaks.address, address_of(standing)), ("127.0.0.1:1",))
        peers = rendezvous.Peers(cluster)
        assert peers.unresponsive([PS, silent], 0.4) == []
        time.sleep(0.5)
        assert peers.unresponsive([PS, silent], 0.4) == [silent]
        standing.close()
        patient_probes(monkeypatch)
        with contextlib.closing(Speaker(silent, addresses.split(cluster.ps[1])[1])):
            time.sleep(0.1)
            assert peers.unresponsive([PS, silent], 0.4) == []


def test_who_has_taken_a_lost_tasks_port_does_not_speak_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A port can be reached as before when another program, or a task of another job, has it: the task is gone."""
    patient_probes(monkeypatch)
    with contextlib.closing(Speaker(PS)) as speaks, contextlib.closing(Speaker(CHIEF)) as other, web_server() as web:
        cluster = Cluster((speaks.address, web), ("127.0.0.1:1", other.address))
        taken = [Task("ps", 1), WORKER]
        peers = rendezvous.Peers(cluster)
        assert peers.unresponsive([PS, *taken], 0.0) == taken
        assert peers.unresponsive([PS, *taken], 1000.0) == []


def test_a_free_port_is_fine_and_so_is_one_that_the_launcher_holds() -> None:
    """A port that nobody listens on can be used, also while ``tfps launch`` holds it for this task; it stays free."""
    with held_ports(1) as [port]:
        ports.check_port(f"127.0.0.1:{port}", "--ps_hosts")
        ports.check_port(f"some-name:{port}", "--ps_hosts")
    ports.check_port(f"127.0.0.1:{port}", "--ps_hosts")
    with socket.create_server(("", port)):
        pass


@pytest.mark.parametrize("reuse", [False, True])
def test_a_port_that_is_listened_on_is_taken(reuse: bool) -> None:
    """A listener's port is taken, also where it would let others share it; the flag and the fix are reported."""
    with socket.socket() as other:
        if reuse:
            other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        other.bind(("", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(ConfigError) as caught:
            ports.check_port(f"h1:{port}", "--worker_hosts")
    assert str(caught.value) == (
        f"--worker_hosts: port {port} of h1:{port} is taken by another process: end that process or give another port."
    )


def test_a_port_that_another_holds_for_itself_is_taken() -> None:
    """A port that is bound without leave to share is taken, though nobody listens."""
    with socket.socket() as other:
        other.bind(("", 0))
        port = other.getsockname()[1]
        with pytest.raises(ConfigError, match=f"port {port} of 127.0.0.1:{port} is taken by another process"):
            ports.check_port(f"127.0.0.1:{port}", "--ps_hosts")


def test_a_port_that_may_not_be_used_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the system forbids the port, its own words are shown."""

    def forbidden(self: socket.socket, address: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(socket.socket, "bind", forbidden)
    with pytest.raises(ConfigError, match="--ps_hosts: port 80 of h1:80 cannot be used: Permission denied"):
        ports.check_port("h1:80", "--ps_hosts")


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
    """Return whether a port can be bound by one who does not share it."""
    with socket.socket() as other:
        try:
            other.bind(("", port))
        except OSError:
            return False
        return True


@pytest.mark.parametrize("name", ["no_grpc_proxy", "no_proxy"])
def test_the_clusters_hosts_go_round_the_proxy(name: str) -> None:
    """To gRPC every host of the cluster is one to reach directly, as is what was exempt before; none is named twice."""
    env = {"http_proxy": "http://proxy:3128", name: "localhost,,p0"}
    rendezvous.bypass_proxies(env, Cluster(("p0:1", "[::1]:1"), ("w0:1", "w0:2")))
    assert env["no_grpc_proxy"] == "localhost,p0,::1,w0"
    assert env["http_proxy"] == "http://proxy:3128"


def test_no_variable_sends_tasks_to_a_proxy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """With every proxy variable at a port where nobody listens, and exemptions for others only, a job trains."""
    closed = f"http://{address_of_closed()}"
    for name in ("grpc_proxy", "https_proxy", "http_proxy", "all_proxy"):
        monkeypatch.setenv(name, closed)
        monkeypatch.setenv(name.upper(), closed)
    monkeypatch.setenv("no_proxy", "example.com")
    monkeypatch.delenv("no_grpc_proxy", raising=False)
    with by_hand(tmp_path, 1, 1, "--max_steps=20") as tasks:
        assert [task.wait(120) for task in tasks.values()] == [0, 0], tasks["worker/0"].output()
