"""Write what was measured: a line for each run, and the page."""

import math
import statistics
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from candidates import candidates
from trials import LINES_PER_POINT, SLOWED, UNDISTURBED, Setting, Trial

from tfps.modes.registry import MODES

_JOINT = "\0"  # in place of a space within a name
KEPT = 0.7  # of its examples a second: a mode that keeps so much goes on without its slow worker

_HEAD = """# The modes compared

<!-- Written by scripts/compare_modes: edit scripts/compare/page.py instead. -->

`scripts/compare_modes` trains the built-in `mnist` ({data}) in every mode with {num_workers} workers and
{batches:,} batches of {batch_size} examples in all: undisturbed, and with the last worker {slowdown:g} times slower.

Each step of a worker sleeps {nap_ms:g} ms instead of a longer computation, {slow_ms:g} ms on the slow worker. Real
computations would compete for the cores of one machine. So the rates tell who waits for whom, not how fast tfps is;
[performance](performance.md) has that.

Measured on {when} on {cores} cores of one {machine} machine with TensorFlow {tensorflow}, {rounds}.
{busy}

{missing}![Loss against time and steps, accuracy against bytes](mode-comparison.svg)

A point of a loss curve is the mean of {lines} progress lines, each of which has the loss of one batch;
the last point may be of fewer.

## With a slow worker

"Kept" is the rate with the slow worker divided by the undisturbed one. It can be {most:.2f} where nobody waits for the
slow worker: {others} workers at full speed and one at 1/{slowdown:g}. It can be 1 where an update leaves out the
gradients of the slowest worker. It is about {least:.2f} where each step waits for the slow worker.

| mode | examples/s | with the slow worker | kept | accuracy | with the slow worker |
|---|---:|---:|---:|---:|---:|
{rates}

- Goes on without the slow worker (keeps {kept:g} or more): {keeping}.
- Falls to the pace of the slow worker, or near it: {falling}.

`ssp` lets a fast worker run ahead of the slow one until the bound is reached, and then all go at its pace. A bound
of `s` lasts for `s / (1 - 1/{slowdown:g})` steps of a fast worker: {lasts:.0f} with `--staleness=3`. It evens out short
delays. A worker that is always slow needs a bound that the run does not reach, such as 500 here.

## Bytes

The bytes are computed, not measured: what `tfps plan` says for a worker's step or round, times the steps or rounds
taken, for all workers: pulls and pushes, or what workers send each other. Steps whose gradient came too late count.
The undisturbed runs are of three lengths.

| mode | batches in updates | late gradients | bytes sent | accuracy |
|---|---:|---:|---:|---:|
{sizes}
"""


def line(trial: Trial) -> str:
    """Return a run as one line for people."""
    head = f"round {trial.number}  {trial.name:<24} {trial.case:<11}"
    if trial.problem:
        return f"{head} failed: {trial.problem}"
    tail = f"accuracy {trial.accuracy:.3f}  {trial.sent:,} bytes"
    return f"{head} {trial.batches:>5} batches in {trial.seconds:5.1f} s  {trial.rate:>7,.0f} examples/s  {tail}"


def page(trials: Sequence[Trial], setting: Setting, facts: Mapping[str, Any]) -> str:
    """Return the page.

    Args:
        trials: All runs.
        setting: Their sizes.
        facts: ``when``, ``load`` (average, before the first run), ``cores``, ``machine``, ``tensorflow``.
    """
    names = list(dict.fromkeys(trial.name for trial in trials))
    share = {name: kept(trials, name) for name in names}
    rounds = max(trial.number for trial in trials)
    sizes = {name: getattr(setting, name) for name in ("num_workers", "batch_size", "batches", "slowdown", "nap_ms")}
    return _HEAD.format(
        **sizes,
        data="MNIST" if setting.data_dir else "the digits of the package",
        slow_ms=setting.nap_ms * setting.slowdown,
        **facts,
        rounds="one run each" if rounds == 1 else f"medians of {rounds} runs each",
        busy=_busy(facts["load"]),
        missing=_missing(names),
        lines=LINES_PER_POINT,
        most=(setting.num_workers - 1 + 1 / setting.slowdown) / setting.num_workers,
        least=1 / setting.slowdown,
        others=setting.num_workers - 1,
        lasts=3 / (1 - 1 / setting.slowdown) if setting.slowdown > 1 else math.inf,
        rates="\n".join(_rates(trials, name) for name in names),
        kept=KEPT,
        keeping=_listed([name for name in names if (share[name] or 0) >= KEPT]),
        falling=_listed([name for name in names if share[name] is not None and (share[name] or 0) < KEPT]),
        sizes="\n".join(row for name in names for row in _sizes(trials, name)),
    )


def _busy(load: float) -> str:
    """Return what a reader must know about other work on the machine."""
    said = f"Before the first run, the load average was {load:.1f}"
    return f"{said}: other programs were running, so small differences mean nothing." if load > 1 else f"{said}."


def _missing(names: Sequence[str]) -> str:
    """Return what a reader must know about modes that have come since, or nothing."""
    others = [one.name for one in candidates(list(MODES.builtin)) if one.name not in names]
    return f"Not measured yet: {_listed(others)}.\n\n" if others else ""


def whole_runs(trials: Sequence[Trial], name: str, case: str) -> list[Trial]:
    """Return a candidate's good runs of full length in a case."""
    good = [trial for trial in trials if (trial.name, trial.case) == (name, case) and not trial.problem]
    return [trial for trial in good if trial.batches == max(one.batches for one in good)]


def kept(trials: Sequence[Trial], name: str) -> float | None:
    """Return the rate of a candidate with a slow worker divided by the undisturbed one; ``None`` without both."""
    calm, slowed = (whole_runs(trials, name, case) for case in (UNDISTURBED, SLOWED))
    return _median(slowed, "rate") / _median(calm, "rate") if calm and slowed else None


def _rates(trials: Sequence[Trial], name: str) -> str:
    calm, slowed = (whole_runs(trials, name, case) for case in (UNDISTURBED, SLOWED))
    share = kept(trials, name)
    cells = [_cell(calm, "rate", ",.0f"), _cell(slowed, "rate", ",.0f"), "-" if share is None else f"{share:.2f}"]
    cells += [_cell(calm, "accuracy", ".3f"), _cell(slowed, "accuracy", ".3f")]
    return f"| `{name}` | {' | '.join(cells)} |"


def _sizes(trials: Sequence[Trial], name: str) -> list[str]:
    good = [t for t in trials if (t.name, t.case) == (name, UNDISTURBED) and not t.problem]
    rows = []
    for batches in sorted({trial.batches for trial in good}):
        own = [trial for trial in good if trial.batches == batches]
        figures = [_cell(own, "dropped", ",.0f"), _cell(own, "sent", ",.0f"), _cell(own, "accuracy", ".3f")]
        rows.append(f"| `{name}` | {batches:,} | {' | '.join(figures)} |")
    return rows or [f"| `{name}` | failed | - | - | - |"]


def _cell(trials: Sequence[Trial], of: str, form: str) -> str:
    return format(_median(trials, of), form) if trials else "failed"


def _median(trials: Sequence[Trial], of: str) -> float:
    return statistics.median(float(getattr(trial, of)) for trial in trials)


def _listed(names: Sequence[str]) -> str:
    """Return names as code, in lines that a terminal shows whole; no name is cut."""
    joined = ", ".join(f"`{name.replace(' ', _JOINT)}`" for name in names) or "none"
    return "\n  ".join(textwrap.wrap(joined, 60, break_long_words=False, break_on_hyphens=False)).replace(_JOINT, " ")
