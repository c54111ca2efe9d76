"""The programs of the service's pages, run as they stand there, and the same arithmetic in one process."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from support.processes import PATIENCE, REPO, environment, load_variable, summary

from tfps.data import digits

Floats = npt.NDArray[np.float64]
LOOPBACK = REPO / "tests" / "support" / "loopback"
_MOST_LINES = 60
_SECS_TO_END = 60


def program(page: str) -> str:
    """Return the program of a page: its first block of Python."""
    text = (REPO / "tfps" / "docs" / page).read_text()
    found = re.search(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    assert found, page
    assert found[1].count("\n") < _MOST_LINES
    return found[1]


def run(page: str, directory: Path, *args: str, secs: float = 150, **env: str) -> str:
    """Run the program of a page with some arguments; return its output. It connects to this machine only."""
    (directory / "program.py").write_text(program(page))
    outside = directory / "outside"
    path = os.pathsep.join([str(LOOPBACK), str(REPO)])
    home = {"HOME": str(directory), "TMPDIR": str(directory), "PYTHONPATH": path, "OUTSIDE": str(outside)}
    with subprocess.Popen(
        [sys.executable, "-X", "faulthandler", "program.py", *args],
        cwd=directory,
        env=environment(**{**home, **env}),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as started:
        output, log = _communicate(started, secs * PATIENCE)
    assert started.returncode == 0, output + log
    assert not outside.exists(), outside.read_text()
    return output


def _communicate(started: subprocess.Popen[str], secs: float) -> tuple[str, str]:
    """Return what a program writes; one that does not end in time is ended, and writes where its threads are."""
    try:
        return started.communicate(timeout=secs)
    except subprocess.TimeoutExpired:
        started.send_signal(signal.SIGABRT)
        return started.communicate(timeout=_SECS_TO_END)


class Trained(NamedTuple):
    """What a service leaves in its directory.

    Attributes:
        weights: float32 [784, 10].
        bias: float32 [10].
        updates: The number of updates.
        dropped: How many gradients were dropped.
    """

    weights: Any
    bias: Any
    updates: int
    dropped: int


def trained(model_dir: Path, weights: str = "weights", bias: str = "bias") -> Trained:
    """Return what the last checkpoint has, and the summary."""
    dropped = sum(task.get("gradients_dropped", 0) for task in summary(model_dir)["tasks"].values())
    found = [load_variable(model_dir, name) for name in (weights, bias, "global_step")]
    return Trained(found[0], found[1], int(found[2]), dropped)


def softmax_gradients(weights: Floats, bias: Floats, inputs: Floats, labels: npt.NDArray[Any]) -> tuple[Floats, Floats]:
    """Return the sums over examples of the gradients of the softmax loss with respect to weights and bias."""
    logits = inputs @ weights + bias
    chances = np.exp(logits - logits.max(1, keepdims=True))
    chances /= chances.sum(1, keepdims=True)
    errors = chances - np.eye(10)[labels]
    return inputs.T @ errors, errors.sum(0)


def in_one_process(workers: int, updates: int, rate: float, is_sync: bool) -> tuple[Floats, Floats]:
    """Train in this process, in float64: update after update of all images, or worker after worker of their parts."""
    data = digits.load()
    images, labels = data.train_images.reshape(-1, 784) / 255.0, data.train_labels
    weights, bias = np.zeros([784, 10]), np.zeros(10)
    for update in range(updates):
        part = slice(None) if is_sync else slice(update % workers, None, workers)
        by_weights, by_bias = softmax_gradients(weights, bias, images[part], labels[part])
        weights, bias = weights - rate * by_weights / len(labels), bias - rate * by_bias / len(labels)
    return weights, bias


def accuracy(weights: Any, bias: Any) -> float:
    """Return the accuracy on the digits that were not trained on."""
    data = digits.load()
    found = (data.eval_images.reshape(-1, 784) / 255.0 @ weights + bias).argmax(1)
    return float((found == data.eval_labels).mean())


def check_sync(model_dir: Path, output: str) -> None:
    """Check that 25 workers have made 5 updates, whose result is that of one process to float tolerance."""
    found = trained(model_dir)
    weights, bias = in_one_process(25, 5, 0.1, is_sync=True)
    assert (found.updates, found.dropped) == (5, 0)
    np.testing.assert_allclose(found.weights, weights, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(found.bias, bias, rtol=1e-4, atol=1e-6)
    assert f"sync: 5 updates, accuracy {accuracy(weights, bias):.3f}" in output.splitlines()  # Ray may add lines


def check_async(model_dir: Path, output: str) -> None:
    """Check that each of 125 gradients was applied, and that the accuracy is about that of one process."""
    found = trained(model_dir)
    assert (found.updates, found.dropped) == (125, 0)
    expected = accuracy(*in_one_process(25, 125, 0.1, is_sync=False))
    assert expected > 0.8
    reached = accuracy(found.weights, found.bias)
    assert abs(reached - expected) < 0.06
    assert f"async: 125 updates, accuracy {reached:.3f}" in output.splitlines()
