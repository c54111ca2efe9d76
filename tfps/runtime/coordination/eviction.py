"""Evict lost workers, where others wait for them while they train (``modes.base.Fence.held_by``).

Every worker that trains looks for lost ones, from its main thread, because its training may wait for just these. It
takes a worker for lost

1. that the PS have not heard of for ``_LOST_AFTER_SECS``, and whose server accepts no connection: it has ended, or
2. that the PS have not heard of for ``_FROZEN_AFTER_SECS``: it is frozen, or cut off from the PS.

Time in which the PS did not answer this worker does not count (``heartbeat``). It then raises the fence, which all may
do, one after another. A worker that came back in the meantime has sent a heartbeat before it joined. So the heartbeats
are read again right before the fence is raised.
"""

from collections.abc import Sequence

from tfps.cluster import rendezvous
from tfps.cluster.spec import Cluster, Task
from tfps.modes.recovery import Fence
from tfps.runtime.coordination.heartbeat import Heartbeat
from tfps.runtime.coordination.state_reader import JobStateReader

_LOST_AFTER_SECS = 10.0
_FROZEN_AFTER_SECS = 30.0  # launchers that restart a frozen task have done so by then


class Eviction:
    """Evict lost workers, for one worker.

    Args:
        cluster: The cluster.
        task: The worker.
        fence: The mode's fence.
        heartbeat: Knows who sends heartbeats.
        reader: Reaches the PS while the training session is blocked.
    """

    def __init__(
        self, cluster: Cluster, task: Task, fence: Fence | None, heartbeat: Heartbeat, reader: JobStateReader
    ) -> None:
        self._cluster, self._heartbeat, self._reader = cluster, heartbeat, reader
        self._others = [other for other in cluster.tasks() if other.job == "worker" and other != task]
        self._fence = fence if fence and fence.held_by is not None else None

    def act(self) -> None:
        """Evict the workers that are lost now, and log which. Call it while this worker trains."""
        if self._fence and (lost := self._lost()):
            self._reader.evict(self._fence, {task.index: self._heartbeat.pulse_of(task.index) for task in lost})

    def _lost(self) -> Sequence[Task]:
        silent = {task: self._heartbeat.silent_secs(task.index) for task in self._others}
        silent = {task: secs for task, secs in silent.items() if secs >= _LOST_AFTER_SECS}
        absent = rendezvous.missing(self._cluster, silent)
        return [task for task, secs in silent.items() if task in absent or secs >= _FROZEN_AFTER_SECS]
