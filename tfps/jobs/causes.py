"""Which of the tasks of a failed job is the cause, by their exit codes.

A parameter server never is if a worker has told it of its own failure. It ends with the worker's code, or with that of
``WorkerFailedError``.
"""

from tfps.cluster.spec import Task
from tfps.errors import ClusterFormError, PeerLostError, RetryableError, StoppedError, WorkerFailedError

_OWN, _MENDABLE, _LOST, _TOLD, _STOPPED, _DONE = range(6)
_RANKS = {PeerLostError.exit_code: _LOST, ClusterFormError.exit_code: _LOST, StoppedError.exit_code: _STOPPED, 0: _DONE}


def is_final(task: Task, code: int) -> bool:
    """Return whether a task has failed by itself, with a code that no restart mends."""
    return _rank(task, code) == _OWN


def by_cause(task: Task, code: int | None) -> tuple[int, bool]:
    """Return the key that sorts tasks by how likely each made their job fail, the likeliest first.

    Args:
        task: The task.
        code: Its exit code; ``None`` if it has none.
    """
    rank = _rank(task, code or 0)
    return rank, rank < _TOLD and task.job == "ps"  # a worker comes before the PS that repeat its code


def _rank(task: Task, code: int) -> int:
    if task.job == "ps" and code == WorkerFailedError.exit_code:
        return _TOLD
    return _OWN if 0 < code < RetryableError.exit_code else _RANKS.get(code, _MENDABLE)
