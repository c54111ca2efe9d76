"""The entries of ``summary.json``, by who knows them. Does not import TensorFlow."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from tfps.json_object import JsonObject

Metric: TypeAlias = "float | Sequence[Metric] | None"
"""The value of a metric: a number, an array as nested lists of numbers, or ``None`` for what is not finite."""


@dataclass(frozen=True)
class RunPace:
    """How steps run: how many a run takes, and how many runs a worker has in flight."""

    steps_per_run: int
    runs_in_flight: int


@dataclass(frozen=True)
class RoundCount:
    """The rounds of a run: how many it has made, and the fewest and the most steps of a worker in a full one."""

    made: int
    fewest_steps: int
    most_steps: int


@dataclass(frozen=True)
class ChiefReport:
    """The entries that only the chief knows.

    Attributes:
        versions: The versions of tfps, TensorFlow and Python.
        hosts: The addresses of the tasks.
        is_blocking: Whether workers wait for one another.
        resumed_from_step: The step at which this run began.
        resumed_from: The checkpoint from which this run began; ``None`` for none.
        seconds: How long this run has trained: the time of the worker that has trained the longest.
        examples_per_sec: Examples per second of training, over all workers.
        loss: The chief's last training loss.
        pace: The pace of the chief's steps; ``None`` if it has taken none.
        rounds: The rounds of this run; ``None`` if the mode has none, or the job has not come to its end.
        gradients_dropped: How many gradients came too late; ``None`` if none can, or that is not known.
        batches_skipped: How many batches led to no step, because their loss or gradient was not finite.
        batch_size: The mean number of examples in a step of a worker.
        eval: The final metrics by name; empty if there was no evaluation.
    """

    versions: Mapping[str, str] = field(default_factory=dict)
    hosts: Sequence[str] = ()
    is_blocking: bool = False
    resumed_from_step: int = 0
    resumed_from: str | None = None
    seconds: float | None = None
    examples_per_sec: float = 0
    loss: float | None = None
    pace: RunPace | None = None
    rounds: RoundCount | None = None
    gradients_dropped: int | None = None
    batches_skipped: int = 0
    batch_size: float = 0
    eval: Mapping[str, Metric] = field(default_factory=dict)


@dataclass(frozen=True)
class WorkersReport:
    """The entries about the workers' progress, known if the job has come to its end.

    Attributes:
        steps_per_sec: The steps per second of each worker that has taken any, by task.
        behind: For each worker, the share of the time in which only it held the others up, or fell behind.
        staleness: How many steps have seen 0, 1, ... other updates on their way; ``None`` where there can be none.
    """

    steps_per_sec: Mapping[str, float] = field(default_factory=dict)
    behind: Mapping[str, float] = field(default_factory=dict)
    staleness: Sequence[int] | None = None


@dataclass(frozen=True)
class LauncherReport:
    """The entries that only a launcher knows that runs the whole job.

    Attributes:
        recovery_secs: Total time in which at least one task was lost or on its way back.
        first_step_secs: Time from the start to the first step; ``None`` if there was none.
    """

    recovery_secs: float = 0.0
    first_step_secs: float | None = None


@dataclass(frozen=True)
class TaskSummary:
    """The result of one task.

    Attributes:
        steps: How many steps a worker has taken in this run; ``None`` if that is not known.
        exit_code: The exit code of its last process; ``None`` if that is not known. Negative for a signal.
        restarts: How many times it was started again; ``None`` unless a launcher has counted that.
        restarted_after: The reason for each restart.
        gradients_dropped: How many gradients of a worker came too late; ``None`` unless an update may leave some out.
    """

    steps: int | None = None
    exit_code: int | None = None
    restarts: int | None = None
    restarted_after: Sequence[str] = ()
    gradients_dropped: int | None = None

    def to_json(self) -> dict[str, object]:
        """Return the JSON object of this task."""
        counted = {"exit_code": self.exit_code, "restarts": self.restarts} if self.restarts is not None else {}
        reasons = {"restarted_after": self.restarted_after} if self.restarted_after else {}
        dropped = {} if self.gradients_dropped is None else {"gradients_dropped": self.gradients_dropped}
        return {**({} if self.steps is None else {"steps": self.steps}), **dropped, **counted, **reasons}


def chief_of(entries: JsonObject) -> ChiefReport | None:
    """Return the chief's report; ``None`` if there is no entry of it."""
    if not entries.has_any(ChiefReport):
        return None
    versions = JsonObject(entries.content.get("versions"))
    pace = JsonObject(entries.content.get("pace"))
    steps_per_run, runs_in_flight = pace.integer("steps_per_run"), pace.integer("runs_in_flight")
    metrics = JsonObject(entries.content.get("eval")).content.items()
    return ChiefReport(
        versions={name: version for name in versions.content if (version := versions.text(name)) is not None},
        hosts=entries.texts("hosts"),
        is_blocking=entries.boolean("is_blocking") or False,
        resumed_from_step=entries.integer("resumed_from_step") or 0,
        resumed_from=entries.text("resumed_from"),
        seconds=entries.number("seconds"),
        examples_per_sec=entries.number("examples_per_sec", 0),
        loss=entries.number("loss"),
        pace=RunPace(steps_per_run, runs_in_flight) if steps_per_run and runs_in_flight else None,
        rounds=_rounds(JsonObject(entries.content.get("rounds"))),
        gradients_dropped=entries.integer("gradients_dropped"),
        batches_skipped=entries.integer("batches_skipped") or 0,
        batch_size=entries.number("batch_size", 0),
        eval={name: _metric(value) for name, value in metrics if isinstance(value, (int, float, list, type(None)))},
    )


def _rounds(entries: JsonObject) -> RoundCount | None:
    made, fewest, most = (entries.integer(name) for name in ("made", "fewest_steps", "most_steps"))
    return None if made is None or fewest is None or most is None else RoundCount(made, fewest, most)


def _metric(value: object) -> Metric:
    if isinstance(value, list):
        return [_metric(inner) for inner in value]
    return value if isinstance(value, (int, float)) else None


def workers_of(entries: JsonObject) -> WorkersReport | None:
    """Return the report on the workers' progress; ``None`` if there is no entry of it."""
    if not entries.has_any(WorkersReport):
        return None
    return WorkersReport(entries.numbers("steps_per_sec"), entries.numbers("behind"), entries.integers("staleness"))


def launcher_of(entries: JsonObject) -> LauncherReport | None:
    """Return the launcher's report; ``None`` if there is no entry of it."""
    if not entries.has_any(LauncherReport):
        return None
    return LauncherReport(entries.number("recovery_secs", 0.0), entries.number("first_step_secs"))


def task_of(entries: JsonObject) -> TaskSummary:
    """Return the result of a task."""
    return TaskSummary(
        steps=entries.integer("steps"),
        exit_code=entries.integer("exit_code"),
        restarts=entries.integer("restarts"),
        restarted_after=entries.texts("restarted_after"),
        gradients_dropped=entries.integer("gradients_dropped"),
    )
