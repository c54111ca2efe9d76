"""Find the machines of a Slurm step's nodes, whose names may not resolve, or which may share a machine.

Small sites and test benches have such nodes. Must not import TensorFlow.
"""

import ipaddress
import re
import shutil
import socket
import subprocess
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

_ASK_SECS = 30.0


@dataclass(frozen=True)
class Machine:
    """The location of a node: its ``address``, and the ``name`` of its machine, which other nodes may share."""

    address: str
    name: str


def place(addresses: Sequence[str], machines: Mapping[str, Machine], port_base: int) -> tuple[str, ...]:
    """Return the addresses of tasks, with node names replaced by the known addresses of their machines.

    A task's port is ``port_base`` plus its position among the tasks of its machine. So tasks do not collide if their
    nodes share a machine.
    """
    slots: Counter[str] = Counter()
    placed = []
    for node in (address.rpartition(":")[0] for address in addresses):
        machine = machines.get(node, Machine(node, node))
        host = f"[{machine.address}]" if ":" in machine.address else machine.address
        placed.append(f"{host}:{port_base + slots[machine.name]}")
        slots[machine.name] += 1
    return tuple(placed)


def lookup_nodes(nodes: Sequence[str], env: Mapping[str, str]) -> Mapping[str, Machine]:
    """Ask Slurm for the machines of nodes if their names are ambiguous; empty if they are not, or Slurm fails.

    Every task of a step asks separately. So all tasks must see the same reason to ask. A machine that resolves its own
    name to loopback, as Debian's do, is no reason.
    """
    if not _are_odd(nodes, env.get("SLURMD_NODENAME", "")) or shutil.which("scontrol") is None:
        return {}
    try:
        output = subprocess.run(
            ["scontrol", "show", "node", "--oneliner", ",".join(nodes)],
            capture_output=True,
            text=True,
            timeout=_ASK_SECS,
            check=False,
        ).stdout
    except subprocess.TimeoutExpired:
        return {}
    return read_machines(output)


def _are_odd(nodes: Sequence[str], mine: str) -> bool:
    """Return whether a name does not resolve, two names share an address, or another node's name is loopback."""
    seen: set[str] = set()
    for node in dict.fromkeys(nodes):
        try:
            found = {str(info[4][0]) for info in socket.getaddrinfo(node, None, type=socket.SOCK_STREAM)}
        except OSError:
            return True
        if found & seen or (node != mine and any(ipaddress.ip_address(a.split("%")[0]).is_loopback for a in found)):
            return True
        seen |= found
    return False


def read_machines(text: str) -> dict[str, Machine]:
    """Return the machines by node from the output of ``scontrol show node --oneliner``."""
    found = {}
    for line in text.splitlines():
        fields = dict(re.findall(r"\b(NodeName|NodeAddr|NodeHostName)=(\S+)", line))
        if len(fields) == 3:
            found[fields["NodeName"]] = Machine(fields["NodeAddr"], fields["NodeHostName"])
    return found
