"""The final report of a job, made from ``summary.json``. Does not import TensorFlow."""

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence

from tfps.storage import JobDirectory
from tfps.summary import DONE, JobSummary
from tfps.summary_entries import ChiefReport, Metric, RoundCount, RunPace, TaskSummary, WorkersReport
from tfps.text import count, duration, number, plural

_SHORT_SECS = 10.0  # in a shorter job, chance decides which worker is the slowest
_WIDTH = 14  # of the names, unless one is longer
_SLOW, _BEHIND = 0.8, 0.2  # the thresholds from which a worker is reported as slow


def describe_pace(pace: RunPace) -> str:
    """Return a description of how steps run."""
    steps = f"{pace.steps_per_run} steps a run" if pace.steps_per_run > 1 else "1 step a run"
    several = f", {pace.runs_in_flight} runs in flight"
    return steps + (several if pace.runs_in_flight > 1 else "")


def final_lines(summary: JobSummary, model_dir: str | None) -> list[str]:
    """Return the final report of a job for its user, made from the summary."""
    chief = summary.chief or ChiefReport()
    rows = {name: text for name, text in _rows(summary, chief, model_dir) if text}
    width = max([_WIDTH, *map(len, rows)])
    return [_headline(summary, chief), *(f"  {name:<{width}} {text}" for name, text in rows.items())]


def _headline(summary: JobSummary, chief: ChiefReport) -> str:
    step, rate, resumed = count(summary.global_step), chief.examples_per_sec, chief.resumed_from_step
    if limit := _limit_before(summary, chief):
        return f"done: nothing to train, {limit} to continue"
    first = f"done: step {step} after {duration(chief.seconds or 0)}"
    first += f", {count(rate)} examples/s" if rate else ""
    return first + (f", resumed from step {count(resumed)}" if resumed else "")


def _limit_before(summary: JobSummary, chief: ChiefReport) -> str:
    """Return which limit a job had reached when it began, and which flag raises it; empty if it has trained.

    One that lost a PS at its end has trained before it resumed.
    """
    has_trained = summary.launcher is not None and summary.launcher.first_step_secs is not None
    if has_trained or summary.global_step != chief.resumed_from_step:
        return ""
    step = count(summary.global_step)
    if summary.max_steps is not None and summary.has_reached(summary.max_steps):
        return f"step {step} was reached before: raise --max_steps"
    if summary.epochs is None or summary.status != DONE:
        return ""
    return f"each example was read {plural(summary.epochs, 'time')} before, at step {step}: raise --epochs"


def _rows(summary: JobSummary, chief: ChiefReport, model_dir: str | None) -> Iterator[tuple[str, str]]:
    """Yield the names and texts of the report; a text may be empty."""
    if summary.launcher and summary.launcher.first_step_secs is not None:
        yield "first step", f"{duration(summary.launcher.first_step_secs)} after the start of the command"
    yield "training loss", _loss(summary, chief)
    yield "pace", describe_pace(chief.pace) if chief.pace else ""
    yield "rounds", _rounds(chief.rounds, summary.global_step - chief.resumed_from_step) if chief.rounds else ""
    yield from ((f"eval {name}", _metric(value)) for name, value in chief.eval.items())
    yield from _course(summary, chief).items()
    if model_dir:
        yield "checkpoint", summary.checkpoint or "none"
        yield "logs", str(JobDirectory(model_dir).logs)


def _loss(summary: JobSummary, chief: ChiefReport) -> str:
    """Return the chief's last loss, or why there is none in a job that has trained; empty if that is not known."""
    own = summary.tasks.get("worker/0", TaskSummary())
    if chief.loss is None and own.steps == 0 and any(task.steps for task in summary.tasks.values()):
        return "none: it is that of the chief, worker/0, which took no step"
    return "" if chief.loss is None else f"{chief.loss:.4g} (chief)"


def _rounds(rounds: RoundCount, steps: int) -> str:
    """Return how many rounds a run of some steps has made, and how long they were."""
    is_exact = rounds.made * rounds.most_steps == steps
    length = f"{'' if is_exact else 'at most '}{plural(rounds.most_steps, 'step')}"
    fewer = f", {count(rounds.fewest_steps)} of the worker with the fewest"
    return f"{count(rounds.made)} of {length}" + (fewer if rounds.fewest_steps < rounds.most_steps else "")


def _course(summary: JobSummary, chief: ChiefReport) -> Mapping[str, str]:
    """Return the notable facts about a job's course for its user."""
    dropped, skipped, partial = chief.gradients_dropped, chief.batches_skipped, summary.partial_updates
    return {
        "staleness": _shares((summary.workers.staleness if summary.workers else None) or []),
        "slowest": slowest(summary),
        "restarts": _restarts(summary),
        "dropped": f"{plural(dropped, 'gradient')} that came too late{_by_worker(summary)}" if dropped else "",
        "skipped": plural(skipped, "batch", "batches") if skipped else "",
        "partial": f"{plural(partial, 'update')} of a lost worker, which some variables have and others not"
        if partial
        else "",
    }


def _restarts(summary: JobSummary) -> str:
    restarted = {name: task for name, task in summary.tasks.items() if task.restarts}
    counts = ", ".join(f"{name} {task.restarts}{_after(task.restarted_after)}" for name, task in restarted.items())
    lost_secs = summary.launcher.recovery_secs if summary.launcher else 0.0
    return counts + (f"; {duration(lost_secs)} lost to recovery" if counts and lost_secs else "")


def _by_worker(summary: JobSummary) -> str:
    """Return how many gradients of each worker came too late, most first; empty if that was not counted."""
    dropped = {name: task.gradients_dropped for name, task in summary.tasks.items() if task.gradients_dropped}
    most_first = sorted(dropped.items(), key=lambda item: -item[1])
    return f": {', '.join(f'{name} {count(number)}' for name, number in most_first)}" if dropped else ""


def _after(reasons: Sequence[str]) -> str:
    return f" (after {', '.join(dict.fromkeys(reasons))})" if reasons else ""


def _shares(counts: Sequence[int], most: int = 5) -> str:
    """Return a histogram of the staleness of gradients as shares; empty if none was stale."""
    total = sum(counts)
    if total == (counts[0] if counts else 0):
        return ""
    shown = {str(stale): number for stale, number in enumerate(counts[:most])}
    shown |= {f"{most} or more": sum(counts[most:])} if len(counts) > most else {}
    return ", ".join(f"{stale}: {number / total:.0%}" for stale, number in shown.items() if number) + " of the steps"


def slowest(summary: JobSummary) -> str:
    """Return which worker is clearly slower than the others, and how that shows; empty if none is."""
    chief, workers = summary.chief or ChiefReport(), summary.workers or WorkersReport()
    paces, behind, is_blocking = workers.steps_per_sec, workers.behind, chief.is_blocking
    secs = math.inf if chief.seconds is None else chief.seconds
    if len(paces) > 1 and not is_blocking and secs > _SHORT_SECS:
        last = min(paces, key=paces.__getitem__)
        usual = statistics.median(pace for task, pace in paces.items() if task != last)
        if paces[last] < _SLOW * usual:
            return f"{last}: {paces[last] / usual:.0%} of the others' steps a second"
    most, *others = sorted(behind, key=behind.__getitem__, reverse=True) or [""]
    if not most or behind[most] < _BEHIND + max((behind[other] for other in others), default=0.0):
        return ""
    are_spared = any(task.gradients_dropped is not None for task in summary.tasks.values())
    waited = "behind the others" if are_spared else "the others waited for it"
    what = waited if is_blocking else "at less than half the others' pace"
    return f"{most}: {what} {behind[most]:.0%} of the time"


def _metric(value: Metric, most: int = 8) -> str:
    """Return a metric's value in readable form: a number, or the first ones of an array."""
    if value is None or (isinstance(value, float) and not math.isfinite(value)):
        return "not finite"
    if isinstance(value, Sequence):
        values = list(_flat(value))
        return " ".join(map(_metric, values[:most])) + (
            f" ... ({count(len(values))} in all)" if len(values) > most else ""
        )
    return number(value)


def _flat(values: Sequence[Metric]) -> Iterator[float | None]:
    for value in values:
        if isinstance(value, Sequence):
            yield from _flat(value)
        else:
            yield value
