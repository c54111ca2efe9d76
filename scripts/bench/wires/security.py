"""Who may connect, and whether it is encrypted: the same for all candidates."""

import ssl
import subprocess
from pathlib import Path
from typing import NamedTuple


class Security(NamedTuple):
    """A token, and a certificate in a directory; ``is_encrypted`` says whether it is used."""

    token: str
    directory: Path
    is_encrypted: bool

    @property
    def cert(self) -> Path:
        """The certificate, which is its own authority."""
        return self.directory / "cert.pem"

    @property
    def key(self) -> Path:
        """Its private key."""
        return self.directory / "key.pem"

    def server_context(self) -> ssl.SSLContext | None:
        """Return how a server of Python's ``ssl`` encrypts."""
        if not self.is_encrypted:
            return None
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(self.cert, self.key)
        return context

    def client_context(self) -> ssl.SSLContext | None:
        """Return how a client of Python's ``ssl`` encrypts."""
        return ssl.create_default_context(cafile=str(self.cert)) if self.is_encrypted else None


def make(directory: Path) -> Security:
    """Return a new token, and make a certificate for 127.0.0.1."""
    made = Security("a-token-of-32-characters-a-token", directory, False)
    new = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=127.0.0.1"]
    files = ["-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(made.key), "-out", str(made.cert)]
    subprocess.run([*new, *files], check=True, capture_output=True)
    return made
