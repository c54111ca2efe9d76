"""``summary.json``: the result of a job, for people and programs. Does not import TensorFlow.

The chief writes the file when it ends, however the job ends. A launcher that runs the whole job adds what only it
knows. If the chief could not write the file, the launcher does.

Files of other versions, and files that people have edited, can be read: an entry that is missing, or whose value has
another type than it should, has its default. Entries that this version does not know are kept.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

from tfps.errors import RetryableError
from tfps.json_object import JsonObject
from tfps.storage import SCHEMA_VERSION, read_json, write_json
from tfps.summary_entries import (
    ChiefReport,
    LauncherReport,
    TaskSummary,
    WorkersReport,
    chief_of,
    launcher_of,
    task_of,
    workers_of,
)

DONE, STOPPED, FAILED = "done", "stopped", "failed"  # the values of ``JobSummary.status``


@dataclass(frozen=True)
class JobSummary:
    """The content of ``summary.json``.

    Attributes:
        status: ``DONE``, ``STOPPED`` or ``FAILED``.
        exit_code: The exit code of the job.
        began: When the job began; times are UTC in ISO 8601 format.
        ended: When it ended.
        model_dir: The directory.
        model: The model.
        mode: The mode.
        global_step: How many updates the variables have had.
        max_steps: The step at which training ends.
        epochs: How many times each example is read until training ends; ``None`` if that is no limit.
        partial_updates: How many updates are in some variables and not in others; ``None`` if that is not known.
        checkpoint: The newest checkpoint; ``None`` for none.
        tasks: The result of each task, by its name, like ``worker/0``.
        error: Why the job has failed or was stopped; ``None`` if it is done.
        chief: The chief's report; ``None`` if the chief has written no summary.
        workers: The report on the workers' progress; ``None`` if the job has not come to its end.
        launcher: The launcher's report; ``None`` if no launcher has run the whole job.
        schema_version: The version of the file's format.
        others: The entries that this version does not know, by name.
    """

    status: str = ""
    exit_code: int = 0
    began: str | None = None
    ended: str | None = None
    model_dir: str | None = None
    model: str | None = None
    mode: str | None = None
    global_step: int = 0
    max_steps: int | None = None
    epochs: int | None = None
    partial_updates: int | None = None
    checkpoint: str | None = None
    tasks: Mapping[str, TaskSummary] = field(default_factory=dict)
    error: str | None = None
    chief: ChiefReport | None = None
    workers: WorkersReport | None = None
    launcher: LauncherReport | None = None
    schema_version: int = SCHEMA_VERSION
    others: Mapping[str, object] = field(default_factory=dict)

    @property
    def may_continue(self) -> bool:
        """Whether the job has failed in a way that a restart of its tasks may mend."""
        return self.status == FAILED and self.exit_code >= RetryableError.exit_code

    def has_reached(self, max_steps: int) -> bool:
        """Return whether training has come to a step."""
        return self.global_step >= max_steps

    def to_json(self) -> dict[str, object]:
        """Return the JSON object of this summary."""
        content = {name: getattr(self, name) for name in _PLAIN}
        parts = [asdict(part) for part in (self.chief, self.workers, self.launcher) if part]
        known = {name: value for part in (content, *parts) for name, value in part.items()}
        known["tasks"] = {name: task.to_json() for name, task in self.tasks.items()}
        for name in ("epochs", "partial_updates", "error"):
            if known[name] is None:
                del known[name]
        return {**{name: known[name] for name in _ORDER if name in known}, **self.others}

    @classmethod
    def from_json(cls, content: Mapping[str, object]) -> "JobSummary":
        """Return the summary that a JSON object is."""
        entries = JsonObject(content)
        schema_version = entries.integer("schema_version")
        return cls(
            status=entries.text("status") or "",
            exit_code=entries.integer("exit_code") or 0,
            began=entries.text("began"),
            ended=entries.text("ended"),
            model_dir=entries.text("model_dir"),
            model=entries.text("model"),
            mode=entries.text("mode"),
            global_step=entries.integer("global_step") or 0,
            max_steps=entries.integer("max_steps"),
            epochs=entries.integer("epochs"),
            partial_updates=entries.integer("partial_updates"),
            checkpoint=entries.text("checkpoint"),
            tasks={name: task_of(task) for name, task in entries.objects("tasks").items()},
            error=entries.text("error"),
            chief=chief_of(entries),
            workers=workers_of(entries),
            launcher=launcher_of(entries),
            schema_version=SCHEMA_VERSION if schema_version is None else schema_version,
            others={name: value for name, value in content.items() if name not in _ORDER},
        )

    @classmethod
    def read(cls, path: Path) -> "JobSummary | None":
        """Return the summary in a file, or ``None`` if there is no such file.

        Raises:
            CheckpointError: If it is not a JSON object.
        """
        content = read_json(path)
        return None if content is None else cls.from_json(content)

    def write(self, path: Path) -> None:
        """Write the file, completely or not at all.

        Raises:
            StorageError: If it cannot be written.
        """
        write_json(path, self.to_json())


_PLAIN = (
    *("schema_version", "status", "exit_code", "began", "ended", "model_dir", "model", "mode", "global_step"),
    *("max_steps", "epochs", "partial_updates", "checkpoint", "error"),
)
# All entries, as they follow each other in the file.
_ORDER = (
    *("schema_version", "versions", "status", "exit_code", "began", "ended", "hosts", "model_dir", "model", "mode"),
    *("is_blocking", "global_step", "max_steps", "epochs", "resumed_from_step", "resumed_from", "seconds"),
    *("examples_per_sec", "loss", "pace", "rounds", "gradients_dropped", "batches_skipped", "batch_size", "eval"),
    *("steps_per_sec", "behind", "staleness", "partial_updates", "checkpoint", "tasks", "error", "recovery_secs"),
    "first_step_secs",
)
