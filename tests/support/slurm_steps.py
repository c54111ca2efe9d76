"""Slurm's environment: recorded from Slurm 22.05 with nodes n1, n2, n3, n10 and o03 of four CPUs each.

``RECORDED`` holds, by the ``srun`` line, the variables of the step and the node on which each rank really ran.
"""

from collections.abc import Iterator, Mapping


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
