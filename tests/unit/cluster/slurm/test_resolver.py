"""The cluster of a Slurm step."""

import pytest
from support.slurm_steps import RECORDED, tasks

from tfps.cluster import resolver
from tfps.cluster.resolver import NumPs
from tfps.cluster.slurm import nodes
from tfps.cluster.slurm.nodes import Machine
from tfps.cluster.slurm.resolver import SlurmResolver
from tfps.cluster.spec import Cluster
from tfps.errors import ConfigError


def test_workers_may_be_the_first_component() -> None:
    """Where each component's --job_name says so, its tasks are the workers, whatever their ranks; all tasks agree."""
    variables, ran_on = RECORDED["sbatch: -n1 -w n2, hetjob -n4 -N2 -w n[1,3]; srun --het-group=0,1"]
    found = []
    for rank, env in enumerate(tasks(variables, ran_on.split())):
        job_name = "worker" if rank == 0 else "ps"
        found.append(resolver.resolve(None, None, job_name, None, NumPs(), None, env))
    expected = Cluster(("n1:8888", "n1:8889", "n1:8890", "n3:8888"), ("n2:8888",))
    assert [members for members, _ in found] == [expected] * 5
    assert [str(task) for _, task in found] == ["worker/0", "ps/0", "ps/1", "ps/2", "ps/3"]


def test_parameter_servers_are_the_first_component() -> None:
    """So it is where the components do not tell their roles; a size that is given has to be that of its component."""
    variables, ran_on = RECORDED["sbatch: -n1 -w n2, hetjob -n4 -N2 -w n[1,3]; srun --het-group=0,1"]
    envs = list(tasks(variables, ran_on.split()))
    expected = Cluster(("n2:8888",), ("n1:8888", "n1:8889", "n1:8890", "n3:8888"))
    for sizes in ((NumPs(), None), (NumPs(1), 4)):
        assert {resolver.resolve(None, None, None, None, *sizes, env)[0] for env in envs} == {expected}
    with pytest.raises(ConfigError, match=r"--num_ps=4, but Slurm's step has 1: "):
        resolver.resolve(None, None, None, None, NumPs(4), 1, envs[0])


def test_all_tasks_are_workers_without_ps() -> None:
    """So it is in a step of two components, too."""
    variables, ran_on = RECORDED["sbatch: -n1 -w n2, hetjob -n4 -N2 -w n[1,3]; srun --het-group=0,1"]
    found = [resolver.resolve(None, None, None, None, NumPs(0), None, env) for env in tasks(variables, ran_on.split())]
    assert {members.ps for members, _ in found} == {()}
    assert [str(task) for _, task in found] == [f"worker/{rank}" for rank in range(5)]


def test_all_tasks_are_servers_of_a_service() -> None:
    """Whatever the number of components; a size that is given has to be that of the step."""
    variables, ran_on = RECORDED["sbatch: -n1 -w n2, hetjob -n4 -N2 -w n[1,3]; srun --het-group=0,1"]
    envs = list(tasks(variables, ran_on.split()))
    found = [resolver.resolve(None, None, "ps", None, NumPs(has_workers=False), None, env) for env in envs]
    assert [str(task) for _, task in found] == [f"ps/{rank}" for rank in range(5)]
    assert {members for members, _ in found} == {Cluster(("n2:8888", "n1:8888", "n1:8889", "n1:8890", "n3:8888"), ())}
    with pytest.raises(ConfigError, match=r"--num_ps=2, but Slurm's step has 5: "):
        resolver.resolve(None, None, "ps", None, NumPs(2, has_workers=False), None, envs[0])


def test_a_located_cluster_has_the_addresses_of_its_machines(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tasks of nodes that share a machine get its address and different ports, and keep their order."""
    monkeypatch.setattr(nodes, "lookup_nodes", lambda *_: {name: Machine("10.0.0.1", "vm") for name in ("n1", "n2")})
    cluster = Cluster(("n1:8888",), ("n1:8889", "n2:8888"))
    assert SlurmResolver().locate(cluster, 9000, {}) == Cluster(("10.0.0.1:9000",), ("10.0.0.1:9001", "10.0.0.1:9002"))
    assert SlurmResolver().locate(cluster, None, {}).ps == ("10.0.0.1:8888",)
