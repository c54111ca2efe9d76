"""What a worker's main thread looks for while its work goes on in another: lost tasks, and a step that never ends."""

import time
from collections.abc import Sequence
from typing import Any

from tfps.cluster import Cluster, Task
from tfps.config import JobConfig
from tfps.errors import PeerLostError, TfpsError
from tfps.report import duration
from tfps.runtime import jobstate, net
from tfps.runtime.enquiry import Enquiry
from tfps.runtime.loop import Progress
from tfps.runtime.stall import Stall
from tfps.runtime.stragglers import Beat

_LOST_AFTER_SECS = 10.0  # a PS that does not answer for so long is lost
_MUTE_AFTER_SECS = 20.0  # so is one whose process stands still; its launcher may have noticed before
_REPLACED_AFTER_SECS = 20.0  # so is a worker that others wait for, which may be started again meanwhile


class Watch:
    """Looks after one worker.

    Args:
        config: The job.
        cluster: Its tasks.
        task: The worker.
        in_step: Whether workers wait for one another.
        enquiry: Asks the PS.
    """

    def __init__(self, config: JobConfig, cluster: Cluster, task: Task, in_step: bool, enquiry: Enquiry) -> None:
        self._patience_secs, self._task, self._in_step = config.patience_secs, task, in_step
        self._enquiry = enquiry
        self._servers = [other for other in cluster.tasks() if other.job == "ps"]
        self._others = [other for other in cluster.tasks() if other.job == "worker" and other != task]
        self._peers = net.Peers(cluster)
        self._stall = Stall(config.stall_timeout_secs)

    def error(self, progress: Progress | None, steps_on: bool) -> TfpsError | None:
        """Return why the worker cannot go on, or nothing.

        Args:
            progress: How far it has come; ``None`` if it has not begun to train.
            steps_on: Whether it takes steps now.
        """
        if lost := self._any_lost(self._servers, _LOST_AFTER_SECS) or self._any_mute():
            return lost
        if progress is None:  # the chief has yet to set the variables, or others to begin anew together with this one
            awaited = [other for other in self._others if other.is_chief or self._in_step]
            return self._any_lost(awaited, self._patience_secs)
        if self._in_step and (lost := self._any_lost(self._others, _REPLACED_AFTER_SECS)):
            return lost
        return self._stall.error(progress.steps, progress.global_step, self._awaited) if steps_on else None

    def are_gone(self, tasks: Sequence[Task], after_secs: float) -> bool:
        """Tell whether none of some tasks has answered for some time."""
        return len(self._peers.lost(tasks, after_secs)) == len(tasks)

    def _any_lost(self, tasks: Sequence[Task], after_secs: float) -> TfpsError | None:
        lost = self._still_needed(self._peers.lost(tasks, after_secs))
        return PeerLostError(f"lost {_named(lost)}: no answer for {after_secs:g} s.") if lost else None

    def _any_mute(self) -> TfpsError | None:
        mute = self._peers.mute(self._servers, _MUTE_AFTER_SECS)
        told = f"it can be reached, but has not answered for {_MUTE_AFTER_SECS:g} s"
        return PeerLostError(f"lost {_named(mute)}: {told}.") if mute else None

    def _still_needed(self, lost: Sequence[Task]) -> Sequence[Task]:
        """Return lost tasks without the workers that had signed off."""
        if not lost or lost[0].job == "ps":
            return lost
        phases = self._enquiry.phases()
        return [task for task in lost if phases and phases[task.index] != jobstate.DONE]

    def _awaited(self) -> Sequence[str]:
        """Return the workers that have yet to hand over their part of the present update, if this one has."""
        behind = [index for index, count in enumerate(self._enquiry.ahead()) if not count]
        if not behind or self._task.index in behind:
            return []
        beats = self._enquiry.beats()
        return [f"{Task('worker', index)}{_since(beats[index]) if beats else ''}" for index in behind]


def _since(beat: Beat) -> str:
    if not beat.when:
        return " (no step yet)"
    return f" (last step {beat.global_step}, {duration(max(time.time() - beat.when, 0.0))} ago)"


def _named(tasks: Sequence[Any]) -> str:
    return ", ".join(map(str, tasks))
