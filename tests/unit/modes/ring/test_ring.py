"""The ring on real servers: sums and gathered values by hand, and parts of another generation."""

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import tensorflow.compat.v1 as tf
from support import cluster

from tfps.cluster.spec import Task
from tfps.modes.ring import gradients
from tfps.modes.ring.ring import Ring
from tfps.modes.worker_queues import STALE

pytestmark = pytest.mark.slow

N = 3
VECTORS = np.float32([[1, 2, 4, 8, 16], [32, 64, 128, 256, 512], [0.5, 0.25, 1024, 2048, 4096]])
ROWS: Sequence[tuple[Any, Any]] = [([1, 1], [[1.0], [2.0]]), ([], np.zeros([0, 1])), ([0, 1], [[4.0], [8.0]])]


class Worker:
    """One worker of a ring: the sum of a vector, and the mean of a sparse and two dense gradients."""

    def __init__(self, index: int) -> None:
        with tf.Graph().as_default(), tf.device(f"/job:worker/task:{index}"):
            self.generation = tf.placeholder(tf.int64, [])
            ring = Ring(N, index, tf.constant(7, tf.int64))
            self.begin = lambda: ring.begin(self.generation)
            total = ring.sum(tf.constant(VECTORS[index]))
            variables = [tf.get_variable(name, [5], use_resource=True) for name in ("a", "b")]
            table = tf.get_variable("table", [4, 1], use_resource=True)
            rows, values = ROWS[index]
            sparse = tf.IndexedSlices(tf.constant(np.float32(values)), tf.constant(np.int64(rows)))
            half = tf.cast(tf.constant(VECTORS[index]) / 16, tf.float16)
            pairs = [(tf.constant(VECTORS[index]), variables[0]), (sparse, table), (half, variables[1])]
            means = [one for one, _ in gradients.mean(pairs, ring)]
            self.result = [total, means[0], means[1].indices, means[1].values, means[2]]
            self.sent, begun = ring.sent, self.begin()
            config = tf.ConfigProto(allow_soft_placement=True)
            self.session = tf.Session(cluster.target_of(Task("worker", index)), config=config)
            self.begun = begun

    def start(self, generation: int) -> None:
        """Enter a generation."""
        self.session.run(self.begun, {self.generation: generation})

    def run(self) -> Any:
        """Take part in the ring once."""
        options = tf.RunOptions(timeout_in_ms=30000)
        return self.session.run([self.result, self.sent], options=options)[0]


@pytest.fixture
def workers() -> Iterator[Sequence[Worker]]:
    """Return three workers."""
    with cluster.shared_servers():
        yield [Worker(index) for index in range(N)]


def test_all_have_the_same_sums_and_means(workers: Sequence[Worker]) -> None:
    """A vector whose length n does not divide, rows of which one worker has none, and two types; twice."""
    for generation in (1, 2):
        for worker in workers:
            worker.start(generation)
        with ThreadPoolExecutor(N) as pool:
            results = [future.result(100) for future in [pool.submit(worker.run) for worker in workers]]
        for total, dense, rows, values, half in results:
            np.testing.assert_array_equal(total, VECTORS.sum(axis=0))
            np.testing.assert_array_equal(dense, VECTORS.sum(axis=0) / np.float32(3))
            assert rows.tolist() == [1, 0]  # in the order of the workers
            np.testing.assert_array_equal(values, np.float32([[11], [4]]) / np.float32(3))
            assert half.dtype == np.float16
            np.testing.assert_allclose(half, (VECTORS / 16).sum(axis=0) / 3, rtol=1e-3)


def test_nothing_of_another_generation_arrives(workers: Sequence[Worker]) -> None:
    """A worker that was lost fails, and leaves nothing in the queues of those that went on."""
    for index, worker in enumerate(workers):
        worker.start(1 if index == 1 else 2)
    with pytest.raises(tf.errors.InvalidArgumentError, match=STALE):
        workers[1].run()
    workers[1].start(2)
    with ThreadPoolExecutor(N) as pool:
        results = [future.result(100) for future in [pool.submit(worker.run) for worker in workers]]
    assert all((result[0] == VECTORS.sum(axis=0)).all() for result in results)


def test_a_restart_removes_what_has_arrived(workers: Sequence[Worker]) -> None:
    """What one worker has sent in a run that was interrupted does not count twice."""
    for worker in workers:
        worker.start(1)
    with pytest.raises(tf.errors.DeadlineExceededError):
        workers[0].session.run([workers[0].result], options=tf.RunOptions(timeout_in_ms=1000))
    workers[0].session.run(workers[0].sent[0], options=tf.RunOptions(timeout_in_ms=10000))
    for worker in workers:
        worker.start(2)
    with ThreadPoolExecutor(N) as pool:
        results = [future.result(100) for future in [pool.submit(worker.run) for worker in workers]]
    assert all((result[0] == VECTORS.sum(axis=0)).all() for result in results)
