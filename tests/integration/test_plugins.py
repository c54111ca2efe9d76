"""What another package adds through entry points, without a change in this one."""

from pathlib import Path

from support import distributions
from support.processes import REPO, load_variable, run_tfps, summary

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


def installed(tmp_path: Path, *entries: str) -> str:
    """Install a distribution that offers modes; returns a ``PYTHONPATH`` with which it is there."""
    distributions.install(tmp_path / "site", "extra", *entries, group="tfps.modes")
    return f"{REPO}:{REPO / 'tests'}:{tmp_path / 'site'}"


def test_a_mode_of_another_package_trains(tmp_path: Path) -> None:
    """``--mode`` takes its name, and each of exactly ``--max_steps`` updates is half a gradient with two workers."""
    path = installed(tmp_path, "damped = support.damped_mode:DampedMode")
    (tmp_path / "mine.py").write_text(MODEL)
    flags = [f"--model={tmp_path / 'mine.py'}", f"--model_dir={tmp_path / 'm'}", "--max_steps=40", "--num_workers=2"]
    ended = run_tfps("launch", "--mode=damped", *flags, PYTHONPATH=path)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    told = summary(tmp_path / "m")
    assert (told["mode"], told["global_step"]) == ("damped", 40)
    assert load_variable(tmp_path / "m", "weight") == -20.0
    assert sum(task.get("steps", 0) for task in told["tasks"].values()) == 40


def test_its_name_is_among_the_choices(tmp_path: Path) -> None:
    """``--help`` lists the modes of other packages behind the built-in ones, and a near miss is told."""
    path = installed(tmp_path, "damped = support.damped_mode:DampedMode")
    told = run_tfps("launch", "--help", PYTHONPATH=path).stdout
    assert "async, sync, damped (default async)" in " ".join(told.split())
    missed = run_tfps("launch", "--mode=dampd", PYTHONPATH=path)
    assert missed.returncode == 2
    assert "--mode=dampd is not one of async, sync, damped. Did you mean damped?" in missed.stderr


def test_one_that_cannot_be_used_is_told_with_its_distribution(tmp_path: Path) -> None:
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
