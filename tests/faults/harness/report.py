"""FAULTS.md, from what the runs gave. Pure."""

import os
import platform
import statistics
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version

from faults import Fault
from result import CLASSIC, FAILED, HANG, NEVER_BACK, NOT_RUN, OK, TFPS, Result, Soak

_HEAD = """# tfps under faults

Written by `scripts/faults`, on {cores} cores of one {machine} machine, TensorFlow {tensorflow}. Each run is a job
of its own, of 2 PS and 2 workers whose steps take 0.1 s, that saves every second and is to come to its last step with
exit code 0 unless the table says otherwise. The harness proves of each fault that it happened, and a run that is not
over by its deadline is a hang.

Updates are counted where they end, and not by what tfps says of them. Each PS holds weights of three kinds: small ones,
which live packed, one of 640 KB, which the wire does not pack, and rows of a table. Each update raises each of them by
exactly 1. When a run is over, TensorFlow reads every checkpoint that is on the disk: each weight has to have had as
many updates as its `global_step` says and, in sync, the exact mean of the workers' gradients each time. Steps that a
job goes back are lost from both. In async with two PS, a worker that is killed in its pushes may leave steps on one of
them alone: one of each run that it has under way. Checkpoints before the last one may then also lack, on one PS, what
was under way as they were saved.

- **held**: the runs in which all that should be was: what the column before says, within its time limits (below), and
  no process left.
- **detected after**: from the fault to the first line that names it, or the end of another task.
- **settled after**: from the fault, or its cure, until the job had taken a step beyond the last one before the fault,
  and the tasks that were hit as well; or until it had ended, where it has to.
- **steps lost**: how far the job went back, by the steps that it reports; it has to say the same.
- **updates - step**: by how much some weight of some checkpoint differs from its `global_step`, at most.
- **pause**: the longest time without a step of anybody.
- Lost tasks are started again by `tfps launch` (`--max_restarts=3`), or one by one as platforms do it; some faults need
  tasks that nobody starts again. **by** tells which.
- Times are median / max, in seconds; so are steps. Tasks and launchers are forked from one process that has imported
  TensorFlow, without oneDNN, whose pass over each graph is a fifth of so short a job's time.
- **plain TensorFlow**: the classic script of `scripts/bench` with checkpoints every second, its lost tasks started
  again one by one. Its PS never end by themselves, in any run.
"""
_COLUMNS = (
    "fault",
    "expected",
    "mode",
    "by",
    "runs",
    "held",
    "detected after",
    "settled after",
    "steps lost",
    "updates - step",
    "pause",
    "exit codes",
    "left",
    "plain TensorFlow",
)


def table(faults: Mapping[str, Fault], results: Sequence[Result], soaks: Sequence[Soak]) -> str:
    """Return FAULTS.md."""
    machine, cores = platform.machine(), len(os.sched_getaffinity(0))
    parts = [_HEAD.format(cores=cores, machine=machine, tensorflow=version("tensorflow"))]
    if results:
        parts += [_row(_COLUMNS), "|---" * len(_COLUMNS) + "|"]
        parts += [row for name, fault in faults.items() for row in _rows(name, fault, results)]
        parts += ["", *_limits(faults, results), *_failures(faults, results)]
    if soaks:
        parts += ["", *_soaks(soaks)]
    return "\n".join(parts) + "\n"


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _rows(name: str, fault: Fault, results: Sequence[Result]) -> list[str]:
    rows = []
    for mode in fault.modes:
        own = [one for one in results if (one.fault, one.mode) == (name, mode)]
        ours, theirs = ([one for one in own if one.program == program] for program in (TFPS, CLASSIC))
        if own:
            rows.append(_row([fault.title, fault.expected, mode, *_cells(ours), _beside(theirs)]))
    return rows


def _cells(runs: Sequence[Result]) -> list[str]:
    if not runs:
        return ["-"] * (len(_COLUMNS) - 4)
    return [
        " ".join(sorted({one.under for one in runs})),
        str(len(runs)),
        str(sum(one.outcome == OK for one in runs)),
        _spread([one.detect_secs for one in runs]),
        _spread([one.settle_secs for one in runs]),
        _spread([one.lost for one in runs], whole=True),
        _spread([one.off for one in runs], whole=True),
        _spread([one.pause_secs for one in runs]),
        _counted([one.code if one.outcome != HANG else None for one in runs]),
        str(max((one.left for one in runs if one.left is not None), default="-")),
    ]


def _spread(values: Sequence[float | None], whole: bool = False) -> str:
    """Return median and maximum of what is known."""
    known = [value for value in values if value is not None]
    if not known:
        return "-"
    shown: Callable[[float], str] = (lambda value: f"{value:,.0f}") if whole else (lambda value: f"{value:.1f}")
    middle, most = shown(statistics.median(known)), shown(max(known))
    return middle if middle == most else f"{middle} / {most}"


def _counted(codes: Sequence[int | None]) -> str:
    """Return exit codes, and how often each, if there are several."""
    counts = Counter("hang" if code is None else str(code) for code in codes)
    return ", ".join(counts) if len(counts) == 1 else ", ".join(f"{code} ({n})" for code, n in counts.most_common())


def _beside(runs: Sequence[Result]) -> str:
    """Return what became of the classic script, in words."""
    kinds: dict[str, list[Result]] = {}
    for one in runs:
        kinds.setdefault(_became(one), []).append(one)
    reported = [f"{became} {len(some)}/{len(runs)}{_detail(some)}" for became, some in kinds.items()]
    return "; ".join(reported) or "-"


def _became(one: Result) -> str:
    if NEVER_BACK in one.problem:
        return "goes on without it"
    if one.outcome == HANG:
        return "hangs" if one.settle_secs is None else "goes on, but never ends"
    fine = "ends" if one.lost is None else "goes on"
    return {OK: fine, FAILED: f"exit {one.code}", NOT_RUN: "not run"}[one.outcome]


def _detail(runs: Sequence[Result]) -> str:
    parts = [(_spread([one.settle_secs for one in runs]), "after {} s")]
    parts += [(_spread([one.lost for one in runs], whole=True), "{} steps lost")]
    known = [text.format(value) for value, text in parts if value != "-"]
    return f" ({', '.join(known)})" if known else ""


def _limits(faults: Mapping[str, Fault], results: Sequence[Result]) -> list[str]:
    """Return the time limits, those that many faults share once."""
    by_limit: dict[str, list[str]] = {}
    for name in dict.fromkeys(one.fault for one in results):
        by_limit.setdefault(_limits_of(faults[name]), []).append(faults[name].title)
    usual = max(by_limit, key=lambda limit: len(by_limit[limit]))
    lines = [f"Limits: {usual}; but"] if len(by_limit) > 1 else [f"Limits: {usual}."]
    lines += [f"- {limit}: {'; '.join(titles)}" for limit, titles in by_limit.items() if limit != usual]
    return [lines[0], "", *lines[1:], ""]


def _limits_of(fault: Fault) -> str:
    parts = [f"settled in {fault.settle_within:g} s"]
    parts += [f"named in {fault.detect_within:g} s"] if fault.detect_within else []
    parts += [f"in async a step every {fault.async_pause:g} s"] if fault.async_pause else []
    parts += [fault.keeps] if fault.keeps else []
    return ", ".join(parts)


def _failures(faults: Mapping[str, Fault], results: Sequence[Result]) -> list[str]:
    """Return what went wrong in tfps's runs, and what was remarked, each once."""
    reported: Counter[str] = Counter()
    for one in results:
        if one.program == TFPS and (one.outcome != OK or one.note):
            words = f"{one.outcome}: {one.problem}" if one.outcome != OK else one.note
            reported[f"{faults[one.fault].title}, {one.mode}: {words}"] += 1
    lines = [f"- {text}{f' ({count} runs)' if count > 1 else ''}" for text, count in reported.items()]
    return ["What went wrong, and remarks:", "", *lines] if lines else []


def _soaks(soaks: Sequence[Soak]) -> list[str]:
    lines = ["## Soak", "", "Random faults, one after another, on one job on the package's digits; then it comes to"]
    lines += ["its last step, and its evaluation loss is held against that of undisturbed runs of as many steps.", ""]
    columns = [
        "mode",
        "minutes",
        "seed",
        "faults",
        "settled after, at most",
        "steps lost, at most",
        "updates - step",
        "steps",
        "loss",
    ]
    columns += ["undisturbed", "exit code", "left", "outcome"]
    lines += [_row(columns), "|---" * len(columns) + "|"]
    for one in soaks:
        faults = f"{sum(one.faults.values())}: " + ", ".join(f"{n} {name}" for name, n in sorted(one.faults.items()))
        band = f"{min(one.undisturbed):.4f} to {max(one.undisturbed):.4f}" if one.undisturbed else "-"
        loss = "-" if one.loss is None else f"{one.loss:.4f}"
        worst = [
            f"{one.worst_settle_secs:.1f}",
            f"{one.worst_lost:,}",
            "-" if one.off is None else str(one.off),
            f"{one.steps:,}",
            loss,
            band,
        ]
        ended = [
            _counted([one.code]),
            "-" if one.left is None else str(one.left),
            f"{one.outcome} {one.problem}".strip(),
        ]
        lines.append(_row([one.mode, f"{one.minutes:g}", str(one.seed), faults, *worst, *ended]))
    return lines
