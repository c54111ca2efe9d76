"""Run tfps and its peers side by side, interleaved, several rounds; write RESULTS.md and results.svg.

Usage: scripts/bench/run [--rounds=3] [--workload=NAME ...] [--program=NAME ...] [--quick]
"""

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

import data
import measure
import processes
import programs
import report
from measure import Result
from programs import HERE, PROGRAMS, ROOT, Place
from workloads import WORKLOADS, Workload

RAW = ROOT / "runs" / "bench" / "results.json"
MNIST_FILES = ("t10k-images-idx3-ubyte.gz", "t10k-labels-idx1-ubyte.gz")


def main() -> int:
    """Run what the flags ask for."""
    flags = _flags()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, stop)
    workloads = [WORKLOADS[name] for name in flags.workload or WORKLOADS]
    chosen = flags.program or list(PROGRAMS)
    mnist = Path(os.environ.get("TFPS_BENCH_MNIST", ROOT / ".." / "shared" / "data" / "mnist")).resolve()
    problem = _problem(workloads, chosen, mnist)
    if problem:
        print(f"scripts/bench/run: {problem}", file=sys.stderr)
        return 2
    if flags.quick:
        workloads = [workload.shorter() for workload in workloads]
    with tempfile.TemporaryDirectory(prefix="tfps-bench-") as scratch:
        for model in {workload.model for workload in workloads}:
            data.write(model, mnist, Path(scratch))
        planned = {w.name: report.planned(w, _place(w, mnist, Path(scratch))) for w in workloads}
        results: list[Result] = []
        for number in range(1, 2 if flags.quick else flags.rounds + 1):
            results += _round(number, workloads, chosen, mnist, Path(scratch))
            _write(flags.out, workloads, results, planned)  # what is done is not lost if the rest is cut short
    return 0


def stop(number: int, _frame: object) -> None:
    """End by way of every ``finally``, which end what was started; a second signal must not cut that short."""
    for other in (signal.SIGTERM, signal.SIGINT):
        signal.signal(other, signal.SIG_IGN)
    sys.exit(128 + number)


def _flags() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="scripts/bench/run", description=__doc__, allow_abbrev=False)
    parser.add_argument("--rounds", type=int, default=3, help="how often each program runs each workload")
    parser.add_argument("--workload", action="append", choices=WORKLOADS, metavar="NAME", help=", ".join(WORKLOADS))
    parser.add_argument("--program", action="append", choices=PROGRAMS, metavar="NAME", help=", ".join(PROGRAMS))
    parser.add_argument("--quick", action="store_true", help="one round, a third of the steps")
    parser.add_argument("--out", type=Path, default=HERE, help="directory for RESULTS.md and results.svg")
    return parser.parse_args()


def _problem(workloads: Sequence[Workload], chosen: Sequence[str], mnist: Path) -> str:
    """Return why nothing can be run, on one line, or nothing; makes virtual environments that are missing."""
    if any(w.model == "mnist" for w in workloads) and not all((mnist / name).is_file() for name in MNIST_FILES):
        return f"no MNIST in {mnist}: give the directory of {' and '.join(MNIST_FILES)} as TFPS_BENCH_MNIST."
    if find_spec("tensorflow") is None:
        return "no TensorFlow in .venv: run scripts/venv tensorflow."
    needed = {name for w in workloads for name in w.programs if name in chosen}
    if not needed:
        return "none of these programs takes part in these workloads."
    for venv in programs.missing(sorted(needed)):
        subprocess.run([HERE / "venvs", venv], check=False)
    absent = programs.missing(sorted(needed))
    return f"no virtual environment .venv/bench/{absent[0]}: run scripts/bench/venvs {absent[0]}." if absent else ""


def _round(
    number: int, workloads: Sequence[Workload], chosen: Sequence[str], mnist: Path, scratch: Path
) -> list[Result]:
    """Run each workload, each program in turn, once."""
    results = []
    for workload in workloads:
        for name in [name for name in workload.programs if name in chosen]:
            results.append(run_once(workload, name, number, _place(workload, mnist, scratch)))
            print(report.line(results[-1], workload), flush=True)
    return results


def _place(workload: Workload, mnist: Path, scratch: Path) -> Place:
    return Place(scratch / workload.model, mnist, scratch / "run")


def run_once(workload: Workload, name: str, number: int, place: Place) -> Result:
    """Run one program once."""
    program, result = PROGRAMS[name], Result(workload.name, name, number)
    workload = program.share_of(workload)
    shutil.rmtree(place.scratch, ignore_errors=True)
    place.scratch.mkdir()
    tasks, env = program.tasks(workload, place), programs.environment(program, workload)
    output, sampler = processes.run(tasks, env, place.scratch, workload.deadline_secs, program.lasts)
    found = [
        *measure.events(output),
        *(measure.logged(place.scratch / "model" / "logs") if workload.unit == "s" else ()),
    ]
    result.metrics = programs.metrics(name, place, found)
    result.problem = output.problem or (workload.problem(result.metrics) if program.checked else "")
    if not result.problem:
        measure.fill(result, workload, program, output, sampler, measure.marks(found))
    return result


def _write(out: Path, workloads: Sequence[Workload], results: Sequence[Result], planned: report.Plans) -> None:
    """Write the raw figures, the table and the picture."""
    RAW.parent.mkdir(parents=True, exist_ok=True)
    RAW.write_text(json.dumps([result.to_dict() for result in results], indent=1) + "\n")
    out.mkdir(parents=True, exist_ok=True)
    (out / "RESULTS.md").write_text(report.table(workloads, results, planned))
    if programs.is_missing("plot"):
        subprocess.run([HERE / "venvs", "plot"], check=False)
    subprocess.run([programs.python("plot"), HERE / "plot.py", RAW, out / "results.svg"], check=True)


if __name__ == "__main__":
    sys.exit(main())
