"""The classic TF1 script: between-graph replication, ``replica_device_setter``, ``feed_dict``, MonitoredSession.

As written for TensorFlow 1.x, on ``compat.v1``, plus the two things without which it trains with one worker only in a
short job: device filters, and a short ``recovery_wait_secs``.
"""

from typing import Any

import numpy as np
import task
import tensorflow.compat.v1 as tf

EDGES = np.array(
    [
        [[1, 0, -1], [1, 0, -1], [1, 0, -1]],
        [[1, 1, 1], [0, 0, 0], [-1, -1, -1]],
        [[-1, -1, 0], [-1, 0, 1], [0, 1, 1]],
    ],
    np.float32,
)
Built = tuple[Any, Any, Any, dict[str, Any]]  # x, y, loss and what is evaluated


def mnist(flags: Any) -> Built:
    """Build the ConvNet."""
    del flags
    x, y = tf.placeholder(tf.float32, [None, 28, 28, 1]), tf.placeholder(tf.int32, [None])
    edges = EDGES.transpose(1, 2, 0).reshape(3, 3, 1, 3)
    kernel = tf.get_variable("conv/kernel", [3, 3, 1, 3], initializer=tf.constant_initializer(edges))
    bias = tf.get_variable("conv/bias", [3], initializer=tf.zeros_initializer())
    net = tf.nn.max_pool2d(tf.nn.conv2d(x, kernel, strides=1, padding="VALID"), 3, strides=3, padding="VALID")
    net = tf.reshape(tf.nn.relu(tf.nn.bias_add(net, bias)), [-1, 192])
    logits = dense("dense", net, 192, 10, tf.zeros_initializer())
    loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels=y, logits=logits))
    right = tf.equal(tf.argmax(logits, axis=1, output_type=tf.int32), y)
    return x, y, loss, {"accuracy": tf.reduce_mean(tf.cast(right, tf.float32))}


def narrow(flags: Any) -> Built:
    """Build 50 small residual layers."""
    x, y = (tf.placeholder(tf.float32, [None, 16]) for _ in range(2))
    net = x
    for layer, first in enumerate(task.load(flags, "init")):
        kernel = tf.get_variable(f"layer{layer}/kernel", [16, 16], initializer=tf.constant_initializer(first))
        bias = tf.get_variable(f"layer{layer}/bias", [16], initializer=tf.zeros_initializer())
        net += 0.1 * tf.tanh(tf.matmul(net, kernel) + bias)
    loss = tf.reduce_mean(tf.square(net - y))
    return x, y, loss, {"loss": loss}


def ctr(flags: Any) -> Built:
    """Build 26 embedding tables and an MLP."""
    del flags
    x, y = tf.placeholder(tf.int32, [None, 26]), tf.placeholder(tf.float32, [None])
    normal = tf.random_normal_initializer(stddev=0.05)
    tables = [tf.get_variable(f"table{i}", [40_000, 16], initializer=normal) for i in range(26)]
    net = tf.concat([tf.nn.embedding_lookup(table, x[:, i]) for i, table in enumerate(tables)], axis=1)
    glorot = tf.glorot_uniform_initializer()
    net = tf.nn.relu(dense("hidden1", net, 26 * 16, 64, glorot))
    net = tf.nn.relu(dense("hidden2", net, 64, 32, glorot))
    logits = tf.squeeze(dense("logits", net, 32, 1, glorot), axis=1)
    loss = tf.reduce_mean(tf.nn.sigmoid_cross_entropy_with_logits(labels=y, logits=logits))
    return x, y, loss, {"loss": loss}


def ladder(flags: Any) -> Built:
    """Build 16 variables of ``--mb`` together, whose gradient is the input."""
    x, y = tf.placeholder(tf.float32, []), tf.placeholder(tf.float32, [])
    size = flags.mb * 10**6 // 4 // task.DENSE_VARIABLES
    zeros = tf.zeros_initializer()
    values = [tf.get_variable(f"part{i}", [size], initializer=zeros) for i in range(task.DENSE_VARIABLES)]
    low = tf.reduce_min([tf.reduce_min(value) for value in values])
    high = tf.reduce_max([tf.reduce_max(value) for value in values])
    return x, y, tf.add_n([tf.reduce_sum(value * x) for value in values]), {"low": low, "high": high}


def null(flags: Any) -> Built:
    """Build ``--mb`` of parameters, one table or 16 variables, or a scalar, whose gradient is the input."""
    x, y = tf.placeholder(tf.float32, []), tf.placeholder(tf.float32, [])
    size, zeros = flags.mb * 10**6 // 4, tf.zeros_initializer()
    if flags.rows:
        table = tf.get_variable("table", [size // 64, 64], initializer=zeros)
        ids = tf.random.uniform([flags.rows], maxval=size // 64, dtype=tf.int32)
        variables, loss = [table], tf.reduce_sum(tf.nn.embedding_lookup(table, ids) * x)
    else:
        shapes = [[size // task.DENSE_VARIABLES]] * task.DENSE_VARIABLES if size else [[]]
        variables = [tf.get_variable(f"part{i}", shape, initializer=zeros) for i, shape in enumerate(shapes)]
        loss = tf.add_n([tf.reduce_sum(variable * x) for variable in variables])
    totals = []
    for variable in variables:
        with tf.device(variable.device):
            totals.append(tf.reduce_sum(variable))
    return x, y, loss, {"total": tf.add_n(totals)}


def dense(name: str, net: Any, inputs: int, outputs: int, initializer: Any) -> Any:
    """Build a dense layer."""
    kernel = tf.get_variable(f"{name}/kernel", [inputs, outputs], initializer=initializer)
    return tf.matmul(net, kernel) + tf.get_variable(f"{name}/bias", [outputs], initializer=tf.zeros_initializer())


MODELS = {"mnist": mnist, "narrow": narrow, "ctr": ctr, "dense": ladder, "null": null}
OPTIMIZERS = {
    "mnist": lambda: tf.train.AdagradOptimizer(0.05),
    "narrow": lambda: tf.train.AdagradOptimizer(0.02),
    "ctr": lambda: tf.train.AdagradOptimizer(0.05),
    "dense": lambda: tf.train.GradientDescentOptimizer(task.DENSE_RATE),
    "null": lambda: tf.train.GradientDescentOptimizer(task.DENSE_RATE),
}


class QuickWorkerCreator(tf.train.WorkerSessionCreator):
    """Makes a worker's session, looking for initialised variables every 0.2 s instead of every 30 s."""

    def _get_session_manager(self) -> Any:
        if self._session_manager is None:
            super()._get_session_manager()._recovery_wait_secs = 0.2
        return self._session_manager


def session(server: Any, flags: Any, hooks: list[Any]) -> Any:
    """Return the session that trains."""
    config = session_config(flags)
    if flags.index == 0:
        return tf.train.MonitoredTrainingSession(master=server.target, is_chief=True, hooks=hooks, config=config)
    return tf.train.MonitoredSession(QuickWorkerCreator(master=server.target, config=config), hooks=hooks)


def session_config(flags: Any) -> Any:
    """Return the configuration that makes a session wait for no other worker."""
    return tf.ConfigProto(device_filters=["/job:ps", f"/job:worker/task:{flags.index}"])


def worker(flags: Any, cluster: Any, server: Any) -> None:
    """Train, then let the chief evaluate."""
    with tf.device(tf.train.replica_device_setter(worker_device=f"/job:worker/task:{flags.index}", cluster=cluster)):
        global_step = tf.train.get_or_create_global_step()
        x, y, loss, measured = MODELS[flags.model](flags)
        optimizer = OPTIMIZERS[flags.model]()
        hooks = [tf.train.StopAtStepHook(last_step=flags.steps)]
        if flags.mode == "sync":
            count = flags.num_workers
            optimizer = tf.train.SyncReplicasOptimizer(optimizer, count, total_num_replicas=count)
            hooks.append(optimizer.make_session_run_hook(flags.index == 0))
        train_op = optimizer.minimize(loss, global_step=global_step)
    marks, batches = task.Marks(flags.every, flags.steps), task.batches(flags)
    with session(server, flags, hooks) as training:
        while not training.should_stop():
            features, labels = next(batches)
            _, step, _ = training.run([train_op, global_step, loss], feed_dict={x: features, y: labels})
            marks.at(int(step))
    task.say("mark", step=int(step))
    if flags.index == 0:
        evaluate(server, flags, {x: "eval_x", y: "eval_y"}, measured)


def evaluate(server: Any, flags: Any, names: dict[Any, str], measured: dict[str, Any]) -> None:
    """Measure the model on the parameter servers' values."""
    feeds = {} if flags.model in ("dense", "null") else {x: task.load(flags, name) for x, name in names.items()}
    with tf.Session(server.target, config=session_config(flags)) as evaluating:
        task.say("done", **{name: float(v) for name, v in evaluating.run(measured, feeds).items()})


def main() -> None:
    """Be one task."""
    tf.disable_v2_behavior()
    flags = task.flags()
    ps, workers, _ = task.addresses(flags)
    cluster = tf.train.ClusterSpec({"ps": ps, "worker": workers})
    server = tf.train.Server(cluster, job_name=flags.role, task_index=flags.index)
    if flags.role == "ps":
        server.join()
    worker(flags, cluster, server)


if __name__ == "__main__":
    main()
