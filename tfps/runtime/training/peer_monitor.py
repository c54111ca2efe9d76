"""Checks that a worker's main thread makes while another thread trains: lost tasks, and a step that never ends."""

import logging
import math
import time
from collections.abc import Callable, Sequence
from typing import Any

from tfps.cluster import probe, rendezvous
from tfps.cluster.spec import Cluster, Task
from tfps.config.job_config import JobConfig
from tfps.errors import PeerLostError, TfpsError
from tfps.modes.base import Mode
from tfps.runtime.coordination.job_state import Phase
from tfps.runtime.coordination.stall_detector import StallDetector
from tfps.runtime.coordination.state_reader import JobStateReader
from tfps.runtime.coordination.stragglers import WorkerPace
from tfps.runtime.training.worker_progress import Progress
from tfps.text import duration
from tfps.timeouts import BUSY_MUTE_AFTER_SECS, MUTE_AFTER_SECS, REPLACED_AFTER_SECS

_LOST_AFTER_SECS = 10.0  # a PS that does not answer for this long is lost
_ENDED_AFTER_SECS = 1.0  # so is a chief in the place of the PS, where no process listens
_REPORT_AFTER_SECS = 30.0  # after this, log which workers the end of the job waits for
_PULSE_SECS = 2.0  # at most this long between two heartbeats while all is well

log = logging.getLogger(__name__)


class PeerMonitor:
    """Watch the other tasks for one worker.

    Args:
        config: The job.
        cluster: Its tasks.
        task: The worker.
        mode: The job's mode.
        reader: Reads the job's state from the PS.
        silent_secs: Returns for how long a worker has sent no heartbeat to the PS.
    """

    def __init__(
        self,
        config: JobConfig,
        cluster: Cluster,
        task: Task,
        mode: Mode,
        reader: JobStateReader,
        silent_secs: Callable[[int], float] = lambda _: math.inf,
    ) -> None:
        self._patience_secs, self._task, self._is_blocking = config.patience_secs, task, mode.is_blocking
        self._spare = mode.spare_workers(config)
        self._reader, self._silent_secs = reader, silent_secs
        self._servers = [holder for holder in cluster.state_tasks if holder != task]
        self._others = [other for other in cluster.tasks() if other.job == "worker" and other != task]
        self._cluster = cluster
        self._mute_secs = MUTE_AFTER_SECS if cluster.ps else BUSY_MUTE_AFTER_SECS
        self._peers = rendezvous.Peers(cluster)
        self._stall, self._stall_secs = StallDetector(config.stall_timeout_secs), config.stall_timeout_secs
        self._waits_for: tuple[Task, ...] = ()
        self._waits_since = self._report_at = 0.0

    def error(self, progress: Progress | None, steps_on: bool, needs_others: bool = True) -> TfpsError | None:
        """Return why the worker cannot continue, or ``None``.

        Args:
            progress: The worker's progress; ``None`` if it does not train yet.
            steps_on: Whether it is taking steps now.
            needs_others: Whether it cannot go on without the other workers, where workers wait for one another.
        """
        if lost := self._any_lost_server() or self._any_ended_chief() or self._any_mute():
            return lost
        if progress is None:  # waiting for the chief to set the variables, or for others to restart together
            awaited = [other for other in self._others if other.is_chief or self._is_blocking]
            return self._any_silent(awaited, self._patience_secs)
        if self._is_blocking and needs_others and (lost := self._any_needed()):
            return lost
        return self._stall.error(progress.steps, progress.global_step, self._awaited) if steps_on else None

    def are_gone(self, tasks: Sequence[Task], after_secs: float) -> bool:
        """Return whether none of ``tasks`` has answered for ``after_secs``, and none sends heartbeats to the PS.

        A frozen worker can still be reached; it is gone when it has sent no heartbeat for ``stall_timeout_secs``.
        """
        lost = set(self._peers.unreachable(tasks, after_secs))
        silent_secs = {task: self._silent_secs(task.index) for task in tasks}
        self._report_waiting(tasks)
        return all(
            secs > max(after_secs + _PULSE_SECS, 0.0 if task in lost else self._stall_secs)
            for task, secs in silent_secs.items()
        )

    def _report_waiting(self, tasks: Sequence[Task]) -> None:
        """Log now and then which workers the end of the job waits for."""
        now = time.monotonic()
        if tuple(tasks) != self._waits_for:
            self._waits_for, self._waits_since, self._report_at = tuple(tasks), now, now + _REPORT_AFTER_SECS
        if tasks and now > self._report_at:
            self._report_at = now + 2 * (now - self._waits_since)
            beats = self._reader.beats()
            names = [f"{task}{_since(beats[task.index]) if beats else ''}" for task in tasks]
            log.info("waiting: for %s to end", rendezvous.first_few(names))

    def can_spare(self, workers: Sequence[int]) -> bool:
        """Return whether the others can go on without some workers: all are lost, and no more than the mode allows."""
        lost = {task.index for task in self._silent(self._others, REPLACED_AFTER_SECS)} if workers else set()
        return lost.issuperset(workers) and len(workers) <= self._spare

    def _any_needed(self) -> TfpsError | None:
        """Return an error if the chief is silent, or more of the other workers than can be spared."""
        silent = self._silent(self._others, REPLACED_AFTER_SECS)
        is_enough = len(silent) <= self._spare and not any(other.is_chief for other in silent)
        return None if is_enough else self._lost(silent, REPLACED_AFTER_SECS)

    def _any_silent(self, tasks: Sequence[Task], after_secs: float) -> TfpsError | None:
        """Return an error if some of ``tasks`` are silent."""
        return self._lost(self._silent(tasks, after_secs), after_secs)

    def _silent(self, tasks: Sequence[Task], after_secs: float) -> Sequence[Task]:
        """Return those of ``tasks`` that neither answer nor send heartbeats to the PS, and have not signed off.

        A worker that cannot be reached from here may still reach the PS, and training needs no more than that.
        """
        absent = self._peers.unreachable(tasks, after_secs)
        return self._still_needed([task for task in absent if self._silent_secs(task.index) >= after_secs])

    def _any_lost_server(self) -> TfpsError | None:
        """Return an error if some PS accept no new connection, and not all PS answer on the existing ones."""
        absent = self._peers.unreachable(self._servers, _LOST_AFTER_SECS)
        return None if absent and self._reader.are_ps_up() else self._lost(absent, _LOST_AFTER_SECS)

    def _any_ended_chief(self) -> TfpsError | None:
        """Return an error if the process of a chief in the place of the PS has ended.

        A step calls each PS, so it fails if a PS ends. A step without PS may wait for other workers alone.
        """
        absent = [] if self._cluster.ps else self._peers.unreachable(self._servers, _ENDED_AFTER_SECS)
        answers = probe.probe_all(self._cluster, absent)
        ended = [task for task, answer in answers.items() if answer.problem == probe.REFUSED]
        return self._lost(ended, _ENDED_AFTER_SECS)

    def _lost(self, lost: Sequence[Task], after_secs: float) -> TfpsError | None:
        return PeerLostError(f"lost {_named(lost)}: no answer for {after_secs:g} s.") if lost else None

    def _any_mute(self) -> TfpsError | None:
        mute = self._peers.unresponsive(self._servers, self._mute_secs)
        why = f"it is reachable but has not answered for {self._mute_secs:g} s"
        return PeerLostError(f"lost {_named(mute)}: {why}.") if mute else None

    def _still_needed(self, lost: Sequence[Task]) -> Sequence[Task]:
        """Return the lost tasks, without the workers that had signed off as done."""
        if not lost:
            return lost
        phases = self._reader.phases()
        return [task for task in lost if phases and phases[task.index] != Phase.DONE]

    def _awaited(self) -> Sequence[str]:
        """Return the workers that this one waits for: they are behind, or their part of the present update is missing.

        Return none if this one's part is missing, too.
        """
        ahead = self._reader.ahead()
        behind = self._reader.awaited() or [index for index, count in enumerate(ahead) if count <= 0]
        if ahead and not behind and not self._cluster.ps:
            return ["what the other workers send (do all of them reach each other?)"]
        if not behind or self._task.index in behind:
            return []
        beats = self._reader.beats()
        return [f"{Task('worker', index)}{_since(beats[index]) if beats else ''}" for index in behind]


def _since(beat: WorkerPace) -> str:
    if not beat.when:
        return " (no step yet)"
    return f" (last step {beat.global_step}, {duration(max(time.time() - beat.when, 0.0))} ago)"


def _named(tasks: Sequence[Any]) -> str:
    return ", ".join(map(str, tasks))
