"""Where the nodes of a step are."""

import socket
from pathlib import Path

import pytest

from tfps.cluster.slurm import nodes as slurm_nodes
from tfps.cluster.slurm.step import PORT_BASE

MACHINES = """\
NodeName=n1 Arch=x86_64 Gres=gpu:2 NodeAddr=127.0.0.11 NodeHostName=vm Port=17001 State=IDLE
NodeName=n2 Arch=x86_64 NodeAddr=127.0.0.12 NodeHostName=vm Port=17002 Comment=NodeAddr
NodeName=n3 NodeAddr=fe80::3 NodeHostName=other Version=22.05.8
"""


def test_tasks_of_nodes_on_one_machine_have_ports_of_their_own() -> None:
    """Ports are counted on each machine; a node has the address that Slurm knows, in brackets if it is IPv6."""
    machines = slurm_nodes.read_machines(MACHINES)
    addresses = ["n1:8888", "n1:8889", "n2:8888", "n3:8888", "m5:8888"]
    expected = ("127.0.0.11:9000", "127.0.0.11:9001", "127.0.0.12:9002", "[fe80::3]:9000", "m5:9000")
    assert slurm_nodes.place(addresses, machines, 9000) == expected
    assert slurm_nodes.place(addresses, {}, PORT_BASE) == tuple(addresses)


NAMES = {"a": "10.0.0.1", "b": "10.0.0.2", "same": "10.0.0.1", "loop": "127.0.1.1", "loop6": "::1"}


@pytest.mark.parametrize(
    ("nodes", "mine", "asks"),
    [
        (["a", "b", "a"], "a", False),
        (["a", "loop"], "loop", False),  # Debian's own name of a machine: the others see nothing odd, nor may it
        (["a", "loop"], "a", True),
        (["a", "loop6"], "a", True),
        (["a", "same"], "a", True),
        (["a", "unknown"], "a", True),
        (["unknown"], "unknown", True),
    ],
)
def test_slurm_is_asked_only_if_names_cannot_tell(
    nodes: list[str], mine: str, asks: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A task asks where nodes are if a name is unknown, or another's, or loopback on other machines."""

    def look_up(name: str, *_: object, **__: object) -> list[tuple[object, ...]]:
        if name not in NAMES:
            raise socket.gaierror
        return [(None, None, None, "", (NAMES[name], 0))]

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    scontrol = tmp_path / "scontrol"
    scontrol.write_text("#!/bin/sh\necho NodeName=a NodeAddr=10.1.1.1 NodeHostName=h\n")
    scontrol.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    found = slurm_nodes.lookup_nodes(nodes, {"SLURMD_NODENAME": mine})
    assert found == ({"a": slurm_nodes.Machine("10.1.1.1", "h")} if asks else {})


def test_without_scontrol_names_are_what_there_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A node without Slurm's commands is no reason to fail: its names may be known to the network later."""
    monkeypatch.setenv("PATH", str(tmp_path))
    assert slurm_nodes.lookup_nodes(["no-such-node.invalid"], {}) == {}
