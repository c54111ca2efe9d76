"""A soak: random faults from a seed, one after another, on one long job; and the loss it ends with.

Its weights count the updates that were applied, as those of all other faults do, see ``sums``; and its loss tells what
they were worth. The band comes from undisturbed jobs of as many steps. Gradients are stale by chance, and faults make a
job go back, so the loss of one run is no figure: the band is widened by its own width, or a tenth of the loss where
that is more.
"""

import random
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import network
import proc
from attempt import Attempt, HangError, UnexpectedError
from kills import workers_of
from result import FAILED, HANG, OK, TFPS, Result, Soak

from tfps.storage import read_json

STEP_SECS = 0.2
_UNDISTURBED = 3
_QUIET_SECS = (3.0, 10.0)  # between two faults
_EACH_WITHIN_SECS = 120.0
_TASKS = ("worker/0", "worker/1", "ps/0", "ps/1")


def _kill(*victims: str) -> Callable[[Attempt], None]:
    def act(run: Attempt) -> None:
        run.kill(*victims)
        run.recover(*workers_of(victims))

    return act


def _freeze(victim: str, secs: float | None) -> Callable[[Attempt], None]:
    def act(run: Attempt) -> None:
        [pid] = run.pids(victim)
        with run.fault(victim):
            proc.stop(pid)
        if secs is not None:
            time.sleep(secs)
            proc.go_on(pid)
            run.healed()
        run.recover(*workers_of([victim]))

    return act


def _cut(kind: str) -> Callable[[Attempt], None]:
    def act(run: Attempt) -> None:
        with network.broken(run, "ps/1", kind):
            time.sleep(5)
        run.healed()
        run.recover()

    return act


DISTURBANCES: Mapping[str, Callable[[Attempt], None]] = {
    **{f"{task} killed": _kill(task) for task in _TASKS},
    "both PS killed": _kill("ps/0", "ps/1"),
    "worker/0 and ps/1 killed": _kill("worker/0", "ps/1"),
    **{f"{task} frozen for 5 s": _freeze(task, 5.0) for task in _TASKS},
    "worker/1 frozen": _freeze("worker/1", None),
    **{f"ps/1 cut off, {kind}": _cut(kind) for kind in network.KINDS},
}


def run(mode: str, minutes: float, seed: int, under: str) -> Soak:
    """Soak one mode."""
    workers = 2 if mode == "async" else 1
    steps = int(minutes * 60 * workers / STEP_SECS) + 200
    found = Soak(mode, seed, minutes, steps=steps)
    for number in range(_UNDISTURBED):
        loss = _undisturbed(mode, steps, seed + number, under)
        print(f"undisturbed {mode}: loss {loss:.4f} after {steps:,} steps", flush=True)
        found.undisturbed.append(loss)
    _soak(found, under)
    print(f"{found.outcome} {found.problem} {found.loss} {found.faults}", flush=True)
    return found


def _undisturbed(mode: str, steps: int, seed: int, under: str) -> float:
    with tempfile.TemporaryDirectory(prefix="tfps-faults-") as directory:
        job = Attempt(Result("", mode, TFPS, under, 0), Path(directory), "", 3600.0)
        try:
            job.tell("hurry")
            _start(job, steps, seed)
            job.finish()
            job.check_saved()
            return _loss(job)
        finally:
            job.close()


def _start(job: Attempt, steps: int, seed: int) -> None:
    job.tell("step_secs", str(STEP_SECS))
    often = 20 if (job.control / "hurry").exists() else 1
    job.start(model="digits", batch_size=128, max_steps=steps, seed=seed, steps_to_validate=often, restarts=1000)


def _loss(job: Attempt) -> float:
    reported = (read_json(job.model_dir / "summary.json") or {}).get("eval") or {}
    job.need("loss" in reported, "there is no final loss")
    return float(reported["loss"])


def _soak(found: Soak, under: str) -> None:
    with tempfile.TemporaryDirectory(prefix="tfps-faults-", ignore_cleanup_errors=True) as directory:
        measured = Result("soak", found.mode, TFPS, under, 0)
        job = Attempt(measured, Path(directory), str(found.seed), found.minutes * 60 + 600)
        try:
            _start(job, found.steps, found.seed)
            job.training()
            _disturb(job, found)
            job.finish()
            job.check_saved()
            found.loss = _loss(job)
            found.problem = _problem(found)
            found.outcome = FAILED if found.problem else OK
        except HangError as error:
            found.outcome, found.problem = HANG, str(error)
        except (UnexpectedError, proc.NotInjectedError) as error:
            found.outcome, found.problem = FAILED, str(error)
        finally:
            job.close()
            found.code, found.left = measured.code, measured.left
            found.off = measured.off
            found.worst_settle_secs, found.worst_lost = measured.settle_secs or 0.0, measured.lost or 0


def _disturb(job: Attempt, found: Soak) -> None:
    """Break one thing after another until the time is over."""
    choose = random.Random(found.seed)
    until = time.monotonic() + found.minutes * 60
    while time.monotonic() < until:
        time.sleep(choose.uniform(*_QUIET_SECS))
        name = choose.choice(list(DISTURBANCES))
        job.deadline(_EACH_WITHIN_SECS)
        DISTURBANCES[name](job)
        found.faults[name] = found.faults.get(name, 0) + 1
        print(f"{found.mode} {name}: settled, worst {job.result.settle_secs:.1f} s", flush=True)
        job.back_at_work(_EACH_WITHIN_SECS)
    job.deadline(600.0)


def _problem(found: Soak) -> str:
    """Return how the loss lies outside the band, or nothing."""
    low, high = min(found.undisturbed), max(found.undisturbed)
    width = max(high - low, 0.1 * high)
    if found.loss is None or not low - width <= found.loss <= high + width:
        return f"the loss is {found.loss}, outside {low - width:.4f} to {high + width:.4f}"
    return f"exit code {found.code}" if found.code else ""
