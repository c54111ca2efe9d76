"""What every peer's program shares: its flags, its share of the data, and the lines that it tells the harness.

A program is started once a task and prints JSON lines. ``mark`` says how far it is: ``step`` counts the updates of the
whole job, or only this worker's where no one counts them all. ``done`` gives what the model is worth. Needs numpy only.
"""

import argparse
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

Arrays = tuple[Any, Any]
DENSE_VARIABLES = 16
DENSE_RATE = 2.0**-10  # so that n pushes of ones make exactly -n/1024


def flags() -> argparse.Namespace:
    """Parse the flags that the harness gives to every program."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    for name in ("role", "model", "mode", "data_dir", "variant"):
        parser.add_argument(f"--{name}", default="")
    for name in ("index", "num_ps", "num_workers", "batch_size", "steps", "every", "mb", "rows"):
        parser.add_argument(f"--{name}", type=int, default=0)
    parser.add_argument("--ports", type=lambda text: [int(port) for port in text.split(",")], default=[])
    return parser.parse_args()


def addresses(given: argparse.Namespace) -> tuple[list[str], list[str], list[str]]:
    """Return the addresses of the PS, the workers, and any port that is left over (a chief's)."""
    hosts = [f"127.0.0.1:{port}" for port in given.ports]
    workers_end = given.num_ps + given.num_workers
    return hosts[: given.num_ps], hosts[given.num_ps : workers_end], hosts[workers_end:]


def load(given: argparse.Namespace, name: str) -> Any:
    """Return an array of the workload: ``train_x``, ``train_y``, ``eval_x``, ``eval_y`` or ``init``."""
    return np.load(Path(given.data_dir) / f"{name}.npy")


def batches(given: argparse.Namespace) -> Iterator[Arrays]:
    """Yield this worker's batches for ever, each epoch in a new order; of dense ladder and null step, ones."""
    if given.model in ("dense", "null"):
        while True:
            yield np.float32(1), np.float32(0)
    x, y = (load(given, name)[given.index :: given.num_workers] for name in ("train_x", "train_y"))
    random = np.random.default_rng(given.index)
    while True:
        order = random.permutation(len(x))
        for start in range(0, len(x) - given.batch_size + 1, given.batch_size):
            rows = order[start : start + given.batch_size]
            yield x[rows], y[rows]


def say(event: str, **values: Any) -> None:
    """Print one line for the harness."""
    print(json.dumps({"event": event, "time": time.time(), **values}), flush=True)


class Marks:
    """Prints a mark at the first step, whenever ``every`` more steps are done, and at the last."""

    def __init__(self, every: int, steps: int) -> None:
        self._every, self._steps = every, steps
        self._last = -1

    def at(self, step: int) -> None:
        """Tell that ``step`` steps are done."""
        if self._last < 0 or step // self._every > self._last // self._every or step >= self._steps > self._last:
            say("mark", step=step)
            self._last = step
