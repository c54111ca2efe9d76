"""Show a running job: a live view on a terminal (drawn by rich), plain lines with the task's name elsewhere.

The display uses only the lines that tasks print and the way they end, so it serves every launcher.
"""

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from tfps.cluster.spec import Task
from tfps.config.converters import INT64_MAX
from tfps.config.job_config import JobConfig
from tfps.jobs.events import TaskExited, TaskRestarted, TaskStalled
from tfps.jobs.output import Output
from tfps.progress import RATES, format_progress, parse_progress, state_of
from tfps.text import count, duration

_PROGRESS_EVERY_SECS, _QUIET_SECS = 1.0, 5.0


@dataclass
class TaskView:
    """The known facts about one task.

    Attributes:
        state: One of ``report.STATES``, or ``starting``.
        step: Global step of its last report.
        values: The last reported value of each metric, by name.
        error: The error message that it printed.
        restarted_after: The reason for each of its restarts.
    """

    state: str = "starting"
    step: int = 0
    values: dict[str, float] = field(default_factory=dict)
    error: str = ""
    restarted_after: list[str] = field(default_factory=list)
    loss_step: int = 0


@dataclass
class JobView:
    """The known facts about a job, gathered from the lines of its tasks.

    Attributes:
        config: The config of the job.
        tasks: The view of each task.
        began: Monotonic time of the job's start.
        doing: The launcher's current action, until a task prints something.
        first_step_secs: Time from the start to the first step; ``None`` before it.
        recovery_secs: Total time in which at least one task was lost or on its way back.
    """

    config: JobConfig
    tasks: dict[Task, TaskView]
    began: float
    doing: str = ""
    first_step_secs: float | None = None
    recovery_secs: float = 0.0
    _away: set[Task] = field(default_factory=set)
    _away_since: float = 0.0

    @property
    def step(self) -> int:
        """The newest global step that any task has reported."""
        return max((task.step for task in self.tasks.values()), default=0)

    @property
    def examples_per_sec(self) -> float:
        """The sum of the last reported rates, in examples per second, of the tasks that still train."""
        return sum(task.values.get("examples/s", 0.0) for task in self.tasks.values() if task.state == "training")

    @property
    def loss(self) -> float | None:
        """The loss in the newest report; ``None`` before the first one."""
        return self._newest.values.get("loss") if self._newest else None

    @property
    def has_reports(self) -> bool:
        """Whether a task has reported its progress."""
        return self._newest is not None

    @property
    def progress(self) -> str:
        """A progress line of the job: the newest report, with the examples per second of all workers."""
        values = {name: value for name, value in (self._newest or TaskView()).values.items() if "eval/" not in name}
        speed = {"examples/s": self.examples_per_sec} if self.examples_per_sec else {}
        return format_progress(self.reported_step, values | speed)

    @property
    def reported_step(self) -> int:
        """The step of the newest report that has a loss; the step of an evaluation may be later."""
        return self._newest.loss_step if self._newest else 0

    @property
    def _newest(self) -> TaskView | None:
        reports = [task for task in self.tasks.values() if not task.values.keys().isdisjoint(RATES)]
        return max(reports, key=lambda task: task.loss_step) if reports else None

    def said(self, task: Task, line: str) -> None:
        """Process a line that a task printed."""
        self.doing, view = "", self.tasks[task]
        progress = parse_progress(line)
        if progress is None:
            if state_of(line) == "training":
                self._back(task)
            self._state(task, line)
            return
        self._back(task, *(away for away in self._away if away.job == "ps"))  # the task could not train without the PS
        view.step, view.values = int(progress.pop("step")), _merged(view.values, progress)
        is_report = not progress.keys().isdisjoint(RATES)
        view.loss_step = view.step if is_report else view.loss_step
        if self.first_step_secs is None and is_report:
            self.first_step_secs = time.monotonic() - self.began

    def stalled(self, event: TaskStalled) -> None:
        """Mark a task as stalled; it counts as lost since its last sign of life."""
        self.doing = ""
        self._lost(event.task, event.secs)
        self.tasks[event.task].state = "stalled"

    def restarted(self, event: TaskRestarted) -> None:
        """Mark a task as restarted; its previous process prints nothing more."""
        self.doing, view = "", self.tasks[event.task]
        self._lost(event.task)
        reason = "no sign of life" if view.state == "stalled" else event.reason
        view.restarted_after += [reason] if reason else []
        view.state, view.error = "restarted", ""

    def failed(self, event: TaskExited) -> None:
        """Record why a task failed, where the task could not report the reason."""
        view = self.tasks[event.task]
        view.state, view.error = "error", f"{view.error}\n{event.error}" if view.error else event.error

    def _lost(self, task: Task, secs_ago: float = 0.0) -> None:
        """Start the recovery clock, which runs from the end of a task until all tasks train, or serve, again."""
        if not self._away:
            self._away_since = time.monotonic() - secs_ago
        self._away.add(task)

    def _back(self, *tasks: Task) -> None:
        before = bool(self._away)
        self._away -= set(tasks)
        if before and not self._away:
            self.recovery_secs += time.monotonic() - self._away_since

    def is_of_error(self, task: Task, line: str) -> bool:
        """Return whether a line belongs to a task's error message: its first line, or an indented later one."""
        return line.partition(" ")[0] == "error:" or bool(self.tasks[task].error and line.startswith("    "))

    def _state(self, task: Task, line: str) -> None:
        view = self.tasks[task]
        state = state_of(line)
        view.state = state or view.state
        if state == "restarted":  # printed by the task's supervisor, where it has one
            view.error, view.values, view.loss_step = "", {}, 0  # these belong to the previous process
        if self.is_of_error(task, line):
            text = line.removeprefix("error: ")
            view.error = f"{view.error}\n{text}" if view.error else text


def job_view(config: JobConfig, tasks: Iterable[Task], began: float) -> JobView:
    """Return the view of a job that started at the monotonic time ``began``."""
    return JobView(config, {task: TaskView() for task in tasks}, began)


class Plain:
    """Prints each line immediately, after the name of its task; progress lines are merged into the job's own."""

    def __init__(self, view: JobView) -> None:
        self._view = view
        self._width = max(len(str(task)) for task in view.tasks)
        self._output = Output()
        self._shown_step, self._shown_at = -1, 0.0

    def __enter__(self) -> "Plain":
        return self

    def __exit__(self, *_: object) -> None:
        self._output.close()

    def line(self, task: Task, text: str) -> None:
        """Show a line that a task printed, unless it reports training progress."""
        if parse_progress(text) is None or " eval/" in text:
            self._line(str(task), text)

    def refresh(self) -> None:
        """Show the progress of the job: one line for the reports of all tasks, and at most one line a second."""
        step, secs = self._view.reported_step, time.monotonic() - self._shown_at
        every = self._view.config.steps_to_validate
        due = self._shown_step < 0 or step // every > self._shown_step // every or secs > _QUIET_SECS
        if step > self._shown_step and due and secs >= _PROGRESS_EVERY_SECS and self._view.has_reports:
            self._shown_step, self._shown_at = step, time.monotonic()
            self._line("job", self._view.progress)

    def _line(self, who: str, text: str) -> None:
        self.note(f"{who:<{self._width}} | {text}")

    def note(self, text: str) -> None:
        """Show a note about what the launcher does.

        Raises:
            BrokenPipeError: If the reader of standard output is gone.
        """
        self._output.write(text)


class Terminal:
    """Draws the job in place; all lines except progress scroll by above."""

    def __init__(self, view: JobView, console: Console) -> None:
        self._view = view
        self._console = console
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.completed:.0f}{task.fields[end]} steps"),
        )
        self._progress = Progress(*columns, TimeRemainingColumn(), TextColumn("left"), console=console)
        last = view.config.max_steps if view.config.max_steps < INT64_MAX else None  # with --epochs
        self._bar = self._progress.add_task(view.config.model, total=last, end=f"/{last}" if last else "")
        self._live = Live(get_renderable=self._draw, console=console, refresh_per_second=8, transient=True)

    def __enter__(self) -> "Terminal":
        self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    def line(self, task: Task, text: str) -> None:
        """Show a line that a task printed, unless it reports progress."""
        if parse_progress(text) is None:
            self._console.print(Text.assemble((f"{task!s:>9} ", "dim"), text))

    def note(self, text: str) -> None:
        """Show what the launcher does, until a task prints something."""
        self._view.doing = text

    def refresh(self) -> None:
        """Update the progress bar; rich redraws it periodically."""
        self._progress.update(self._bar, completed=min(self._view.step, self._view.config.max_steps))

    def _draw(self) -> Group:
        view = self._view
        loss = "-" if view.loss is None else f"{view.loss:.4g}"
        elapsed = duration(time.monotonic() - view.began)
        numbers = f"loss {loss}   {count(view.examples_per_sec)} examples/s"
        head = Text(f"{view.doing or numbers}   {elapsed}")
        return Group(self._progress, head, self._table())

    def _table(self, most: int = 16) -> Table:
        table = Table(box=None, padding=(0, 2, 0, 0))
        for name in ("task", "state", "step", "examples/s"):
            table.add_column(name, justify="right" if name in ("step", "examples/s") else "left", style="dim")
        shown: Sequence[tuple[Task, TaskView]] = list(self._view.tasks.items())
        for task, known in shown[:most]:
            rate = known.values.get("examples/s")
            table.add_row(str(task), known.state, count(known.step) if known.step else "", count(rate) if rate else "")
        if len(shown) > most:
            table.add_row(f"and {len(shown) - most} more", "", "", "")
        return table


def _merged(older: Mapping[str, float], newer: Mapping[str, float]) -> dict[str, float]:
    """Return a task's values after a newer line. A line with a loss replaces all that was logged with an older loss."""
    merged = {**older, **newer}
    if "loss" not in newer:
        return merged
    return {name: merged[name] for name in merged if name in (*newer, "examples/s") or "eval/" in name}


def screen(view: JobView) -> Plain | Terminal:
    """Return the display that suits standard output: a live view on a terminal, else plain lines."""
    console = Console(highlight=False)
    return Terminal(view, console) if console.is_terminal else Plain(view)
