"""Contexts of TLS from files: what is wrong with a file is said before anything starts."""

import os
from pathlib import Path

import pytest

pytest.importorskip("tensorflow")  # which the certificates' module needs

from support.certificates import Authority

from tfps.client import tls
from tfps.client.connect import connect
from tfps.errors import ConfigError


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a directory with files that are good, and that are not."""
    directory = tmp_path_factory.mktemp("files")
    authority = Authority(directory)
    for name in ("good", "other"):
        authority.issue(name)
    (directory / "empty").touch()
    (directory / "text").write_text("-----BEGIN CERTIFICATE-----\nno\n-----END CERTIFICATE-----\n")
    (directory / "directory").mkdir()
    os.mkfifo(directory / "pipe")
    os.system(f"openssl ec -in {directory}/good.key -aes256 -passout pass:x -out {directory}/locked.key 2>/dev/null")
    assert b"ENCRYPTED" in (directory / "locked.key").read_bytes()
    return directory


def test_good_files(files: Path) -> None:
    """They are taken."""
    assert tls.server_context(str(files / "good.pem"), str(files / "good.key")).get_ca_certs() == []
    assert len(tls.client_context("--tls_ca", str(files / "ca.pem")).get_ca_certs()) == 1


@pytest.mark.parametrize(
    ("cert", "key", "problem"),
    [
        ("none", "good.key", r"--tls_cert=\S+none cannot be read: No such file or directory\."),
        ("good.pem", "none", r"--tls_key=\S+none cannot be read: No such file or directory\."),
        ("directory", "good.key", r"--tls_cert=\S+directory is no file\."),
        ("good.pem", "pipe", r"--tls_key=\S+pipe is no file\."),
        ("empty", "good.key", r"--tls_cert=\S+empty has no certificate: give a file in PEM format\."),
        ("text", "good.key", r"--tls_cert=\S+text has no certificate"),
        ("good.pem", "empty", r"--tls_key=\S+empty has no key that can be read"),
        ("good.pem", "good.pem", r"--tls_key=\S+good.pem has no key that can be read"),
        ("good.pem", "locked.key", r"--tls_key=\S+locked.key has no key that can be read.* without a password"),
        ("good.pem", "other.key", r"--tls_key=\S+other.key is not the key of --tls_cert=\S+good.pem\."),
    ],
)
def test_wrong_files_of_a_server(files: Path, cert: str, key: str, problem: str) -> None:
    """The flag, the file and what is wrong; nobody is asked for a password."""
    with pytest.raises(ConfigError, match=problem):
        tls.server_context(str(files / cert), str(files / key))


@pytest.mark.parametrize("name", ["none", "directory", "pipe", "empty", "text", "good.key"])
def test_wrong_files_of_a_client(files: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """The variable is named; nothing is connected."""
    monkeypatch.setenv("TFPS_TLS_CA", str(files / name))
    with pytest.raises(ConfigError, match=rf"TFPS_TLS_CA=\S+{name} "):
        connect("127.0.0.1:1", start_timeout_secs=60)
