"""The program of the page ``service-ray``: 25 actors, 5 steps each, in a Ray cluster of one node."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from support.page_programs import check_async, check_sync, run
from support.ray_engine import RayCluster, ray_node

pytest.importorskip("ray")

PAGE = "service-ray.md"


@pytest.fixture(scope="module")
def node() -> Iterator[RayCluster]:
    """Yield the cluster."""
    with ray_node() as cluster:
        yield cluster


def test_sync_is_the_arithmetic_of_one_process(node: RayCluster, tmp_path: Path) -> None:
    """The sum of 25 gradients makes an update."""
    check_sync(tmp_path / "job", run(PAGE, tmp_path, "sync", "job", secs=250, **node.driver_env))


def test_async_applies_each_gradient_once(node: RayCluster, tmp_path: Path) -> None:
    """In whichever order they come."""
    check_async(tmp_path / "job", run(PAGE, tmp_path, "async", "job", secs=250, **node.driver_env))
