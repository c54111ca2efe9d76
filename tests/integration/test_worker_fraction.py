"""``--worker_fraction`` on real servers: the mean of the drawn workers by hand, and the bytes that really cross."""

import re
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import tensorflow.compat.v1 as tf
from support.cluster import cluster_of, model_of, session_config, shared_servers, target_of

import tfps
from tfps.cluster.spec import Task
from tfps.config.job_config import JobConfig
from tfps.runtime.graph import builder, plan
from tfps.runtime.graph.background_updates import UpdateRunner

pytestmark = pytest.mark.slow

WORKERS, EVERY, SIZE, ROUNDS = 3, 2, 1000, 36
LARGE = 2 * 4 * SIZE  # bytes of the two variables, one on each PS
SMALL = 100  # bytes of weights, steps, tokens and conditions
CONFIG = JobConfig(mode="local", sync_every=EVERY, worker_fraction=0.5, max_steps=100, seed=7, batch_size=1)
_RECEIVED = re.compile(r"\[(\d+)B\] .* from /job:(\w+)/.* to /job:(\w+)/")


def input_fn(mode: str, params: Any, context: Any) -> Any:
    """Give worker i batches of i + 1 examples, each 2 ** i."""
    worker = context.input_pipeline_id
    batch = {"x": np.full([worker + 1], 2.0**worker, np.float32)}
    return None if mode == "eval" else tf.data.Dataset.from_tensors((batch, 0.0)).repeat()


def model_fn(features: Any, labels: Any, mode: str, params: Any) -> Any:
    """Be a model whose gradient depends on its weights, and on a variable that nothing changes."""
    weights = [tf.get_variable(name, [SIZE], initializer=tf.zeros_initializer()) for name in ("first", "second")]
    unchanged = tf.get_variable("unchanged", [], initializer=tf.ones_initializer(), trainable=False)
    target = unchanged * tf.reduce_mean(features["x"])
    loss = tf.add_n([0.5 * tf.reduce_sum((weight - target) ** 2) for weight in weights])
    return tfps.ModelSpec(loss=loss, optimizer=tf.train.GradientDescentOptimizer(0.25))


MODEL = model_of(input_fn, model_fn)


class Cluster:
    """Three workers and two PS, whose rounds a test takes itself."""

    def __init__(self) -> None:
        members = cluster_of(2, WORKERS)
        self.steps = []
        self.sessions: list[Any] = []
        for index in range(WORKERS):
            task = Task("worker", index)
            built = builder.training(CONFIG, members, task, MODEL)
            filters = session_config("/job:ps", f"/job:worker/task:{index}")
            session = tf.Session(target_of(task), graph=built.graph, config=filters)
            self.steps.append(built.step)
            self.sessions.append(session)
            now = {built.step.recovery.generation: 0}
            if index == 0:
                with built.graph.as_default():
                    first = tf.global_variables_initializer()
                    self.trained = tf.trainable_variables()
                for op in (first, built.load, built.step.chief_init):
                    session.run(op, now)
                self._update = built.updates, now
            for op in (built.iterator.initializer, built.step.worker_init):
                session.run(op)
        UpdateRunner(self.sessions[0], *self._update)

    def allowed(self) -> Sequence[int]:
        """Return how many steps each worker may take now."""
        return [int(session.run(step.limit.allowed)) for session, step in zip(self.sessions, self.steps, strict=True)]

    def take(self, allowed: Sequence[int]) -> None:
        """Take the local steps."""
        for session, step, count in zip(self.sessions, self.steps, allowed, strict=True):
            for _ in range(count):
                session.run(step.train_op)

    def end_round(self, traced: int) -> Mapping[str, int]:
        """End a round of all workers. Return the bytes that one pushed and pulled, as the receivers have noted them.

        Also the number of noted tensors, those of branches not taken included: each has none or few bytes. It is the
        same for each round of a worker, unless TensorFlow has begun to note too late.
        """
        trace, full = tf.RunMetadata(), {"options": tf.RunOptions(trace_level=tf.RunOptions.FULL_TRACE)}

        def end(index: int) -> None:
            self.sessions[index].run(
                self.steps[index].limit.renew, **(full | {"run_metadata": trace} if index == traced else {})
            )

        threads = [threading.Thread(target=end, args=(index,), daemon=True) for index in range(WORKERS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(100)
        assert not any(thread.is_alive() for thread in threads)
        return _crossed(trace)

    def values(self) -> Sequence[Any]:
        """Return the trained variables on the PS."""
        found: Sequence[Any] = self.sessions[0].run(self.trained)
        return found


def _crossed(trace: Any) -> Mapping[str, int]:
    bytes_of = {"pushed": 0, "pulled": 0, "tensors": 0}
    ways = {("worker", "ps"): "pushed", ("ps", "worker"): "pulled"}
    for device in trace.step_stats.dev_stats:
        for node in device.node_stats:
            if node.node_name == "RecvTensor":
                found = _RECEIVED.match(node.timeline_label)
                assert found, node.timeline_label
                bytes_of["tensors"] += 1
                if way := ways.get((found[2], found[3])):
                    bytes_of[way] += int(found[1])
    return bytes_of


def test_a_waiting_worker_sends_and_gets_nothing_large_and_the_mean_is_that_of_the_drawn() -> None:
    """Over rounds in which each worker is drawn and waits, also twice in a row."""
    planned = plan.make(CONFIG, cluster_of(2, WORKERS), MODEL)
    all_pushed, waiting = (
        sum(one.num_bytes or 0 for one in found) for found in (planned.round_pushed, planned.waiting_pushed or ())
    )
    with shared_servers():
        job, weight, drawn, noted = Cluster(), 0.0, [], []
        allowed = job.allowed()
        for number in range(ROUNDS):
            drawn.append([count > 0 for count in allowed])
            assert sorted(allowed) == [0, EVERY, EVERY]
            job.take(allowed)
            worker = number % WORKERS
            crossed, allowed = job.end_round(worker), job.allowed()
            changes = [(2.0**one - weight) * (1 - 0.75**EVERY) for one in range(WORKERS)]
            parts = [(one + 1) * drawn[-1][one] for one in range(WORKERS)]
            weight += float(np.dot(parts, changes)) / sum(parts)
            for found in job.values():
                np.testing.assert_allclose(found, np.full(SIZE, weight), rtol=1e-5)
            noted.append((worker, drawn[-1][worker], allowed[worker] > 0, crossed))
    most = {worker: max(each["tensors"] for one, *_, each in noted if one == worker) for worker in range(WORKERS)}
    complete = [one for one in noted if one[-1]["tensors"] == most[one[0]]]
    for _, is_drawn, is_next, crossed in complete:
        assert crossed["pushed"] <= (all_pushed if is_drawn else waiting)
        assert (crossed["pushed"] >= LARGE) == is_drawn
        assert (crossed["pulled"] >= LARGE) == is_next
        assert crossed["pulled"] <= (LARGE if is_next else 0) + SMALL
    assert len(complete) >= ROUNDS // 2
    assert len({one[1:3] for one in complete}) == 4  # drawn or not, and then again drawn or not
    assert len({tuple(one) for one in drawn}) == WORKERS


def test_the_plan_tells_both_kinds_of_rounds() -> None:
    """And only one where all workers train in each round."""
    sizes = {}
    planned = plan.make(CONFIG, cluster_of(2, WORKERS), MODEL)
    for name in ("round_pushed", "round_pulled", "waiting_pushed", "waiting_pulled"):
        sizes[name] = sum(one.num_bytes or 0 for one in getattr(planned, name))
    assert LARGE <= sizes["round_pushed"] <= LARGE + SMALL
    assert LARGE <= sizes["round_pulled"] <= LARGE + SMALL
    assert 0 < sizes["waiting_pushed"] <= SMALL
    assert 0 < sizes["waiting_pulled"] <= SMALL
    whole = plan.make(CONFIG.replace(worker_fraction=None), cluster_of(2, WORKERS), MODEL)
    assert whole.waiting_pushed is whole.waiting_pulled is None
