"""The other workers of a job, as far as the end of training depends on them: which still train, and which are gone."""

import logging
from collections.abc import Callable, Collection, Sequence

from tfps.cluster.spec import Cluster, Task
from tfps.modes.recovery import Fence
from tfps.runtime.coordination.job_state import AT_ITS_END, AT_WORK, JobState, Phase
from tfps.tf_types import Session
from tfps.timeouts import REPLACED_AT_END_SECS

log = logging.getLogger(__name__)

_GONE_AFTER_SECS = 2.0  # at the end of the job, do not wait for a worker that does not answer for this long


class OtherWorkers:
    """The workers other than one worker.

    Args:
        cluster: The cluster.
        task: The worker.
        state: The job's state.
        are_gone: Returns whether tasks have not answered for some seconds; see ``PeerMonitor.are_gone``.
        fence: The mode's fence.

    Attributes:
        tasks: The other workers.
    """

    def __init__(
        self,
        cluster: Cluster,
        task: Task,
        state: JobState,
        are_gone: Callable[[Sequence[Task], float], bool],
        fence: Fence | None,
    ) -> None:
        self.tasks = [other for other in cluster.tasks() if other.job == "worker" and other != task]
        self._task, self._state, self._are_gone, self._fence = task, state, are_gone, fence

    def are_done(self, session: Session) -> bool:
        """Return whether there are other workers, and all of them have signed off."""
        return bool(self.tasks) and self._of(session, (Phase.DONE,)) == self.tasks

    def this_one_ended(self, session: Session) -> bool:
        """Return whether an earlier process of this worker has come to the end of its training."""
        phases, _ = self._state.read(session)
        return phases[self._task.index] in AT_ITS_END

    def not_done(self, session: Session) -> Sequence[Task]:
        """Return those of the others that have not come to their end."""
        done = self._of(session, AT_ITS_END)
        return [task for task in self.tasks if task not in done]

    def report_idle(self, steps: Sequence[int], why: Callable[[int], str]) -> None:
        """Log which workers have taken no step, this one included, by the number of steps of each worker.

        Args:
            steps: By worker, the number of its steps.
            why: Returns the mode's reason, for that many workers; see ``Mode.why_idle``.
        """
        if idle := [f"worker/{index}" for index, count in enumerate(steps) if not count]:
            log.info("%s took no step: %s", ", ".join(idle), why(len(idle)))

    def any_trains(self, session: Session) -> bool:
        """Return whether one of the others takes steps."""
        return bool(self._of(session, (Phase.RUNNING,)))

    def let_this_one(self, session: Session) -> bool:
        """Return whether this worker may take the remaining steps: no other trains, or comes first in order."""
        # All phases are of one read: a worker that becomes IDLE between two would be missed in both.
        phases, _ = self._state.read(session)
        first = [task for task in self.tasks if phases[task.index] == Phase.IDLE and task.index < self._task.index]
        training = [task for task in self.tasks if phases[task.index] == Phase.RUNNING]
        return self._are_fenced_off(session, [*first, *training])

    def are_through(self, session: Session, are_needed: bool) -> bool:
        """Return whether each of the others has signed off, or does not answer any more.

        Args:
            session: The session.
            are_needed: Whether steps are left for a worker that was lost or stopped. If so, wait for its replacement.
        """
        if are_needed:
            return self._are_fenced_off(session, self._of(session, (*AT_WORK, Phase.STOPPED)), REPLACED_AT_END_SECS)
        return self._are_fenced_off(session, self._of(session, AT_WORK))

    def _are_fenced_off(self, session: Session, tasks: Sequence[Task], after_secs: float = _GONE_AFTER_SECS) -> bool:
        """Return whether ``tasks`` are gone; if so, block their updates that are still on the way."""
        if not self._are_gone(tasks, after_secs):
            return False
        if self._fence and tasks:
            session.run(self._fence.raise_, {self._fence.workers: [task.index for task in tasks]})
        return True

    def _of(self, session: Session, phases: Collection[int]) -> Sequence[Task]:
        present, _ = self._state.read(session)
        return [task for task in self.tasks if present[task.index] in phases]
