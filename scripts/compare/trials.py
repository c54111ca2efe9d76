"""Run one job of the comparison with ``tfps launch``, and read what it did from its logs and its summary.

A batch counts when it is in an update. All times are from the moment when every worker has taken its first step.
"""

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import processes
from candidates import Candidate

from tfps.modes.gossip.mode import collect_every
from tfps.progress import parse_progress

HERE = Path(__file__).resolve().parent
UNDISTURBED, SLOWED = "undisturbed", "slowed"
LINES_PER_POINT = 8  # the loss of one batch says little: a point of a curve is the mean of so many progress lines
_TIMED = re.compile(r"(\d{4}-\S+ \d\d:\d\d:\d\d),(\d{3}) (step=.*)")
_WAYS = re.compile(r"^\w+, \w+ to [\w/]+(, a round|, a mean)? +[\d,]+ +([\d,]+)", re.MULTILINE)


@dataclass(frozen=True)
class Setting:
    """What all jobs share.

    Attributes:
        data_dir: The directory of MNIST's files; empty for the digits of the package.
        num_workers: Workers.
        batch_size: Examples of one worker's step.
        batches: Batches of a whole run, over all workers.
        nap_ms: How long a step sleeps.
        slowdown: How many times as long the slow worker sleeps, which is the last one.
        deadline_secs: When a run is ended and called failed.
    """

    data_dir: str = ""
    num_workers: int = 4
    batch_size: int = 32
    batches: int = 1_600
    nap_ms: float = 20.0
    slowdown: float = 5.0
    deadline_secs: float = 180.0


@dataclass(frozen=True)
class Line:
    """A progress line: its Unix time, global step and loss, which is that of one batch."""

    time: float
    step: int
    loss: float


@dataclass(frozen=True)
class Traffic:
    """Bytes of one worker, both directions, as ``tfps plan`` tells them: of a step and of a round."""

    step: int
    round: int


@dataclass
class Trial:
    """One run.

    Attributes:
        name: The candidate's.
        case: ``undisturbed`` or ``slowed``.
        number: Of the round.
        batches: Batches that are in updates.
        seconds: Time from the first steps to the last one.
        rate: Examples a second in this time.
        accuracy: On the images for evaluation, at the end.
        sent: Bytes between all tasks.
        dropped: Gradients that came too late.
        curve: Points (seconds, batches, loss).
        problem: Why the run does not count; empty if it does.
    """

    name: str
    case: str
    number: int
    batches: int = 0
    seconds: float = 0.0
    rate: float = 0.0
    accuracy: float = 0.0
    sent: int = 0
    dropped: int = 0
    curve: list[tuple[float, float, float]] = field(default_factory=list)
    problem: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Return it for JSON."""
        return asdict(self)


def traffic(candidate: Candidate, setting: Setting) -> Traffic:
    """Return what ``tfps plan`` says that a worker sends and receives.

    Raises:
        SystemExit: If ``tfps plan`` fails or names no bytes.
    """
    argv = _command("plan", candidate, setting, {"model": "mnist"})
    told = subprocess.run(argv, capture_output=True, text=True, timeout=setting.deadline_secs, check=False)
    if told.returncode or not _WAYS.search(told.stdout):
        raise SystemExit(f"tfps plan of {candidate.name} names no bytes: {told.stderr.strip()[-200:]}")
    return traffic_of(told.stdout)


def traffic_of(plan: str) -> Traffic:
    """Return the bytes in the output of ``tfps plan``."""
    ways = [(bool(way[1]), int(way[2].replace(",", ""))) for way in _WAYS.finditer(plan)]
    return Traffic(*(sum(size for of_round, size in ways if of_round is wanted) for wanted in (False, True)))


def run(candidate: Candidate, setting: Setting, trial: Trial, each: Traffic, batches: int, scratch: Path) -> Trial:
    """Run a job until a number of batches are in updates.

    Args:
        candidate: The mode.
        setting: The sizes.
        trial: Names the case; it is filled.
        each: What a step and a round send.
        batches: How many; a few more where a global step has several.
        scratch: A directory of which nothing is kept.
    """
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir(parents=True)
    steps = candidate.max_steps(batches, setting.num_workers)
    flags = {"model": HERE / "naps.py", "model_dir": scratch / "model", "max_steps": steps}
    argv = _command("launch", candidate, setting, {**flags, "steps_to_validate": max(1, steps // 40)})
    tasks = [processes.Task("launch", "launch", argv, awaited=True)]
    output, _ = processes.run(tasks, environment(setting, trial.case), scratch, setting.deadline_secs, lasts=False)
    summary = scratch / "model" / "summary.json"
    if output.problem or not summary.exists():
        trial.problem = output.problem or "no summary.json"
        return trial
    measure(trial, candidate, setting, json.loads(summary.read_text()), lines_of(scratch / "model" / "logs"))
    trial.sent = sent(trial, candidate, setting, each, steps)
    return trial


def environment(setting: Setting, case: str) -> dict[str, str]:
    """Return the variables that ``naps.py`` reads."""
    slow = str(setting.num_workers - 1) if case == SLOWED else ""
    return {
        "TFPS_COMPARE_NAP_MS": str(setting.nap_ms),
        "TFPS_COMPARE_SLOWDOWN": str(setting.slowdown),
        "TFPS_COMPARE_SLOW_WORKER": slow,
    }


def lines_of(logs: Path) -> list[list[Line]]:
    """Return the progress lines of each worker, from its log."""
    return [parse_log(log.read_text(errors="replace")) for log in sorted(logs.glob("worker-*.log"))]


def parse_log(text: str) -> list[Line]:
    """Return the progress lines in a worker's log, without those of evaluation."""
    found = []
    for told in filter(None, map(_TIMED.match, text.splitlines())):
        values = parse_progress(told[3]) or {}
        if "loss" in values:
            when = datetime.strptime(told[1], "%Y-%m-%d %H:%M:%S").timestamp() + int(told[2]) / 1_000
            found.append(Line(when, int(values["step"]), values["loss"]))
    return found


def measure(
    trial: Trial, candidate: Candidate, setting: Setting, summary: Mapping[str, Any], lines: Sequence[Sequence[Line]]
) -> None:
    """Fill in what a run has done, or why it does not count."""
    if summary["status"] != "done":
        trial.problem = f"status {summary['status']}"
        return
    per_step = candidate.batches_per_step(setting.num_workers)
    trial.batches = int(summary["global_step"]) * per_step
    trial.accuracy, trial.dropped = summary["eval"]["accuracy"], summary["gradients_dropped"] or 0
    if trial.batches < setting.batches:  # of a shorter run only the accuracy is used
        return
    if len(lines) != setting.num_workers or not all(lines):
        trial.problem = f"progress of {sum(map(bool, lines))} workers"
        return
    began = max(own[0].time for own in lines)
    merged = sorted((line for own in lines for line in own), key=lambda line: (line.time, line.step))
    reached = np.maximum.accumulate([line.step for line in merged])
    trial.seconds = merged[int(np.argmax(reached))].time - began
    if trial.seconds <= 0:
        trial.problem = "too short to be measured"
        return
    counted = float(reached[-1]) - float(np.interp(began, [line.time for line in merged], reached))
    trial.rate = counted * per_step * setting.batch_size / trial.seconds
    trial.curve = curve(merged, began, per_step)


def curve(merged: Sequence[Line], began: float, per_step: int) -> list[tuple[float, float, float]]:
    """Return the points (seconds, batches, loss) of progress lines in the order of time: means of several each."""
    groups = [merged[start : start + LINES_PER_POINT] for start in range(0, len(merged), LINES_PER_POINT)]
    points = []
    for group in groups:
        means = np.mean([(line.time - began, line.step * per_step, line.loss) for line in group], axis=0)
        points.append((round(max(0.0, float(means[0])), 3), round(float(means[1]), 1), round(float(means[2]), 4)))
    return points


def sent(trial: Trial, candidate: Candidate, setting: Setting, each: Traffic, steps: int) -> int:
    """Return the bytes of a run: of every step, also those whose gradient came too late, and of every round."""
    if candidate.mode == "gossip":  # it begins with a round of no steps
        rounds = 1 + -(-steps // collect_every(candidate.config))
    else:
        rounds = -(-steps // (candidate.config.sync_every or 1))
    return (trial.batches + trial.dropped) * each.step + rounds * setting.num_workers * each.round


def _command(verb: str, candidate: Candidate, setting: Setting, more: Mapping[str, object]) -> list[str]:
    flags = {
        "mode": candidate.mode,
        **candidate.flags,
        "num_ps": candidate.num_ps,
        "num_workers": setting.num_workers,
        "batch_size": setting.batch_size,
        **({"data_dir": setting.data_dir} if setting.data_dir else {}),
        **more,
    }
    return [sys.executable, "-m", "tfps", verb, *(f"--{name}={value}" for name, value in flags.items())]
