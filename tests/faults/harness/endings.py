"""Ends: jobs that are asked to end, that lose their launcher, that are through, or whose numbers break."""

import math
import signal
import time
from pathlib import Path
from typing import Any

import proc
import timeline
from attempt import Attempt
from kills import Act

from tfps.storage import read_json

_END_SECS = 10.0


def asked_to_stop(victim: str, number: signal.Signals = signal.SIGTERM, twice: bool = False) -> Act:
    """Return the fault of a task that is asked to stop, where nobody starts it again; the others get no signal.

    ``launcher`` is all of the job. ``twice``: in a step that never ends, and once more after half a second.
    """

    def act(run: Attempt) -> None:
        run.start(under="launch" if victim == "launcher" else "hand")
        run.saved()
        if twice:
            run.tell("stuck")
            time.sleep(0.5)
        [pid] = run.pids(victim)
        with run.fault(victim, says="stopp"):
            proc.send(pid, number)
        if twice:
            time.sleep(0.5)
            proc.send(pid, number)
        run.ends() if victim == "launcher" else run.ends_alone(victim)
        if not twice and victim in ("launcher", "worker/0"):
            _state_is_saved(run)

    return act


def two_signals(run: Attempt) -> None:
    """The launcher is asked to end twice within 0.1 s, as by a shell and by a terminal; what it says is on the disk."""
    run.start(under="launch")
    run.saved()
    [pid] = run.pids("launcher")
    with run.fault("launcher", says="stopp"):
        proc.send(pid, signal.SIGTERM)
        time.sleep(0.1 * run.random.random())
        proc.send(pid, signal.SIGTERM)
    run.ends()
    _state_is_saved(run)
    newest = max(run.model_dir.glob("model.ckpt-*.index"), key=_step).with_suffix("")
    reported = f"stopped at step {_step(newest)}; the same flags and --model_dir={run.model_dir} resume from {newest}."
    run.need(run.said(reported), f"it does not say: {reported}")


def _step(path: Path) -> int:
    return int(path.name.removesuffix(".index").rpartition("-")[2])


def _state_is_saved(run: Attempt) -> None:
    """Make sure that the newest checkpoint is of the last steps; in gossip, of the last mean."""
    saved_at = max((int(path.stem.rpartition("-")[2]) for path in run.model_dir.glob("model.ckpt-*.index")), default=0)
    taken = {step for _, step in timeline.steps(run.lines[: run.mark.edge])}  # in async, not all in order
    run.result.lost = max(0, len(taken) - saved_at)
    since_mean = 0 if run.mode.size.num_ps else run.mode.round_steps
    run.need(run.result.lost <= since_mean, f"the last checkpoint is of step {saved_at}")


def launcher_killed(run: Attempt) -> None:
    """The launcher is killed: nobody can tell its tasks any more."""
    run.start(under="launch")
    run.training()
    [pid] = run.pids("launcher")
    tasks = run.own() - {pid}
    run.need(len(tasks) >= len(run.job.names), "the tasks had ended already")
    with run.fault("launcher"):
        proc.kill([pid])
    run.result.code = run.job.code
    proc.wait_gone(tasks, _END_SECS)
    run.result.settle_secs = time.monotonic() - run.mark.at


def normal_end(**flags: Any) -> Act:
    """Return the end of a job that is soon through with its steps."""

    def act(run: Attempt) -> None:
        run.tell("hurry")
        run.start(**flags)
        run.finish()
        _after_last_step(run)

    return act


def undisturbed(run: Attempt) -> None:
    """Nothing happens to a job that trains as all others here do."""
    run.start()
    run.training()
    run.finish()
    _after_last_step(run)


def uneven_data(run: Attempt) -> None:
    """One worker's data ends after 20 batches."""
    run.tell("ends-1", "20")
    run.start(max_steps=200)
    with run.fault("worker/1", says="input has ended"):
        run.until(lambda: run.said("the input has ended"), "the end of the input")
    run.finish()
    _after_last_step(run)


def late_worker(run: Attempt) -> None:
    """A worker is started 5 s after the others."""
    run.start(under="hand", leave_out=["worker/1"])
    time.sleep(5)
    run.need("worker/1" not in timeline.newest(run.lines), "it was there already")
    run.platform.start("worker/1")
    run.training()
    run.finish()
    _after_last_step(run)


def _after_last_step(run: Attempt) -> None:
    ended = time.monotonic()
    last = max((line.at for line, _ in timeline.steps(run.lines)), default=ended)
    run.result.settle_secs = ended - last
    run.need(set(run.job.codes.values()) == {0}, f"exit codes {run.job.codes}")


def not_a_number(victim: int) -> Act:
    """Return the fault of a gradient of NaN; after the end, the job is started again and its weights looked at."""

    def act(run: Attempt) -> None:
        run.start()
        run.saved()
        _send_nan(run, victim)
        run.ends()
        code = run.result.code
        run.result.lost = None
        run.tell("hurry")
        run.start(max_steps=max(run.mark.last.values()) + 200)
        run.finish()
        run.result.code = code
        reported = (read_json(run.model_dir / "summary.json") or {}).get("eval") or {}
        run.need(math.isfinite(reported.get("weight") or math.nan), f"the checkpoint holds {reported}")

    return act


def skipped(victim: int) -> Act:
    """Return the fault of a gradient of NaN in a job that is to leave such out."""

    def act(run: Attempt) -> None:
        run.start(on_nan="skip")
        run.training()
        _send_nan(run, victim)
        run.recover(f"worker/{victim}")
        run.finish()
        reported = (read_json(run.model_dir / "summary.json") or {}).get("eval") or {}
        run.need(math.isfinite(reported.get("weight") or math.nan), f"the weights are {reported}")
        run.need(run.said("skip"), "nobody says that a gradient was left out")

    return act


def _send_nan(run: Attempt, victim: int) -> None:
    with run.fault(f"worker/{victim}", says=r"\bNaN\b|\bInf\b|\bnan\b|not finite"):
        run.tell(f"nan-{victim}")
        run.until((run.control / f"nan-{victim}.sent").exists, "the NaN")
