"""Read from a Slurm step's environment where each of its tasks runs, in rank order.

Slurm lists a step's nodes sorted, but the ranks follow that order only in the plain case. In a heterogeneous step
(``srun A : B``) they follow the components, each in its own node order. ``--distribution`` decides how ranks are dealt
to the nodes. The result is checked against the node and the ranks that Slurm gives this task. So a rule of Slurm that
is unknown here ends in an error and never in a wrong cluster. Must not import TensorFlow.

Nodes of small sites and test benches may have names that do not resolve, or share a machine: see ``lookup_nodes``.
"""

import ipaddress
import itertools
import math
import re
import shutil
import socket
import subprocess
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from tfps.errors import ConfigError
from tfps.text import show

PORT_BASE = 8888  # TensorFlow's SlurmClusterResolver starts there, too

_ASK_SECS = 30.0

_Nodes = dict[str, int]  # the number of tasks by node, in Slurm's order of nodes


@dataclass(frozen=True)
class Step:
    """A step's tasks: ``addresses`` in rank order, this task's ``rank``, and the size of each component."""

    addresses: tuple[str, ...]
    rank: int
    components: tuple[int, ...]


@dataclass(frozen=True)
class Machine:
    """The location of a node: its ``address``, and the ``name`` of its machine, which other nodes may share."""

    address: str
    name: str


def in_step(env: Mapping[str, str]) -> bool:
    """Return whether ``srun`` started this process."""
    return "SLURM_STEP_NUM_TASKS" in env


def read(env: Mapping[str, str], most: int) -> Step:
    """Return the step that the environment describes.

    A task's port is ``PORT_BASE`` plus its position among the tasks of its node.

    Args:
        env: The environment of a process that ``srun`` started.
        most: The largest number of tasks that a step may have.

    Raises:
        ConfigError: If a variable is missing or malformed, or the step has more tasks.
    """
    nodes = _nodes(env, most)
    components = _components(env, nodes, most)
    plane = _plane(env, components, most)
    ranks = [node for component in components for node in _deal(component, plane)]
    rank = _number(env, "SLURM_PROCID", 0, len(ranks) - 1)
    _check_self(env, ranks, rank)
    return Step(tuple(_with_ports(ranks)), rank, tuple(sum(component.values()) for component in components))


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
        told = subprocess.run(
            ["scontrol", "show", "node", "--oneliner", ",".join(nodes)],
            capture_output=True,
            text=True,
            timeout=_ASK_SECS,
            check=False,
        ).stdout
    except subprocess.TimeoutExpired:
        return {}
    return read_machines(told)


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
        told = dict(re.findall(r"\b(NodeName|NodeAddr|NodeHostName)=(\S+)", line))
        if len(told) == 3:
            found[told["NodeName"]] = Machine(told["NodeAddr"], told["NodeHostName"])
    return found


def expand_nodes(text: str, most: int) -> list[str]:
    """Return the names in a nodelist like ``n[1-2],m5,o[03-06]``, in its order.

    Raises:
        ValueError: If the list is malformed or has more than ``most`` names.
    """
    names: list[str] = []
    for parts in _items(text, most):
        if len(names) + math.prod(len(part) for part in parts) > most:
            raise ValueError(f"names more nodes than the {most:,} tasks a cluster can have: ask for fewer")
        names += ["".join(choice) for choice in itertools.product(*parts)]
    return names


def expand_counts(text: str, most: int) -> list[int]:
    """Return the numbers in a list like ``3(x2),2,1``: 3, 3, 2, 1.

    Raises:
        ValueError: If the list is malformed or its numbers add up to more than ``most``.
    """
    counts: list[int] = []
    for item in text.split(","):
        match = re.fullmatch(r"([1-9][0-9]{0,8})(?:\(x([1-9][0-9]{0,8})\))?", item)
        if not match:
            raise ValueError("is not a list of counts like 3(x2),2,1: start the task with srun")
        times = int(match[2] or 1)
        if sum(counts) + int(match[1]) * times > most:
            raise ValueError(f"is more than the {most:,} tasks a cluster can have: ask for fewer")
        counts += [int(match[1])] * times
    return counts


def _items(text: str, most: int) -> Iterator[list[list[str]]]:
    """Yield each item of a nodelist as parts, each a list of alternatives: ``n[1-2]`` is ``[[n], [1, 2]]``."""
    parts: list[list[str]] = []
    for piece in [*re.findall(r"[^,\[\]]+|\[[^\[\]]*\]|.", text, re.DOTALL), ","]:
        if piece != ",":
            parts.append(_alternatives(piece, most))
        elif parts:
            yield parts
            parts = []


def _alternatives(piece: str, most: int) -> list[str]:
    if piece[0] not in "[]":
        return [piece]
    found: list[str] = []
    for item in piece[1:-1].split(","):
        match = re.fullmatch(r"([0-9]{1,18})(?:-([0-9]{1,18}))?", item)
        low, high = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
        if not match or low > high:
            raise ValueError("is not a nodelist like n[1-2],m5: start the task with srun")
        if len(found) + high - low >= most:
            raise ValueError(f"names more nodes than the {most:,} tasks a cluster can have: ask for fewer")
        found += [str(number).zfill(len(match[1])) for number in range(low, high + 1)]
    return found


def _value(env: Mapping[str, str], *names: str) -> tuple[str, str]:
    """Return the name and value of the first of ``names`` that is set, because Slurm renamed some."""
    for name in names:
        if env.get(name):
            return name, env[name]
    raise ConfigError(f"{names[0]} is missing, but SLURM_STEP_NUM_TASKS is set: start the task with srun.")


def _list_of_nodes(env: Mapping[str, str], most: int, *names: str) -> list[str]:
    name, text = _value(env, *names)
    try:
        found = expand_nodes(text, most)
    except ValueError as error:
        raise ConfigError(f"{name}={show(text)} {error}.") from None
    if len(set(found)) < len(found):
        raise ConfigError(f"{name}={show(text)} names a node twice: start the task with srun.")
    return found


def _nodes(env: Mapping[str, str], most: int) -> _Nodes:
    """Return the step's nodes and the number of tasks on each."""
    names = _list_of_nodes(env, most, "SLURM_STEP_NODELIST")
    name, text = _value(env, "SLURM_STEP_TASKS_PER_NODE")
    try:
        counts = expand_counts(text, most)
    except ValueError as error:
        raise ConfigError(f"{name}={show(text)} {error}.") from None
    if len(counts) != len(names):
        raise ConfigError(
            f"{name}={show(text)} counts {len(counts)} nodes, but SLURM_STEP_NODELIST names {len(names)}: "
            "start the task with srun."
        )
    _number(env, "SLURM_STEP_NUM_TASKS", sum(counts), sum(counts))
    return dict(zip(names, counts, strict=True))


def _number(env: Mapping[str, str], variable: str, low: int, high: int) -> int:
    name, text = _value(env, variable)
    if not re.fullmatch(r"[0-9]{1,9}", text) or not low <= int(text) <= high:
        wanted = f"{low}" if low == high else f"a whole number from {low} to {high}"
        raise ConfigError(f"{name}={show(text)} must be {wanted}: start the task with srun.")
    return int(text)


def _components(env: Mapping[str, str], nodes: _Nodes, most: int) -> list[_Nodes]:
    """Return the step's nodes by component of the heterogeneous job; other jobs have one component."""
    if not env.get("SLURM_HET_SIZE"):
        return [nodes]
    components: list[_Nodes] = []
    for group in range(_number(env, "SLURM_HET_SIZE", 1, 128)):
        names = (f"SLURM_JOB_NODELIST_{kind}_GROUP_{group}" for kind in ("HET", "PACK"))
        components.append({node: nodes[node] for node in _list_of_nodes(env, most, *names) if node in nodes})
    if Counter(node for component in components for node in component) != Counter(list(nodes)):
        raise ConfigError(
            f"SLURM_STEP_NODELIST={show(env['SLURM_STEP_NODELIST'])} does not match the nodes of the job's "
            "components (SLURM_JOB_NODELIST_HET_GROUP_...): start the task with srun."
        )
    return [component for component in components if component]


def _plane(env: Mapping[str, str], components: Sequence[_Nodes], most: int) -> int:
    """Return how many consecutive ranks a node gets before the next node's turn."""
    if len(components) > 1:
        return most  # SLURM_DISTRIBUTION may be any component's; by default Slurm deals all in blocks
    text = env.get("SLURM_DISTRIBUTION") or "block"
    kind = re.split("[:,]", text)[0].lower()
    if kind == "plane":
        return _number(env, "SLURM_DIST_PLANESIZE", 1, 999_999_999)
    if kind not in ("block", "cyclic"):
        raise ConfigError(
            f"SLURM_DISTRIBUTION={show(text)} hides which rank runs on which node: give srun --distribution=block."
        )
    return most if kind == "block" else 1


def _deal(nodes: _Nodes, plane: int) -> Iterator[str]:
    """Yield the node of each rank: ``plane`` ranks to each node in turn, until every node has its count."""
    left = dict(nodes)
    while left:
        for node, count in list(left.items()):
            yield from [node] * min(plane, count)
            left[node] -= plane
            if left[node] <= 0:
                del left[node]


def _with_ports(ranks: Sequence[str]) -> Iterator[str]:
    slots: Counter[str] = Counter()
    for node in ranks:
        yield f"{node}:{PORT_BASE + slots[node]}"
        slots[node] += 1


def _check_self(env: Mapping[str, str], ranks: Sequence[str], rank: int) -> None:
    """Raise an error if the derived ranks give this task another node, or other neighbors there, than Slurm did."""
    mine = ",".join(str(other) for other, node in enumerate(ranks) if node == ranks[rank])
    for name, read_as in (("SLURMD_NODENAME", ranks[rank]), ("SLURM_GTIDS", mine)):
        told = env.get(name, read_as)
        if told != read_as:
            raise ConfigError(
                f"{name}={show(told)}, but SLURM_STEP_NODELIST means {show(read_as)} for rank {rank}: give each "
                "component of srun --distribution=block, and outside a heterogeneous job start only one."
            )
