"""Train MNIST in every mode, undisturbed and with one of four workers slowed five times, in turn.

Writes mode-comparison.md and mode-comparison.svg to tfps/docs, and results.json to scripts/compare; with --quick or
--mode, all to runs/compare. TFPS_BENCH_MNIST is the directory of MNIST (default ../shared/data/mnist); without it, the
data are the digits of the package. TFPS_BENCH_PLOT is a Python with matplotlib (default: that of .venv/bench/plot).
"""

import argparse
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from datetime import datetime, timezone
from importlib.metadata import version
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(1, str(HERE.parent / "bench"))

import bench  # noqa: E402
import page  # noqa: E402
import programs  # noqa: E402
import trials  # noqa: E402
from candidates import Candidate, candidates  # noqa: E402
from trials import SLOWED, UNDISTURBED, Setting, Traffic, Trial  # noqa: E402

from tfps.modes.registry import MODES  # noqa: E402

DOCS = programs.ROOT / "tfps" / "docs"
PARTS = programs.ROOT / "runs" / "compare"
SHORTER = (10, 4)  # shorter runs, a tenth and a quarter, give more points of accuracy against bytes


def main() -> int:
    """Run what the flags ask for; returns 1 if a run failed."""
    flags = _flags()
    for ending in (signal.SIGTERM, signal.SIGINT):
        signal.signal(ending, bench.stop)
    if flags.redraw:
        _show(flags.out, flags.results)
        return 0
    setting, facts = _setting(flags), _facts()
    done: list[Trial] = []
    chosen = candidates(flags.mode or list(MODES.builtin))
    sizes = {one.name: trials.traffic(one, setting) for one in chosen}
    with tempfile.TemporaryDirectory(prefix="tfps-compare-") as scratch:
        for number in range(1, flags.rounds + 1):
            for one in chosen:
                done += _runs(one, setting, sizes[one.name], number, Path(scratch) / "run")
                _save(flags.results, setting, done, facts)  # what is done is not lost if the rest is cut short
    _show(flags.out, flags.results)
    return int(any(trial.problem for trial in done))


def _flags() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="scripts/compare_modes", description=__doc__, allow_abbrev=False)
    parser.add_argument("--rounds", type=int, default=1, help="how often each job runs (default 1)")
    parser.add_argument("--mode", action="append", choices=list(MODES.builtin), help="only this mode; may be repeated")
    parser.add_argument("--nap_ms", type=float, default=20.0, help="sleep of a step, in ms (default 20)")
    parser.add_argument("--slowdown", type=float, default=5.0, help="the slow worker sleeps so many times as long")
    parser.add_argument("--batches", type=int, default=1_600, help="batches of a run, over all workers (default 1600)")
    parser.add_argument("--quick", action="store_true", help="a tenth of the batches")
    parser.add_argument("--redraw", action="store_true", help="run nothing: write page and picture from --results")
    parser.add_argument("--out", type=Path, help="directory of the page and the picture")
    parser.add_argument("--results", type=Path, help="file of all figures")
    flags = parser.parse_args()
    if min(flags.rounds, flags.batches) < 1 or flags.nap_ms < 0 or flags.slowdown < 1:
        parser.error("--rounds, --batches and --slowdown must be at least 1, --nap_ms at least 0.")
    in_part = flags.quick or flags.mode  # must not take the place of the whole
    flags.out = flags.out or (PARTS if in_part else DOCS)
    flags.results = flags.results or (PARTS if in_part else HERE) / "results.json"
    return flags


def _setting(flags: argparse.Namespace) -> Setting:
    """Return the sizes; the data are MNIST if there is a directory of it, else the package's digits."""
    mnist = Path(os.environ.get("TFPS_BENCH_MNIST", programs.ROOT / ".." / "shared" / "data" / "mnist")).resolve()
    there = all((mnist / name).is_file() for name in bench.MNIST_FILES)
    setting = Setting(str(mnist) if there else "", batches=flags.batches, nap_ms=flags.nap_ms, slowdown=flags.slowdown)
    return replace(setting, batches=max(1, setting.batches // 10)) if flags.quick else setting


def _runs(one: Candidate, setting: Setting, each: Traffic, number: int, scratch: Path) -> list[Trial]:
    """Run one candidate in all cases."""
    lengths = [(UNDISTURBED, setting.batches), (SLOWED, setting.batches)]
    lengths += [(UNDISTURBED, max(1, setting.batches // part)) for part in SHORTER]
    made = []
    for case, batches in lengths:
        made.append(trials.run(one, setting, Trial(one.name, case, number), each, batches, scratch))
        print(page.line(made[-1]), flush=True)
    return made


def _facts() -> dict[str, object]:
    """Return when and where the runs are."""
    return {
        "when": datetime.now(timezone.utc).strftime("%Y-%m-%d"),
        "load": round(os.getloadavg()[0], 1),
        "cores": len(os.sched_getaffinity(0)),
        "machine": platform.machine(),
        "tensorflow": version("tensorflow"),
    }


def _save(results: Path, setting: Setting, done: Sequence[Trial], facts: Mapping[str, object]) -> None:
    """Write all figures."""
    shared = {**asdict(setting), "data_dir": "MNIST" if setting.data_dir else ""}  # no path of this machine
    rows = ",\n".join(json.dumps(trial.to_dict()) for trial in done)
    results.parent.mkdir(parents=True, exist_ok=True)
    results.write_text(f'{{"facts": {json.dumps(facts)},\n"setting": {json.dumps(shared)},\n"trials": [\n{rows}\n]}}\n')


def _show(out: Path, results: Path) -> None:
    """Write the page and the picture."""
    found = json.loads(results.read_text())
    done = [Trial(**trial) for trial in found["trials"]]
    out.mkdir(parents=True, exist_ok=True)
    (out / "mode-comparison.md").write_text(page.page(done, Setting(**found["setting"]), found["facts"]))
    python = os.environ.get("TFPS_BENCH_PLOT", programs.python("plot"))
    if not Path(python).exists():
        subprocess.run([programs.HERE / "venvs", "plot"], check=True)
    subprocess.run([python, HERE / "picture.py", results, out / "mode-comparison.svg"], check=True)


if __name__ == "__main__":
    sys.exit(main())
