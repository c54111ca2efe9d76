"""What another package adds through entry points, without a change in this one."""

from pathlib import Path

import pytest
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


def installed(tmp_path: Path, group: str, *entries: str) -> str:
    """Install a package that has nothing but entry points; returns a ``PYTHONPATH`` with which it is there."""
    info = tmp_path / "site" / "extra-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: extra\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("\n".join([f"[{group}]", *entries, ""]))
    return f"{REPO}:{REPO / 'tests'}:{tmp_path / 'site'}"


def test_a_mode_of_another_package_trains(tmp_path: Path) -> None:
    """``--mode`` takes its name, and each of exactly ``--max_steps`` updates is half a gradient with two workers."""
    path = installed(tmp_path, "tfps.modes", "damped = support.damped_mode:DampedMode")
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
    path = installed(tmp_path, "tfps.modes", "damped = support.damped_mode:DampedMode")
    told = run_tfps("launch", "--help", PYTHONPATH=path).stdout
    assert "async, sync, damped (default async)" in " ".join(told.split())
    missed = run_tfps("launch", "--mode=dampd", PYTHONPATH=path)
    assert missed.returncode == 2
    assert "--mode=dampd is not one of async, sync, damped. Did you mean damped?" in missed.stderr


@pytest.mark.parametrize(
    ("entry", "problem"),
    [
        ("bad = support.no_such_module:Mode", "cannot be loaded: ModuleNotFoundError: "),
        ("bad = support.processes:Process", "cannot be loaded: TypeError: "),
        ("bad = collections:OrderedDict", "is not a tfps.modes.base.Mode."),
    ],
)
def test_one_that_cannot_be_used_is_told_with_its_package(tmp_path: Path, entry: str, problem: str) -> None:
    """A broken entry point is exit 2 with one line that names its package, not a traceback; others still train."""
    path = installed(tmp_path, "tfps.modes", entry, "sync = support.no_such_module:Mode")
    ended = run_tfps("launch", "--mode=bad", PYTHONPATH=path)
    target = entry.partition(" = ")[2]
    assert ended.returncode == 2
    assert f"error: --mode=bad: {target}, which the package extra declares, {problem}" in ended.stderr
    assert "Traceback" not in ended.stderr
    flags = ["--model=linear", "--max_steps=3", f"--model_dir={tmp_path / 'm'}"]
    assert run_tfps("launch", "--mode=sync", *flags, PYTHONPATH=path).returncode == 0, "a built-in name keeps its class"
