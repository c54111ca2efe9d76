"""All-reduce by TF2's MultiWorkerMirroredStrategy, in a ring; ``--variant`` steps in each function.

The strategy gives the mean of the workers' gradients (tensorflow/python/distribute/collective_all_reduce_strategy.py).
Each worker applies it to its own variables, which begin alike, by the op of the optimizer: Keras 3 has no Adagrad that
starts at other sums than its own.
"""

import json
import os
from typing import Any

import numpy as np
import task
import tensorflow as tf
from tf2_pss import RATE, Model, dataset


class Mnist(Model):
    """MNIST's ConvNet."""

    def gradients(self, x: Any, y: Any) -> Any:
        """Return this worker's gradients."""
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(y, self.logits(x)))
        return tape.gradient(loss, self.variables)

    def apply(self, means: Any) -> None:
        """Take a step of Adagrad."""
        for variable, squares, mean in zip(self.variables, self.squares, means, strict=True):
            tf.raw_ops.ResourceApplyAdagrad(var=variable.handle, accum=squares.handle, lr=RATE, grad=mean)

    def metrics(self, flags: Any) -> dict[str, float]:
        """Return the accuracy."""
        x, y = task.load(flags, "eval_x"), task.load(flags, "eval_y")
        return {"accuracy": float(np.mean(np.argmax(self.logits(x), axis=1) == y))}


class Dense:
    """Nothing but bytes; the gradient is the input, everywhere."""

    def __init__(self, mb: int) -> None:
        size = mb * 10**6 // 4 // task.DENSE_VARIABLES
        self.variables = [tf.Variable(tf.zeros([size])) for _ in range(task.DENSE_VARIABLES)]

    def gradients(self, x: Any, y: Any) -> Any:
        """Return this worker's gradients."""
        del y
        with tf.GradientTape() as tape:
            loss = tf.add_n([tf.reduce_sum(variable * x) for variable in self.variables])
        return tape.gradient(loss, self.variables)

    def apply(self, means: Any) -> None:
        """Take a step of SGD."""
        for variable, mean in zip(self.variables, means, strict=True):
            variable.assign_sub(task.DENSE_RATE * mean, read_value=False)

    def metrics(self, flags: Any) -> dict[str, float]:
        """Return the least and the greatest value."""
        del flags
        values = [variable.numpy() for variable in self.variables]
        return {"low": float(min(map(np.min, values))), "high": float(max(map(np.max, values)))}


def main() -> None:
    """Be one worker."""
    flags = task.flags()
    _, workers, _ = task.addresses(flags)
    member = {"type": "worker", "index": flags.index}
    os.environ["TF_CONFIG"] = json.dumps({"cluster": {"worker": workers}, "task": member})
    ring = tf.distribute.experimental.CommunicationImplementation.RING
    options = tf.distribute.experimental.CommunicationOptions(implementation=ring)
    strategy = tf.distribute.MultiWorkerMirroredStrategy(communication_options=options)
    model = Mnist() if flags.model == "mnist" else Dense(flags.mb)
    ones = tf.data.Dataset.from_tensors((1.0, 1.0)).repeat()
    inputs = iter(ones if flags.model == "dense" else dataset(flags))
    train(flags, strategy, model, inputs)
    if flags.index == 0:
        task.say("done", **model.metrics(flags))
    strategy.run(lambda: reduce_mean(tf.ones([])))  # nobody ends before the chief has evaluated
    os._exit(0)


def reduce_mean(values: Any) -> Any:
    """Return the mean over the workers."""
    return tf.distribute.get_replica_context().all_reduce(tf.distribute.ReduceOp.MEAN, values)


def train(flags: Any, strategy: Any, model: Any, inputs: Any) -> None:
    """Take all steps."""
    steps = int(flags.variant)

    def replica(x: Any, y: Any) -> None:
        model.apply(reduce_mean(model.gradients(x, y)))

    @tf.function
    def several(iterator: Any) -> None:
        for _ in tf.range(steps):
            strategy.run(replica, args=next(iterator))

    marks = task.Marks(flags.every, flags.steps)
    for done in range(steps, flags.steps + 1, steps):
        several(inputs)
        marks.at(done)


if __name__ == "__main__":
    main()
