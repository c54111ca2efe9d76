"""The process of one server of a parameter service, ``tfps run --serve``."""

import json
import logging
import socket
import ssl
import time
from dataclasses import dataclass

import tensorflow.compat.v1 as tf

import tfps
from tfps.client import tls
from tfps.client.connect import TOKEN, token_in_environment
from tfps.cluster.addresses import split
from tfps.cluster.spec import Cluster, Task
from tfps.config.job_config import OPTIONS, JobConfig
from tfps.errors import ConfigError, PeerLostError
from tfps.runtime.process.shutdown import StopRequest
from tfps.runtime.service.following_server import FollowingServer
from tfps.runtime.service.listener import Listener
from tfps.runtime.service.parameters.store import Store
from tfps.timeouts import PS_GRACE_SECS

OPTIMIZER, LEARNING_RATE = "sgd", 0.01  # unless flags say otherwise
_BACKLOG = 1024
_POLL_SECS = 0.1

log = logging.getLogger(__name__)


def serve(config: JobConfig, cluster: Cluster, task: Task, stop: StopRequest) -> None:
    """Serve as one server of a parameter service until it is over.

    Raises:
        ConfigError: If this machine cannot listen on the address.
        ClusterFormError: If another server never started.
        PeerLostError: If another server is lost, and does not come back.
        DivergedError: If a parameter is not finite.
        StoppedError: If the task is asked to stop; the first server has saved then, or logged why it could not.
    """
    from tfps.runtime.service.leading_task import LeadingTask  # noqa: PLC0415  which imports this module

    tf.enable_eager_execution()
    warn_of_open_port(cluster.address(task))
    encryption = tls_of(config)
    with listening(cluster.address(task)) as bound:
        if task.index == 0:
            LeadingTask(config, cluster, stop, bound, encryption).run()
        else:
            _follow(config, cluster, task, stop, bound, encryption.own)
    log.info("done")


def store_of(config: JobConfig) -> Store:
    """Return the store that the flags ask for."""
    rate = LEARNING_RATE if config.learning_rate is None else config.learning_rate
    return Store(config.optimizer or OPTIMIZER, rate, config.aggregate or "mean")


def terms_of(config: JobConfig) -> str:
    """Return what all servers have to agree on, as JSON."""
    flags = {f"--{name}": getattr(config, name) for name, option in OPTIONS.items() if option.must_agree}
    return json.dumps({**flags, "the release of tfps": tfps.__version__, "TensorFlow": tf.__version__}, default=str)


@dataclass(frozen=True)
class Encryption:
    """How a server encrypts; ``None`` for not at all.

    Attributes:
        own: As a server.
        to_others: As a client of other servers.
    """

    own: ssl.SSLContext | None = None
    to_others: ssl.SSLContext | None = None


def tls_of(config: JobConfig) -> Encryption:
    """Return how the flags ask to encrypt.

    Raises:
        ConfigError: If a file is missing or wrong.
    """
    if not (config.tls_cert and config.tls_key):
        return Encryption()
    own = tls.server_context(config.tls_cert, config.tls_key)
    return Encryption(own, tls.client_context("--tls_ca", config.tls_ca or ""))


def token() -> str:
    """Return the secret that clients must know; empty for none."""
    return token_in_environment()


def listening(address: str) -> socket.socket:
    """Return a socket that listens on a port: on loopback only if that is the address, else on all networks.

    Raises:
        ConfigError: If that is not possible.
    """
    host, port = split(address)
    if ":" in host:
        raise ConfigError(
            f"--ps_hosts: {address} is of IPv6, and a service listens on IPv4: give a name or such an address."
        )
    bound = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        for option in (socket.SO_REUSEADDR, socket.SO_REUSEPORT):  # the launcher holds the port, as ``held_ports`` says
            bound.setsockopt(socket.SOL_SOCKET, option, 1)
        bound.bind((host if _is_loopback(host) else "", port))
        bound.listen(_BACKLOG)
    except OSError as error:
        bound.close()
        raise ConfigError(f"--ps_hosts: cannot listen on {address}: {error.strerror}.") from None
    return bound


def warn_of_open_port(address: str) -> None:
    """Log a warning if everybody who reaches the port can change the parameters."""
    if not token() and not _is_loopback(split(address)[0]):
        log.warning("whoever reaches %s can read and change the parameters: set %s for all tasks.", address, TOKEN)


def _is_loopback(host: str) -> bool:
    return host.lower() == "localhost" or host.startswith("127.")


def _follow(
    config: JobConfig,
    cluster: Cluster,
    task: Task,
    stop: StopRequest,
    bound: socket.socket,
    encryption: ssl.SSLContext | None,
) -> None:
    """Serve as another server than the first."""
    server = FollowingServer(task.index, store_of(config), cluster.num_ps, terms_of(config))
    listener = Listener(server, bound, token(), encryption)
    listener.start()
    log.info("waiting: for ps/0")
    try:
        _until_over(config, server, stop)
    finally:
        listener.close()


def _until_over(config: JobConfig, server: FollowingServer, stop: StopRequest) -> None:
    """Return when the first server says that the service is over."""
    seen, is_serving = time.monotonic(), False
    while not server.is_over:
        if server.has_first:
            seen = time.monotonic()
        if server.run and not is_serving:
            is_serving = True
            log.info("training: serving clients")
        if stop.error and (stop.waited_secs > PS_GRACE_SECS or not server.has_first):
            raise stop.error
        if time.monotonic() - seen > config.patience_secs:
            raise PeerLostError(f"ps/0 has had no connection for {config.patience_secs:g} s: giving up on the service.")
        time.sleep(_POLL_SECS)
    if server.error:
        raise server.error
