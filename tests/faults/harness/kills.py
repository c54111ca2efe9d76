"""Faults of processes: tasks that are killed, frozen, slow, or fail again and again."""

import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import control
import network
import proc
import timeline
from attempt import Attempt, UnexpectedError
from job import Size
from timeline import Line

Act = Callable[[Attempt], None]
When = Callable[[Attempt], None]

_LOOK_SECS, _SAVE_TAKES_SECS = 0.002, 0.05
_SAVES_TRIED, _SAVED_LATER_SECS = 10, 0.3  # what a save that is not held up takes to be said
_FAST_STEPS, _FAST_STEPS_WAITING, _FAST_SHOWN = 3000, 800, 10


def workers_of(tasks: Sequence[str]) -> list[str]:
    """Return those of some tasks that report steps."""
    return [task for task in tasks if task.startswith("worker")]


def training(run: Attempt) -> None:
    """In the middle of training, before or after a save."""
    run.training()


def saved(run: Attempt) -> None:
    """In training, when there is a checkpoint."""
    run.saved()


def forming(run: Attempt) -> None:
    """As soon as the task's process is there."""
    run.until(lambda: all(run.job.pid(task) for task in run.job.names), "every task's process")
    time.sleep(0.3 * run.random.random())


def saving(run: Attempt) -> None:
    """While a checkpoint is being written: there is a file or a directory of it."""
    run.saved()
    known = set(os.listdir(run.model_dir))
    deadline = time.monotonic() + 10
    while not [name for name in set(os.listdir(run.model_dir)) - known if "ckpt" in name or "saving" in name]:
        if time.monotonic() > deadline:
            raise proc.NotInjectedError("no file of a further checkpoint in 10 s")
        time.sleep(_LOOK_SECS)
    time.sleep(_SAVE_TAKES_SECS * run.random.random() ** 2)  # rather early than when it is through


def said_saved(run: Attempt) -> int:
    """Return the step of the last checkpoint that the chief has called saved."""
    reported = [line.text for line in run.lines if line.text.startswith("saved ")]
    return int(reported[-1].rpartition("-")[2]) if reported else 0


def killed(*victims: str, when: When = training, times: int = 1, **flags: Any) -> Act:
    """Return the fault of tasks that are killed at once, and ``times`` in a row."""

    def act(run: Attempt) -> None:
        run.start(restarts=max(3, times), **flags)
        when(run)
        for _ in range(times):
            run.kill(*victims)
            run.recover(*workers_of(victims))
        run.finish()

    return act


def killed_in_save(*victims: str) -> Act:
    """Return the fault of tasks that are killed before a checkpoint is saved that is being written."""

    def act(run: Attempt) -> None:
        run.start()
        whole = frozen_in_save(run, victims)
        run.kill(*victims)
        run.recover(*workers_of(victims))
        if any(victim.startswith("ps") for victim in victims):
            run.need(run.first_after() >= whole, f"went on from step {run.first_after()}, but {whole} was saved")
        run.finish()

    return act


def frozen_in_save(run: Attempt, victims: Sequence[str]) -> int:
    """Freeze tasks in a save that does not end without them; return the step of the checkpoint before it.

    A save may be over, or need only what is not frozen, before the signal is there: then the next one is tried.
    """
    for _ in range(_SAVES_TRIED):
        whole = said_saved(run)
        saving(run)
        pids = run.pids(*victims)
        for pid in pids:
            proc.stop(pid)
        time.sleep(_SAVED_LATER_SECS)
        if said_saved(run) == whole:
            return whole
        for pid in pids:
            proc.go_on(pid)
    raise proc.NotInjectedError(f"{_SAVES_TRIED} saves were through before the kill")


def killed_in_turn(first: str, second: str) -> Act:
    """Return the fault of a task that is killed while the job recovers from the loss of another."""

    def act(run: Attempt) -> None:
        run.start()
        run.saved()
        run.kill(first)
        first_kill = run.mark
        run.until(lambda: run.job.restarts(first) > 0, f"{first} started again")
        time.sleep(run.random.random())
        run.until(lambda: run.job.pid(second) is not None, f"a process of {second}")
        run.kill(second)
        first_kill.healed = run.mark.at  # it can recover from here on, but what it lost counts from the first
        run.moment = first_kill
        run.recover()
        run.finish()

    return act


def gone(victim: str) -> Act:
    """Return the fault of a task that is killed and may not be started again."""

    def act(run: Attempt) -> None:
        run.start(under="launch", restarts=0)
        run.training()
        run.kill(victim)
        run.ends()
        run.need(run.result.detect_secs is not None, f"nobody has named {victim}")

    return act


def exits(victim: int, restarts: int = 3) -> Act:
    """Return the fault of a worker that something ends with exit code 0, before it has signed off."""

    def act(run: Attempt) -> None:
        run.start(under="launch", restarts=restarts)
        run.training()
        done = run.control / f"exit-{victim}.done"
        with run.fault(f"worker/{victim}"):
            run.tell(f"exit-{victim}")
            run.until(done.exists, "the exit")
        if restarts:
            run.recover(f"worker/{victim}")
            run.finish()
        else:
            run.ends()
        run.need(run.said("exit code 0 before it was done"), "nobody says that it had not done its work")
        run.need(run.result.detect_secs is not None, f"nobody has named worker/{victim}")

    return act


def fast(*victims: str, times: int = 1) -> Act:
    """Return the fault of tasks that are killed while the job takes steps as fast as it can, between its saves.

    So fast, a worker is nearly always in the middle of its pushes.
    """

    def act(run: Attempt) -> None:
        run.tell("step_secs", "0")
        max_steps = _FAST_STEPS_WAITING if run.mode.waits else _FAST_STEPS
        run.start(restarts=max(3, times), steps_to_validate=_FAST_SHOWN, max_steps=max_steps)
        saved(run)
        for _ in range(times):
            time.sleep(run.random.random())
            if run.job.code is not None:
                raise proc.NotInjectedError("the job was through before the fault")
            run.kill(*victims)
            run.recover(*workers_of(victims))
        at, since = run.mark.at, run.mark.at - 1.0
        steps = [step for line, step in timeline.steps(run.lines) if since <= line.at <= at]
        run.note(f"{max(steps, default=0) - min(steps, default=0)} steps in the second before")
        run.finish()

    return act


def crash_loop(run: Attempt) -> None:
    """A worker dies at its tenth input, whenever it is started."""
    budget = 2
    run.tell("crash-1")
    run.start(under="launch", restarts=budget)
    run.until(lambda: "worker/1" in timeline.newest(run.lines), "a step of worker/1")
    with run.fault("worker/1"):
        pass  # it is on its way
    run.ends()
    took = run.job.restarts("worker/1")
    run.need(took == budget, f"started again {took} times, not {budget}")
    run.need(run.said(control.LAST_WORDS), "what the task said is not shown")


def stalled_back(run: Attempt) -> None:
    """A worker stands still until another process has taken its place, and then goes on.

    Its address is taken from it, as of a pod that is lost to its node, and goes to the other process.
    """
    run.start(under="hand")
    run.training()
    [pid] = run.pids("worker/1")
    with run.fault("worker/1"):
        proc.stop(pid)
        network.free(run.job.port("worker/1"))
        run.lines.append(Line(time.monotonic(), "worker/1", timeline.KILLED))  # its last steps are nobody's
    run.platform.start("worker/1")
    edge = len(run.lines)
    run.until(lambda: "worker/1" in timeline.newest(run.lines[edge:]), "a step of the new worker/1")
    others = run.pids(*run.job.names)
    proc.go_on(pid)
    run.healed()
    run.recover("worker/1")
    run.need(not proc.wait_gone([pid], 20), "the worker that came back has not ended")
    run.until(lambda: run.said("another process replaced this task"), "why the worker that came back has ended")
    run.need(run.pids(*run.job.names) == others, "others ended for it")
    run.finish()


def frozen(victim: str, secs: float | None = None) -> Act:
    """Return the fault of a task that is stopped for some seconds, or for ever."""

    def act(run: Attempt) -> None:
        run.start()
        run.training()
        [pid] = run.pids(victim)
        with run.fault(victim):
            proc.stop(pid)
        if secs is not None:
            time.sleep(secs)
            run.need(proc.state(pid) == "T", "it was not let be for so long")
            proc.go_on(pid)
            run.healed()
        run.recover(*workers_of([victim]))
        if secs is None:
            run.need(not proc.wait_gone([pid], 5), f"the frozen process of {victim} is still there")
        run.finish()

    return act


class _DutyCycle(threading.Thread):
    """Stops a process for three quarters of the time, as a machine does that others share."""

    def __init__(self, pid: int) -> None:
        super().__init__(daemon=True)
        self._pid, self._over = pid, threading.Event()
        self.stops = 0

    def run(self) -> None:
        while not self._over.is_set():
            proc.stop(self._pid)
            self.stops += 1
            self._over.wait(0.3)
            proc.go_on(self._pid)
            self._over.wait(0.1)

    def end(self) -> None:
        """Let the process be."""
        self._over.set()
        self.join()
        proc.go_on(self._pid)


def straggler(run: Attempt) -> None:
    """A worker gets a quarter of the time."""
    before_secs, slow_secs = 6.0, 12.0
    run.start()
    run.training()
    time.sleep(before_secs)
    [pid] = run.pids("worker/1")
    with run.fault("worker/1", says="slow"):
        slow = _DutyCycle(pid)
        slow.start()
    time.sleep(slow_secs)
    slow.end()
    run.need(slow.stops >= 5, f"it was stopped {slow.stops} times only")
    at = run.mark.at
    spans = (at - before_secs, at), (at, at + slow_secs)
    rates = [timeline.rate(run.lines, "worker/0", *span) for span in spans]
    run.note(f"worker/0 at {rates[1] / max(rates[0], 1e-9):.0%} of its pace")
    run.need(run.mode.waits or rates[1] > 0.8 * rates[0], "worker/0 was slowed down, too")
    run.healed()
    run.recover("worker/1")
    run.finish()
    reported = " ".join(line.text for line in run.lines if not line.task)
    run.need(
        "slowest" in reported and "worker/1" in reported.partition("slowest")[2],
        "the report does not name the straggler",
    )


def worker_loop(times: int) -> Act:
    """Return the fault of a worker that is killed at each first step, with the PS's memory watched."""

    def act(run: Attempt) -> None:
        run.start(Size(1, 2), under="platform", restarts=times, backoff_secs=0.0)
        run.training()
        [server] = run.pids("ps/0")
        sizes = []
        for _ in range(times):
            run.kill("worker/1")
            run.recover("worker/1")
            sizes.append(proc.resident_mb(server))
        grown = sizes[-1] - sizes[times // 10]
        run.note(f"the PS grew by {grown:.1f} MB over the last {times - times // 10 - 1} of {times} restarts")
        run.need(run.pids("ps/0") == [server], "the PS was started again")
        if grown > 32:
            raise UnexpectedError("the PS's memory is not bounded")
        run.finish()

    return act
