"""Which of the tasks of a failed job is the cause, by their exit codes.

A parameter server never is if a worker has told it of its own failure. It ends with the worker's code, or with that of
``WorkerFailedError``. Its error message names the worker and the worker's code. A chief without PS does
the same.
"""

from tfps.cluster.spec import Task
from tfps.errors import ClusterFormError, PeerLostError, RetryableError, StoppedError, WorkerFailedError, failed_worker

_OWN, _MENDABLE, _LOST, _TOLD, _STOPPED, _DONE = range(6)
_RANKS = {PeerLostError.exit_code: _LOST, ClusterFormError.exit_code: _LOST, StoppedError.exit_code: _STOPPED, 0: _DONE}


def is_final(task: Task, code: int) -> bool:
    """Return whether a task has failed by itself, with a code that no restart mends."""
    return _rank(task, code) == _OWN


def is_told(task: Task, code: int) -> bool:
    """Return whether a task is a parameter server that ended because a worker has failed, with a code of its own."""
    return task.job == "ps" and code == WorkerFailedError.exit_code


def named_cause(task: Task, line: str) -> tuple[Task, int] | None:
    """Return the worker that has failed for good, and its exit code, if ``line`` is an error that names them."""
    named = failed_worker(line) if task.job == "ps" or task.is_chief else None
    return (Task("worker", named[0]), named[1]) if named else None


def may_name_cause(task: Task, code: int) -> bool:
    """Return whether a task's error may name a worker: a PS does, and so does the chief of a job without PS."""
    return is_told(Task("ps", 0), code) and (task.job == "ps" or task.is_chief)


def by_cause(task: Task, code: int | None, is_known: bool = True) -> tuple[int, bool]:
    """Return the key that sorts tasks by how likely each made their job fail, the likeliest first.

    Args:
        task: The task.
        code: Its exit code; ``None`` if it has none.
        is_known: Whether that code is known; one that is only assumed counts less than what a PS reports.
    """
    rank = _rank(task, code or 0) if is_known else max(_rank(task, code or 0), _TOLD)
    return rank, rank < _TOLD and task.job == "ps"  # a worker comes before the PS that repeat its code


def _rank(task: Task, code: int) -> int:
    if is_told(task, code):
        return _TOLD
    return _OWN if 0 < code < RetryableError.exit_code else _RANKS.get(code, _MENDABLE)
