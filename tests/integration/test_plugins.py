"""What another package adds through entry points, without a change in this one."""

from pathlib import Path

import numpy as np
import pytest
from support import distributions
from support.processes import REPO, load_variable, run_tfps, summary

pytestmark = pytest.mark.slow

MODEL = """
import tensorflow.compat.v1 as tf
import tfps

def input_fn(mode, params, input_context):
    return None if mode == "eval" else tf.data.Dataset.from_tensors(({"x": 1.0}, 0.0)).repeat()

def model_fn(features, labels, mode, params):
    weight = tf.get_variable("weight", [], initializer=tf.zeros_initializer())
    optimizer = tf.train.GradientDescentOptimizer(1.0, use_locking=True)
    return tfps.ModelSpec(loss=weight * features["x"], optimizer=optimizer)
"""


def installed(tmp_path: Path, *entries: str, group: str = "tfps.modes") -> str:
    """Install a distribution that offers classes of a group; returns the ``PYTHONPATH`` to use."""
    distributions.install(tmp_path / "site", "extra", *entries, group=group)
    return f"{REPO}:{REPO / 'tests'}:{tmp_path / 'site'}"


def test_a_mode_of_another_package_trains(tmp_path: Path) -> None:
    """``--mode`` takes its name, and each of exactly ``--max_steps`` updates is half a gradient with two workers."""
    path = installed(tmp_path, "damped = support.damped_mode:DampedMode")
    (tmp_path / "mine.py").write_text(MODEL)
    flags = [f"--model={tmp_path / 'mine.py'}", f"--model_dir={tmp_path / 'm'}", "--max_steps=40", "--num_workers=2"]
    ended = run_tfps("launch", "--mode=damped", *flags, PYTHONPATH=path)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    reported = summary(tmp_path / "m")
    assert (reported["mode"], reported["global_step"]) == ("damped", 40)
    assert load_variable(tmp_path / "m", "weight") == -20.0
    assert sum(task.get("steps", 0) for task in reported["tasks"].values()) == 40


def test_its_name_is_among_the_choices(tmp_path: Path) -> None:
    """``--help`` lists the modes of other packages behind the built-in ones, and a near miss is reported."""
    path = installed(tmp_path, "damped = support.damped_mode:DampedMode")
    reported = run_tfps("launch", "--help", PYTHONPATH=path).stdout
    assert "async, sync, ssp, local, allreduce, gossip, damped (default async)" in " ".join(reported.split())
    missed = run_tfps("launch", "--mode=dampd", PYTHONPATH=path)
    assert missed.returncode == 2
    assert (
        "--mode=dampd is not one of async, sync, ssp, local, allreduce, gossip, damped. Did you mean damped?"
        in missed.stderr
    )


def test_one_that_cannot_be_used_is_reported_with_its_distribution(tmp_path: Path) -> None:
    """A broken entry point is exit 2 with one line that names its distribution, not a traceback; others still train."""
    path = installed(tmp_path, "bad = support.no_such_module:Mode", "other = collections:OrderedDict")
    for name, problem in (
        ("bad", "cannot be imported: ModuleNotFound"),
        ("other", "is no subclass of tfps.modes.base."),
    ):
        ended = run_tfps("launch", f"--mode={name}", PYTHONPATH=path)
        assert ended.returncode == 2
        assert f"error: the mode {name} of the distribution extra 1.2, " in ended.stderr
        assert problem in ended.stderr
        assert "Traceback" not in ended.stderr
    flags = ["--model=linear", "--max_steps=3", f"--model_dir={tmp_path / 'm'}"]
    assert run_tfps("launch", "--mode=sync", *flags, PYTHONPATH=path).returncode == 0


TWO_VARIABLES = """
import numpy as np
import tensorflow.compat.v1 as tf
import tfps

def input_fn(mode, params, input_context):
    numbers = np.random.default_rng(3).normal(size=(8, 4, 5)).astype("f4")
    return None if mode == "eval" else tf.data.Dataset.from_tensor_slices(({"x": numbers}, numbers)).repeat()

def model_fn(features, labels, mode, params):
    weight = tf.get_variable("weight", [5, 3], initializer=tf.ones_initializer())
    bias = tf.get_variable("bias", [3], initializer=tf.zeros_initializer())
    optimizer = tfps.make_optimizer(params, "sgd", learning_rate=0.1)
    packed = __import__("tfps.runtime.graph.passes.variable_packing", fromlist=["can_pack"]).can_pack(optimizer)
    print("elementwise:", packed, type(optimizer).__name__)
    return tfps.ModelSpec(tf.reduce_mean(tf.square(tf.matmul(features["x"], weight) + bias - 1.0)), optimizer=optimizer)
"""


def test_an_optimizer_of_another_package_trains_packed_and_plain(tmp_path: Path) -> None:
    """``--optimizer`` takes its name; it states that it is element-wise, so it is packed, to the same bit."""
    path = installed(tmp_path, "sign = support.sign_optimizer:SignFactory", group="tfps.optimizers")
    (tmp_path / "mine.py").write_text(TWO_VARIABLES)
    flags = [f"--model={tmp_path / 'mine.py'}", "--max_steps=9", "--num_workers=1", "--optimizer=sign"]
    for wire in ("packed", "plain"):
        ended = run_tfps("launch", *flags, f"--wire={wire}", f"--model_dir={tmp_path / wire}", PYTHONPATH=path)
        assert ended.returncode == 0, ended.stdout + ended.stderr
        assert "elementwise: True SignSgdOptimizer" in ended.stdout
    for name in ("weight", "bias", "weight/SignSgd", "bias/SignSgd"):
        packed, plain = (np.asarray(load_variable(tmp_path / wire, name)) for wire in ("packed", "plain"))
        assert packed.tobytes() == plain.tobytes()
        assert np.any(packed)
    missed = run_tfps("launch", "--optimizer=sig", PYTHONPATH=path)
    assert missed.returncode == 2
    assert "rmsprop, sign. Did you mean sign?" in missed.stderr
