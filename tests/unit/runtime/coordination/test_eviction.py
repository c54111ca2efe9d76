"""Which workers are evicted while others wait for them."""

import contextlib
from collections.abc import Mapping
from typing import Any

import pytest
from support.cluster import cluster_of, session_config, shared_servers, target_of
from support.listeners import Speaker

from tfps.cluster.spec import Cluster, Task
from tfps.modes.recovery import Fence
from tfps.runtime.coordination.eviction import Eviction
from tfps.runtime.coordination.job_state import JobState
from tfps.runtime.coordination.job_variables import all_variables
from tfps.runtime.coordination.state_reader import JobStateReader
from tfps.runtime.process import tensorflow_import

tensorflow_import.load_v1()

import tensorflow.compat.v1 as tf  # noqa: E402

FENCE = Fence("workers", "raise", "held_by")


class Silence:
    """A heartbeat that knows for how long each worker was silent."""

    def __init__(self, secs: Mapping[int, float]) -> None:
        self.silent_secs = secs.__getitem__
        self.pulse_of = {index: 100 + index for index in secs}.__getitem__


class Reader:
    """Notes which workers are to be evicted."""

    def __init__(self) -> None:
        self.asked: list[Mapping[int, int]] = []

    def evict(self, _fence: Fence, pulses: Mapping[int, int]) -> None:
        """Note that."""
        self.asked.append(pulses)


@pytest.mark.parametrize(
    ("is_up", "secs", "lost"),
    [(True, 9.0, False), (False, 9.0, False), (True, 11.0, False), (False, 11.0, True), (True, 31.0, True)],
)
def test_who_is_lost(is_up: bool, secs: float, lost: bool) -> None:
    """A worker that has ended, after 10 s without a heartbeat; one whose port is open, after 30 s."""
    with contextlib.ExitStack() as stack:
        there = stack.enter_context(contextlib.closing(Speaker(Task("worker", 1)))).address
        cluster = Cluster(("127.0.0.1:1",), ("127.0.0.1:2", there if is_up else "127.0.0.1:3"))
        for fence, expected in ((FENCE, lost), (Fence("workers", "raise"), False), (None, False)):
            reader, silence = Reader(), Silence({1: secs})
            Eviction(cluster, Task("worker", 0), fence, silence, reader).act()  # type: ignore[arg-type]
            assert reader.asked == ([{1: 101}] if expected else [])


@pytest.mark.slow
def test_who_has_come_back_or_holds_nobody_is_not_evicted(caplog: pytest.LogCaptureFixture) -> None:
    """The heartbeats and the mode's state are read again on the PS, and the log names who is evicted."""
    caplog.set_level("INFO", "tfps")
    cluster = cluster_of(1, 3)
    with tf.Graph().as_default() as of_ps:
        init, _ = all_variables(cluster, 0, "")
    with shared_servers(), tf.Graph().as_default() as graph:
        state = JobState(cluster, 0)
        with tf.device("/job:ps/task:0"):
            held_by, fenced = (
                tf.Variable(lambda: tf.zeros([3], tf.bool), collections=[], use_resource=True, name=name)
                for name in ("held_by", "fenced")
            )
            workers = tf.placeholder(tf.int64, [None])
            raised = fenced.scatter_update(tf.IndexedSlices(tf.fill(tf.shape(workers), True), workers)).op
        fence = Fence(workers, raised, held_by.read_value())
        hold = held_by.assign([False, True, False], read_value=False)
        first = tf.group(held_by.initializer, fenced.initializer)

        def new_session(of: Any = graph) -> Any:
            config = session_config("/job:ps", "/job:worker/task:0")
            return tf.Session(target_of(Task("worker", 0)), graph=of, config=config)

        reader = JobStateReader(new_session, state, None)
        with new_session(of_ps) as session:
            session.run(init)
        with new_session() as session:
            session.run(first)
            session.run(hold)
            reader.evict(fence, {1: 7, 2: 0})  # worker/1 has sent other heartbeats than those that are known
            assert session.run(fenced.read_value()).tolist() == [False, False, False]
            assert "lost" not in caplog.text
            reader.evict(fence, {1: 0, 2: 0})
            assert session.run(fenced.read_value()).tolist() == [False, True, False]
    assert "lost worker/1: no heartbeat; no worker waits for it until it is started again" in caplog.text
