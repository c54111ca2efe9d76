"""The protocol of shards under random schedules, with real operations: nothing is lost, whoever is lost when."""

import functools
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

from tfps.data.dealer import Dealer
from tfps.data.examples import Examples
from tfps.data.hand import Hand, Supply
from tfps.data.order import Indices
from tfps.data.stream import Stream
from tfps.modes.recovery import Fence

SIZE, WORKERS, BATCH, EPOCHS = 61, 3, 4, 3
PARAMS = {"data_policy": "dynamic", "epochs": EPOCHS, "partition": None, "seed": 1, "batch_size": BATCH}


@functools.cache
def server() -> Any:
    """Return the server of all tests here, on loopback; it cannot be stopped."""
    return tf.train.Server.create_local_server()


class Part:
    """The graph of one worker, and its session."""

    def __init__(self, worker: int) -> None:
        with tf.Graph().as_default() as graph:
            self.counts = tf.Variable(lambda: tf.zeros([SIZE], tf.int64), use_resource=True, name="counts")
            self.dealer = Dealer(self.counts, 0, SIZE, WORKERS, worker)
            self.fence = self.dealer.fenced(Fence(tf.placeholder(tf.int64, [None]), tf.no_op()))
            self.ids, self.given = tf.placeholder(tf.int64, [None]), tf.placeholder(tf.int64, [SIZE])
            self.load, self.now = self.counts.assign(self.given, read_value=False), self.counts.read_value()
            self.update = self.counts.scatter_add(tf.IndexedSlices(tf.ones_like(self.ids), self.ids)).op
        self.session = tf.Session(server().target, graph=graph)


class Job:
    """The PS' variables and the workers' processes."""

    def __init__(self, counts: Indices, size: int) -> None:
        self.parts = [Part(worker) for worker in range(WORKERS)]
        self.chief = self.parts[0]
        self.chief.session.run(self.chief.load, {self.chief.given: counts})
        self.chief.dealer.begin(self.chief.session, counts, size)

    def start(self, worker: int) -> Any:
        """Start a process of a worker: its hand, the batches in it, and how many it has trained on."""
        stream = Stream(Examples(SIZE, lambda ids: (ids, ids)), PARAMS, WORKERS, worker)
        hand = Hand(stream, self.parts[worker].dealer, EPOCHS)
        process = SimpleNamespace(hand=hand, trained=0, batches=[], part=self.parts[worker])
        stream.put = process.batches.append  # type: ignore[method-assign]
        hand.join(process.part.session)
        return process

    def lose(self, worker: int) -> None:
        """Let another worker find that one lost."""
        part = self.parts[(worker + 1) % WORKERS]
        assert part.session.run(part.fence.held_by)[worker] or self.read().min() >= EPOCHS
        part.session.run(part.fence.raise_, {part.fence.workers: [worker]})
        assert not part.session.run(part.fence.held_by)[worker]

    def train(self, process: Any) -> bool:
        """Train on a batch, if there is one; return whether the worker is at its end."""
        part = process.part
        supply = process.hand.fill(part.session, process.trained + 1, process.trained)
        if process.hand.batches > process.trained:
            part.session.run(part.update, {part.ids: process.batches[process.trained]})
            process.trained += 1
            return False
        return bool(supply is Supply.ENDED)

    def read(self) -> Indices:
        """Return how often each example has been read."""
        counts: Indices = self.chief.session.run(self.chief.now)
        return counts


@pytest.mark.parametrize("seed", [0, 1, 2, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(3, 12))])
def test_each_example_is_read_whoever_is_lost(seed: int) -> None:
    """Workers train in any order, die, are fenced or not, and start again; each example is read so often, or more."""
    random, job = np.random.default_rng(seed), Job(np.zeros(SIZE, np.int64), 5)
    processes = [job.start(worker) for worker in range(WORKERS)]
    ended, deaths = [False] * WORKERS, 0
    for _ in range(2000):
        worker = int(random.integers(WORKERS))
        if processes[worker] is None:
            if random.random() < 0.3:
                processes[worker] = job.start(worker)
        elif seed % 3 and random.random() < 0.05 and not all(ended):
            processes[worker], ended[worker] = None, False
            deaths += 1
            if random.random() < 0.5:
                job.lose(worker)
        else:
            ended[worker] = job.train(processes[worker])
        if all(ended):
            break
    assert all(ended)
    assert job.read().min() == EPOCHS
    assert deaths or (job.read() == EPOCHS).all()
    assert job.read().sum() <= SIZE * EPOCHS + deaths * 64


def test_a_resumed_run_reads_what_is_left() -> None:
    """Shards are cut of what the counts leave unread, however uneven they are."""
    job = Job(np.random.default_rng(1).integers(0, EPOCHS + 1, SIZE), 7)
    processes = [job.start(worker) for worker in range(WORKERS)]
    left = list(range(WORKERS))
    for turn in range(2000):
        left = [worker for worker in left if worker != turn % WORKERS or not job.train(processes[worker])]
    assert not left
    assert (job.read() == EPOCHS).all()
