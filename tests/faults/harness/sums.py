"""Whether checkpoints hold as many updates as their step says; see ``models/exact.py``. Pure, but for ``read``.

Updates are counted in the weights on the disk, never by what tfps says of them: each update raises each weight under
``updates/`` by 1. Where the optimizer is Adagrad (``models/digits.py``), it raises their accumulators by 1 instead.

All weights of a PS change in one moment, and a lost PS takes all back to a checkpoint. So in sync, and with one PS, a
checkpoint holds as many updates as its ``global_step`` says. In async on several PS, a worker that is killed has its
last steps applied on some PS, and not on others: one step of each run that it has under way, for the steps of one run
follow each other, and each needs what all PS hold. Until that worker is back, a checkpoint may also be of a moment at
which others' steps are under way, for no moment can be found any more at which the PS agree.
"""

import math
import multiprocessing
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from modes import ModeUnderTest

ROWS = (1, 2, 6)  # of tables, those that each step looks up
_COUNTING, _SLOT, _SLOT_BEGINS = "updates/", "/Adagrad", 0.1
_ROUNDING = 0.05  # that of the accumulators: 0.1 and many times 1 in float32
_READ_SECS = 60.0


@dataclass(frozen=True)
class Saved:
    """What a checkpoint on the disk holds.

    Attributes:
        name: Its name; of the step that it is of.
        step: Its ``global_step``.
        updates: By weight, the least and the most updates that any of its elements has had.
        weight: The sum of what the workers have pushed, each its own number; ``None`` without such a weight.
        error: Why it cannot be read, or nothing.
    """

    name: str
    step: int = 0
    updates: Mapping[str, tuple[float, float]] | None = None
    weight: float | None = None
    error: str = ""

    @property
    def off(self) -> int:
        """By how many updates some weight differs from the step, at most."""
        both = [value - self.step for span in (self.updates or {}).values() for value in span]
        return max((math.ceil(abs(each)) for each in both), default=0)


@dataclass(frozen=True)
class Job:
    """What a job was that has left checkpoints.

    Attributes:
        mode: The mode that it was in.
        num_ps: How many PS.
        num_workers: How many workers.
        runs: How many runs a worker had under way at once.
        done: Whether the last checkpoint was saved when no step was taken any more.
        lost: How many workers had been lost by checkpoint, and in the end: ``timeline.lost_workers``.
    """

    mode: ModeUnderTest
    num_ps: int = 2
    num_workers: int = 2
    runs: int = 1
    done: bool = True
    lost: Mapping[str, int] = field(default_factory=dict)

    def max_off(self, checkpoint: str, last: bool) -> int:
        """Return by how many updates a checkpoint may differ from its step."""
        lost = self.lost.get(checkpoint, self.lost.get("", 0))
        if self.mode.waits or self.num_ps == 1 or not lost:
            return 0
        return (lost + (0 if last and self.done else self.num_workers)) * self.runs


def check(checkpoints: Sequence[Saved], job: Job) -> str:
    """Return how some checkpoint, of which the newest is the last, is not what so many updates make it, or nothing."""
    wrong = [_problem(one, job, job.max_off(one.name, one is checkpoints[-1])) for one in checkpoints]
    return "; ".join(filter(None, wrong))


def _problem(one: Saved, job: Job, max_off: int) -> str:
    if one.error:
        return f"{one.name} cannot be read: {one.error}"
    if not one.name.endswith(f"-{one.step}"):
        return f"{one.name} holds global_step {one.step}"
    if not one.updates:
        return f"{one.name} has no weight that counts updates"
    if one.off > max_off:
        return f"{one.name} holds other updates than its step says: {_description(one)}"
    mean = (2**job.num_workers - 1) / job.num_workers
    weight = -mean * one.step if one.weight is None else one.weight
    if job.mode.means and abs(weight + mean * one.step) > job.mode.mean_within:
        return f"{one.name} is not of exact means: weight {weight:g} at step {one.step}"
    return ""


def _description(one: Saved) -> str:
    """Return the weights that differ from a checkpoint's step, and by how much."""
    found = {name: span for name, span in (one.updates or {}).items() if set(span) != {one.step}}
    return ", ".join(
        f"{name} {low - one.step:+g}" + (f" to {high - one.step:+g}" if high > low else "")
        for name, (low, high) in sorted(found.items())
    )


def of_values(name: str, values: Mapping[str, Any]) -> Saved:
    """Return what a checkpoint of some variables holds.

    Args:
        name: The checkpoint's.
        values: Arrays by name, of a table only the rows that are looked up.
    """
    updates = {}
    for key, value in values.items():
        if key.startswith(_COUNTING) and not key.endswith(_SLOT):
            slot = values.get(key + _SLOT)
            low, high = _span(value) if slot is None else tuple(map(_of_accumulator, _span(slot)))
            updates[key] = (low, high)
    weight = float(values["weight"]) if "weight" in values and not values["weight"].shape else None
    return Saved(name, int(values["global_step"]), updates, weight)


def _span(value: Any) -> tuple[float, float]:
    return float(value.min()), float(value.max())


def _of_accumulator(value: float) -> float:
    """Return how many gradients of size 1 an accumulator has taken in."""
    count = value - _SLOT_BEGINS
    return float(round(count)) if abs(count - round(count)) < _ROUNDING else count


def read(model_dir: Path, without: Collection[str] = ()) -> list[Saved]:
    """Return what the checkpoints in a directory hold, the newest last; ``without`` those of some names.

    TensorFlow reads them, in a process that is forked from one that has it.
    """
    ours, theirs = multiprocessing.get_context("forkserver").Pipe(duplex=False)
    process = multiprocessing.get_context("forkserver").Process(target=_read, args=(model_dir, set(without), theirs))
    process.start()
    theirs.close()
    try:
        if not ours.poll(_READ_SECS):
            raise RuntimeError(f"the checkpoints are not read in {_READ_SECS:g} s")
        found: list[Saved] = ours.recv()
        return found
    finally:
        ours.close()
        process.join()


def _read(model_dir: Path, without: Collection[str], pipe: Connection) -> None:
    indexes = sorted(model_dir.glob("model.ckpt-*.index"), key=lambda path: int(path.stem.rpartition("-")[2]))
    pipe.send([_read_one(index.with_suffix("")) for index in indexes if index.stem not in without])


def _read_one(path: Path) -> Saved:
    import tensorflow as tf  # noqa: PLC0415  here it costs nothing

    try:
        reader = tf.train.load_checkpoint(str(path))
        values = {name: reader.get_tensor(name) for name in reader.get_variable_to_shape_map()}
    except Exception as error:  # whatever it is, the checkpoint cannot be read
        return Saved(path.name, error=str(error).split("\n")[0][:120])
    tables = {name: value[list(ROWS)] for name, value in values.items() if name.startswith(f"{_COUNTING}table")}
    return of_values(path.name, {**values, **tables})
