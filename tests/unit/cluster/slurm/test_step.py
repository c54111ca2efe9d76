"""Each rank of a Slurm step is read to be where Slurm ran it, or the step is refused."""

import pytest
from support.slurm_steps import RECORDED, step, tasks

from tfps.cluster.slurm.step import read
from tfps.errors import ConfigError

MOST = 4096


@pytest.mark.parametrize("line", RECORDED)
def test_each_rank_is_read_to_be_where_slurm_ran_it(line: str) -> None:
    """Every task of a real step derives the same addresses, and its own is on its node, at the slot it has there."""
    variables, ran_on = RECORDED[line]
    nodes = ran_on.split()
    steps = [read(env, MOST) for env in tasks(variables, nodes)]
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
    assert read(next(tasks(variables, nodes.split())), MOST).components == sizes


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
            read(env, MOST)
        except ConfigError as error:
            refusals.append(str(error))
    assert refusals
    assert all("--distribution=block" in refusal for refusal in refusals)


GOOD = next(tasks(step("n[1-3]", "4,2,1"), ["n1"] * 4 + ["n2"] * 2 + ["n3"]))


@pytest.mark.parametrize(
    ("change", "reported"),
    [
        ({"SLURM_PROCID": "7"}, "SLURM_PROCID=7 must be a whole number from 0 to 6"),
        ({"SLURM_PROCID": "x"}, "SLURM_PROCID=x"),
        ({"SLURM_PROCID": ""}, "SLURM_PROCID is empty"),
        ({"SLURM_STEP_NODELIST": ""}, "SLURM_STEP_NODELIST is empty"),
        ({"SLURM_STEP_NUM_TASKS": ""}, "SLURM_STEP_NUM_TASKS is empty"),
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
def test_a_broken_environment_names_the_variable(change: dict[str, str], reported: str) -> None:
    """A variable that is missing, malformed or at odds with another is named, with its value and a fix."""
    with pytest.raises(ConfigError) as caught:
        read(GOOD | change, MOST)
    assert reported in str(caught.value)
    assert ": " in str(caught.value)
    assert "\n" not in str(caught.value)
