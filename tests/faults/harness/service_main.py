"""Run the faults of a parameter service; write SERVICE.md.

Usage: scripts/faults --service [--repeat=N] [--fault=NAME ...] [--mode=MODE ...] [--at_once=N] [--time_scale=X]
       [--seed=S] [--out=DIR] [--add]
"""

import argparse
import dataclasses
import json
import os
import platform
import shutil
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import main as usual
import proc
import service
from forked import PRELOAD, ROOT
from result import replace
from service_faults import FAULTS

OUT, _TRIES = ROOT / "runs" / "service", 5
_HEAD = """# The parameter service under faults

Written by `scripts/faults --service`, on {cores} cores of one {machine} machine, TensorFlow {tensorflow}. Other
programs ran beside it, so the times are those of a busy machine. The commands:

```
{commands}
```

Each run is a service of its own: `tfps launch --serve --num_ps=2`, which saves every second, and two client processes
that pull and push. Its modes: {modes}. Servers and
clients are forked from one process that has imported TensorFlow.

Pushes are counted where they end. Each adds 1 to all numbers of two parameters, one on each server, and to a number of
its client's own. A client writes down each push before it begins, and when it has returned. In the end the service is
stopped with SIGTERM, and TensorFlow reads every checkpoint that is on the disk: each has exactly as many pushes in all
parameters as its `global_step` says; and of each client, every push that has returned counts once, and the one under
way when it was killed at most once. After the loss of a server that holds for the pushes since the checkpoint that it
resumed from, which has to be the last one that was called saved, or a later one.

- **held**: the runs in which all that was so, the fault was proven to have happened, every client pushed again, the
  exit code was 143, and no process was left.
- **settled after**: from the fault, or its cure, until every client had a push applied.
- **updates lost**: those that had returned and are in no checkpoint.
- **pause**: the longest time without a push of anybody. Times are median / max, in seconds.

| fault | expected | mode | runs | held | settled after | updates lost | pause | left |
|---|---|---|---|---|---|---|---|---|
"""


@dataclass
class Result:
    """What a run gave."""

    fault: str
    mode: str
    repeat: int
    outcome: str = "ok"
    problem: str = ""
    settle_secs: float | None = None
    pause_secs: float | None = None
    lost: int | None = None
    left: int | None = None
    secs: float = 0.0

    def line(self) -> str:
        """Return it for people."""
        return " ".join(f"{name}={value}" for name, value in dataclasses.asdict(self).items())


def main() -> int:
    """Run what the flags ask for."""
    flags = _flags()
    if os.getpid() != 1:  # it kills all that it sees
        print("This must be the first process of a namespace: scripts/faults makes one.")
        return 2
    PRELOAD.extend(["tfps.runtime.service.leading_task", "pushing_client"])
    usual._start_fork_server()
    part, parts = (int(number) for number in flags.part.split("/"))
    wanted = [(r, n, m) for r in range(1, flags.repeat + 1) for n in flags.fault for m in flags.mode]
    found: list[Result] = []
    for repeat, name, mode in wanted[part::parts]:
        for _ in range(_TRIES):
            found.append(_run(Result(name, mode, repeat), flags))
            print(found[-1].line(), flush=True)
            if found[-1].outcome != "not run":
                break
            found.pop()
        _store(flags, found, part)
    return int(any(one.outcome != "ok" for one in found))


def _flags() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="scripts/faults --service", allow_abbrev=False)
    parser.add_argument("--service", action="store_true", required=True)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--fault", action="append", choices=FAULTS)
    parser.add_argument("--mode", action="append", choices=service.MODES)
    parser.add_argument("--time_scale", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=1, help="names the file of the results")
    parser.add_argument("--part", default="0/1", help=argparse.SUPPRESS)
    parser.add_argument("--at_once", type=int, default=1)
    parser.add_argument("--add", action="store_true")
    parser.add_argument("--out", type=Path, default=OUT)
    flags = parser.parse_args()
    flags.fault, flags.mode = flags.fault or [*FAULTS], flags.mode or ["async", "sync"]
    return flags


def _run(found: Result, flags: argparse.Namespace) -> Result:
    began, fault = time.monotonic(), FAULTS[found.fault]
    with tempfile.TemporaryDirectory(prefix="tfps-service-", ignore_cleanup_errors=True) as directory:
        run = service.Run(found.mode, Path(directory), flags.time_scale)
        try:
            run.begin()
            fault.act(run)
            settled = run.go_on()
            found.settle_secs, found.pause_secs = settled - run.since, run.pause(settled)
            run.over.set()
            if (code := run.stop()) != 143:
                raise service.BrokenError(f"exit code {code}")
            found.lost = run.check()
            if fault.pause and found.pause_secs > fault.pause * flags.time_scale:
                raise service.BrokenError(f"nobody pushed for {found.pause_secs:.1f} s")
        except proc.NotInjectedError as error:
            found.outcome, found.problem = "not run", str(error)
        except Exception as error:  # whatever it is, it did not hold
            found.outcome, found.problem = "failed", f"{type(error).__name__}: {error}"
        finally:
            found.left = run.close()
        if found.left and found.outcome == "ok":
            found.outcome, found.problem = "failed", f"{found.left} processes left"
        if found.outcome != "ok":
            _keep(run, flags.out / "kept" / f"{found.fault}-{found.mode}-{found.repeat}")
    found.secs = time.monotonic() - began
    return found


def _keep(run: service.Run, directory: Path) -> None:
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    (directory / "said.txt").write_text("".join(f"{at:12.3f} {text}\n" for at, text in run.lines) + f"fault {run.at}\n")
    for journal in run.directory.glob("*.txt"):
        shutil.copy(journal, directory)


def _store(flags: argparse.Namespace, found: list[Result], part: int) -> None:
    flags.out.mkdir(parents=True, exist_ok=True)
    given = [word for word in sys.argv[1:] if not word.startswith("--part")]
    stored = {"command": " ".join(["scripts/faults", *given]), "runs": [dataclasses.asdict(one) for one in found]}
    replace(flags.out / f"runs-{flags.seed}-{part}.json", json.dumps(stored))
    known = [json.loads(path.read_text()) for path in sorted(flags.out.glob("runs-*.json"))]
    runs = [Result(**one) for each in known for one in each["runs"]]
    replace(flags.out / "SERVICE.md", table(runs, list(dict.fromkeys(each["command"] for each in known))))


def table(runs: list[Result], commands: list[str]) -> str:
    """Return SERVICE.md."""
    modes = ", ".join(" ".join([f"`--mode={mode}", *service.MODES[mode]]) + "`" for mode in service.MODES)
    head = _HEAD.format(
        cores=len(os.sched_getaffinity(0)),
        machine=platform.machine(),
        tensorflow=version("tensorflow"),
        commands="\n".join(commands),
        modes=modes,
    )
    rows = [row for name in FAULTS for mode in service.MODES if (row := _row(name, mode, runs))]
    wrong = [f"- {FAULTS[one.fault].title}, {one.mode}: {one.problem}" for one in runs if one.outcome != "ok"]
    return "\n".join([head + "\n".join(rows), *(["", "What did not hold:", "", *wrong] if wrong else [])]) + "\n"


def _row(name: str, mode: str, runs: list[Result]) -> str:
    own = [one for one in runs if (one.fault, one.mode) == (name, mode)]
    held = str(sum(one.outcome == "ok" for one in own))
    cells = [FAULTS[name].title, FAULTS[name].expected, mode, str(len(own)), held]
    for values, digits in (([one.settle_secs for one in own], 1), ([one.lost for one in own], 0)):
        cells.append(_spread(values, digits))
    cells += [_spread([one.pause_secs for one in own], 1), str(max((one.left or 0 for one in own), default=0))]
    return f"| {' | '.join(cells)} |" if own else ""


def _spread(values: list[float | None] | list[int | None], digits: int) -> str:
    known = [value for value in values if value is not None]
    if not known:
        return "-"
    middle, most = f"{statistics.median(known):.{digits}f}", f"{max(known):.{digits}f}"
    return middle if middle == most else f"{middle} / {most}"


if __name__ == "__main__":
    sys.exit(main())
