"""TF2's ParameterServerStrategy with a ClusterCoordinator, ``--variant`` steps in each function; after its guide.

Keras 3 has no optimizer for it, so Adagrad is applied by its op, on the parameter server that holds the variable.
"""

import json
import os
import time
from typing import Any

import numpy as np
import task
import tensorflow as tf
from classic import EDGES

RATE = 0.05
POLL_SECS = 0.05


class Model:
    """MNIST's ConvNet, its sums of squared gradients, and the count of updates."""

    def __init__(self) -> None:
        edges = EDGES.transpose(1, 2, 0).reshape(3, 3, 1, 3)
        values = (edges, np.zeros(3), np.zeros((192, 10)), np.zeros(10))
        self.variables = [tf.Variable(value, dtype=tf.float32) for value in values]
        self.squares = [tf.Variable(np.full(np.shape(value), 0.1), dtype=tf.float32) for value in values]
        self.done = tf.Variable(0, dtype=tf.int64)

    def logits(self, x: Any) -> Any:
        """Return logits of images of shape [batch, 28, 28, 1]."""
        kernel, bias, weights, offsets = (tf.convert_to_tensor(variable) for variable in self.variables)
        net = tf.nn.max_pool2d(tf.nn.conv2d(x, kernel, 1, "VALID"), 3, 3, "VALID")
        return tf.matmul(tf.reshape(tf.nn.relu(tf.nn.bias_add(net, bias)), [-1, 192]), weights) + offsets

    def update(self, x: Any, y: Any) -> None:
        """Take one step."""
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(y, self.logits(x)))
        gradients = tape.gradient(loss, self.variables)
        for variable, squares, gradient in zip(self.variables, self.squares, gradients, strict=True):
            with tf.device(variable.device):
                tf.raw_ops.ResourceApplyAdagrad(var=variable.handle, accum=squares.handle, lr=RATE, grad=gradient)
        self.done.assign_add(1, read_value=False)


def coordinate(flags: Any, resolver: Any) -> None:
    """Be the chief: schedule the steps, then evaluate."""
    strategy = tf.distribute.ParameterServerStrategy(resolver)
    coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
    with strategy.scope():
        model = Model()
    inputs = iter(coordinator.create_per_worker_dataset(lambda: dataset(flags)))
    steps = int(flags.variant)

    @tf.function
    def train(iterator: Any) -> None:
        def replica(x: Any, y: Any) -> None:
            model.update(x, y)

        for _ in tf.range(steps):
            strategy.run(replica, args=next(iterator))

    for _ in range(0, flags.steps, steps):
        coordinator.schedule(train, args=(inputs,))
    marks = task.Marks(flags.every, flags.steps)
    while not coordinator.done():
        tell(marks, int(model.done.read_value()))
        time.sleep(POLL_SECS)
    coordinator.join()
    marks.at(int(model.done.read_value()))
    x, y = task.load(flags, "eval_x"), task.load(flags, "eval_y")
    task.say("done", accuracy=float(np.mean(np.argmax(model.logits(x), axis=1) == y)))


def tell(marks: task.Marks, done: int) -> None:
    """Tell how far the job is, once it has begun: steps are scheduled before the workers are there."""
    if done:
        marks.at(done)


def dataset(flags: Any) -> Any:
    """Return batches for ever, in an order of each worker's own."""
    x, y = task.load(flags, "train_x"), task.load(flags, "train_y")
    rows = tf.data.Dataset.range(len(x)).shuffle(len(x)).repeat().batch(flags.batch_size, drop_remainder=True)
    return rows.map(lambda chosen: (tf.gather(x, chosen), tf.gather(y, chosen))).prefetch(4)


def main() -> None:
    """Be one task."""
    flags = task.flags()
    ps, workers, chiefs = task.addresses(flags)
    cluster = {"ps": ps, "worker": workers, "chief": chiefs}
    member = {"type": flags.role, "index": flags.index}
    os.environ["TF_CONFIG"] = json.dumps({"cluster": cluster, "task": member})
    os.environ["GRPC_FAIL_FAST"] = "use_caller"
    resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
    if flags.role != "chief":
        spec = resolver.cluster_spec()
        tf.distribute.Server(spec, job_name=flags.role, task_index=flags.index, protocol="grpc").join()
    coordinate(flags, resolver)
    os._exit(0)  # the coordinator's threads would try to reconnect to servers that are being ended


if __name__ == "__main__":
    main()
