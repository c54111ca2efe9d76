"""One run of one fault: start a job, break something, and measure what becomes of it.

What a fault does (``kills`` and its like) is written in these verbs: ``start``, ``training``, ``fault``, ``recover`` or
``ends``, ``finish``. Each wait has a deadline: past it the job hangs, and the run is over.
"""

import contextlib
import math
import random
import time
from collections.abc import Callable, Collection, Iterator
from pathlib import Path

import control
import job as jobs
import proc
import sums
import timeline
from forked import HERE
from job import Job, Lost, Platform, Size
from result import CLASSIC, NEVER_BACK, Result
from timeline import Line, Mark

SAVE_SECS = 1.0
WITHOUT_PS = ("allreduce",)
_POLL_SECS = 0.02
_LATE_LINES_SECS = 0.1  # what a task said before the fault may be read so long after it
_TRIES = 3
_LEFT_SECS = {"tfps": 10.0, "classic": 2.0}  # the classic script's PS never end: no need to wait for them


class HangError(Exception):
    """The job neither goes on nor ends."""


class UnexpectedError(Exception):
    """The job does something else than it should."""


class Attempt:
    """A job and the fault in it.

    Attributes:
        moment: The fault that happened last, if one has.
        spoiled: The names of checkpoints that the fault has damaged.

    Args:
        result: What is measured goes here.
        directory: An empty one, for all that the job leaves.
        seed: Of the random times of the fault.
        deadline_secs: When the run is over, whatever happens, unless it is on its way to its end: see ``finish``.
        time_scale: A factor of all time limits, this one too.
    """

    def __init__(
        self, result: Result, directory: Path, seed: str, deadline_secs: float, time_scale: float = 1.0
    ) -> None:
        self.result, self.random = result, random.Random(seed)
        self.model_dir, self.control = directory / "m", directory / "control"
        self.control.mkdir(parents=True)
        self.lines: list[Line] = []
        self._job: Job | None = None
        self._size, self._shown, self._done = Size(), 1, False
        self._flags: dict[str, object] = {}
        self.spoiled: set[str] = set()
        self.moment: Mark | None = None
        self._before = proc.every()
        self._time_scale = time_scale
        self._deadline_secs = self.limit(deadline_secs)
        self.deadline(self._deadline_secs)

    def limit(self, secs: float) -> float:
        """Return a time limit on this machine."""
        return secs * self._time_scale

    def deadline(self, secs: float) -> None:
        """Let the run be over in so many seconds, whatever happens."""
        self._deadline = time.monotonic() + secs

    def start(
        self,
        size: Size = Size(),  # noqa: B008  frozen
        under: str = "",
        restarts: int = 3,
        backoff_secs: float = 1.0,
        leave_out: Collection[str] = (),
        model: str = "exact",
        **flags: object,
    ) -> None:
        """Start a job.

        Args:
            size: How many tasks; by default two PS and two workers. There are no PS in a mode without.
            under: Who starts lost tasks again: ``launch``, ``platform``, or nobody: ``hand``. By default, as asked for.
            restarts: How often each is started again.
            backoff_secs: After how long the first time, on a platform; the launcher has its own.
            leave_out: Tasks that are not started; by hand only.
            model: One of ``models``.
            **flags: Flags instead of the usual ones; ``None`` leaves one out.
        """
        if self._job is not None:
            self._job.close()  # the one before
        size = Size(0, size.num_workers) if self.result.mode in WITHOUT_PS else size
        self._size, self._done = size, False
        self.result.under = under or self.result.under
        options: dict[str, object] = {**self._usual_flags(size), "model": HERE / "models" / f"{model}.py", **flags}
        self._flags = options
        lost = Lost(0 if self.result.under == "hand" else restarts, backoff_secs)
        self._shown = int(str(options["steps_to_validate"]))
        self._job = jobs.start(self.result.program, self.result.under, size, options, lost, self.lines, leave_out)

    def another(self, lines: list[Line]) -> Job:
        """Start another job of the same flags; ``lines`` gets what it says. It is the caller's to look after."""
        return jobs.start(self.result.program, "launch", self._size, self._flags, Lost(0), lines, ())

    def _usual_flags(self, size: Size) -> dict[str, object]:
        """Return flags with which a job is not through before the deadline, unless it is asked to hurry."""
        at_once = size.num_workers if self.result.mode == "async" else 1
        return {
            "model_dir": self.model_dir,
            "data_dir": self.control,
            "mode": self.result.mode,
            "max_steps": int(self._deadline_secs / 3 * at_once / control.STEP_SECS),
            "batch_size": 1,
            "steps_to_validate": 1,
            "save_checkpoint_secs": SAVE_SECS,
            "start_timeout_secs": self.limit(30),
        }

    @property
    def job(self) -> Job:
        """The job that was started last."""
        assert self._job is not None
        return self._job

    @property
    def platform(self) -> Platform:
        """The same, where tasks are started one by one."""
        assert isinstance(self.job, Platform)
        return self.job

    @property
    def mark(self) -> Mark:
        """The fault that happened last."""
        assert self.moment is not None
        return self.moment

    def tell(self, name: str, text: str = "") -> None:
        """Tell the model something; see ``control``."""
        (self.control / name).write_text(text)

    def until(self, holds: Callable[[], bool], what: str, within: float = math.inf) -> None:
        """Wait until something holds.

        Raises:
            UnexpectedError: If the job ends before.
            HangError: If it does neither.
        """
        deadline = min(self._deadline, time.monotonic() + within)
        while not holds():
            self._look_at_others()
            if self.job.code is not None and not holds():
                self.result.code = self.job.code
                error = timeline.last_error(self.lines).replace(str(self.model_dir), "MODEL_DIR")
                raise UnexpectedError(f"ended with {self.job.code}, without {what}: {error}")
            if time.monotonic() > deadline:
                raise HangError(f"waited in vain for {what}")
            time.sleep(_POLL_SECS)

    def _look_at_others(self) -> None:
        if self.moment and self.moment.other_ended is None and not all(proc.alive(pid) for pid in self.moment.others):
            self.moment.other_ended = time.monotonic()

    def said(self, text: str) -> bool:
        """Return whether any task has said something."""
        return any(text in line.text for line in self.lines)

    def own(self) -> set[int]:
        """Return all processes that the job has, or has left behind."""
        return proc.every() - self._before

    def training(self) -> None:
        """Wait until every worker has taken a step, and then for a random time."""
        workers = {name for name in self.job.names if name.startswith("worker")}
        self.until(lambda: workers <= set(timeline.newest(self.lines)), "every worker's first step")
        time.sleep(self.random.random())

    def back_at_work(self, within: float) -> None:
        """Wait until every worker takes steps again."""
        edge, workers = len(self.lines), {name for name in self.job.names if name.startswith("worker")}
        everybody = lambda: workers <= set(timeline.newest(self.lines[edge:]))  # noqa: E731
        self.until(everybody, "a step of every worker", within)

    def saved(self, count: int = 1) -> None:
        """Wait until every worker trains and so many checkpoints are there."""
        self.training()
        self.until(lambda: len(list(self.model_dir.glob("model.ckpt-*.index"))) >= count, "a checkpoint")

    @contextlib.contextmanager
    def fault(self, *victims: str, says: str = "") -> Iterator[None]:
        """Break something inside; what is measured counts from there.

        Args:
            *victims: The tasks that it hits.
            says: A pattern of lines that name the fault otherwise than by a victim's name.
        """
        others = [pid for name in self.job.names if name not in victims and (pid := self.job.pid(name))]
        self.moment = Mark(time.monotonic(), len(self.lines), victims, says, others)
        yield
        time.sleep(_LATE_LINES_SECS)
        self.moment.edge = len(self.lines)
        self.moment.last = timeline.newest(self.lines[: self.moment.edge])

    def pids(self, *tasks: str) -> list[int]:
        """Return the processes of some tasks, all of which have to run."""
        found = [(name, self.job.pid(name)) for name in tasks]
        absent = [name for name, pid in found if pid is None]
        if absent:
            raise proc.NotInjectedError(f"{absent[0]} has no process")
        return [pid for _, pid in found if pid is not None]

    def kill(self, *tasks: str) -> None:
        """Kill tasks with SIGKILL, all at once."""
        pids = self.pids(*tasks)
        with self.fault(*tasks):
            proc.kill(pids)
            self.lines += [Line(time.monotonic(), task, timeline.KILLED) for task in tasks]

    def kill_all(self) -> None:
        """Kill the whole job, and whoever starts its tasks again."""
        if isinstance(self.job, Platform):
            self.job.end_tasks()
        for _ in range(_TRIES):  # one may start another just then
            proc.end(self.own())

    def healed(self) -> None:
        """Note that the cause of the fault is gone."""
        self.mark.healed = time.monotonic()

    def recover(self, *back: str) -> None:
        """Wait until the job has gone on beyond the fault, with some workers back at work, and measure it."""

        def at(back: Collection[str] = back) -> float | None:
            return timeline.recovered(self.lines, self.mark, back)

        try:
            self.until(lambda: at() is not None, f"a step beyond {max(self.mark.last.values(), default=0)}")
        except HangError:
            if at([]) is None:
                raise
            raise HangError(f"{' and '.join(back)} {NEVER_BACK}") from None
        self.measure(at() or time.monotonic())

    def resumed_step(self) -> int | None:
        """Return the step that the job says it goes on from after the fault, if it has gone back."""
        return timeline.reported_step(self.lines, self.mark)

    def first_after(self) -> int:
        """Return the lowest step that was reported after the fault."""
        return min((step for _, step in timeline.steps(self.lines[self.mark.edge :])), default=0)

    def measure(self, settled: float) -> None:
        """Take down the figures of a fault that had settled at a time; of several, the worst."""
        found, lines = self.result, list(self.lines)
        lost, lost_secs = timeline.lost(lines, self.mark, early=int(found.program == CLASSIC))
        found.detect_secs = _worse(found.detect_secs, timeline.detected(lines, self.mark))
        found.settle_secs = _worse(found.settle_secs, settled - self.mark.since)
        found.pause_secs = _worse(found.pause_secs, timeline.pause(lines, self.mark.at, settled))
        found.lost, found.lost_secs = max(found.lost or 0, lost), max(found.lost_secs, lost_secs)
        found.lost_saved = max(found.lost_saved, timeline.lost_saved(lines, self.mark))
        self._compare_reported(lost)

    def _compare_reported(self, lost: int) -> None:
        """Make sure that the job has gone back as far as it says."""
        reported, last = timeline.reported_step(self.lines, self.mark), max(self.mark.last.values(), default=0)
        if self.result.program != "tfps" or (reported is None and not lost):
            return
        self.need(reported is not None, f"{lost} steps were lost, and nobody says so")
        self.need(
            self.first_after() > (reported or 0), f"it says step {reported}, and takes step {self.first_after()} again"
        )
        steps, runs = timeline.under_way(self.lines)
        slack = steps * runs * self._size.num_workers if self._shown == 1 else math.inf  # taken by others meanwhile
        says = max(0, last - (reported or 0))
        self.need(lost <= says <= lost + slack, f"{lost} steps were lost, {says} by what it says")

    def ends(self) -> None:
        """Wait for the end of a job that cannot go on, and measure it."""
        self._wait_for_end()
        self._measure_end()

    def ends_alone(self, task: str) -> None:
        """Wait for the end of one task, and measure it; then end the others."""
        self.until(lambda: task in self.job.codes, f"an end of {task}")
        self.result.code = self.job.codes[task]
        self._measure_end()
        self.platform.end_tasks()

    def _measure_end(self) -> None:
        self.result.settle_secs = time.monotonic() - self.mark.since
        self.result.detect_secs = timeline.detected(list(self.lines), self.mark)

    def finish(self) -> None:
        """Let the job come to its end, and wait for that; all its remaining steps have a deadline of their own."""
        self.tell("hurry")
        self._deadline = max(self._deadline, time.monotonic() + self._deadline_secs)
        self._wait_for_end()
        self._done = self.job.code == 0
        self.need(not self._done or self._is_of_tfps_saved(), "no checkpoint is left")

    def _is_of_tfps_saved(self) -> bool:
        return self.result.program != "tfps" or any(self.model_dir.glob("model.ckpt-*.index"))

    def _wait_for_end(self) -> None:
        self.until(lambda: self.job.code is not None, "an end")
        self.result.code = self.job.code

    def check_saved(self) -> None:
        """Make sure that each checkpoint on the disk holds as many updates as its step says."""
        if self._job is None or self.result.program != "tfps" or not self.model_dir.is_dir():
            return
        saved = sums.read(self.model_dir, self.spoiled)
        runs = timeline.under_way(self.lines)[1]
        lost = timeline.lost_workers(self.lines)
        job = sums.Job(self.result.mode, self._size.num_ps, self._size.num_workers, runs, self._done, lost)
        self.result.off = max([one.off for one in saved], default=self.result.off)
        problem = sums.check(saved, job)
        self.need(not problem, problem)

    def note(self, text: str) -> None:
        """Add a remark to the result."""
        self.result.note = "; ".join(part for part in (self.result.note, text) if part)

    def need(self, holds: bool, otherwise: str) -> None:
        """Raise ``UnexpectedError`` if something does not hold."""
        if not holds:
            raise UnexpectedError(otherwise)

    def close(self) -> None:
        """Count what is left behind, and end it."""
        if self.result.code is not None:
            self.result.left = len(proc.wait_gone(self.own(), self.limit(_LEFT_SECS[self.result.program])))
        if self._job is not None:
            self.kill_all()
            self._job.close()


def _worse(one: float | None, other: float | None) -> float | None:
    known = [value for value in (one, other) if value is not None]
    return max(known, default=None)
