"""What ``tfps plan`` prints, of plans made by hand."""

from collections.abc import Sequence
from typing import Any

import pytest

from tfps.cli.tables import print_plan
from tfps.cluster.spec import Cluster
from tfps.config.job_config import JobConfig
from tfps.modes.rounds import Rounds
from tfps.runtime.graph.placement import PlacedVariable, Transfer
from tfps.runtime.graph.plan import Plan

WEIGHT, SLOT = PlacedVariable("w", (10,), "float32", 40, 0), PlacedVariable("w/Adagrad", (10,), "float32", 40, 0)


def sent(*sizes: int | None, to: str = "ps/0", most: int | None = None) -> Sequence[Transfer]:
    """Return transfers of some sizes; ``most`` is the bound of those whose size is not known."""
    return [Transfer(f"t{at}", "worker/1", to, size, most if size is None else None) for at, size in enumerate(sizes)]


def printed(capsys: pytest.CaptureFixture[str], flags: dict[str, Any], num_ps: int = 1, **parts: Any) -> str:
    """Return what is printed of a plan for four workers."""
    cluster = Cluster(tuple(f"p:{i}" for i in range(num_ps)), tuple(f"w:{i}" for i in range(4)))
    plan = {"pulled": [], "pushed": [], **parts}
    print_plan(JobConfig(**flags), cluster, Plan([WEIGHT, SLOT], {0: 80}, plan.pop("packed", {}), **plan))
    return capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "total"),
    [
        ({"mode": "async"}, "one step, which takes 1 batch: 100"),
        ({"mode": "sync"}, "one step, which takes 4 batches: 400"),
        ({"mode": "sync", "backup_workers": 1}, "one step, which takes 3 batches: 400"),
    ],
)
def test_the_bytes_of_the_whole_job(flags: dict[str, Any], total: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Of one global step, and the batches of it: so modes can be compared. A gradient that is dropped is sent, too."""
    out = printed(capsys, flags, pulled=sent(60), pushed=sent(30, 10))
    assert f"\nbytes of all workers in {total}\n" in out
    assert "one step of one worker, on the wire" in out


def test_a_size_that_the_batch_bounds(capsys: pytest.CaptureFixture[str]) -> None:
    """Is a number that can be compared; one without bound is counted apart."""
    out = printed(capsys, {}, pulled=sent(60, None, most=1000), pushed=[*sent(None), *sent(None, most=5)])
    assert "at most 1,060" in out
    assert "at most 5 and 1 whose size depends on the batch" in out
    assert "which takes 1 batch: at most 1,065 and 1 whose size depends on the batch" in out


def test_a_mode_with_rounds(capsys: pytest.CaptureFixture[str]) -> None:
    """How long they are, both kinds, what stays with the workers, and the bytes of a round of a sample of them."""
    parts = {"round_pushed": sent(50), "round_pulled": sent(40), "waiting_pushed": sent(2), "waiting_pulled": sent(1)}
    flags = {"mode": "local", "sync_every": 20, "worker_fraction": 0.5, "max_steps": 50}
    out = printed(capsys, flags, rounds=Rounds([20] * 4, "--sync_every=20", 2), kept=["w/Adagrad"], **parts)
    assert "a round: 20 steps (--sync_every=20); --max_steps=50: 2 rounds and one of 10 steps" in out
    assert "w/Adagrad: each worker has its own and does not send them; the ps hold the chief's when saved" in out
    assert "what one worker gets and sends" in out
    assert "push, worker to ps, a step " in out
    assert "push, worker to ps, a round " in out
    assert "\nbytes of all workers in one round, which takes 40 batches: 186\n" in out


def test_rounds_of_each_worker_alone(capsys: pytest.CaptureFixture[str]) -> None:
    """With ``--async_rounds`` there is no common one."""
    rounds = Rounds([20] * 4, "--sync_every=20", 4, are_common=False)
    flags = {"mode": "local", "sync_every": 20, "async_rounds": True}
    out = printed(capsys, flags, rounds=rounds, round_pushed=sent(50), round_pulled=sent(40))
    assert "\nbytes of all workers in one round of one worker, which takes 20 batches: 90\n" in out


def test_without_ps_nothing_is_said_that_says_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    """All variables are on the chief, and none is packed. What the chief gets from itself is not sent."""
    out = printed(capsys, {"mode": "allreduce"}, num_ps=0, to_next=sent(100, to="worker/2"), pushed=sent(8))
    assert "packed" not in out
    assert "share" not in out
    assert [line.split() for line in out.splitlines() if line.startswith(("name", "w "))] == [
        ["name", "shape", "type", "bytes"],
        ["w", "10", "float32", "40"],
    ]
    assert "\nbytes of all workers in one step, which takes 4 batches: 424\n" in out
    assert "packed" in printed(capsys, {}, packed={0: 80})


def test_neighbors_may_differ(capsys: pytest.CaptureFixture[str]) -> None:
    """The plan is of one worker: the total holds if the others have as many."""
    to = [*sent(10, to="worker/0"), *sent(10, to="worker/2")]
    rounds = Rounds([100] * 4, "--collect_every=100", 4)
    out = printed(capsys, {"mode": "gossip"}, num_ps=0, to_next=to, rounds=rounds, round_pushed=sent(50))
    assert "one round, which takes 400 batches, if each has as many neighbors: 8,150\n" in out
    assert "send, worker to worker/2, a step " in out
