"""A real sshd on this machine's loopback addresses, with keys of its own."""

import contextlib
import os
import shlex
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

from support.processes import REPO

from tfps.cluster import ports
from tfps.cluster.ports import held_ports


@contextlib.contextmanager
def sshd(directory: Path) -> Iterator[dict[str, str]]:
    """Run sshd; yields the environment in which ``ssh 127.0.0.N`` logs in to it."""
    for name in ("host", "user"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", directory / name], check=True, timeout=20)
    Path("/run/sshd").mkdir(exist_ok=True)
    with held_ports(1) as [port]:
        pass
    settings = {
        "ListenAddress": f"127.0.0.1:{port}",
        "HostKey": directory / "host",
        "AuthorizedKeysFile": directory / "user.pub",
        "StrictModes": "no",
        "UsePAM": "no",
        "PermitRootLogin": "yes",
        "PidFile": "none",
        "MaxStartups": 100,
        "SetEnv": f"PYTHONPATH={REPO}",
    }
    (directory / "sshd_config").write_text(
        "".join(f"{name} {value}\n" for name, value in settings.items())
        + "".join(f"ListenAddress 127.0.0.{n}:{port}\n" for n in (2, 3))
    )
    daemon = subprocess.Popen(
        [shutil.which("sshd") or "/usr/sbin/sshd", "-D", "-e", "-f", directory / "sshd_config"],
        stdin=subprocess.DEVNULL,
        stderr=open(directory / "sshd.log", "wb"),  # noqa: SIM115
    )
    try:
        deadline = time.monotonic() + 100
        while not ports.answers(f"127.0.0.3:{port}"):
            assert daemon.poll() is None, (directory / "sshd.log").read_text()
            assert time.monotonic() < deadline, "sshd does not listen"
            time.sleep(0.05)
        yield _environment(directory, port)
    finally:
        daemon.kill()
        daemon.wait()


def _environment(directory: Path, port: int) -> dict[str, str]:
    """Return an environment whose ssh reads a configuration of its own: the user's is none of the tests' business."""
    (directory / "ssh_config").write_text(
        f"Host 127.0.0.*\n  Port {port}\n  User root\n  IdentityFile {directory / 'user'}\n  IdentitiesOnly yes\n"
        f"  StrictHostKeyChecking no\n  UserKnownHostsFile {directory / 'known'}\n  LogLevel ERROR\n"
    )
    (directory / "bin").mkdir()
    real = shutil.which("ssh")
    assert real, "openssh-client is not installed"
    (directory / "bin" / "ssh").write_text(
        f'#!/bin/sh\nexec {real} -F {shlex.quote(str(directory / "ssh_config"))} "$@"\n'
    )
    (directory / "bin" / "ssh").chmod(0o755)
    return {"PATH": f"{directory / 'bin'}{os.pathsep}{os.environ['PATH']}"}
