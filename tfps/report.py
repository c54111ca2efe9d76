"""The final report of a job, made from ``summary.json``. Does not import TensorFlow."""

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tfps.storage import JobDirectory
from tfps.text import count, duration, number, plural

_SHORT_SECS = 10.0  # in a shorter job, chance decides which worker is the slowest
_SLOW, _BEHIND = 0.8, 0.2  # the thresholds from which a worker is reported as slow


def pace(steps_per_run: int, runs_in_flight: int, num_workers: int) -> str:
    """Return a description of how steps run, and how much staler each worker's extra runs make gradients."""
    steps = f"{steps_per_run} steps a run" if steps_per_run > 1 else "1 step a run"
    late = f", {runs_in_flight} under way: gradients are up to {(runs_in_flight - 1) * num_workers} staler"
    return steps + (late if runs_in_flight > 1 else "")


def final_lines(summary: Mapping[str, Any], model_dir: str | None) -> list[str]:
    """Return the final report of a job for its user, made from the summary."""
    step, secs, rate = (summary.get(name) or 0 for name in ("global_step", "seconds", "examples_per_sec"))
    resumed = summary.get("resumed_from_step")
    lines = [f"done: step {count(step)} after {duration(secs)}"]
    lines[0] += f", {count(rate)} examples/s" if rate else ""
    lines[0] += f", resumed from step {count(resumed)}" if resumed else ""
    if (first := summary.get("first_step_secs")) is not None:
        lines.append(f"  first step     after {duration(first)}")
    if summary.get("loss") is not None:
        lines.append(f"  training loss  {summary['loss']:.4g}")
    if summary.get("pace"):
        workers = sum(task.startswith("worker/") for task in summary.get("tasks", {}))
        lines.append(f"  pace           {pace(**summary['pace'], num_workers=workers)}")
    metrics = summary.get("eval") or {}
    lines += [f"  eval {name:<9} {told}" for name, value in metrics.items() if (told := _metric(value))]
    lines += [f"  {name:<14} {told}" for name, told in _course(summary).items() if told]
    if model_dir:
        lines.append(f"  checkpoint     {summary.get('checkpoint') or 'none'}")
        lines.append(f"  logs           {JobDirectory(model_dir).logs}")
    return lines


def _course(summary: Mapping[str, Any]) -> dict[str, str]:
    """Return the notable facts about a job's course for its user."""
    restarted = {task: of for task, of in summary.get("tasks", {}).items() if of.get("restarts")}
    restarts = [f"{task} {of['restarts']}{_after(of.get('restarted_after'))}" for task, of in restarted.items()]
    lost = summary.get("recovery_secs")
    names = ("gradients_dropped", "batches_skipped", "partial_updates")
    dropped, skipped, partial = (summary.get(name) for name in names)
    return {
        "staleness": _shares(summary.get("staleness") or []),
        "slowest": slowest(summary),
        "restarts": ", ".join(restarts) + (f"; {duration(lost)} lost to recovery" if restarts and lost else ""),
        "dropped": f"{count(dropped)} gradients that came too late" if dropped else "",
        "skipped": f"{count(skipped)} {'batch' if skipped == 1 else 'batches'}" if skipped else "",
        "partial": f"{plural(partial, 'update')} of a lost worker, which some variables have and others not"
        if partial
        else "",
    }


def _after(reasons: Sequence[str] | None) -> str:
    return f" (after {', '.join(dict.fromkeys(reasons))})" if reasons else ""


def _shares(counts: Sequence[int], most: int = 5) -> str:
    """Return a histogram of the staleness of gradients as shares; empty if none was stale."""
    total = sum(counts)
    if total == (counts[0] if counts else 0):
        return ""
    shown = {str(stale): number for stale, number in enumerate(counts[:most])}
    shown |= {f"{most} or more": sum(counts[most:])} if len(counts) > most else {}
    return ", ".join(f"{stale}: {number / total:.0%}" for stale, number in shown.items() if number) + " of the steps"


def slowest(summary: Mapping[str, Any]) -> str:
    """Return which worker is clearly slower than the others, and how that shows; empty if none is."""
    paces, behind = summary.get("steps_per_sec") or {}, summary.get("behind") or {}
    is_blocking = summary.get("is_blocking")
    if len(paces) > 1 and not is_blocking and summary.get("seconds", math.inf) > _SHORT_SECS:
        last = min(paces, key=paces.__getitem__)
        usual = statistics.median(pace for task, pace in paces.items() if task != last)
        if paces[last] < _SLOW * usual:
            return f"{last}: {paces[last] / usual:.0%} of the others' steps a second"
    most, *others = sorted(behind, key=behind.__getitem__, reverse=True) or [""]
    if not most or behind[most] < _BEHIND + max((behind[other] for other in others), default=0.0):
        return ""
    what = "the others waited for it" if is_blocking else "at less than half the others' pace"
    return f"{most}: {what} {behind[most]:.0%} of the time"


def _metric(value: Any, most: int = 8) -> str:
    """Return a metric's value in readable form: a number, or the first ones of an array; else empty."""
    if value is None or (isinstance(value, float) and not math.isfinite(value)):
        return "not finite"
    if isinstance(value, list):
        values = list(_flat(value))
        return " ".join(map(_metric, values[:most])) + (
            f" ... ({count(len(values))} in all)" if len(values) > most else ""
        )
    return number(value) if isinstance(value, (int, float)) else ""


def _flat(values: Sequence[Any]) -> Iterator[Any]:
    for value in values:
        yield from _flat(value) if isinstance(value, list) else [value]
