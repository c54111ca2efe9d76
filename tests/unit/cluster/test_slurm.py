"""Slurm's environment: recorded from Slurm 22.05 with nodes n1, n2, n3, n10 and o03 of four CPUs each.

``RECORDED`` holds, by the ``srun`` line, the variables of the step and the node on which each rank really ran.
"""

import socket
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from tfps.cluster import resolver, slurm
from tfps.errors import ConfigError

MOST = 4096


def step(nodelist: str, tasks_per_node: str, distribution: str = "", **groups: str) -> dict[str, str]:
    """Return a step's variables; ``groups`` are the nodelists of its job's components."""
    env = {"SLURM_STEP_NODELIST": nodelist, "SLURM_STEP_TASKS_PER_NODE": tasks_per_node}
    env |= {"SLURM_DISTRIBUTION": distribution} if distribution else {}
    env |= {"SLURM_HET_SIZE": str(len(groups))} if groups else {}
    return env | {f"SLURM_JOB_NODELIST_{name}": nodes for name, nodes in groups.items()}


RECORDED = {
    "srun -n7 -N3 -w n[1-3]": (step("n[1-3]", "4,2,1"), "n1 n1 n1 n1 n2 n2 n3"),
    "srun -n5 -N3 -w n10,o03,n2": (step("n[2,10],o03", "3,1(x2)"), "n2 n2 n2 n10 o03"),
    "srun -n6 -N1 -w n1 --overcommit": (step("n1", "6"), "n1 n1 n1 n1 n1 n1"),
    "srun -n7 -N3 -w n[1-3] -m cyclic": (step("n[1-3]", "4,2,1", "cyclic"), "n1 n2 n3 n1 n2 n1 n1"),
    "srun -n5 -N2 -w n1,n3 -m cyclic:block": (step("n[1,3]", "4,1", "cyclic:block"), "n1 n3 n1 n1 n1"),
    "srun -n5 -N2 -w n1,n3 -m block,NoPack": (step("n[1,3]", "4,1", "block,nopack"), "n1 n1 n1 n1 n3"),
    "srun -n9 -N3 -w n[1-3] -m plane=2": (
        step("n[1-3]", "4(x2),1", "plane") | {"SLURM_DIST_PLANESIZE": "2"},
        "n1 n1 n2 n2 n3 n1 n1 n2 n2",
    ),
    "srun -n2 -w n3 A : -n4 -N2 -w n[1-2] B": (
        step("n[1-3]", "3,1,2", "block", PACK_GROUP_0="n3", PACK_GROUP_1="n[1-2]"),
        "n3 n3 n1 n1 n1 n2",
    ),
    "srun -n2 -w o03 A : -n1 -w n10 B : -n2 -w n1 C": (
        step("n[1,10],o03", "2,1,2", "cyclic", PACK_GROUP_0="o03", PACK_GROUP_1="n10", PACK_GROUP_2="n1"),
        "o03 o03 n10 n1 n1",
    ),
    "srun -n4 -N2 -w n[2-3] A : -n2 -N2 -w n1,n10 B": (
        step("n[1-3,10]", "1,3,1(x2)", "cyclic", PACK_GROUP_0="n[2-3]", PACK_GROUP_1="n[1,10]"),
        "n2 n2 n2 n3 n1 n10",
    ),
    "sbatch: -n1 -w n2, hetjob -n4 -N2 -w n[1,3]; srun --het-group=0,1": (
        step("n[1-3]", "3,1(x2)", "block", HET_GROUP_0="n2", HET_GROUP_1="n[1,3]"),
        "n2 n1 n1 n1 n3",
    ),
    "sbatch: the same; srun --het-group=0 -n1 A : --het-group=1 -n2 B": (
        step("n[1-3]", "1(x3)", "cyclic", HET_GROUP_0="n2", HET_GROUP_1="n[1,3]"),
        "n2 n1 n3",
    ),
    "sbatch: the same; srun --het-group=1": (
        step("n[1,3]", "3,1", "block", HET_GROUP_0="n2", HET_GROUP_1="n[1,3]"),
        "n1 n1 n1 n3",
    ),
}


def tasks(variables: Mapping[str, str], nodes: list[str]) -> Iterator[dict[str, str]]:
    """Yield each task's environment."""
    for rank, node in enumerate(nodes):
        mine = ",".join(str(other) for other, its in enumerate(nodes) if its == node)
        own = {"SLURM_PROCID": str(rank), "SLURMD_NODENAME": node, "SLURM_GTIDS": mine}
        yield {**variables, "SLURM_STEP_NUM_TASKS": str(len(nodes)), **own}


@pytest.mark.parametrize("line", RECORDED)
def test_each_rank_is_read_to_be_where_slurm_ran_it(line: str) -> None:
    """Every task of a real step derives the same addresses, and its own is on its node, at the slot it has there."""
    variables, ran_on = RECORDED[line]
    nodes = ran_on.split()
    steps = [slurm.read(env, MOST) for env in tasks(variables, nodes)]
    expected = tuple(f"{node}:{8888 + nodes[:rank].count(node)}" for rank, node in enumerate(nodes))
    assert {step.addresses for step in steps} == {expected}
    assert [step.rank for step in steps] == list(range(len(nodes)))


@pytest.mark.parametrize(
    ("line", "sizes"),
    [
        ("srun -n7 -N3 -w n[1-3]", (7,)),
        ("srun -n2 -w n3 A : -n4 -N2 -w n[1-2] B", (2, 4)),
        ("srun -n2 -w o03 A : -n1 -w n10 B : -n2 -w n1 C", (2, 1, 2)),
        ("sbatch: the same; srun --het-group=0 -n1 A : --het-group=1 -n2 B", (1, 2)),
        ("sbatch: the same; srun --het-group=1", (4,)),
    ],
)
def test_components_are_those_that_take_part_in_the_step(line: str, sizes: tuple[int, ...]) -> None:
    """A component's size is its tasks in this step, whatever the job has; one that has none is left out."""
    variables, nodes = RECORDED[line]
    assert slurm.read(next(tasks(variables, nodes.split())), MOST).components == sizes


UNREADABLE = {
    "-m arbitrary with SLURM_HOSTFILE": (step("n[1,3]", "2(x2)", "arbitrary"), "n3 n1 n1 n3"),
    "sbatch -n8 -N2; srun -n1 -N1 -w n2 A : -n1 -N1 -w n1 B": (step("n[1-2]", "1(x2)", "cyclic"), "n2 n1"),
    "srun -n3 -N2 -w n1,n2 -m cyclic A : -n3 -N2 -w n3,n10 -m block B": (
        step("n[1-3,10]", "2,1,2,1", "block", PACK_GROUP_0="n[1-2]", PACK_GROUP_1="n[3,10]"),
        "n1 n2 n1 n3 n3 n10",
    ),
    "srun -n3 -N2 -w n[2-3] -m block A : -n4 -N2 -w n1,n10 -m cyclic B": (
        step("n[1-3,10]", "3,2,1(x2)", "cyclic", PACK_GROUP_0="n[2-3]", PACK_GROUP_1="n[1,10]"),
        "n2 n2 n3 n1 n10 n1 n1",
    ),
}


@pytest.mark.parametrize("line", UNREADABLE)
def test_a_step_whose_order_cannot_be_read_is_refused(line: str) -> None:
    """Where Slurm ran the ranks in an order that its variables hide, some task says so, with the option that helps."""
    variables, nodes = UNREADABLE[line]
    refusals = []
    for env in tasks(variables, nodes.split()):
        try:
            slurm.read(env, MOST)
        except ConfigError as error:
            refusals.append(str(error))
    assert refusals
    assert all("--distribution=block" in refusal for refusal in refusals)


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("n1", "n1"),
        ("n[1-2],m5,o[03-06]", "n1 n2 m5 o03 o04 o05 o06"),
        ("r[1-2]n[1-3]", "r1n1 r1n2 r1n3 r2n1 r2n2 r2n3"),
        ("n[8-10,012],m5", "n8 n9 n10 n012 m5"),
        ("n[3,1-2]", "n3 n1 n2"),
        ("n[001-3]", "n001 n002 n003"),
        ("n[10-11],n9", "n10 n11 n9"),
    ],
)
def test_a_nodelist_expands_as_scontrol_does(text: str, names: str) -> None:
    """The names, their padding and their order are those of ``scontrol show hostnames``."""
    assert slurm.expand_nodes(text, MOST) == names.split()


@pytest.mark.parametrize(
    "text", ["n[1-2", "n[]", "n[3-1]", "n[1-2]]", "n[[1-2]]", "n[1,,2]", "n[a-b]", "n[1-2-3]", "]"]
)
def test_a_malformed_nodelist_is_refused(text: str) -> None:
    """What is not a nodelist is a ``ValueError`` that shows one."""
    with pytest.raises(ValueError, match=r"nodelist like n\[1-2\]"):
        slurm.expand_nodes(text, MOST)


@pytest.mark.parametrize(
    "text",
    ["n[1-999999999]", "n[1-4097]", "a[1-99]b[1-99]", "n[1-3000],m[1-3000]", ",".join(["n"] * 5000), "[1-9]" * 200],
)
def test_a_nodelist_of_too_many_nodes_is_refused_at_once(text: str) -> None:
    """The limit is applied before anything of that size is made."""
    began = time.monotonic()
    with pytest.raises(ValueError, match="4,096 tasks"):
        slurm.expand_nodes(text, MOST)
    assert time.monotonic() - began < 1


def test_tasks_per_node_expand() -> None:
    """``3(x2),2,1`` is 3, 3, 2, 1."""
    assert slurm.expand_counts("3(x2),2,1", MOST) == [3, 3, 2, 1]


GOOD = next(tasks(step("n[1-3]", "4,2,1"), ["n1"] * 4 + ["n2"] * 2 + ["n3"]))


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"SLURM_PROCID": "7"}, "SLURM_PROCID=7 must be a whole number from 0 to 6"),
        ({"SLURM_PROCID": "x"}, "SLURM_PROCID=x"),
        ({"SLURM_PROCID": ""}, "SLURM_PROCID is missing"),
        ({"SLURM_STEP_NODELIST": ""}, "SLURM_STEP_NODELIST is missing"),
        ({"SLURM_STEP_NODELIST": "n[1-2]"}, "counts 3 nodes, but SLURM_STEP_NODELIST names 2"),
        ({"SLURM_STEP_NODELIST": "n1,n1,n2"}, "names a node twice"),
        ({"SLURM_STEP_NODELIST": "n[1-999999999]"}, "SLURM_STEP_NODELIST=n[1-999999999] names more nodes than"),
        ({"SLURM_STEP_TASKS_PER_NODE": "4,2"}, "counts 2 nodes"),
        ({"SLURM_STEP_TASKS_PER_NODE": "4,0,1"}, "SLURM_STEP_TASKS_PER_NODE=4,0,1 is not a list"),
        ({"SLURM_STEP_TASKS_PER_NODE": "1(x999999999)"}, "more than the 4,096"),
        ({"SLURM_STEP_NUM_TASKS": "8"}, "SLURM_STEP_NUM_TASKS=8 must be 7"),
        ({"SLURM_DISTRIBUTION": "plane"}, "SLURM_DIST_PLANESIZE is missing"),
        ({"SLURM_HET_SIZE": "2"}, "SLURM_JOB_NODELIST_HET_GROUP_0 is missing"),
        ({"SLURM_HET_SIZE": "999999"}, "SLURM_HET_SIZE=999999 must be"),
        ({"SLURM_HET_SIZE": "1", "SLURM_JOB_NODELIST_HET_GROUP_0": "m[1-3]"}, "does not match the nodes"),
        ({"SLURMD_NODENAME": "n9"}, "SLURMD_NODENAME=n9"),
        ({"SLURM_GTIDS": "0,1"}, "SLURM_GTIDS=0,1"),
    ],
)
def test_a_broken_environment_names_the_variable(change: dict[str, str], told: str) -> None:
    """A variable that is missing, malformed or at odds with another is named, with its value and a fix."""
    with pytest.raises(ConfigError) as caught:
        slurm.read(GOOD | change, MOST)
    assert told in str(caught.value)
    assert ": " in str(caught.value)
    assert "\n" not in str(caught.value)


MACHINES = """\
NodeName=n1 Arch=x86_64 Gres=gpu:2 NodeAddr=127.0.0.11 NodeHostName=vm Port=17001 State=IDLE
NodeName=n2 Arch=x86_64 NodeAddr=127.0.0.12 NodeHostName=vm Port=17002 Comment=NodeAddr
NodeName=n3 NodeAddr=fe80::3 NodeHostName=other Version=22.05.8
"""


def test_tasks_of_nodes_on_one_machine_have_ports_of_their_own() -> None:
    """Ports are counted on each machine; a node has the address that Slurm knows, in brackets if it is IPv6."""
    machines = slurm.read_machines(MACHINES)
    addresses = ["n1:8888", "n1:8889", "n2:8888", "n3:8888", "m5:8888"]
    expected = ("127.0.0.11:9000", "127.0.0.11:9001", "127.0.0.12:9002", "[fe80::3]:9000", "m5:9000")
    assert slurm.place(addresses, machines, 9000) == expected
    assert slurm.place(addresses, {}, slurm.PORT_BASE) == tuple(addresses)


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
    found = slurm.lookup_nodes(nodes, {"SLURMD_NODENAME": mine})
    assert found == ({"a": slurm.Machine("10.1.1.1", "h")} if asks else {})


def test_without_scontrol_names_are_what_there_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A node without Slurm's commands is no reason to fail: its names may be known to the network later."""
    monkeypatch.setenv("PATH", str(tmp_path))
    assert slurm.lookup_nodes(["no-such-node.invalid"], {}) == {}


def test_workers_may_be_the_first_component() -> None:
    """Where each component's --job_name says so, its tasks are the workers, whatever their ranks; all tasks agree."""
    variables, ran_on = RECORDED["sbatch: -n1 -w n2, hetjob -n4 -N2 -w n[1,3]; srun --het-group=0,1"]
    found = []
    for rank, env in enumerate(tasks(variables, ran_on.split())):
        job_name = "worker" if rank == 0 else "ps"
        found.append(resolver.resolve(None, None, job_name, None, None, None, env))
    expected = resolver.Cluster(("n1:8888", "n1:8889", "n1:8890", "n3:8888"), ("n2:8888",))
    assert [members for members, _ in found] == [expected] * 5
    assert [str(task) for _, task in found] == ["worker/0", "ps/0", "ps/1", "ps/2", "ps/3"]
