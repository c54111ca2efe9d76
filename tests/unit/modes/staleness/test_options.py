"""Claims about the options of async for stale gradients: without them nothing changes, and bad ones are refused."""

from typing import Any

import pytest
import tensorflow.compat.v1 as tf
from support.cluster import LINEAR
from support.processes import run_tfps

from tfps.cluster.spec import Cluster, Task
from tfps.config.job_config import JobConfig
from tfps.modes.staleness import options
from tfps.runtime.graph import builder


def test_without_options_the_graph_is_that_of_plain_async() -> None:
    """No operation is added, and there is nothing to finish."""
    with tf.Graph().as_default() as graph:
        weight = tf.get_variable("weight", [], use_resource=True)
        optimizer = tf.train.FtrlOptimizer(1.0)
        pairs = optimizer.compute_gradients(weight * 2.0)
        before = len(graph.get_operations())
        assert options.of(JobConfig(), optimizer, pairs) == options.Options(optimizer)
        assert options.of(JobConfig(staleness_lr=False), optimizer, pairs) == options.Options(optimizer)
        assert len(graph.get_operations()) == before


@pytest.mark.parametrize("flags", [{}, {"staleness_lr": False}, {"staleness_lr": True}, {"delay_compensation": 0.04}])
def test_a_step_has_what_its_options_need_and_no_more(flags: dict[str, Any]) -> None:
    """The counters of updates for one, no variable for the other, and nothing to finish without both."""
    built = builder.training(JobConfig(**flags), Cluster(("p:1",), ("w:1",)), Task("worker", 0), LINEAR)
    made = {op.name for op in built.graph.get_operations() if op.name.startswith(("tfps/updates_", "tfps/read"))}
    assert any(name.startswith("tfps/updates_") for name in made) == bool(flags.get("staleness_lr"))
    assert any(name.startswith("tfps/read") for name in made) == ("delay_compensation" in flags)
    assert (built.step.finish is not None) == any(flags.values())


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--staleness_lr=2"], "--staleness_lr"),
        (["--delay_compensation=0"], "--delay_compensation=0"),
        (["--delay_compensation=-1"], "--delay_compensation=-1"),
        (["--delay_compensation=nan"], "--delay_compensation=nan"),
        (["--mode=sync", "--staleness_lr=1"], "--staleness_lr=1 is for --mode=async"),
        (["--mode=sync", "--delay_compensation=0.04"], "--delay_compensation=0.04 is for --mode=async"),
        (["--staleness_lr=1", "--optimizer=ftrl"], "--staleness_lr=1 is not for --optimizer=ftrl"),
    ],
)
def test_a_bad_value_or_combination_is_refused_before_anything_starts(flags: list[str], said: str) -> None:
    """Exit code 2, and one line with the flag, the value, and what to do."""
    ended = run_tfps("launch", *flags)
    assert ended.returncode == 2
    assert said in ended.stderr
    assert "Traceback" not in ended.stderr
