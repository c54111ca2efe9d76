"""Read from a Slurm step's environment where each of its tasks runs, in rank order.

Slurm lists a step's nodes sorted, but the ranks follow that order only in the plain case. In a heterogeneous step
(``srun A : B``) they follow the components, each in its own node order. ``--distribution`` decides how ranks are dealt
to the nodes. The result is checked against the node and the ranks that Slurm gives this task. So a rule of Slurm that
is unknown here ends in an error and never in a wrong cluster. Must not import TensorFlow.
"""

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from tfps.cluster.slurm.hostlist import expand_counts, expand_nodes
from tfps.errors import ConfigError
from tfps.text import show

VARIABLE = "SLURM_STEP_NUM_TASKS"  # set in a process that srun started
PORT_BASE = 8888  # TensorFlow's SlurmClusterResolver starts there, too

_Nodes = dict[str, int]  # the number of tasks by node, in Slurm's order of nodes


@dataclass(frozen=True)
class Step:
    """A step's tasks: ``addresses`` in rank order, this task's ``rank``, and the size of each component."""

    addresses: tuple[str, ...]
    rank: int
    components: tuple[int, ...]


def in_step(env: Mapping[str, str]) -> bool:
    """Return whether ``srun`` started this process."""
    return VARIABLE in env


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


def _value(env: Mapping[str, str], *names: str) -> tuple[str, str]:
    """Return the name and value of the first of ``names`` that is set, because Slurm renamed some."""
    for name in names:
        if env.get(name):
            return name, env[name]
    if empty := [name for name in names if name in env]:
        raise ConfigError(f"{empty[0]} is empty: start the task with srun.")
    raise ConfigError(f"{names[0]} is missing, but {VARIABLE} is set: start the task with srun.")


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
        actual = env.get(name, read_as)
        if actual != read_as:
            raise ConfigError(
                f"{name}={show(actual)}, but SLURM_STEP_NODELIST gives {show(read_as)} for rank {rank}: give each "
                "component of srun --distribution=block; outside a heterogeneous job, start only one."
            )
