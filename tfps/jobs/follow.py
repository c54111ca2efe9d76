"""Follow a running job to its end: show it, stop it if a task fails or the user asks, and report its outcome."""

import re
import signal
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import FrameType
from typing import Any

from tfps.cluster.spec import Task
from tfps.config.job_config import JobConfig
from tfps.errors import CheckpointError, PeerLostError, StoppedError, stopping_signals
from tfps.jobs.causes import may_name_cause, named_cause
from tfps.jobs.display import JobView, Plain, Terminal, screen
from tfps.jobs.events import LogLine, Note, TaskExited, TaskRestarted, TaskStalled, how_it_ended
from tfps.jobs.handle import RunningJob
from tfps.storage import JobDirectory
from tfps.summary import DONE, FAILED, STOPPED, JobSummary
from tfps.summary_entries import LauncherReport, TaskSummary
from tfps.text import utc
from tfps.timeouts import SECOND_THOUGHT_SECS

_HELD_SECS = 2.0


@dataclass
class Outcome:
    """The outcome of a job.

    Attributes:
        exit_codes: The exit code of every task that has ended; negative for a signal.
        exit_code: The job's: 0, the code of the first task that failed, 170 if a signal killed that task, or 143.
        error: The reason, if ``exit_code`` is not 0.
        restarts: Number of restarts of each task.
        stop_requested_at: Monotonic time of the first signal to stop the job.
        of_chief: The chief's summary when the chief ended; ``None`` if there was none.
    """

    exit_codes: dict[Task, int]
    exit_code: int = 0
    error: str = ""
    restarts: Mapping[Task, int] = field(default_factory=dict)
    stop_requested_at: float | None = None
    of_chief: JobSummary | None = None


def follow(job: RunningJob, view: JobView) -> Outcome:
    """Show a job until it ends.

    The first SIGINT, SIGTERM or SIGHUP stops it in order, with its state saved; one more than 2 s later kills it.
    """
    outcome = Outcome({})
    with _on_signals(lambda number: _interrupt(job, outcome, number)), screen(view) as shown:
        errors = _Errors(view, shown)
        for event in job.events():
            if isinstance(event, Note):
                shown.note(event.text)
            elif isinstance(event, LogLine):
                _take_line(event, view, shown, errors)
            elif isinstance(event, (TaskRestarted, TaskStalled)):
                _take_loss(event, view, shown, errors)
            elif isinstance(event, TaskExited):
                _take_end(event, job, view, outcome, errors)
            errors.show_old()
            shown.refresh()
    if outcome.exit_codes and not any(outcome.exit_codes.values()):
        return Outcome(outcome.exit_codes, restarts=job.restarts, of_chief=outcome.of_chief)  # the signal came too late
    return replace(outcome, restarts=job.restarts)


class _Errors:
    """The error messages of tasks, each of which is shown once.

    A message is held back until its task has ended, because the first one is shown with the job's end. It is held for
    at most ``_HELD_SECS``.
    """

    def __init__(self, view: JobView, shown: Plain | Terminal) -> None:
        self._view, self._shown = view, shown
        self._held: dict[Task, list[str]] = {}
        self._since: dict[Task, float] = {}
        self._reported: list[str] = []

    def hold(self, task: Task, line: str) -> None:
        """Add a line of a task's error message."""
        self._held.setdefault(task, []).append(line)
        self._since.setdefault(task, time.monotonic())

    def reported(self, task: Task) -> None:
        """Note that another place shows a task's error."""
        self._take(task)
        self._reported.append(f"{self._view.tasks[task].error}\n")

    def show(self, task: Task) -> None:
        """Show the lines held for a task, unless an error shown before begins with all of them."""
        lines, said = self._take(task), f"{self._view.tasks[task].error}\n"
        if lines and not any(text.startswith(said) for text in self._reported):
            self._reported.append(said)
            for line in lines:
                self._shown.line(task, line)

    def show_old(self) -> None:
        """Show the lines that were held for too long."""
        for task in [task for task, since in self._since.items() if time.monotonic() - since > _HELD_SECS]:
            self.show(task)

    def _take(self, task: Task) -> list[str]:
        self._since.pop(task, None)
        return self._held.pop(task, [])


def _take_line(event: LogLine, view: JobView, shown: Plain | Terminal, errors: _Errors) -> None:
    if view.is_of_error(event.task, event.text):
        view.said(event.task, event.text)
        errors.hold(event.task, event.text)
        return
    errors.show(event.task)
    view.said(event.task, event.text)
    shown.line(event.task, event.text)


def _take_loss(event: TaskRestarted | TaskStalled, view: JobView, shown: Plain | Terminal, errors: _Errors) -> None:
    errors.show(event.task)
    if isinstance(event, TaskRestarted):
        view.restarted(event)
    else:
        view.stalled(event)
    shown.line(event.task, event.text)


def _take_end(event: TaskExited, job: RunningJob, view: JobView, outcome: Outcome, errors: _Errors) -> None:
    outcome.exit_codes[event.task] = event.exit_code
    if event.error:
        view.failed(event)
        errors.hold(event.task, f"error: {event.error}")
    if event.task.is_chief:
        outcome.of_chief = _of_chief(view.config.model_dir)  # another job may own the directory when this one ends
    if event.exit_code and not outcome.exit_code:
        cause = _cause(event, view)
        outcome.exit_code = cause.exit_code if cause.exit_code > 0 else PeerLostError.exit_code
        outcome.error = _why(cause, view)
        errors.reported(cause.task)
        job.cancel()
    errors.show(event.task)


def _cause(event: TaskExited, view: JobView) -> TaskExited:
    """Return the end of the worker that a PS names, whose own end is perhaps not reported yet; else the same end."""
    last_line = view.tasks[event.task].error.rpartition("\n")[2]
    named = named_cause(event.task, last_line) if may_name_cause(event.task, event.exit_code) else None
    return TaskExited(*named) if named and named[0] in view.tasks else event


def _why(event: TaskExited, view: JobView) -> str:
    said = view.tasks[event.task].error
    if said:
        return f"{event.task}: {said}"
    verb = "was killed by" if event.exit_code < 0 else "ended with"
    return f"{event.task} {verb} {how_it_ended(event.exit_code)}"


def _interrupt(job: RunningJob, outcome: Outcome, number: int) -> None:
    now = time.monotonic()
    if outcome.stop_requested_at is None:
        outcome.stop_requested_at = now
    elif now - outcome.stop_requested_at > SECOND_THOUGHT_SECS:
        job.kill()
    outcome.exit_code = outcome.exit_code or StoppedError.exit_code
    outcome.error = outcome.error or f"stopped by {signal.Signals(number).name}"
    job.cancel()


def log_tail(config: JobConfig, view: JobView, outcome: Outcome, most: int = 10) -> list[str]:
    """Return the end of the log of the first task that failed without an error message."""
    stopped = StoppedError.exit_code
    silent = [t for t, code in outcome.exit_codes.items() if code not in (0, stopped) and not view.tasks[t].error]
    if not silent or outcome.exit_code == stopped:
        return []
    path = JobDirectory(config.model_dir or ".").log(str(silent[0]))
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines() if path.is_file() else []
    lines = [line for line in lines if not re.match(r"[IW]\d{4} ", line)]  # TensorFlow's information and warnings
    return [f"the end of {path}:", *(f"  {line}" for line in lines[-most:])]


class _on_signals:  # noqa: N801  used as a function
    """A context in which each signal that asks the process to stop calls a function with its number."""

    def __init__(self, call: Any) -> None:
        self._call = call
        self._before: dict[int, Any] = {}

    def __enter__(self) -> None:
        for number in stopping_signals():
            self._before[number] = signal.signal(number, self._handle)

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        del frame
        self._call(number)


def complete_summary(config: JobConfig, view: JobView, outcome: Outcome, read: bool = True) -> JobSummary:
    """Return the chief's summary with the launcher's facts: exit codes, and the reason for a failure.

    If ``read`` is false, another job owns the directory now: use the chief's part as it was when the chief ended.
    """
    summary = (_of_chief(config.model_dir) if read else None) or outcome.of_chief or _without_chief(config, view)
    if outcome.exit_code:
        status = STOPPED if outcome.exit_code == StoppedError.exit_code else FAILED
        summary = replace(summary, status=status, error=outcome.error)
    return replace(
        summary,
        exit_code=outcome.exit_code,
        began=utc(time.time() - (time.monotonic() - view.began)),
        tasks={
            str(task): replace(
                summary.tasks.get(str(task), TaskSummary()),
                exit_code=outcome.exit_codes.get(task),
                restarts=outcome.restarts.get(task, 0),
                restarted_after=shown.restarted_after,
            )
            for task, shown in view.tasks.items()
        },
        launcher=LauncherReport(round(view.recovery_secs, 3), view.first_step_secs),
    )


def _of_chief(model_dir: str | None) -> JobSummary | None:
    """Return the chief's summary; ``None`` if there is none or it cannot be read."""
    try:
        summary = JobSummary.read(JobDirectory(model_dir or ".").summary)
    except CheckpointError:
        return None
    return summary if summary and summary.status else None


def _without_chief(config: JobConfig, view: JobView) -> JobSummary:
    """Return the summary of a job whose chief has left none."""
    return JobSummary(
        status=DONE,
        ended=utc(time.time()),
        model_dir=config.model_dir,
        model=config.model,
        mode=config.mode,
        global_step=view.step,
        max_steps=config.max_steps,
        epochs=config.epochs,
    )
