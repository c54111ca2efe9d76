"""The chief's duties beside training: initial values, checkpoints, and the final evaluation."""

import contextlib
import json
import logging
import math
import time
from collections.abc import Mapping
from typing import Any

import numpy as np
import tensorflow.compat.v1 as tf

from tfps.cluster.spec import Cluster, Task
from tfps.config.job_config import JobConfig
from tfps.config.launch_protocol import RECORDED, give_sign
from tfps.errors import ModelError, StorageError
from tfps.models.model import Model
from tfps.progress import format_progress
from tfps.runtime.checkpoint import job_end, restore
from tfps.runtime.checkpoint.background import BackgroundThread
from tfps.runtime.checkpoint.manager import CheckpointManager
from tfps.runtime.checkpoint.ownership import HeldError, Ownership, check_launch
from tfps.runtime.coordination import compatibility, interrupted_steps
from tfps.runtime.coordination.stall_detector import StallDetector
from tfps.runtime.graph import builder, layout
from tfps.runtime.graph.background_updates import UpdateRunner
from tfps.runtime.graph.evaluation import evaluation_graph
from tfps.runtime.graph.passes.snapshot import Snapshot
from tfps.runtime.process.session import elements
from tfps.runtime.results import evaluation, run_record
from tfps.runtime.results.evaluation_progress import EvaluationProgress
from tfps.runtime.results.event_file import EventFile
from tfps.runtime.training.connection import Connection
from tfps.runtime.training.steps import end_of_input
from tfps.storage import JobDirectory, remove
from tfps.summary_entries import Metric, RoundCount
from tfps.text import brief
from tfps.tf_types import Session

log = logging.getLogger(__name__)


class Chief:
    """The duties that only worker 0 has. Build it while the training graph is the default one.

    Args:
        config: The job.
        cluster: The cluster.
        model: The model.
        built: The training graph.
        connection: The worker's sessions.
    """

    def __init__(
        self,
        config: JobConfig,
        cluster: Cluster,
        model: Model,
        built: builder.TrainGraph,
        connection: Connection,
    ) -> None:
        self._config = config
        self._directory = JobDirectory(config.model_dir) if config.model_dir else None
        self._cluster = cluster
        self._model = model
        self._built = built
        self._connection = connection
        self._init = tf.global_variables_initializer()
        self.owner = Ownership(
            config.model_dir, cluster, config.force, self._save_anew, lambda: self._checkpoints.others
        )
        snapshot = Snapshot(built.step.moments, built.places, built.may_be_inf, built.step.partial)
        secs = config.save_checkpoint_secs
        self._checkpoints = CheckpointManager(config.model_dir, secs, snapshot, self.owner, built.remedy)
        self._background = BackgroundThread()
        self._save_stall = StallDetector(math.inf, "checkpoint written")  # a large one may take any time
        self.evaluation = EvaluationProgress(config.stall_timeout_secs)
        self._eval = evaluation_graph(config, cluster, Task("worker", 0), model, like=built.graph)
        self.num_workers = built.num_workers
        self.updates: UpdateRunner | None = None
        self.was_restarted = False
        self._run = ""
        self.began_at = time.time()  # seconds since 1970, when the first chief of this run started
        self.resumed_from: str | None = None
        self.resumed_from_step = 0
        self.found_step = 0  # the variables' global step when this chief started

    def take_over(self, session: Session, run: str) -> None:
        """Take over from a lost chief: the variables have their values, and that chief stored ``run`` on the PS.

        Raises:
            HeldError: If another job holds ``--model_dir``.
            ModelError: If this chief expects a variable in another place than the earlier chief did.
        """
        record = json.loads(run) if run else {}
        layout.check(self._built.layout, record.get("layout", {}), self._model)
        self._run, self._checkpoints.found_partial = record.get("id", ""), record.get("partial_updates", 0)
        try:
            self.owner.claim(record.get("owner", self.owner.this_chief.job), self._run)
            self._write_job()  # the launcher of this chief may be another one
            job_end.remove_of_lost_chief(self._config.model_dir)
        except HeldError:
            raise
        except StorageError as error:  # training continues while nothing can be written
            log.info("%s Training continues.", error)
        self.was_restarted = True  # the steps that others took until now are not all counted
        step = self.found_step = self.global_step(session)
        self.resumed_from, self.resumed_from_step = record.get("resumed_from"), record.get("step", step)
        self.began_at = record.get("began", {}).get("time", self.began_at)
        log.info("continuing from step %d after a restart", step)

    def initialize_variables(self, session: Session) -> str:
        """Give the variables their initial values or those of the newest intact checkpoint; return the run as JSON.

        Raises:
            HeldError: If another job holds ``--model_dir``, or it holds another run than the one to resume.
            CheckpointError: If there are checkpoints and none is intact, or if the newest intact one does not fit.
            StorageError: If ``--model_dir`` cannot be written.
        """
        self.owner.claim()
        self.owner.check()
        check_launch(self._config.model_dir)
        self.resumed_from = self._checkpoints.restore_latest(session)
        if self.resumed_from:
            self.resumed_from_step = self.found_step = self.global_step(session)
            restore.check_name(self.resumed_from, self.resumed_from_step)
            log.info("resumed from %s", self.resumed_from)
            if changed := run_record.changes(self._config, self._cluster):
                log.info("resuming with %s", ", ".join(changed))
        else:
            restore.report_no_checkpoint(self._config.model_dir)
            self._give_first_values(session)
        session.run(self._built.load)
        run = compatibility.new_run(self._config.model_dir, self.resumed_from_step)
        found = {"resumed_from": self.resumed_from, "partial_updates": self._checkpoints.found_partial}
        run |= {"owner": self.owner.this_chief.job, "layout": self._built.layout, **found}
        self._run = run["id"]
        self._write_job()
        if self._directory:
            remove(self._directory.summary)  # the summary of an earlier run
        return json.dumps(run)

    def _give_first_values(self, session: Session) -> None:
        try:
            session.run(self._built.global_step.initializer)  # others may read it, as optimizers with a schedule do
            session.run(self._init)
        except tf.errors.FailedPreconditionError as error:
            raise ModelError(
                f"--model={self._model.name}: the initial value of a variable reads another variable, which has none "
                f"yet ({brief(error)}): use its initial_value instead"
            ) from error

    def _write_job(self) -> None:
        if self._run:
            run_record.write_job(self._config, self._cluster, self._run)
            give_sign(RECORDED)

    def _write_missing_job(self) -> None:
        """Write ``job.json`` where it is gone: ``tfps eval`` needs it, and this chief if it is started again."""
        with contextlib.suppress(StorageError, OSError):
            if self._directory and not self._directory.job.exists():
                self._write_job()

    def _save_anew(self) -> None:
        """Save the checkpoint and ``job.json`` again after the directory was removed and recreated."""
        self._write_missing_job()
        self._checkpoints.make_due()

    def release_workers(self, session: Session, generation: int) -> None:
        """Initialize the mode, clear the remains of interrupted steps, and start the background updates."""
        step, self.was_restarted = self._built.step, generation > 0
        now: dict[Any, int] = {step.recovery.generation: generation} if step.recovery else {}
        if step.partial:
            now[step.partial.first] = self._checkpoints.found_partial
        session.run(step.chief_init, now)
        if step.recovery and generation:
            interrupted_steps.clear(session, step.recovery)
            session.run(step.chief_init, now)  # again: clearing an accumulator has advanced its global step
        if self._built.updates is not None:
            self.updates = UpdateRunner(self._connection.new_session(), self._built.updates, now)

    def settle_update(self, session: Session) -> bool:
        """Wait for the update that has started, and start no other; return whether all variables are of one step.

        They are not if a chief was lost in the middle of an update. An update that has started needs only the PS.
        """
        recovery = self._built.step.recovery
        if recovery is None:
            return True
        interrupted_steps.settle(session, recovery, self._built.step.pause)
        if self.updates:
            self.updates.end()
            self.updates = None
        return not session.run(recovery.partially_applied)

    def global_step(self, session: Session) -> int:
        """Return how many updates the variables have had."""
        return int(session.run(self._built.global_step))

    def staleness(self, session: Session) -> list[int] | None:
        """Return how many steps have seen 0, 1, ... other updates on their way; ``None`` where there can be none."""
        counts = self._built.step.staleness
        return None if counts is None else np.trim_zeros(session.run(counts), "b").tolist()

    def partial_updates(self, session: Session) -> int:
        """Return how many partial updates the variables hold: those that workers counted, and those of lost workers."""
        if not (partial := self._built.step.partial):
            return self._checkpoints.found_partial
        return int(sum(map(np.sum, session.run([partial.total, partial.unreported]))))

    def report_end_of_input(self, step: int) -> None:
        """Log that the input ended before ``max_steps``; see ``end_of_input.report``."""
        position, session = self._built.iterator.position, self._connection.session
        end_of_input.report(self._config, position, session, step, self.resumed_from_step)

    def steps_taken(self, session: Session) -> list[int]:
        """Return how many steps each worker has taken in this run; empty where only the workers know."""
        return elements(session, self._built.step.steps_taken)

    def gradients_dropped(self, session: Session) -> list[int]:
        """Return how many gradients of each worker came too late; empty where that is not counted."""
        return elements(session, self._built.step.dropped)

    def rounds(self, session: Session) -> RoundCount | None:
        """Return the rounds of this run; ``None`` in a mode without."""
        made, rounds = self._built.step.rounds_made, self._built.rounds
        if made is None or rounds is None:
            return None
        return RoundCount(int(session.run(made)), min(rounds.steps), max(rounds.steps))

    def save_if_due(self, session: Session) -> None:
        """Save every ``save_checkpoint_secs``; log a failure, and continue training.

        Where no worker waits for another, training continues during the save, and this raises the last save's error.
        Elsewhere all workers wait for the chief, or updates are paused, so the checkpoint is of one step.
        """
        if not (self._background.is_idle() and self._checkpoints.is_due):
            return
        self.owner.check()  # a session of a replaced chief would end its successor's
        self._write_missing_job()
        if self._built.step.moments is not None:
            self._built.step.prepare_save(session)
            self._background.start(self._save_apart)
        else:
            with self._built.step.without_updates(session):
                self._checkpoints.try_save(session, int(session.run(self._built.global_step)))

    def _save_apart(self) -> None:
        """Save with a separate session: training adds to the graph, and a session must not take in incomplete parts."""
        with self._connection.new_session() as session:
            step = int(session.run(self._built.global_step))
            self._checkpoints.try_save(session, step, at_rest=False)

    def report_slow_save(self) -> None:
        """Log now and then that a save does not end, as where the storage of ``--model_dir`` does not answer."""
        saves = self._checkpoints
        self._save_stall.error(saves.saves if saves.is_saving else object(), None)

    @property
    def checkpoint(self) -> str | None:
        """The newest checkpoint."""
        return self._checkpoints.newest

    def save(self, session: Session) -> int:
        """Save now, after any save in progress; return the global step that was saved.

        Raises:
            StorageError: If saving fails.
        """
        self._background.wait()
        self._write_missing_job()
        self._built.step.prepare_save(session)
        return self._checkpoints.save(session, int(session.run(self._built.global_step)))

    def check_evaluation(self) -> None:
        """Check that the final evaluation can end, before there is training to lose; see ``evaluation``."""
        if self._eval is not None:
            with self._connection.new_session(self._eval.graph) as eval_session:
                evaluation.check_end(eval_session, self._eval)

    def complete(self, session: Session) -> tuple[int, Mapping[str, Metric]]:
        """Save and evaluate; return the global step and the metrics. Save again if the checkpoint was lost by then."""
        self.save(session)
        metrics = self.evaluate(session)
        return self.save(session), metrics

    def evaluate(self, session: Session) -> Mapping[str, Metric]:
        """Evaluate the live parameters; return the metrics by name, empty if the model has no evaluation input."""
        if self._eval is None:
            return {}
        session.run(self._built.store)
        step = self.global_step(session)
        log.info("evaluating at step %d", step)
        with self._connection.new_session(self._eval.graph) as eval_session:
            metrics = evaluation.measure(eval_session, self._eval, self.evaluation)
        scalars = {f"eval/{name}": value for name, value in metrics.items() if isinstance(value, float)}
        log.info(format_progress(step, scalars))
        EventFile(self._directory.evaluation_events if self._directory else None).write(step, metrics)
        return metrics
