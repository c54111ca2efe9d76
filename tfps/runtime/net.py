"""Look at the network before TensorFlow does: is this task's port free, do the other tasks' servers answer.

``tf.train.Server`` says of a taken port only that it "could not start" (and where gRPC sets ``SO_REUSEPORT``, shares
it in silence), and ``CreateSession`` waits for a missing task for ever. Does not import TensorFlow.
"""

import errno
import logging
import socket
import time
from collections.abc import Callable, Iterable, MutableMapping, Sequence
from concurrent.futures import ThreadPoolExecutor

from tfps.cluster import Cluster, Task
from tfps.errors import ClusterFormError, ConfigError, TfpsError

_PROBE_SECS = 1.0  # a blackholed address costs this long
_POLL_SECS = 0.05
_TELL_AFTER_SECS = 2.0  # waiting shorter than this is not worth a line
_ASK_AFTER_SECS = 10.0  # tasks started together have met by then

log = logging.getLogger(__name__)


def split(address: str) -> tuple[str, int]:
    """Return host and port of ``host:port``; an IPv6 address is without its brackets."""
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


def check_port(address: str, flag: str) -> None:
    """Make sure that this machine can listen on a task's port.

    A port that is bound but not listened on is one that a launcher holds for this task: see ``launchers.local``.

    Raises:
        ConfigError: If another process listens there, or the port may not be used.
    """
    port = split(address)[1]
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            probe.bind(("", port))
        taken = answers(f"127.0.0.1:{port}")
        why = "is taken by another process"
    except OSError as error:
        taken = True
        why = "is taken by another process" if error.errno == errno.EADDRINUSE else f"cannot be used: {error.strerror}"
    if taken:
        raise ConfigError(f"{flag}: port {port} of {address} {why}: end that process or give another port.")


def bypass_proxies(env: MutableMapping[str, str], cluster: Cluster) -> None:
    """Keep gRPC from sending the cluster's traffic to the proxy that ``http_proxy`` names."""
    hosts = [split(cluster.address(task))[0] for task in cluster.tasks()]
    known = [host for name in ("no_grpc_proxy", "no_proxy") for host in env.get(name, "").split(",") if host]
    env["no_grpc_proxy"] = ",".join(dict.fromkeys([*known, *hosts]))


def answers(address: str) -> bool:
    """Tell whether something accepts connections at ``host:port``."""
    try:
        with socket.create_connection(split(address), timeout=_PROBE_SECS) as connection:
            return bool(connection.getsockname() != connection.getpeername())  # a port can connect to itself
    except OSError:
        return False


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
    """Wait until every other task of the cluster answers.

    Args:
        cluster: The cluster.
        task: This task, which is not waited for.
        timeout_secs: For how long.
        stopping: Returns an error when this task has to end instead.
        ended: Tells whether the job is over; asked when nobody has come for some time.
        enough: Tells whether the job goes on without the workers that are missing; asked once, when only workers are.

    Returns:
        Whether all that are needed answer; if not, the job is over.

    Raises:
        ClusterFormError: If some never answered; names them.
    """
    start_time = time.monotonic()
    told = asked = False
    absent = [peer for peer in cluster.tasks() if peer != task]
    while absent := missing(cluster, absent):
        if error := stopping():
            raise error
        waited = time.monotonic() - start_time
        if waited > timeout_secs:
            raise ClusterFormError(
                f"the cluster did not form: no answer from {_named(cluster, absent)} within "
                f"--start_timeout_secs={timeout_secs:g}. Start them, or correct their addresses."
            )
        if waited > _ASK_AFTER_SECS and ended():
            log.info("the job has ended already")
            return False
        if not asked and waited > _TELL_AFTER_SECS and all(peer.job == "worker" for peer in absent):
            asked = True
            if enough():
                return True
        if not told and waited > _TELL_AFTER_SECS:
            log.info("waiting for %s", _named(cluster, absent))
            told = True
        time.sleep(_POLL_SECS)
    return True


class Peers:
    """Since when other tasks have not answered."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._silent_since: dict[Task, float] = {}

    def answer(self, task: Task) -> bool:
        """Tell whether a task answers now."""
        return not self.lost([task], 0.0)

    def lost(self, tasks: Sequence[Task], after_secs: float) -> list[Task]:
        """Return those of ``tasks`` that do not answer now and have not for ``after_secs``."""
        absent = missing(self._cluster, tasks)
        for task in set(tasks) - set(absent):
            self._silent_since.pop(task, None)
        now = time.monotonic()
        return [task for task in absent if now - self._silent_since.setdefault(task, now) >= after_secs]


def _named(cluster: Cluster, tasks: Sequence[Task], most: int = 10) -> str:
    """Return tasks with their addresses, the first ``most`` of them."""
    named = [f"{task} ({cluster.address(task)}{_unknown(cluster.address(task))})" for task in tasks[:most]]
    return ", ".join(named) + (f" and {len(tasks) - most} more" if len(tasks) > most else "")


def _unknown(address: str) -> str:
    """Say so if the host of an address has no known name."""
    try:
        socket.getaddrinfo(*split(address))
    except OSError:
        return ", unknown host"
    return ""
