"""Claims about the input of a graph: nothing is counted for a batch that does not come."""

from pathlib import Path
from typing import Any

import tensorflow.compat.v1 as tf
from support.cluster import dataset_of, model_of, train
from support.processes import summary

import tfps

BATCHES = 7


def batches(mode: str, params: Any, context: Any) -> Any:
    """Be an ``input_fn`` whose evaluation has ``BATCHES`` batches."""
    return dataset_of([1.0] * BATCHES).batch(1) if mode == "eval" else dataset_of([1.0]).repeat().batch(1)


def counting(features: Any, labels: Any, mode: str, params: Any) -> tfps.ModelSpec:
    """Be a model whose metrics count batches in a branch and in a loop, and do not look at the batch."""
    weight = tf.get_variable("weight", [], initializer=tf.zeros_initializer())
    local = {"initializer": tf.zeros_initializer(), "collections": [tf.GraphKeys.LOCAL_VARIABLES]}
    branch, loop = (tf.get_variable(name, [], trainable=False, **local) for name in ("branch", "loop"))

    def turn(index: Any) -> Any:
        with tf.control_dependencies([loop.assign_add(1.0)]):
            return index + 1

    counted = {
        "branch": tf.cond(tf.random.uniform([]) < 2.0, lambda: branch.assign_add(1.0), lambda: tf.constant(0.0)),
        "loop": tf.while_loop(lambda index: index < 1, turn, [tf.constant(0)]),
    }
    return tfps.ModelSpec(
        loss=weight * tf.reduce_mean(features["x"]),
        optimizer=tf.train.GradientDescentOptimizer(1.0),
        eval_metric_ops={name: (one.read_value(), counted[name]) for name, one in (("branch", branch), ("loop", loop))},
    )


def test_a_branch_or_a_loop_waits_for_the_batch(tmp_path: Path) -> None:
    """The run that finds the end of the input counts nothing, wherever a metric counts."""
    train(model_of(batches, counting), 1, 1, 60, model_dir=str(tmp_path), max_steps=5)
    found = summary(tmp_path)["eval"]
    assert (found["branch"], found["loop"]) == (BATCHES, BATCHES)
