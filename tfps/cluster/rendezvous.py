"""Look at the network before TensorFlow does: are the other tasks there, and no others.

``CreateSession`` waits for a missing task for ever. So each task first asks at every address who is there (``probe``).
Does not import TensorFlow.
"""

import logging
import time
from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from concurrent.futures import ThreadPoolExecutor

from tfps.cluster import probe
from tfps.cluster.addresses import split
from tfps.cluster.ports import answers
from tfps.cluster.probe import ProbeResult
from tfps.cluster.resolver import Cluster, Task
from tfps.errors import ClusterFormError, ConfigError, TfpsError

LEAVING_SECS = 10.0  # what is still there after so long does not leave by itself

_POLL_SECS = 0.05
_TELL_AFTER_SECS = 2.0  # waiting shorter than this is not worth a line
_ASK_MUTE_SECS = 5.0  # at least so often
_ASK_AFTER_SECS = 10.0  # tasks started together have met by then

log = logging.getLogger(__name__)


def bypass_proxies(env: MutableMapping[str, str], cluster: Cluster) -> None:
    """Keep gRPC from sending the cluster's traffic to the proxy that a variable names.

    gRPC reads the first of ``grpc_proxy``, ``https_proxy`` and ``http_proxy``, in lower case only, and goes round it to
    what the first of ``no_grpc_proxy`` and ``no_proxy`` names (grpc/src/core/handshaker/http_connect/
    http_proxy_mapper.cc); an IPv6 address has no brackets there.
    """
    hosts = [split(cluster.address(task))[0] for task in cluster.tasks()]
    known = [host for name in ("no_grpc_proxy", "no_proxy") for host in env.get(name, "").split(",") if host]
    env["no_grpc_proxy"] = ",".join(dict.fromkeys([*known, *hosts]))


def missing(cluster: Cluster, tasks: Iterable[Task]) -> list[Task]:
    """Return those of ``tasks`` whose server does not answer; they are asked at the same time."""
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
    """Wait until every other task of the cluster is there, and says that it is that task.

    Args:
        cluster: The cluster.
        task: This task, which is not waited for.
        timeout_secs: For how long.
        stopping: Returns an error when this task has to end instead.
        ended: Tells whether the job is over; asked when nobody has come for some time.
        enough: Tells whether the job goes on without the workers that are missing; asked once, when only workers are.

    Returns:
        Whether all that are needed are there; if not, the job is over.

    Raises:
        ConfigError: If another task is at some address, and stays.
        ClusterFormError: If some never answered; names them.
    """
    meeting = _Meeting(cluster, task, timeout_secs)
    told = asked = False
    while not meeting.is_complete():
        if error := stopping():
            raise error
        meeting.check()
        if meeting.lasts(_ASK_AFTER_SECS) and ended():
            log.info("the job has ended already")
            return False
        if not asked and meeting.lasts(_TELL_AFTER_SECS) and meeting.lacks_only_workers:
            asked = True
            if enough():
                return True
        if not told and meeting.lasts(_TELL_AFTER_SECS):
            log.info("waiting for %s", meeting.missing)
            told = True
        time.sleep(_POLL_SECS)
    return True


class _Meeting:
    """The other tasks: who of them is not there yet, and what is found in their place."""

    def __init__(self, cluster: Cluster, task: Task, timeout_secs: float) -> None:
        self._cluster, self._timeout_secs = cluster, timeout_secs
        self._absent: Mapping[Task, ProbeResult] = {peer: ProbeResult() for peer in cluster.tasks() if peer != task}
        self._began = self._wrong_since = time.monotonic()

    def is_complete(self) -> bool:
        """Ask those who were not there; return whether all are now."""
        found = probe.probe_all(self._cluster, list(self._absent))
        self._absent = {peer: answer for peer, answer in found.items() if answer.task != peer}
        if not any(answer.task for answer in self._absent.values()):
            self._wrong_since = time.monotonic()
        return not self._absent

    def check(self) -> None:
        """Raise an error if it is no use to wait any longer."""
        found = {peer: answer.task for peer, answer in self._absent.items() if answer.task}
        wrong = [
            f"--{peer.job}_hosts: {peer} ({self._cluster.address(peer)}) {stranger(other)}"
            for peer, other in found.items()
        ]
        if wrong and time.monotonic() - self._wrong_since > min(LEAVING_SECS, self._timeout_secs):
            raise ConfigError(wrong)
        if self.lasts(self._timeout_secs):
            raise ClusterFormError(
                f"the cluster did not form: no answer from {self.missing} within "
                f"--start_timeout_secs={self._timeout_secs:g}. Start them, or correct their addresses."
            )

    def lasts(self, secs: float) -> bool:
        """Return whether it has lasted longer than ``secs``."""
        return time.monotonic() - self._began > secs

    @property
    def lacks_only_workers(self) -> bool:
        """Whether all that are not there are workers."""
        return all(peer.job == "worker" for peer in self._absent)

    @property
    def missing(self) -> str:
        """Those who are not there, with their addresses, the first of them; and what is there instead."""
        notes = {peer: _note(answer) for peer, answer in self._absent.items()}
        return first_few([f"{peer} ({self._cluster.address(peer)}{note})" for peer, note in notes.items()])


def stranger(found: Task) -> str:
    """Return what to tell of an address at which another task is found."""
    return (
        f"says that it is {found}: it was started with another order of hosts, or for another job. Give every task the "
        "same hosts in the same order, and each address to one job."
    )


def first_few(named: Sequence[str], most: int = 10) -> str:
    """Return some things as one text, the first ``most`` of them, and how many more there are."""
    return ", ".join(named[:most]) + (f" and {len(named) - most} more" if len(named) > most else "")


def _note(answer: ProbeResult) -> str:
    """Return what to add to an address; nothing if there is simply nobody."""
    if answer.task:
        return f", which says that it is {answer.task}"
    return "" if answer.problem in ("", probe.REFUSED, probe.SILENT) else f", {answer.problem}"


class Peers:
    """Since when other tasks have not answered."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._silent_since: dict[Task, float] = {}
        self._mute_since: dict[Task, float] = {}
        self._ask_at = 0.0

    def answer(self, task: Task) -> bool:
        """Return whether a task answers now."""
        return not self.lost([task], 0.0)

    def mute(self, tasks: Sequence[Task], after_secs: float) -> list[Task]:
        """Return those that can be reached and have not said who they are for ``after_secs``: their process stands.

        They are asked a few times in that while. Of a worker that computes little can be told: it may not answer.
        """
        now = time.monotonic()
        if now >= self._ask_at:
            self._ask_at = now + min(after_secs / 8, _ASK_MUTE_SECS)
            found = probe.probe_all(self._cluster, tasks)
            mute = [task for task, answer in found.items() if answer.problem == probe.MUTE]
            self._mute_since = {task: self._mute_since.get(task, now) for task in mute}
        return [task for task, since in self._mute_since.items() if now - since >= after_secs]

    def lost(self, tasks: Sequence[Task], after_secs: float) -> list[Task]:
        """Return those of ``tasks`` that do not answer now and have not for ``after_secs``."""
        absent = missing(self._cluster, tasks)
        for task in set(tasks) - set(absent):
            self._silent_since.pop(task, None)
        now = time.monotonic()
        return [task for task in absent if now - self._silent_since.setdefault(task, now) >= after_secs]
