"""The import of TensorFlow at the start of a job on this machine, begun again if its process is killed."""

import time
from collections.abc import Callable, Iterator

from tfps.cluster.spec import Task
from tfps.errors import KilledError
from tfps.jobs.events import Note, TaskRestarted, how_it_ended
from tfps.launchers.local.fork_server import ForkServer
from tfps.launchers.local.restart_policy import RestartPolicy


def imported(
    server: ForkServer, restarts: RestartPolicy, first: Task, is_cancelled: Callable[[], bool], every_secs: float
) -> Iterator[Note | TaskRestarted | None]:
    """Start the fork server, and again if it is killed, until it has imported TensorFlow or the job is canceled.

    Yields ``None`` when nothing happened for a while, and an event for each new start. A new start uses the budget of
    the task that would be the first to run.

    Raises:
        ConfigError: If TensorFlow cannot be imported.
        KilledError: If the budget for restarts is used up.
        StorageError: If the log of the import cannot be written.
    """
    _start(server, restarts, first)
    yield Note("importing TensorFlow")
    while not is_cancelled():
        try:
            if server.is_ready(every_secs):
                return
            yield None
        except KilledError as error:
            grant = restarts.grant(first, -error.signal)
            if grant is None:
                raise
            how = f"{how_it_ended(-error.signal)} during the import of TensorFlow"
            yield TaskRestarted(first, how, grant.used, grant.budget)
            while not is_cancelled() and not list(restarts.due()):
                time.sleep(every_secs)
                yield None
            if not is_cancelled():
                _start(server, restarts, first)


def _start(server: ForkServer, restarts: RestartPolicy, first: Task) -> None:
    restarts.began(first)
    server.start()
