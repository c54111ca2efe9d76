"""The null-step ladder: how long a step takes that only reads parameters and gives an update, against workers.

As figure 7 of Abadi et al. 2016, "TensorFlow: A System for Large-Scale Machine Learning" (OSDI), for tfps and the
classic script, asynchronous, 1 PS. A sparse step must not take longer for a larger table. Writes NULL_STEPS.md.
"""

import argparse
import signal
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import bench
import data
import report
from measure import Result
from programs import HERE, PROGRAMS, Place
from workloads import Workload

PROGRAMS_MEASURED = ("tfps", "classic")
WORKERS = (1, 2, 4, 8)
KINDS = {  # parameters read, of how many MB, how many rows of it, steps of one or two workers together
    "a scalar": (0, 0, 4_000),
    "dense, 1 MB": (1, 0, 1_920),
    "dense, 10 MB": (10, 0, 160),
    "dense, 100 MB": (100, 0, 32),
    "32 rows of 100 MB": (100, 32, 2_400),
    "32 rows of 1 GB": (1_000, 32, 2_400),
}

_HEAD = """# The null step

Written by `scripts/bench/null`, {rounds}: milliseconds of a worker's step that reads parameters from one PS and
gives an update of ones, asynchronous, in the steady state; the median of the rounds. Each run is checked: the sum of
all parameters must be what the updates make of it. All tasks share one machine's cores, so more workers than cores
take longer in any case.
"""


def workload(kind: str, workers: int) -> Workload:
    """Return one cell's workload."""
    mb, rows, total = KINDS[kind]
    total *= max(1, workers // 2)
    return Workload(
        f"{kind}, {workers}w",
        kind,
        "null",
        PROGRAMS_MEASURED,
        total,
        total // 3,
        batch_size=1,
        num_workers=workers,
        mb=mb,
        rows=rows,
        unit="ms",
    )


def table(results: Sequence[Result], rounds: int) -> str:
    """Return NULL_STEPS.md."""
    lines = [_HEAD.format(rounds="1 round" if rounds == 1 else f"{rounds} rounds")]
    lines += ["| a step reads | program | " + " | ".join(f"{n} worker{'s' * (n > 1)}" for n in WORKERS) + " |"]
    lines += ["|---|---|" + "---:|" * len(WORKERS)]
    for kind in KINDS:
        for name in PROGRAMS_MEASURED:
            cells = [_cell([r for r in results if (r.workload, r.program) == (f"{kind}, {n}w", name)]) for n in WORKERS]
            lines.append(f"| {kind} | {PROGRAMS[name].title} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _cell(runs: Sequence[Result]) -> str:
    good = [run.value for run in runs if not run.problem]
    return report.figure(statistics.median(good)) if good else "failed" if runs else "-"


def main() -> None:
    """Run what the flags ask for."""
    parser = argparse.ArgumentParser(prog="scripts/bench/null", description=__doc__, allow_abbrev=False)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=HERE, help="directory for NULL_STEPS.md")
    flags = parser.parse_args()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, bench.stop)
    results = []
    with tempfile.TemporaryDirectory(prefix="tfps-bench-") as scratch:
        data.write("null", Path(scratch), Path(scratch))
        place = Place(Path(scratch) / "null", Path(scratch), Path(scratch) / "run")
        cells = [(r, workload(k, n)) for r in range(1, flags.rounds + 1) for k in KINDS for n in WORKERS]
        for number, each in cells:
            for name in PROGRAMS_MEASURED:
                results.append(bench.run_once(each, name, number, place))
                print(report.line(results[-1], each), flush=True)
    flags.out.mkdir(parents=True, exist_ok=True)
    (flags.out / "NULL_STEPS.md").write_text(table(results, flags.rounds))


if __name__ == "__main__":
    sys.exit(main())
