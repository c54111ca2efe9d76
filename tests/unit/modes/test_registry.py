"""What is told of a job's mode: its flags that were given, and the defaults that decide."""

from pathlib import Path
from typing import Any

import pytest

from tfps.cli import tables
from tfps.cluster.spec import Cluster
from tfps.config.job_config import OPTIONS, JobConfig
from tfps.config.topology import topology
from tfps.modes import registry
from tfps.modes.gossip.mode import GossipMode
from tfps.runtime.graph import plan


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        ({}, "async"),
        ({"staleness_lr": True, "delay_compensation": 0.04}, "async --staleness_lr=1 --delay_compensation=0.04"),
        ({"mode": "ssp"}, "ssp --staleness=3 (default)"),
        ({"mode": "ssp", "staleness": 0}, "ssp --staleness=0"),
        ({"mode": "sync", "backup_workers": 1, "aggregate": "sum"}, "sync --backup_workers=1 --aggregate=sum"),
        ({"mode": "local"}, "local --sync_every=10 (default) --server_optimizer=sgd (default)"),
        (
            {"mode": "local", "sync_every": 5, "worker_fraction": 0.5, "data_policy": "shard"},
            "local --sync_every=5 --server_optimizer=sgd (default) --worker_fraction=0.5 --data_policy=shard",
        ),
        (
            {"mode": "local", "async_rounds": True},
            "local --sync_every=10 (default) --server_optimizer=sgd (default) --async_rounds=1",
        ),
        ({"mode": "allreduce"}, "allreduce"),
        ({"mode": "gossip"}, "gossip --topology=ring (default) --collect_every=100 (default)"),
        ({"mode": "gossip", "topology": "0-1,1-2", "collect_every": 7}, "gossip --topology=0-1,1-2 --collect_every=7"),
    ],
)
def test_a_mode_is_told_with_what_decides(flags: dict[str, Any], told: str) -> None:
    """A flag is told if it was given, or if the mode says that its default decides."""
    assert registry.described(JobConfig(**flags)) == told


@pytest.mark.parametrize("name", list(registry.MODES.builtin))
def test_each_flag_of_a_mode_is_told(name: str) -> None:
    """There is none that a mode forgets, and no default of a flag that it does not have."""
    mode = registry.MODES.load(name)
    assert set(mode.defaults(JobConfig(mode=name))) <= set(mode.flags) <= set(OPTIONS)
    told = registry.described(JobConfig(mode=name, **dict.fromkeys(mode.flags, 7)))
    assert told == " ".join([name, *(f"--{flag}=7" for flag in mode.flags)])


def test_what_is_for_several_modes_names_them_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The modes of a flag are one list; a single one is repeated as what to give."""
    monkeypatch.setattr(GossipMode, "flags", ())
    [several] = registry.problems_of(JobConfig(mode="gossip", data_policy="shard"), 2)
    modes = "--mode=async, sync, ssp, local or allreduce"
    assert several == (
        f"--data_policy=shard is for {modes}, and this job has --mode=gossip: give one of these, or leave it out."
    )
    [single] = registry.problems_of(JobConfig(mode="gossip", staleness=1), 2)
    assert single.endswith("this job has --mode=gossip: give --mode=ssp, or leave it out.")


def test_without_ps_the_modes_that_need_none_are_named() -> None:
    """They are those of the table that say so."""
    [problem] = registry.problems_of(JobConfig(num_ps=0), 2)
    assert problem.endswith("or choose a mode without PS: --mode=allreduce or --mode=gossip.")
    assert registry.num_ps_of(JobConfig()).modes_without() == ["allreduce", "gossip"]


def test_a_default_that_another_flag_replaces_is_not_told() -> None:
    """The length of a round is that of ``--local_epochs``."""
    assert "--sync_every=10 (default)" in registry.described(JobConfig(mode="local"))
    assert "sync_every" not in registry.described(JobConfig(mode="local", local_epochs=2))


def test_a_topology_of_a_file_is_told_by_its_name(tmp_path: Path) -> None:
    """Its edges can be as many as make a page."""
    (tmp_path / "a b").write_text("0 1\n")
    edges = topology(str(tmp_path / "a b"))
    assert registry.described(JobConfig(mode="gossip", topology=edges)).startswith(
        f"gossip --topology='{tmp_path}/a b'"
    )
    many = ",".join(f"{index}-{index + 1}" for index in range(1000))
    assert len(registry.described(JobConfig(mode="gossip", topology=many))) < 200


def test_the_plan_tells_it_on_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    """What looks like a style of the terminal is told as it is."""
    config = JobConfig(model="[bold]", mode="local", server_optimizer="adam", server_learning_rate=0.01)
    empty = plan.Plan([], {0: 0}, {}, [], [])
    tables.print_plan(config, Cluster(("p:1",), ("w:1", "w:2")), empty)
    first = "[bold] on 1 ps and 2 workers, --mode=local --sync_every=10 (default) --server_optimizer=adam "
    assert capsys.readouterr().out.splitlines()[0] == f"{first}--server_learning_rate=0.01"
