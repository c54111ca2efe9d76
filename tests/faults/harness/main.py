"""Run faults against real jobs, and the same faults against the classic script; write FAULTS.md.

Usage: scripts/faults [--repeat=N] [--seed=S] [--fault=NAME ...] [--mode=MODE ...] [--at_once=N] [--out=DIR]
       [--add]
       scripts/faults --soak --minutes=M [--seed=S] [--mode=async|sync ...] [--out=DIR]
"""

import argparse
import dataclasses
import itertools
import multiprocessing
import os
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from multiprocessing import forkserver, resource_tracker
from pathlib import Path

import proc
import report
import result
import soak
import timeline
from attempt import Attempt, HangError, UnexpectedError
from faults import BOTH, FAULTS
from forked import HERE, PRELOAD, ROOT
from modes import MODES
from result import CLASSIC, FAILED, HANG, NOT_RUN, OK, TFPS, Result, replace

TABLE, RAW = HERE.parent, ROOT / "runs" / "faults"  # of all that git knows the table only
_TRIES = 10  # each has its own seed; what is not hit is reported in some seconds


def main() -> int:
    """Run what the flags ask for."""
    flags = _flags()
    if os.getpid() != 1:  # it kills all that it sees
        print("This must be the first process of a namespace: scripts/faults makes one.")
        return 2
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _leave)
    _start_fork_server()
    return _soak(flags) if flags.soak else _break(flags)


def _soak(flags: argparse.Namespace) -> int:
    found = []
    for mode in flags.mode or BOTH:
        found.append(soak.run(mode, flags.minutes, flags.seed, flags.under))
        result.store((flags.out or RAW) / f"soak-{mode}.json", [], found[-1:])
        _write_table(flags.out)
    return int(any(one.outcome != OK for one in found))


def _break(flags: argparse.Namespace) -> int:
    found: list[Result] = []
    part, parts = (int(number) for number in flags.part.split("/"))
    raw = flags.out or RAW
    for one in itertools.islice(_all_runs(flags), part, None, parts):
        found.append(_run_until_it_happens(one, flags.seed, raw / "kept", flags.time_scale))
        print(found[-1].line(), flush=True)
        result.store(raw / f"runs-{flags.seed}-{part}.json", found, [])
        _write_table(flags.out)
    return int(any(one.outcome != OK for one in found if one.program == TFPS))


def _leave(number: int, _frame: object) -> None:
    """End at once; what was started ends with this process, the first of its namespace."""
    os._exit(128 + number)


def _start_fork_server() -> None:
    """Start what tasks are forked from, so that it is there before any job is."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "1")
    os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "0")  # a fifth of so short a job's time
    multiprocessing.get_context("forkserver").set_forkserver_preload(["__main__", *PRELOAD])
    resource_tracker.ensure_running()
    shown = os.dup(2)
    with open(os.devnull, "wb") as nowhere:  # for TensorFlow's greetings
        os.dup2(nowhere.fileno(), 2)
    forkserver.ensure_running()
    os.dup2(shown, 2)
    os.close(shown)


def _flags() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="scripts/faults", allow_abbrev=False)
    parser.add_argument("--repeat", type=int, default=10, help="how often each fault happens (default 10)")
    parser.add_argument("--seed", type=int, default=1, help="of the random times of faults (default 1)")
    parser.add_argument("--fault", action="append", choices=FAULTS, metavar="NAME", help=", ".join(FAULTS))
    parser.add_argument(
        "--mode", action="append", choices=MODES, help=f"{', '.join(MODES)} (default all that a fault has)"
    )
    parser.add_argument("--program", action="append", choices=(TFPS, CLASSIC), help="tfps, classic (default both)")
    parser.add_argument(
        "--under", choices=("launch", "platform"), default="launch", help="who starts lost tasks again (default launch)"
    )
    parser.add_argument("--time_scale", type=float, default=1.0, help="factor of all time limits (default 1)")
    parser.add_argument("--soak", action="store_true", help="random faults, one after another, on one job a mode")
    parser.add_argument("--minutes", type=float, default=20.0, help="how long a soak breaks things (default 20)")
    parser.add_argument("--part", default="0/1", help=argparse.SUPPRESS)  # of those at once
    parser.add_argument("--at_once", type=int, default=1, help="how many jobs at once (default 1)")
    parser.add_argument("--add", action="store_true", help="to the runs of other seeds, which are deleted otherwise")
    parser.add_argument("--out", type=Path, help="directory for FAULTS.md and all raw results")
    flags = parser.parse_args()
    if flags.at_once != int(flags.part.partition("/")[2]) or (flags.soak and flags.at_once > 1):
        parser.error("--at_once is written with =, and is not for --soak: soak each --mode by itself")
    flags.program = flags.program or [TFPS, CLASSIC]
    if flags.mode and not flags.soak and not any(_all_runs(flags)):
        parser.error(f"no fault of these happens in {' or '.join(flags.mode)}")
    return flags


def _all_runs(flags: argparse.Namespace) -> Iterator[Result]:
    """Yield the runs in their order: each fault once, in each mode, then all again."""
    for repeat in range(1, flags.repeat + 1):
        for name in flags.fault or FAULTS:
            for mode in [mode for mode in FAULTS[name].modes if mode in (flags.mode or MODES)]:
                programs = [TFPS, *([CLASSIC] if FAULTS[name].peer and mode in BOTH else [])]
                for program in [program for program in programs if program in flags.program]:
                    yield Result(name, mode, program, "platform" if program == CLASSIC else flags.under, repeat)


def _run_until_it_happens(one: Result, seed: int, kept: Path, time_scale: float) -> Result:
    """Run one fault once; a few times, if something else was quicker than it."""
    for turn in range(_TRIES):
        found = _run(dataclasses.replace(one), f"{seed}/{turn}" if turn else str(seed), kept, time_scale)
        if found.outcome != NOT_RUN:
            break
    return found


def _run(found: Result, seed: str, kept: Path, time_scale: float) -> Result:
    fault, began = FAULTS[found.fault], time.monotonic()
    with tempfile.TemporaryDirectory(prefix="tfps-faults-", ignore_cleanup_errors=True) as directory:
        own_seed = f"{seed}/{found.fault}/{found.mode}/{found.repeat}"
        attempt = Attempt(found, Path(directory), own_seed, fault.deadline_secs, time_scale)
        try:
            fault.act(attempt)
            attempt.check_saved()
        except HangError as error:
            found.outcome, found.problem = HANG, str(error)
        except UnexpectedError as error:
            found.outcome, found.problem = FAILED, str(error)
        except proc.NotInjectedError as error:
            found.outcome, found.problem = NOT_RUN, str(error)
        except Exception as error:  # of the harness itself, or of what it runs
            traceback.print_exc()
            found.outcome, found.problem = NOT_RUN, f"{type(error).__name__}: {error}"
        finally:
            attempt.close()
        found.secs = time.monotonic() - began
        if found.outcome == OK and (problem := fault.problem(found, time_scale)):
            found.outcome, found.problem = FAILED, problem
        if found.outcome != OK:
            _keep(attempt, kept / f"{found.fault}-{found.mode}-{found.program}-{found.repeat}")
    return found


def _keep(attempt: Attempt, directory: Path) -> None:
    """Keep what a run that went wrong has said, and its logs."""
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    reported = f"{timeline.transcript(attempt.lines)}\n{attempt.moment}\n{attempt.result.line()}\n"
    (directory / "said.txt").write_text(reported)
    if (attempt.model_dir / "logs").is_dir():
        shutil.copytree(attempt.model_dir / "logs", directory / "logs")


def _write_table(out: Path | None) -> None:
    """Write what is known of the runs of all parts, and of the last soaks."""
    known = [result.load(path) for path in sorted((out or RAW).glob("*.json"))]
    runs = sorted((one for runs, _ in known for one in runs), key=lambda one: one.repeat)
    replace((out or TABLE) / "FAULTS.md", report.table(FAULTS, runs, [one for _, soaks in known for one in soaks]))


if __name__ == "__main__":
    sys.exit(main())
