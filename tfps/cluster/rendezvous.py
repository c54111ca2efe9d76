"""Check the network before TensorFlow uses it: all other tasks must be there, and no wrong ones.

``CreateSession`` waits without end for a missing task. So each task first probes every address (``probe``). Does not
import TensorFlow.
"""

import logging
import time
from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from concurrent.futures import ThreadPoolExecutor

from tfps.cluster import probe
from tfps.cluster.addresses import split
from tfps.cluster.ports import answers
from tfps.cluster.probe import ProbeResult
from tfps.cluster.spec import Cluster, Task
from tfps.errors import ClusterFormError, ConfigError, TfpsError
from tfps.timeouts import TASK_END_SECS

LEAVING_SECS = TASK_END_SECS  # a wrong task that stays this long does not leave without help

_POLL_SECS = 0.05
_REPORT_AFTER_SECS = 2.0  # a shorter wait is not worth a log line
_ASK_MUTE_SECS = 5.0  # the longest interval between probes
_ASK_AGAIN_SECS = 5.0  # a PS that could not answer may do so now
_ASK_AFTER_SECS = 10.0  # tasks started together have met by then

log = logging.getLogger(__name__)


def bypass_proxies(env: MutableMapping[str, str], cluster: Cluster) -> None:
    """Keep gRPC from sending the cluster's traffic through a proxy that the environment names.

    gRPC reads the first of ``grpc_proxy``, ``https_proxy`` and ``http_proxy``, in lower case only. It bypasses that
    proxy for the hosts in the first of ``no_grpc_proxy`` and ``no_proxy``
    (grpc/src/core/handshaker/http_connect/http_proxy_mapper.cc). An IPv6 address has no brackets there.
    """
    hosts = [split(cluster.address(task))[0] for task in cluster.tasks()]
    known = [host for name in ("no_grpc_proxy", "no_proxy") for host in env.get(name, "").split(",") if host]
    env["no_grpc_proxy"] = ",".join(dict.fromkeys([*known, *hosts]))


def missing(cluster: Cluster, tasks: Iterable[Task]) -> list[Task]:
    """Return the tasks in ``tasks`` whose server accepts no connection; checks them concurrently."""
    asked = list(tasks)
    if not asked:
        return []
    with ThreadPoolExecutor(max_workers=min(64, len(asked))) as pool:
        up = pool.map(answers, [cluster.address(task) for task in asked])
        return [task for task, is_up in zip(asked, up, strict=True) if not is_up]


def wait_for_peers(
    cluster: Cluster,
    task: Task,
    timeout_secs: float,
    stopping: Callable[[], TfpsError | None],
    ended: Callable[[], bool] = lambda: False,
    enough: Callable[[], bool] = lambda: False,
) -> bool:
    """Wait until every other task of the cluster is up and confirms that it is that task.

    Args:
        cluster: The cluster.
        task: This task, which is not waited for.
        timeout_secs: The longest wait, in seconds.
        stopping: Returns an error if this task has to end instead.
        ended: Returns whether the job is over; called only after a long wait.
        enough: Returns whether the job goes on without the missing workers; called when only workers are missing.

    Returns:
        Whether all required tasks are there; if not, the job is over.

    Raises:
        ConfigError: If another task is at some address, and stays or was there when the wait ends.
        ClusterFormError: If some tasks never answered; names them.
    """
    meeting = _Meeting(cluster, task, timeout_secs)
    while not meeting.is_complete():
        if error := stopping():
            raise error
        meeting.check()
        if meeting.lasts(_ASK_AFTER_SECS) and ended():
            log.info("the job has already ended")
            return False
        if meeting.is_time_to_ask() and enough():
            return True
        meeting.report()
        time.sleep(_POLL_SECS)
    return True


class _Meeting:
    """The other tasks: which of them are missing, and what was found in their place."""

    def __init__(self, cluster: Cluster, task: Task, timeout_secs: float) -> None:
        self._cluster, self._timeout_secs = cluster, timeout_secs
        self._absent: Mapping[Task, ProbeResult] = {peer: ProbeResult() for peer in cluster.tasks() if peer != task}
        self._wrong: Mapping[Task, Task] = {}  # missing tasks in whose place another one has answered, now or before
        self._began = self._wrong_since = time.monotonic()
        self._is_reported = False
        self._ask_at = _REPORT_AFTER_SECS  # seconds since the wait began

    def is_complete(self) -> bool:
        """Probe the tasks that were missing; return whether all are there now."""
        found = probe.probe_all(self._cluster, list(self._absent))
        self._absent = {peer: answer for peer, answer in found.items() if answer.task != peer}
        present = self._present
        if not present:
            self._wrong_since = time.monotonic()
        self._wrong = {peer: other for peer, other in {**self._wrong, **present}.items() if peer in self._absent}
        return not self._absent

    def check(self) -> None:
        """Raise an error if there is no point in waiting any longer.

        A wrong task that has gone may have ended for the same reason, so a wait that ends without the right one is
        never a ``ClusterFormError``, after which all would be started again with the same hosts.
        """
        is_over = self.lasts(self._timeout_secs)
        found = self._wrong if is_over else self._present
        if found and (is_over or time.monotonic() - self._wrong_since > min(LEAVING_SECS, self._timeout_secs)):
            raise ConfigError([self._refusal(peer, other) for peer, other in found.items()])
        if is_over:
            raise ClusterFormError(
                f"the cluster did not form: no answer from {self.missing} within "
                f"--start_timeout_secs={self._timeout_secs:g}. Start what is missing (after the loss of a PS, also "
                "workers that had ended), or correct the addresses."
            )

    def _refusal(self, peer: Task, other: Task) -> str:
        return f"--{peer.job}_hosts: {peer} ({self._cluster.address(peer)}) {wrong_task_message(other)}"

    @property
    def _present(self) -> Mapping[Task, Task]:
        """The tasks that answer now in place of others."""
        return {peer: answer.task for peer, answer in self._absent.items() if answer.task}

    def report(self) -> None:
        """Log once who is missing, if the wait is a long one."""
        if not self._is_reported and self.lasts(_REPORT_AFTER_SECS):
            log.info("waiting for %s", self.missing)
            self._is_reported = True

    def lasts(self, secs: float) -> bool:
        """Return whether the wait has lasted longer than ``secs``."""
        return time.monotonic() - self._began > secs

    def is_time_to_ask(self) -> bool:
        """Return, every few seconds, that the wait is a long one, and all tasks that hold the job's state are there."""
        if not self.lasts(self._ask_at) or any(peer in self._cluster.state_tasks for peer in self._absent):
            return False
        self._ask_at = time.monotonic() - self._began + _ASK_AGAIN_SECS
        return True

    @property
    def missing(self) -> str:
        """The first missing tasks with their addresses, and the listeners found there instead."""
        notes = {peer: _note(answer) for peer, answer in self._absent.items()}
        return first_few([f"{peer} ({self._cluster.address(peer)}{note})" for peer, note in notes.items()])


def wrong_task_message(found: Task) -> str:
    """Return the message for an address where another task was found."""
    return (
        f"says that it is {found}: it was started with another order of hosts, or for another job. Give every task the "
        "same hosts in the same order, and use each address for one job only."
    )


def first_few(named: Sequence[str], most: int = 10) -> str:
    """Return some items as one text: the first ``most`` of them, and the number of the others."""
    return ", ".join(named[:most]) + (f" and {len(named) - most} more" if len(named) > most else "")


def _note(answer: ProbeResult) -> str:
    """Return a note on the listener at an address; empty if nothing listens there."""
    if answer.task:
        return f", which says that it is {answer.task}"
    return "" if answer.problem in ("", probe.REFUSED, probe.SILENT) else f", {answer.problem}"


class Peers:
    """Records since when other tasks have not answered."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._silent_since: dict[Task, float] = {}
        self._unresponsive_since: dict[Task, float] = {}
        self._ask_at = 0.0

    def answer(self, task: Task) -> bool:
        """Return whether a task answers now."""
        return not self.unreachable([task], 0.0)

    def unresponsive(self, tasks: Sequence[Task], after_secs: float) -> list[Task]:
        """Return the tasks that can be reached but have not named themselves for ``after_secs``.

        They hang, or have ended, and another program has taken the port. They are probed a few times in that period. A
        worker's result says little: while it computes, it may not answer.
        """
        now = time.monotonic()
        if now >= self._ask_at:
            self._ask_at = now + min(after_secs / 8, _ASK_MUTE_SECS)
            found = probe.probe_all(self._cluster, tasks)
            unresponsive = [task for task, answer in found.items() if _is_no_answer_of(task, answer)]
            self._unresponsive_since = {task: self._unresponsive_since.get(task, now) for task in unresponsive}
        return [task for task, since in self._unresponsive_since.items() if now - since >= after_secs]

    def unreachable(self, tasks: Sequence[Task], after_secs: float) -> list[Task]:
        """Return the tasks in ``tasks`` that do not answer now and have not answered for ``after_secs``."""
        absent = missing(self._cluster, tasks)
        for task in set(tasks) - set(absent):
            self._silent_since.pop(task, None)
        now = time.monotonic()
        return [task for task in absent if now - self._silent_since.setdefault(task, now) >= after_secs]


def _is_no_answer_of(task: Task, answer: ProbeResult) -> bool:
    """Return whether a process accepted the connection, and did not say that it is the task."""
    is_other = answer.task is not None and answer.task != task
    return is_other or answer.problem in (probe.UNRESPONSIVE, probe.OTHER)
