"""The limit: the workers of a tfps job with no parameter server. Each trains its own copy of tfps's model file.

Same TensorFlow, same data, one session per worker with its input in the graph. Steps are unrolled, as many per
``session.run`` as no longer make it faster, so that what is left is the computing. Counts its own steps only.
"""

import socket
import time
from types import MappingProxyType
from typing import Any

import task
import tensorflow.compat.v1 as tf

import tfps
from tfps.models import loader

UNROLLED = 16


def params_of(flags: Any) -> Any:
    """Return what a tfps model gets as ``params``."""
    params = {"data_dir": flags.data_dir, "batch_size": flags.batch_size, "seed": 1}
    return MappingProxyType({**params, "learning_rate": None, "optimizer": None})


def train_ops(flags: Any, model: Any, context: Any) -> tuple[Any, Any]:
    """Build unrolled steps, each after the one before; returns what they fetch and the input's initializer."""
    dataset = model.input_fn(tfps.ModeKeys.TRAIN, params_of(flags), context)
    iterator = tf.data.make_initializable_iterator(dataset)
    after: list[Any] = []
    for _ in range(UNROLLED):
        with tf.control_dependencies(after), tf.variable_scope("", reuse=tf.AUTO_REUSE):
            spec = model.model_fn(*iterator.get_next(), tfps.ModeKeys.TRAIN, params_of(flags))
            after = [spec.optimizer.minimize(spec.loss)]
    with tf.control_dependencies(after):
        return tf.identity(spec.loss), iterator.initializer


def eval_ops(flags: Any, model: Any, context: Any) -> tuple[dict[str, Any], list[Any]]:
    """Build the evaluation: metrics by name, and what to initialise."""
    dataset = model.input_fn(tfps.ModeKeys.EVAL, params_of(flags), context)
    iterator = tf.data.make_initializable_iterator(dataset)
    with tf.variable_scope("", reuse=tf.AUTO_REUSE):
        spec = model.model_fn(*iterator.get_next(), tfps.ModeKeys.EVAL, params_of(flags))
    metrics = {"loss": tf.metrics.mean(spec.loss), **spec.eval_metric_ops}
    return metrics, [iterator.initializer, tf.local_variables_initializer()]


def evaluate(session: Any, metrics: dict[str, Any]) -> dict[str, float]:
    """Go once through the evaluation's input."""
    while True:
        try:
            session.run([update for _, update in metrics.values()])
        except tf.errors.OutOfRangeError:
            return {name: float(v) for name, v in session.run({n: value for n, (value, _) in metrics.items()}).items()}


def _answers(port: int) -> bool:
    with socket.socket() as connection:
        return connection.connect_ex(("127.0.0.1", port)) == 0


def meet(flags: Any) -> socket.socket:
    """Wait for the other workers, so that all of them compute in the time measured; returns what has to stay open."""
    ports = flags.ports[flags.num_ps :][: flags.num_workers]
    own = socket.create_server(("127.0.0.1", ports[flags.index]))
    for port in ports:
        while not _answers(port):
            time.sleep(0.01)
    return own


def main() -> None:
    """Be one worker."""
    tf.disable_v2_behavior()
    tf.enable_resource_variables()
    flags = task.flags()
    tf.set_random_seed(1)
    model = loader.load(flags.variant)
    loss, input_init = train_ops(flags, model, tf.distribute.InputContext(flags.num_workers, flags.index))
    metrics, eval_init = eval_ops(flags, model, tf.distribute.InputContext(1, 0))
    threads = {"intra_op_parallelism_threads": 1}  # the workers share the cores among them
    with tf.Session(config=tf.ConfigProto(**threads)) as session:
        session.run([tf.global_variables_initializer(), input_init])
        run, marks, step = session.make_callable(loss), task.Marks(flags.every, flags.steps), 0
        run()
        met = meet(flags)
        while step < flags.steps:
            run()
            step += UNROLLED
            marks.at(step)
        met.close()
        session.run(eval_init)
        task.say("done", **evaluate(session, metrics))


if __name__ == "__main__":
    main()
