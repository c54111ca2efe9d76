"""``--mode=local --async_rounds`` on real servers: rounds in an order that the test chooses, and whole jobs."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow.compat.v1 as tf
from integration.test_local_sgd import STEPS, by_hand, input_fn, model_fn
from support.cluster import by_worker, dataset_of, linear, model_of, shared_servers, train, variables_of
from support.held_steps import ByHand
from support.processes import summary

import tfps
from tfps.cluster.spec import Cluster, Task
from tfps.config.job_config import JobConfig
from tfps.modes.registry import problems_of
from tfps.runtime.graph import builder, placement

pytestmark = pytest.mark.slow

FLAGS = {"mode": "local", "async_rounds": True}


class Quadratic:
    """A model whose gradient depends on its weights: worker i pulls them to 2^i, with momentum, on one PS each."""

    def model(self) -> Any:
        """Return the model."""

        def own_input(mode: str, params: Any, context: Any) -> Any:
            return None if mode == "eval" else dataset_of(np.float32([2.0**context.input_pipeline_id])).repeat()

        def own_model(features: Any, labels: Any, mode: str, params: Any) -> Any:
            weights = [tf.get_variable(name, [3], initializer=tf.zeros_initializer()) for name in ("first", "second")]
            average = tf.get_variable("average", [], initializer=tf.ones_initializer(), trainable=False)
            tf.add_to_collection(tf.GraphKeys.UPDATE_OPS, average.assign(0.5 * (average + tf.squeeze(features["x"]))))
            loss = tf.add_n([0.5 * tf.reduce_sum((weight - features["x"]) ** 2) for weight in weights])
            return tfps.ModelSpec(loss=loss, optimizer=tf.train.MomentumOptimizer(0.25, 0.5))

        return model_of(own_input, own_model)


class Rounds(ByHand):
    """Two workers whose steps and rounds a test takes itself."""

    def take(self, worker: int, steps: int) -> None:
        """Take local steps."""
        for _ in range(steps):
            self.sessions[worker].run(self.built[worker].step.train_op)

    def end(self, worker: int) -> None:
        """End a round, and begin the next."""
        self.sessions[worker].run(self.built[worker].step.limit.renew)

    def read(self, worker: int, tensor: Any) -> Any:
        """Return the value of a tensor, or of a function of ``Step`` that makes one."""
        with self.built[worker].graph.as_default():
            return self.sessions[worker].run(tensor() if callable(tensor) else tensor)

    def weights(self) -> Mapping[str, Any]:
        """Return the variables of the model, and the global step."""
        with self.built[0].graph.as_default():
            variables = [v for v in tf.global_variables() if "/" not in v.op.name]
            values: Mapping[str, Any] = self.sessions[0].run({v.op.name: v for v in variables})
            return values


class Hand:
    """What two workers and the PS do, by hand, with a rate of 0.5 and a momentum on the PS."""

    def __init__(self, server: Mapping[str, Any]) -> None:
        self.weight, self.average, self._server = 0.0, 1.0, 0.0
        self._momentum = server.get("server_momentum", 0.0)
        self._copies = [[0.0, 1.0, 0.0] for _ in range(2)]  # weight, average, slot
        self._before = [0.0, 0.0]

    def take(self, worker: int, steps: int) -> None:
        """Take local steps."""
        copy = self._copies[worker]
        for _ in range(steps):
            copy[1] = 0.5 * (copy[1] + 2**worker)
            copy[2] = 0.5 * copy[2] + copy[0] - 2**worker
            copy[0] -= 0.25 * copy[2]

    def end(self, worker: int) -> None:
        """Apply a worker's change, and let it begin again."""
        copy = self._copies[worker]
        self._server = self._momentum * self._server + (self._before[worker] - copy[0]) / 2
        self.weight -= 0.5 * self._server
        self.average = (self.average + copy[1]) / 2
        copy[:2] = self.weight, self.average
        self._before[worker] = self.weight


@pytest.mark.parametrize("num_ps", [1, 2])
@pytest.mark.parametrize("server", [{}, {"server_optimizer": "momentum", "server_momentum": 0.5}])
def test_changes_are_applied_in_the_order_of_their_arrival(num_ps: int, server: dict[str, Any]) -> None:
    """Each to what the PS have then, from what its worker began with; one waits for nobody."""
    with shared_servers():
        job, hand = Rounds(Quadratic(), num_ps, **FLAGS, sync_every=3, server_learning_rate=0.5, **server), Hand(server)
        job.take(1, 2)
        hand.take(1, 2)
        for worker, steps in ((0, 3), (0, 3), (1, 1), (0, 3), (1, 3)):
            job.take(worker, steps)
            job.end(worker)
            hand.take(worker, steps)
            hand.end(worker)
            found = job.weights()
            for name in ("first", "second"):
                np.testing.assert_allclose(found[name], np.full(3, hand.weight), rtol=1e-5)
            np.testing.assert_allclose(found["average"], hand.average, rtol=1e-5)
        assert found["global_step"] == 15 // 2
        assert job.read(0, job.built[0].step.steps_taken).tolist() == [9, 6]
        assert job.read(0, job.built[0].step.staleness)[:4].tolist() == [2, 2, 1, 0]


def test_a_worker_that_has_gone_loses_its_grant_and_its_round() -> None:
    """Others may take its steps; what it still sends fails, and changes nothing, until it joins again."""
    with shared_servers():
        job = Rounds(Quadratic(), 2, **{**FLAGS, "max_steps": 10}, sync_every=8)
        first, second = job.built
        for worker in (0, 1):
            job.take(worker, 8)
        job.end(0)
        assert job.read(0, first.step.limit.allowed) == 4  # 20 in all, of which worker 1 has been granted 8
        job.sessions[0].run(first.step.fence.raise_, {first.step.fence.workers: [1]})
        before = job.weights()
        with pytest.raises(tf.errors.InvalidArgumentError, match="taken for lost"):
            job.end(1)
        np.testing.assert_equal(job.weights(), before)
        job.take(0, 4)
        job.end(0)
        assert job.read(0, first.step.limit.allowed) == 4
        job.take(0, 4)
        job.end(0)
        assert job.read(0, first.step.limit.allowed) == 2
        assert job.weights()["global_step"] == 8
        job.read(1, second.step.worker_init)
        assert job.read(1, second.step.limit.allowed) == 2
        for worker in (0, 1):
            job.take(worker, 2)
            job.end(worker)
            assert job.read(worker, lambda w=worker: job.built[w].step.draw(2, 0)).tolist() == [10, 10]
        assert job.weights()["global_step"] == 10
        assert job.read(0, first.step.steps_taken).tolist() == [18, 2]


@pytest.mark.parametrize(("every", "num_ps"), [(1, 1), (4, 2), (5, 1)])
def test_one_worker_does_what_local_does(every: int, num_ps: int, tmp_path: Path) -> None:
    """Also with a shorter last round, and state that the model and its optimizer keep."""
    found = []
    for flags in ({"mode": "local"}, FLAGS):
        directory = tmp_path / str(len(flags))
        train(
            model_of(input_fn, model_fn),
            num_ps,
            1,
            model_dir=str(directory),
            sync_every=every,
            max_steps=STEPS,
            **flags,
        )
        found.append(variables_of(directory))
    assert found[0]["global_step"] == STEPS
    assert set(found[0]) == set(found[1])
    for name, value in found[0].items():
        np.testing.assert_allclose(found[1][name], value, rtol=1e-6, err_msg=name)
    assert by_hand(every)  # the same model


def of_constant(mode: str, params: Any, context: Any) -> Any:
    """Give worker i batches of 2 ** i, one example each."""
    return None if mode == "eval" else dataset_of(np.float32([2**context.input_pipeline_id])).repeat()


def test_all_workers_together_take_the_steps_of_the_job(tmp_path: Path) -> None:
    """N times ``--max_steps``, whoever takes them; each is in the weight once, as the summary has them."""
    train(model_of(of_constant, linear), 2, 3, model_dir=str(tmp_path), sync_every=4, max_steps=30, **FLAGS)
    steps = [summary(tmp_path)["tasks"][f"worker/{index}"]["steps"] for index in range(3)]
    saved = variables_of(tmp_path)
    assert saved["global_step"] == 30
    assert sum(steps) == 90
    assert 90 / 4 <= summary(tmp_path)["rounds"]["made"] < 90
    np.testing.assert_allclose(saved["weight"], -sum(taken * 2**i for i, taken in enumerate(steps)) / 3, rtol=1e-6)


@pytest.mark.parametrize("batches", [6, 8])
def test_an_input_ends_in_a_round_or_between_two(tmp_path: Path, batches: int) -> None:
    """The worker brings what it has, or nothing: then the momentum of the PS does not move the weight either."""

    def uneven(mode: str, params: Any, context: Any) -> Any:
        return None if mode == "eval" else dataset_of(np.float32([1] * (batches if context.input_pipeline_id else 5)))

    flags = {"server_optimizer": "momentum", "server_momentum": 0.5, "server_learning_rate": 1.0}
    train(model_of(uneven, linear), 1, 1, model_dir=str(tmp_path / "a"), sync_every=5, max_steps=40, **FLAGS, **flags)
    assert variables_of(tmp_path / "a")["weight"] == -5
    train(model_of(uneven, linear), 1, 2, model_dir=str(tmp_path / "b"), sync_every=4, max_steps=40, **FLAGS)
    saved = variables_of(tmp_path / "b")
    assert saved["global_step"] == (5 + batches) // 2
    assert saved["weight"] == -(5 + batches) / 2


def test_one_worker_takes_what_another_one_has_left(tmp_path: Path) -> None:
    """The input of one ends early; the steps of the job are taken all the same."""
    rows = by_worker(x=[np.ones(3, np.float32), np.ones(300, np.float32)])
    train(model_of(rows, linear), 1, 2, model_dir=str(tmp_path), sync_every=7, max_steps=50, **FLAGS)
    tasks, saved = summary(tmp_path)["tasks"], variables_of(tmp_path)
    assert [tasks[f"worker/{index}"]["steps"] for index in (0, 1)] == [3, 97]
    assert (saved["global_step"], saved["weight"]) == (50, -50)


def test_what_ends_a_round_changes_nothing_before_it_has_ended() -> None:
    """A worker sends what its copies hold before it changes any of them."""
    cluster = Cluster(("p:1", "p:2"), ("w:1", "w:2"))
    built = builder.training(JobConfig(**FLAGS), cluster, Task("worker", 0), model_of(input_fn, model_fn))
    ops = placement.ancestors([built.step.limit.renew])
    changes = [op for op in ops if op.type.startswith("Assign") and placement.task_of(op) == "worker/0"]
    changes = [op for op in changes if "/none/" not in op.name]  # which is always 0
    assert len(changes) >= 2 * 3 + 3
    for op in changes:
        before = placement.ancestors([op])
        assert len({placement.task_of(one) for one in before if one.type == "ConsumeMutexLock"}) == 2, op.name


def test_a_fraction_of_the_workers_is_refused() -> None:
    """There is no common round whose workers could be chosen."""
    [problem] = problems_of(JobConfig(worker_fraction=0.5, **FLAGS), 4)
    assert problem.startswith("--worker_fraction=0.5 ")
    assert "--async_rounds=1" in problem
    [problem] = problems_of(JobConfig(mode="sync", async_rounds=True), 4)
    assert (
        problem
        == "--async_rounds=1 is for --mode=local, and this job has --mode=sync: give --mode=local, or leave it out."
    )
