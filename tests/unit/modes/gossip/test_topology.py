"""Who mixes with whom: graphs, weights, and graphs that do not fit a job."""

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from tfps.config.job_config import JobConfig
from tfps.config.topology import topology
from tfps.modes import registry
from tfps.modes.gossip.topology import neighbors, weights


def matrix(value: str, size: int) -> np.ndarray:
    """Return the mixing matrix of a graph."""
    graph, found = neighbors(value, size), np.zeros([size, size])
    for worker in range(size):
        for other, weight in weights(graph, worker).items():
            found[worker, other] = weight
        found[worker, worker] = 1 - found[worker].sum()
    return found


STAR, PATH = (
    lambda size: ",".join(f"0-{one}" for one in range(1, size)),
    lambda size: ",".join(f"{a}-{b}" for a, b in pairwise(range(size))),
)


@pytest.mark.parametrize("size", range(1, 33))
def test_all_matrices_mix(size: int) -> None:
    """They are symmetric and doubly stochastic, keep a part of each copy, and connect all: all copies become equal."""
    values = ["ring", "complete", "exponential", *([STAR(size), PATH(size)] if size > 1 else [])]
    for value in values:
        found = matrix(value, size)
        np.testing.assert_array_equal(found, found.T)
        np.testing.assert_allclose(found.sum(axis=0), 1, rtol=1e-12)
        assert (found >= 0).all()
        assert (np.diag(found) > 1e-3).all()
        second = np.sort(np.abs(np.linalg.eigvalsh(found)))[-2:-1]
        assert (second < 1 - 1e-3).all(), value
        assert registry.problems_of(JobConfig(mode="gossip", num_ps=0, topology=value), size) == []


def test_weights_by_hand() -> None:
    """``ring`` is that of the paper, ``complete`` the mean, and a denser graph mixes faster."""
    np.testing.assert_allclose(matrix("ring", 5)[0], [1 / 3, 1 / 3, 0, 0, 1 / 3])
    np.testing.assert_allclose(matrix("complete", 4), np.full([4, 4], 1 / 4))
    np.testing.assert_allclose(matrix("exponential", 8)[0], np.array([1, 1, 1, 0, 1, 0, 1, 1]) / 6)
    np.testing.assert_allclose(matrix("0-1,1-2", 3), [[2 / 3, 1 / 3, 0], [1 / 3, 1 / 3, 1 / 3], [0, 1 / 3, 2 / 3]])
    gaps = [1 - np.sort(np.abs(np.linalg.eigvalsh(matrix(value, 16))))[-2] for value in ("ring", "exponential")]
    assert gaps[1] > 5 * gaps[0]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("0 1\n2 3\n", " is not connected: worker 2 is not joined with worker 0. Add an edge, '0 2'."),
        ("0 1\n1 2\n", " is not connected: worker 3 is not joined with worker 0. Add an edge, '0 3'."),
        (
            "0 1\n1 2\n2 3\n3 4\n",
            ", line 4, names worker 4, but the workers are 0 to 3: correct the edge, or give --num_workers=5.",
        ),
    ],
)
def test_a_graph_that_does_not_fit_is_refused(text: str, problem: str, tmp_path: Path) -> None:
    """The message has the file, the line and the fix."""
    file = tmp_path / "graph.txt"
    file.write_text(text)
    job = JobConfig(mode="gossip", num_ps=0, topology=topology(str(file)))
    assert registry.problems_of(job, 4) == [f"--topology={file}{problem}"]


def test_other_flags_are_refused() -> None:
    """A half of the bits would let each worker have another mean, and other modes have no graph."""
    assert "--wire=bfloat16" in registry.problems_of(JobConfig(mode="gossip", wire="bfloat16"), 3)[0]
    assert registry.problems_of(JobConfig(mode="sync", topology="ring"), 3)[0].startswith("--topology=ring is for")
