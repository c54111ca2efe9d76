"""Write what was measured: a line for each run, and RESULTS.md."""

import os
import platform
import re
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version

from measure import Result
from programs import MODELS, PROGRAMS, Place, environment
from workloads import Workload

Plans = Mapping[str, tuple[str, str]]

_HEAD = """# tfps beside its peers

Written by `scripts/bench/run`: {rounds}, in each every program in turn, on {cores} cores of {machine},
TensorFlow {tensorflow}. Median, min and max are of the rounds; the ratio is the median over the rounds of a program's
figure to tfps's in the same round. Figures are of the steady state, from the moment when all workers have passed a
warm-up to the last step. A run that failed its check gives no figure. "Step" is one worker's batch; CPU seconds are
those of PS (with coordinators and other helpers) and workers in the time measured. RPCs (a tensor that crosses tasks
is one) and bytes are what `tfps plan` says.

![The same as a picture](results.svg)
"""
_COLUMNS = (
    "program",
    "median",
    "min",
    "max",
    "x tfps",
    "CPU s per 1,000 steps: PS",
    "workers",
    "RPCs a step",
    "bytes a step",
)
_MEMORY = ("peak MB: PS", "worker")


@dataclass(frozen=True)
class Row:
    """A program's runs of one workload."""

    program: str
    good: Sequence[Result]
    bad: Sequence[Result]

    def median(self) -> float:
        """Return the median figure."""
        return statistics.median(result.value for result in self.good)


def figure(value: float) -> str:
    """Return a figure with three digits or more: ``0.12``, ``12.3``, ``12,345``."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def line(result: Result, workload: Workload) -> str:
    """Return a run as one line for people."""
    head = f"round {result.round}  {result.workload:<12} {result.program:<10}"
    if result.problem:
        return f"{head} failed: {result.problem}"
    cpu = "  ".join(f"{role} {secs:.2f}" for role, secs in sorted(result.cpu_secs.items()))
    peak = "  ".join(f"{role} {mb:,.0f} MB" for role, mb in sorted(result.peak_mb.items())) if workload.mb else ""
    worth = "  ".join(f"{name} {value:.4g}" for name, value in result.metrics.items() if name != "time")
    tail = f"CPU s per 1,000 steps: {cpu}  {peak} " if cpu else ""
    return f"{head} {figure(result.value):>9} {workload.unit}  {tail} {worth}  ({result.measured_secs:.1f} s measured)"


def rows(workload: Workload, results: Sequence[Result]) -> list[Row]:
    """Return the programs' rows, in the order of the table."""
    made = []
    for name in workload.programs:
        own = [result for result in results if (result.workload, result.program) == (workload.name, name)]
        if own:
            made.append(Row(name, [r for r in own if not r.problem], [r for r in own if r.problem]))
    return made


def planned(workload: Workload, place: Place) -> tuple[str, str]:
    """Return RPCs and bytes of one worker's step as ``tfps plan`` tells them, or dashes."""
    argv = [sys.executable, "-m", "tfps", "plan", f"--model={MODELS[workload.model]}", f"--mode={workload.mode}"]
    argv += [f"--data_dir={place.for_tfps(workload)}", f"--batch_size={workload.batch_size}"]
    argv += [f"--num_ps={workload.num_ps}", f"--num_workers={workload.num_workers}"]
    env = environment(PROGRAMS["tfps"], workload)
    told = subprocess.run(argv, capture_output=True, text=True, timeout=120, env={**os.environ, **env}, check=False)
    ways = re.findall(r"^(?:pull|push),.*?([\d,]+) +([\d,]+)(?: .*)?$", told.stdout, re.MULTILINE)
    counts = [[int(number.replace(",", "")) for number in way] for way in ways]
    if told.returncode or not counts:
        return "-", "-"
    tensors, size = (sum(way[i] for way in counts) for i in (0, 1))
    return f"{tensors:,}", f"{size:,}"


def table(workloads: Sequence[Workload], results: Sequence[Result], plans: Plans) -> str:
    """Return RESULTS.md."""
    rounds = max(result.round for result in results)
    head = _HEAD.format(
        rounds="1 round" if rounds == 1 else f"{rounds} rounds",
        cores=len(os.sched_getaffinity(0)),
        machine=f"one {platform.machine()} machine",
        tensorflow=version("tensorflow"),
    )
    return "\n".join([head, *(_section(w, rows(w, results), plans[w.name]) for w in workloads if rows(w, results))])


def _section(workload: Workload, its_rows: Sequence[Row], plan: tuple[str, str]) -> str:
    columns = [*_COLUMNS, *(_MEMORY if workload.mb else ())]
    columns[1] = f"{workload.unit}: median"
    lines = [f"## {workload.name}", "", f"{workload.title}. Each run is checked: {workload.check()}.", ""]
    lines += ["| " + " | ".join(columns) + " |", "|---" + "|---:" * (len(columns) - 1) + "|"]
    base = next((row for row in its_rows if row.program == "tfps"), None)
    lines += [f"| {' | '.join(_cells(row, base, workload, plan))} |" for row in its_rows]
    lines += ["", *(f"- {told}" for row in its_rows for told in _failures(row))]
    return "\n".join(lines).rstrip() + "\n"


def _cells(row: Row, base: Row | None, workload: Workload, plan: tuple[str, str]) -> list[str]:
    title = PROGRAMS[row.program].title
    if not row.good:
        return [title, "failed", *["-"] * (len(_COLUMNS) - 2 + len(_MEMORY) * bool(workload.mb))]
    values = [result.value for result in row.good]
    cells = [title, figure(row.median()), figure(min(values)), figure(max(values)), _ratio(row, base)]
    cells += [_cost(row, "ps"), _cost(row, "worker"), *(plan if row.program == "tfps" else ("-", "-"))]
    return cells + ([_peak(row, "ps"), _peak(row, "worker")] if workload.mb else [])


def _ratio(row: Row, base: Row | None) -> str:
    by_round = {result.round: result.value for result in base.good} if base else {}
    ratios = [result.value / by_round[result.round] for result in row.good if result.round in by_round]
    return f"{statistics.median(ratios):.2f}" if ratios else "-"


def _cost(row: Row, role: str) -> str:
    costs = [result.cpu_secs[role] for result in row.good if role in result.cpu_secs]
    return f"{statistics.median(costs):.2f}" if costs else "-"


def _peak(row: Row, role: str) -> str:
    peaks = [result.peak_mb[role] for result in row.good if role in result.peak_mb]
    return f"{statistics.median(peaks):,.0f}" if peaks else "-"


def _failures(row: Row) -> list[str]:
    title = PROGRAMS[row.program].title
    return [f"{title}, round {result.round}, not counted: {result.problem}" for result in row.bad]
