"""Connecting to a parameter service, with what the arguments or the environment of the process say."""

import math
import numbers
import os
from typing import TYPE_CHECKING, Any

from tfps.client.client import Client
from tfps.client.connection import Connection, Identity
from tfps.client.servers import Servers
from tfps.cluster.addresses import parse_hosts
from tfps.errors import ConfigError
from tfps.text import show

if TYPE_CHECKING:
    import ssl

HOSTS, TOKEN, WORKER, TLS_CA = "TFPS_PS_HOSTS", "TFPS_TOKEN", "TFPS_WORKER", "TFPS_TLS_CA"


def connect(
    ps_hosts: str | None = None,
    *,
    worker: int | None = None,
    token: str | None = None,
    start_timeout_secs: float = 60.0,
    retry_secs: float = 60.0,
    tls: "ssl.SSLContext | None" = None,
) -> Client:
    """Connect to a service, and return the client.

    Args:
        ps_hosts: The addresses of the servers, ``host:port`` with commas between; by default, those in
            ``TFPS_PS_HOSTS``.
        worker: The index of this worker, in modes in which workers wait for each other; by default, that in
            ``TFPS_WORKER``, or 0.
        token: The secret of the service; by default, that in ``TFPS_TOKEN``, or none.
        start_timeout_secs: How long to wait for servers that are not there yet.
        retry_secs: How long to try to reach a server again that is lost.
        tls: How to encrypt, and whose certificates to accept; by default, those of the file in ``TFPS_TLS_CA``, or
            without TLS if it is not set.

    Raises:
        ConfigError: If no address is given, or one is wrong, or the file in ``TFPS_TLS_CA`` is.
        ClusterFormError: If a server does not answer in time.
        ServiceError: If a server refuses this client, or its certificate is not accepted.
    """
    _check_secs("start_timeout_secs", start_timeout_secs)
    _check_secs("retry_secs", retry_secs)
    identity = _identity(worker, token)
    addresses, tls = _addresses(ps_hosts), _tls(tls)
    connections = [Connection(address, identity, start_timeout_secs, retry_secs, tls) for address in addresses]
    servers = Servers(connections, retry_secs)
    try:
        servers.check()
    except BaseException:
        servers.close()
        raise
    return Client(servers)


def _addresses(ps_hosts: str | None) -> list[str]:
    given = ps_hosts or os.environ.get(HOSTS, "")
    if not isinstance(given, str):
        raise ConfigError(f"ps_hosts: expected host:port,host:port, given {show(repr(given))}.")
    addresses = [address for address in given.split(",") if address]
    if not addresses:
        raise ConfigError(f"no address of a service: give ps_hosts, or set {HOSTS}, as host:port,host:port.")
    problems: list[str] = []
    parse_hosts("ps_hosts", ",".join(addresses), problems)
    if problems:
        raise ConfigError(problems)
    return addresses


def _tls(given: "ssl.SSLContext | None") -> "ssl.SSLContext | None":
    if given is not None and not hasattr(given, "wrap_socket"):
        raise ConfigError(f"tls={show(repr(given))}: give an ssl.SSLContext, or set {TLS_CA} to a file.")
    if given is not None or not (ca := os.environ.get(TLS_CA)):
        return given
    from tfps.client.tls import client_context  # noqa: PLC0415  slow to import, and only some need it

    return client_context(TLS_CA, ca)


def _identity(worker: int | None, token: str | None) -> Identity:
    from tfps import __version__  # noqa: PLC0415  tfps imports this module

    given = os.environ.get(WORKER) or "0"
    if worker is None and not given.isdecimal():
        raise ConfigError(f"{WORKER}={show(given)} is no index of a worker: give 0, 1, 2, ...")
    index = int(given) if worker is None else worker
    if isinstance(index, bool) or not isinstance(index, numbers.Integral) or index < 0:
        raise ConfigError(f"worker={show(repr(worker))} is no index of a worker: give 0, 1, 2, ...")
    secret = token_in_environment() if token is None else token
    if not isinstance(secret, str):
        raise ConfigError(f"token: expected a str, given {type(secret).__name__}.")
    return Identity(os.urandom(16).hex(), int(index), secret, __version__)


def token_in_environment() -> str:
    """Return the secret of the service, without the line end that files and commands add.

    Raises:
        ConfigError: If it is no text.
    """
    secret = os.environ.get(TOKEN, "").rstrip("\r\n")
    try:
        secret.encode()
    except UnicodeEncodeError:
        raise ConfigError(f"{TOKEN} is no UTF-8 text: give another one.") from None
    return secret


def _check_secs(name: str, secs: Any) -> None:
    if not isinstance(secs, (int, float)) or not 0 < secs < math.inf:
        raise ConfigError(f"{name}={show(repr(secs))}: expected a number of seconds above 0.")
