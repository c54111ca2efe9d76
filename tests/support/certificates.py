"""Certificates for tests of TLS, made by the program ``openssl``."""

import subprocess
from pathlib import Path

from tfps.client import tls
from tfps.runtime.service.service_task import Encryption


def _openssl(*args: object) -> None:
    subprocess.run(["openssl", *map(str, args)], check=True, capture_output=True, timeout=60)


class Authority:
    """A certificate authority with its files.

    Args:
        directory: Where the files are.
        name: Its name.
    """

    def __init__(self, directory: Path, name: str = "ca") -> None:
        self._directory, self._key = directory, directory / f"{name}.key"
        self.cert = directory / f"{name}.pem"
        new = "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"
        _openssl(*new, "-keyout", self._key, "-out", self.cert, "-days", 2, "-subj", f"/CN=tfps test {name}")

    def issue(self, name: str, hosts: str = "IP:127.0.0.1", days: int = 2) -> tuple[Path, Path]:
        """Return the files of a new certificate for some hosts and of its key; with 0 days, it has expired."""
        cert, key, request = (self._directory / f"{name}.{kind}" for kind in ("pem", "key", "csr"))
        extension = self._directory / f"{name}.ext"
        extension.write_text(f"subjectAltName={hosts}\n")
        new = "req", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"
        _openssl(*new, "-keyout", key, "-out", request, "-subj", f"/CN={name}")
        signed = "x509", "-req", "-in", request, "-CA", self.cert, "-CAkey", self._key, "-CAcreateserial"
        _openssl(*signed, "-days", days, "-extfile", extension, "-out", cert)
        return cert, key

    def encryption(self, cert: Path, key: Path) -> Encryption:
        """Return how servers encrypt that have a certificate, and accept those of this authority."""
        own = tls.server_context(str(cert), str(key))
        return Encryption(own, tls.client_context("--tls_ca", str(self.cert)))
