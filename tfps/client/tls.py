"""TLS of clients and servers: contexts from files, and the handshake of a client, with errors for people."""

import errno
import os
import socket
import ssl

from tfps.cluster.addresses import split
from tfps.errors import ConfigError, ServiceError
from tfps.text import show


def server_context(cert: str, key: str) -> ssl.SSLContext:
    """Return how a server encrypts.

    Args:
        cert: The file of its certificate, and of those between it and the authority's: PEM.
        key: The file of the private key, without a password: PEM.

    Raises:
        ConfigError: If a file cannot be read, or the key is that of another certificate.
    """
    for name, path in (("tls_cert", cert), ("tls_key", key)):
        _check_file(f"--{name}", path)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(cert)
    except ssl.SSLError:
        raise ConfigError(f"--tls_cert={show(cert)} has no certificate: give a file in PEM format.") from None
    try:
        context.load_cert_chain(cert, key, password=lambda: b"")  # else OpenSSL asks on the terminal
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            raise ConfigError(f"--tls_key={show(key)} is not the key of --tls_cert={show(cert)}.") from None
        raise ConfigError(
            f"--tls_key={show(key)} has no key that can be read: give a file in PEM format, without a password."
        ) from None
    return context


def client_context(place: str, ca: str) -> ssl.SSLContext:
    """Return how a client encrypts, and whose certificates it accepts.

    Args:
        place: Where the file is given, for messages: a flag or a variable.
        ca: The file of the authorities' certificates, PEM; empty for those of the system.

    Raises:
        ConfigError: If the file cannot be read.
    """
    if ca:
        _check_file(place, ca)
    try:
        return ssl.create_default_context(cafile=ca or None)
    except ssl.SSLError:
        raise ConfigError(f"{place}={show(ca)} has no certificate: give a file in PEM format.") from None


def encrypted(raw: socket.socket, context: ssl.SSLContext, address: str) -> ssl.SSLSocket:
    """Return a connection to a server, encrypted.

    Raises:
        ServiceError: If the server's certificate is not accepted, or it speaks no TLS.
        OSError: If the connection fails.
    """
    try:
        return context.wrap_socket(raw, server_hostname=split(address)[0])
    except ssl.SSLCertVerificationError as error:
        why = error.verify_message.rstrip(".")
        raise ServiceError(f"{address}: the certificate of the server is not accepted: {why}.") from None
    except (ssl.SSLEOFError, ssl.SSLZeroReturnError, ssl.SSLSyscallError):
        raise  # the connection has ended, as when the server ends
    except ssl.SSLError as error:
        why = (error.reason or "unknown").lower().replace("_", " ")
        fix = "give the servers --tls_cert and --tls_key, or connect without TLS"
        raise ServiceError(f"{address}: TLS is not possible ({why}): {fix}.") from None


def _check_file(place: str, path: str) -> None:
    """Check that a file can be read, without waiting for one that is a pipe.

    Raises:
        ConfigError: If it cannot.
    """
    shown = f"{place}={show(path)}"
    if os.path.exists(path) and not os.path.isfile(path):
        raise ConfigError(f"{shown} is no file.")
    try:
        with open(path, "rb"):
            return
    except (OSError, ValueError) as error:
        why = os.strerror(getattr(error, "errno", None) or errno.EINVAL)
        raise ConfigError(f"{shown} cannot be read: {why}.") from None
