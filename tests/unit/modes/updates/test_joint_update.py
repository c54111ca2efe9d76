"""Claims about optimizers with branches, loops and functions: concurrent updates of two workers lose nothing."""

from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import tensorflow.compat.v1 as tf
from support.cluster import dataset_of, model_of, train, variables_of
from tensorflow.python.ops import cond_v2, while_v2

import tfps
from tfps.cluster.spec import Cluster, Task
from tfps.config.job_config import JobConfig
from tfps.modes.updates import joint_update
from tfps.modes.updates.moments import RUN_ID
from tfps.modes.updates.update_ops import place_of
from tfps.optimizers.registry import OPTIMIZERS
from tfps.runtime.graph import builder
from tfps.runtime.graph.placement import ancestors

pytestmark = pytest.mark.slow

STEPS = 200
EVERY = 4


def ones(mode: str, params: Any, context: Any) -> Any:
    """Be an ``input_fn`` of ones, without end."""
    return None if mode == "eval" else dataset_of([1.0]).repeat().batch(1)


def model(optimizer: Any) -> Any:
    """Return a model with a vector and a scalar, of which one unit of gradient adds 1 to each."""

    def model_fn(features: Any, labels: Any, mode: str, params: Any) -> tfps.ModelSpec:
        vector = tf.get_variable("vector", [4000], initializer=tf.zeros_initializer())
        scalar = tf.get_variable("scalar", [], initializer=tf.zeros_initializer())
        loss = scalar * tf.reduce_mean(features["x"]) + tf.reduce_sum(vector)
        return tfps.ModelSpec(loss=loss, optimizer=optimizer())

    return model_of(ones, model_fn)


class _Wrapper(tf.train.Optimizer):  # type: ignore[misc]
    """Applies gradients with another optimizer, in a subclass's way."""

    def __init__(self, inner: Any) -> None:
        super().__init__(False, "Wrapper")
        self.inner = inner

    def compute_gradients(self, *args: Any, **kwargs: Any) -> Any:
        return self.inner.compute_gradients(*args, **kwargs)


class _Accumulating(_Wrapper):
    """Applies the sum of ``EVERY`` gradients in a branch, and starts again."""

    def apply_gradients(self, grads_and_vars: Any, *_args: Any, **_kwargs: Any) -> Any:
        zeros = tf.zeros_initializer()
        count = tf.get_variable("count", [], tf.int64, initializer=zeros, trainable=False)
        variables = [one for _, one in grads_and_vars]
        sums = [tf.get_variable(f"{one.op.name}/sum", one.shape, initializer=zeros) for one in variables]
        added = [one.assign_add(gradient) for one, (gradient, _) in zip(sums, grads_and_vars, strict=True)]
        with tf.control_dependencies(added):
            number = count.assign_add(1)

        def apply() -> Any:
            pairs = [(one.read_value(), variable) for one, variable in zip(sums, variables, strict=True)]
            with tf.control_dependencies([self.inner.apply_gradients(pairs)]):
                return tf.group(*(one.assign(tf.zeros_like(one)) for one in sums))

        with tf.control_dependencies([number]):
            return tf.group(tf.cond(tf.equal(number % EVERY, 0), apply, tf.no_op))


class _IfSmall(_Wrapper):
    """Applies the gradients in a branch, unless they are too large."""

    def apply_gradients(self, grads_and_vars: Any, *_args: Any, **_kwargs: Any) -> Any:
        norm = tf.linalg.global_norm([gradient for gradient, _ in grads_and_vars])
        return tf.group(tf.cond(norm < 1e6, lambda: tf.group(self.inner.apply_gradients(grads_and_vars)), tf.no_op))


def _assigned(grads_and_vars: Any) -> Any:
    """Add the gradients with a read, a sum and a write, which another update in between would undo."""
    return tf.group(*(variable.assign(variable.read_value() + gradient) for gradient, variable in grads_and_vars))


class _InLoop(_Wrapper):
    """Adds the gradients in a loop."""

    def apply_gradients(self, grads_and_vars: Any, *_args: Any, **_kwargs: Any) -> Any:
        def turn(index: Any) -> Any:
            with tf.control_dependencies([_assigned(grads_and_vars)]):
                return index + 1

        return tf.group(tf.while_loop(lambda index: index < 1, turn, [tf.constant(0)]))


class _ReadInBranch(_Wrapper):
    """Adds the gradients to what a branch has read."""

    def apply_gradients(self, grads_and_vars: Any, *_args: Any, **_kwargs: Any) -> Any:
        def added(gradient: Any, variable: Any) -> Any:
            value = tf.cond(tf.norm(gradient) < 1e6, lambda: variable.read_value() + gradient, variable.read_value)
            return variable.assign(value)

        return tf.group(*(added(*pair) for pair in grads_and_vars))


class _InFunction(_Wrapper):
    """Adds the gradients in one function that changes all variables."""

    def apply_gradients(self, grads_and_vars: Any, *_args: Any, **_kwargs: Any) -> Any:
        @tf.function
        def add(*gradients: Any) -> Any:
            for gradient, (_, variable) in zip(gradients, grads_and_vars, strict=True):
                variable.assign(variable.read_value() + gradient)
            return tf.constant(0)

        return tf.group(add(*(gradient for gradient, _ in grads_and_vars)))


class _InIf(_Wrapper):
    """Adds the gradients in an ``If``, which calls a function for each branch."""

    def apply_gradients(self, grads_and_vars: Any, *_args: Any, **_kwargs: Any) -> Any:
        def added() -> Any:
            with tf.control_dependencies([_assigned(grads_and_vars)]):
                return tf.constant(1)

        norm = tf.linalg.global_norm([gradient for gradient, _ in grads_and_vars])
        return tf.group(cond_v2.cond_v2(norm < 1e6, added, lambda: tf.constant(0)))


class _InWhile(_Wrapper):
    """Adds the gradients in a ``While``, which calls a function for each turn."""

    def apply_gradients(self, grads_and_vars: Any, *_args: Any, **_kwargs: Any) -> Any:
        def turn(index: Any) -> Any:
            with tf.control_dependencies([_assigned(grads_and_vars)]):
                return tf.identity(index) + 1

        return tf.group(while_v2.while_loop(lambda index: index < 1, turn, [tf.constant(0)]))


class _Assigning(_Wrapper):
    """Assigns what the worker computes from the old value, and so sums the gradients too, as BERT's optimizer does."""

    def apply_gradients(self, grads_and_vars: Any, *_args: Any, **_kwargs: Any) -> Any:
        assigned = []
        for gradient, variable in grads_and_vars:
            zeros = tf.zeros_initializer()
            total = tf.get_variable(f"{variable.op.name}/total", variable.shape, initializer=zeros, trainable=False)
            assigned += [total.assign(total + gradient), variable.assign(variable + gradient)]
        return tf.group(*assigned)


class _Clipping(_Wrapper):
    """Applies the gradients, and then clips the variables."""

    def apply_gradients(self, grads_and_vars: Any, *_args: Any, **_kwargs: Any) -> Any:
        with tf.control_dependencies([self.inner.apply_gradients(grads_and_vars)]):
            return tf.group(*(one.assign(tf.clip_by_value(one, -1e6, 1e6)) for _, one in grads_and_vars))


KINDS = [_Accumulating, _IfSmall, _InLoop, _ReadInBranch, _InFunction, _InIf, _InWhile, _Assigning, _Clipping]


class _After(_Wrapper):
    """Changes something after the other optimizer's update."""

    def apply_gradients(self, grads_and_vars: Any, *_args: Any, **_kwargs: Any) -> Any:
        variables = [variable for _, variable in grads_and_vars]
        done = self.inner.apply_gradients(grads_and_vars)
        with tf.control_dependencies([done]):
            return tf.group(done, self.after(variables))

    def after(self, variables: Any) -> Any:
        raise NotImplementedError


class _Averaging(_After):
    """Averages the weights, as ``tf.contrib.opt.MovingAverageOptimizer``."""

    def after(self, variables: Any) -> Any:
        return tf.train.ExponentialMovingAverage(0.5).apply(variables)


class _Decaying(_After):
    """Decays the weights, by nothing, after the step."""

    def after(self, variables: Any) -> Any:
        return tf.group(*(one.assign_sub(0.0 * one, read_value=False) for one in variables))


class _Copying(_After):
    """Copies a weight, as to a target network. With two PS, the copy is on the other one."""

    def after(self, variables: Any) -> Any:
        one, other = variables
        with tf.control_dependencies(None), tf.device(other.device):
            copy = tf.get_variable("copy", one.shape, initializer=tf.zeros_initializer(), trainable=False)
        return copy.assign(one.read_value(), read_value=False)


class _Tallying(_After):
    """Counts the updates after each, on a PS, with a number that is the worker's."""

    def after(self, variables: Any) -> Any:
        del variables
        with tf.control_dependencies(None):
            zeros = tf.zeros_initializer()
            tally = tf.get_variable("tally", [], initializer=zeros, trainable=False)
        return tally.assign_add(1.0, read_value=False)


class _Correcting(_Wrapper):
    """Applies the gradients times what the worker computes from a count of updates on a PS: 1."""

    def apply_gradients(self, grads_and_vars: Any, *_args: Any, **_kwargs: Any) -> Any:
        tally = tf.get_variable("tally", [], initializer=tf.zeros_initializer(), trainable=False)
        factor = tf.sign(tally.assign_add(1.0))
        return self.inner.apply_gradients([(gradient * factor, variable) for gradient, variable in grads_and_vars])


class _Checking(_Wrapper):
    """Adds the gradients after a check on the worker, which returns nothing to the PS."""

    def apply_gradients(self, grads_and_vars: Any, *_args: Any, **_kwargs: Any) -> Any:
        norm = tf.linalg.global_norm([gradient for gradient, _ in grads_and_vars])
        with tf.control_dependencies([tf.check_numerics(norm, "not finite")]):
            return tf.group(*(one.assign_add(gradient, read_value=False) for gradient, one in grads_and_vars))


BACK = [_Averaging, _Decaying, _Copying, _Tallying, _Correcting]
"""Those that let a worker compute from what they have changed, or wait for the worker between two changes."""


def descent() -> Any:
    """Return the optimizer whose update adds the gradient."""
    return tf.train.GradientDescentOptimizer(-1.0)


ON_TWO = [(kind, 2) for kind in [*KINDS, *BACK]]
ON_ONE = [(kind, 1) for kind in [_Accumulating, _InFunction, *BACK]]


@pytest.mark.parametrize(("kind", "num_ps"), [*ON_TWO, *ON_ONE])
def test_no_update_is_lost(tmp_path: Path, kind: Any, num_ps: int) -> None:
    """Each weight is the number of updates, whatever an optimizer puts them into."""
    train(model(lambda: kind(descent())), num_ps, 2, model_dir=str(tmp_path), max_steps=STEPS)
    found = variables_of(tmp_path)
    assert found["global_step"] == STEPS
    assert (found["scalar"], set(found["vector"].tolist())) == (STEPS, {STEPS})
    assert all(np.all(value == STEPS) for name, value in found.items() if name.endswith(("total", "copy", "tally")))
    for average in (value for name, value in found.items() if name.endswith("ExponentialMovingAverage")):
        assert set(np.ravel(average).tolist()) == {average_of(STEPS)}


def average_of(number: int) -> float:
    """Return the moving average of 1, 2, ... after 0."""
    average = np.float32(0.0)
    for value in range(1, number + 1):
        average -= (average - np.float32(value)) * np.float32(0.5)
    return float(average)


@pytest.mark.parametrize("num_ps", [1, 2])
@pytest.mark.parametrize(("inner", "wire"), [(descent, "packed"), (tf.train.AdamOptimizer, "plain")])
@pytest.mark.parametrize("kind", [_Assigning, _Clipping, _Checking, *BACK])
def test_every_change_is_under_a_lock(kind: Any, inner: Any, num_ps: int, wire: str) -> None:
    """Each waits for its PS's lock, and the lock's end for it. It starts after the fence has been checked.

    When a lock is taken, all that the worker does for it is done: it may be frozen later. What a worker computes from
    new values, or assigns from old ones, needs the locks of all PS. A count of updates does not, nor does a check.
    """
    cluster = Cluster(("p0:1", "p1:1")[:num_ps], ("w0:1", "w1:1"))
    built = builder.training(JobConfig(wire=wire), cluster, Task("worker", 0), model(lambda: kind(inner())))
    ops = ancestors([built.step.train_op])
    held = [(op.device, _held(op)) for op in ops if op.type == "MutexLock"]
    assert all(place_of(op).startswith("/job:ps/") for _, part in held for op in part)
    changes = [op for op in ops if _changes_a_weight(op)]
    assert len(changes) >= 3, "two weights and the step"
    for op in changes:
        assert any(op in part for device, part in held if device == place_of(op)), op
        assert kind in (_Checking, _Tallying) or all(op in part for _, part in held), op
        assert any(one.type == "Assert" and place_of(one) == place_of(op) for one in ancestors([op])), op


def _held(lock: Any) -> set[Any]:
    """Return what may run after a lock is taken, and ends before it is released."""
    [end] = [op for op in lock.outputs[0].consumers() if op.type == "ConsumeMutexLock"]
    found = set(ancestors([end])) - set(ancestors([lock]))
    return {op for op in found if op.type != "Const" or op.control_inputs}


def _changes_a_weight(op: Any) -> bool:
    """Return whether an operation changes a variable of the model or the optimizer, or the step."""
    origin = op.inputs[0].op if joint_update.is_change(op) else op
    return origin.type == "VarHandleOp" and origin is not op and not origin.name.startswith("tfps/")


def test_the_first_lock_waits_for_all_that_a_worker_sends() -> None:
    """Else a PS would hold its lock while another PS waits for a worker, which may be frozen."""
    cluster, locks = Cluster(("p0:1", "p1:1"), ("w0:1", "w1:1")), list[tf.Operation]()

    class Watched(joint_update.JointUpdate):
        def _lock(self, arrived: Any) -> Any:
            made = super()._lock(arrived)
            locks.extend(lock.op for lock in made.values())
            return made

    with mock.patch.object(joint_update, "JointUpdate", Watched):
        builder.training(JobConfig(), cluster, Task("worker", 0), model(lambda: _IfSmall(descent())))
    first, second = locks
    assert any(op is first for op in second.control_inputs)
    numbers = [op for op in first.graph.get_operations() if any(t.op.name == RUN_ID for t in op.inputs)]
    assert len({op.device for op in numbers}) == 2
    assert set(numbers) <= set(ancestors([first]))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_stock_optimizer_needs_no_joint_update(name: str) -> None:
    """Its update has a section on each PS, which do not wait for each other."""
    cluster = Cluster(("p0:1", "p1:1"), ("w0:1", "w1:1"))
    stock = model(lambda: tfps.make_optimizer({"optimizer": name, "learning_rate": 0.1}, "sgd", 0.1))
    with mock.patch.object(joint_update, "JointUpdate") as joint:
        builder.training(JobConfig(min_slice_mb=1e-3), cluster, Task("worker", 0), stock)
    assert not joint.called


@pytest.mark.parametrize("num_ps", [1, 2])
def test_adam_in_a_branch_multiplies_its_powers_once_per_update(tmp_path: Path, num_ps: int) -> None:
    """The powers of beta are those of one machine to the last bits, after updates of two workers."""
    optimizer = lambda: _IfSmall(tf.train.AdamOptimizer(0.001))  # noqa: E731
    train(model(optimizer), num_ps, 2, model_dir=str(tmp_path), max_steps=STEPS)
    [power] = [value for name, value in variables_of(tmp_path).items() if name.endswith("beta1_power")]
    np.testing.assert_allclose(power, 0.9 ** (STEPS + 1), rtol=1e-4)


@pytest.mark.parametrize("num_ps", [1, 2])
def test_adam_with_an_average_multiplies_its_powers_once_per_update(tmp_path: Path, num_ps: int) -> None:
    """The powers of beta are those of one machine to the bit, after updates of three workers."""
    optimizer = lambda: _Averaging(tf.train.AdamOptimizer(0.001, 0.999, 0.9999))  # noqa: E731
    train(model(optimizer), num_ps, 3, model_dir=str(tmp_path), max_steps=STEPS)
    found = variables_of(tmp_path)
    for name, beta in (("beta1_power", np.float32(0.999)), ("beta2_power", np.float32(0.9999))):
        [power] = [value for key, value in found.items() if key.endswith(name)]
        assert power == np.multiply.accumulate(np.full(STEPS + 1, beta))[-1]
