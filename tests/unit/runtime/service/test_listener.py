"""Connections with TLS and without: what is encrypted, who is refused, and how soon."""

import contextlib
import socket
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
from support.certificates import Authority
from support.recorder import Recorder
from support.service import Wire, service

from tfps.client import tls
from tfps.client.connect import connect
from tfps.errors import ServiceError
from tfps.runtime.service.service_task import Encryption

_SOON_SECS = 20.0  # less than half of how long a client tries
VALUES = {name: np.frombuffer((name * 400).encode(), np.float32) for name in ("wuff", "blub")}
SECRETS = [*(value.tobytes() for value in VALUES.values()), b"the-token", b"blub", b"push"]


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    """Return an authority of this file's tests."""
    return Authority(tmp_path_factory.mktemp("authority"))


@pytest.fixture(scope="module")
def encryption(authority: Authority) -> Encryption:
    """How servers with a good certificate encrypt."""
    return authority.encryption(*authority.issue("good"))


@contextlib.contextmanager
def recorded(encryption: Encryption) -> Iterator[list[Recorder]]:
    """Run two servers, and let a client and the first server push, pull and save; all that they say is recorded."""
    recorders: list[Recorder] = []

    def via(address: str) -> str:
        recorders.append(Recorder(address))
        return recorders[-1].address

    wire = Wire("the-token", encryption=encryption, via=via)
    with service(2, wire=wire) as running, running.client(token="the-token") as ps:
        ps.init(VALUES)
        assert ps.push(VALUES) == 1
        np.testing.assert_array_equal(ps.push_pull(VALUES)["wuff"], -VALUES["wuff"])
        with running.first.snapshot() as snapshot:
            assert {name for part in snapshot.parts for name in part()} >= set(VALUES)
        yield recorders
    for recorder in recorders:
        recorder.close()


def found(recorders: Sequence[Recorder]) -> list[bytes]:
    """Return the secrets in what was sent."""
    sent = b"".join(recorder.recorded for recorder in recorders)
    return [secret for secret in SECRETS if secret in sent]


def test_nothing_is_plain_with_tls(encryption: Encryption) -> None:
    """Neither parameters nor names, requests and the token, between clients and servers, and among servers."""
    with recorded(encryption) as recorders:
        assert [len(recorder.recorded) > 4 * 1600 for recorder in recorders] == [True, True]
        assert found(recorders) == []


def test_the_recording_sees_what_is_plain() -> None:
    """Without TLS, all of it."""
    with recorded(Encryption()) as recorders:
        assert found(recorders) == SECRETS


def refusal(hosts: str, **options: object) -> str:
    """Return why a client is refused, soon."""
    began = time.monotonic()
    with pytest.raises(ServiceError) as refused:
        connect(hosts, start_timeout_secs=60, **options)  # type: ignore[arg-type]
    assert time.monotonic() - began < _SOON_SECS
    return str(refused.value)


def test_a_client_without_tls_is_told(encryption: Encryption) -> None:
    """And one with it goes on."""
    with service(wire=Wire(encryption=encryption)) as running, running.client() as ps:
        assert "this service has TLS: set TFPS_TLS_CA" in refusal(running.hosts)
        assert ps.step == 0


def test_a_client_with_tls_is_told_that_there_is_none(encryption: Encryption) -> None:
    """And one without goes on."""
    with service() as running, running.client() as ps:
        assert "TLS is not possible" in refusal(running.hosts, tls=encryption.to_others)
        assert "give the servers --tls_cert" in refusal(running.hosts, tls=encryption.to_others)
        assert ps.step == 0


@pytest.mark.parametrize(
    ("hosts", "days", "problem"),
    [
        ("DNS:elsewhere.test", 2, "IP address mismatch"),
        ("IP:127.0.0.2", 2, "IP address mismatch"),
        ("IP:127.0.0.1", 0, "certificate has expired"),
    ],
)
def test_a_wrong_certificate_is_not_accepted(authority: Authority, hosts: str, days: int, problem: str) -> None:
    """The client says why."""
    wrong = authority.encryption(*authority.issue(f"wrong-{hosts}-{days}", hosts, days))
    with service(wire=Wire(encryption=wrong)) as running:
        message = refusal(running.hosts, tls=wrong.to_others)
        assert f"the certificate of the server is not accepted: {problem}" in message


def test_the_certificate_of_a_stranger_is_not_accepted(encryption: Encryption, tmp_path: Path) -> None:
    """It is of another authority than the client's."""
    other = tls.client_context("tls", str(Authority(tmp_path, "other").cert))
    with service(wire=Wire(encryption=encryption)) as running:
        assert "unable to get local issuer certificate" in refusal(running.hosts, tls=other)


@pytest.mark.parametrize("is_encrypted", [True, False])
def test_servers_that_differ_in_tls_do_not_form(encryption: Encryption, is_encrypted: bool) -> None:
    """The first server says so, soon."""
    other = Encryption(encryption.own, None) if is_encrypted else Encryption(None, encryption.to_others)
    began, expected = time.monotonic(), "this service has TLS" if is_encrypted else "TLS is not possible"
    with pytest.raises(ServiceError, match=expected), service(2, wire=Wire(encryption=other)):
        pass
    assert time.monotonic() - began < _SOON_SECS


def test_silent_connections_hold_up_nobody(encryption: Encryption) -> None:
    """Neither those that say nothing, nor those that stop in the middle of the handshake."""
    with service(wire=Wire(encryption=encryption)) as running, contextlib.ExitStack() as stack:
        host, _, port = running.hosts.rpartition(":")
        for said in (b"", b"\x16", b"\x16\x03\x01", b"\x16\x03\x01\x02\x00\x01") * 5:
            silent = stack.enter_context(socket.create_connection((host, int(port))))
            silent.sendall(said)
        began = time.monotonic()
        with running.client() as ps:
            ps.init(VALUES)
            assert ps.push(VALUES) == 1
        assert time.monotonic() - began < _SOON_SECS / 4


def test_a_client_waits_for_a_step_with_tls(encryption: Encryption) -> None:
    """The server does not take its silence for an end, and an end for silence."""
    with service(wire=Wire(encryption=encryption)) as running, running.client() as ps:
        ps.init(VALUES)
        assert not ps.wait(1, timeout_secs=1.5)
        future = ps.push_async(VALUES)
        assert ps.wait(1, timeout_secs=20)
        assert future.result(20) == 1
