"""Which share of the machine's cores a task takes."""

import pytest

from tfps.cluster.spec import Cluster, Task
from tfps.runtime.process import thread_count

ALONE = Cluster(("a:1",), ("b:1", "c:1"))
TOGETHER = Cluster(("a:1",), ("a:2", "a:3"))


@pytest.mark.parametrize(
    ("cluster", "cores", "overlap", "share"),
    [
        (ALONE, 8, True, (8, 8)),
        (ALONE, 1, True, (1, 2)),
        (ALONE, 1, False, (1, 1)),
        (TOGETHER, 8, True, (2, 2)),
        (TOGETHER, 2, True, (1, 2)),
        (TOGETHER, 2, False, (1, 1)),
    ],
)
def test_tasks_of_one_host_share_its_cores(
    monkeypatch: pytest.MonkeyPatch, cluster: Cluster, cores: int, overlap: bool, share: tuple[int, int]
) -> None:
    """A task takes its share of its host's cores; where steps overlap it has two inter-op threads at least."""
    monkeypatch.setattr(thread_count, "cores", lambda: cores)
    monkeypatch.delenv("TF_NUM_INTRAOP_THREADS", raising=False)
    monkeypatch.delenv("TF_NUM_INTEROP_THREADS", raising=False)
    assert thread_count.pool_sizes(cluster, Task("worker", 1), overlap) == share


@pytest.mark.parametrize(("name", "share"), [("INTRAOP", (0, 4)), ("INTEROP", (4, 0))])
def test_what_the_user_set_stays(monkeypatch: pytest.MonkeyPatch, name: str, share: tuple[int, int]) -> None:
    """A number in TensorFlow's own variable is left to TensorFlow."""
    monkeypatch.setattr(thread_count, "cores", lambda: 4)
    monkeypatch.setenv(f"TF_NUM_{name}_THREADS", "3")
    assert thread_count.pool_sizes(ALONE, Task("ps", 0), True) == share
