"""The rounds of a mode: how long they are, how many a job has, and what people read of them."""

from typing import Any

import pytest

from tfps.config.job_config import JobConfig
from tfps.modes.registry import mode_of
from tfps.modes.rounds import Rounds, Shares

EVEN, UNEVEN = Shares([1000] * 4, 64), Shares([10, 25, 8, 8], 4)


@pytest.mark.parametrize(
    ("flags", "shares", "steps", "said"),
    [
        ({"sync_every": 20, "max_steps": 100}, None, [20] * 4, "20 steps (--sync_every=20); --max_steps=100: 5 rounds"),
        (
            {"local_epochs": 1, "max_steps": 330},
            EVEN,
            [16] * 4,
            "16 steps (--local_epochs=1 of 1,000 examples, batches of 64); "
            "--max_steps=330: 20 rounds and one of 10 steps",
        ),
        (
            {"local_epochs": 2, "max_steps": 14},
            UNEVEN,
            [5, 13, 4, 4],
            "4 to 13 steps (--local_epochs=2 of 8 to 25 examples, batches of 4); "
            "--max_steps=14: 1 round and one of 1 step",
        ),
        (
            {"local_epochs": 2, "max_steps": 14, "worker_fraction": 0.5},
            UNEVEN,
            [5, 13, 4, 4],
            "4 to 13 steps (--local_epochs=2 of 8 to 25 examples, batches of 4); --max_steps=14: at least 2 rounds",
        ),
        (
            {"sync_every": 4, "max_steps": 10, "async_rounds": True},
            None,
            [4] * 4,
            "4 steps (--sync_every=4); --max_steps=10: about 3 rounds of each worker",
        ),
        ({"max_steps": 7}, None, [10] * 4, "10 steps (--sync_every=10); --max_steps=7: one round of 7 steps"),
        (
            {"mode": "gossip", "max_steps": 250},
            None,
            [100] * 4,
            "100 steps (--collect_every=100); --max_steps=250: 2 rounds and one of 50 steps",
        ),
    ],
)
def test_a_mode_with_rounds_tells_how_long_they_are_and_how_many(
    flags: dict[str, Any], shares: Shares | None, steps: list[int], said: str
) -> None:
    """Of each worker, whose shares may differ; the global step rises by the most that one has taken."""
    config = JobConfig(**{"mode": "local", **flags})
    rounds = mode_of(config).rounds(config, 4, shares)
    assert rounds is not None
    assert (rounds.steps, rounds.described(config.max_steps)) == (steps, f"a round: {said}")


@pytest.mark.parametrize("mode", ["async", "sync", "ssp", "allreduce"])
def test_other_modes_have_no_rounds(mode: str) -> None:
    """Each of their steps is exchanged by itself."""
    config = JobConfig(mode=mode)
    assert mode_of(config).rounds(config, 4, EVEN) is None


def test_rounds_of_a_job_whose_end_is_not_known() -> None:
    """As with ``--epochs``; and a single step is no plural."""
    assert Rounds([1, 1], "--sync_every=1", 2).described(None) == "a round: 1 step (--sync_every=1)"
