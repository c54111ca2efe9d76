"""The service of tfps itself: ``tfps run --serve`` with its optimizer and numbered pushes, and its client."""

import os
from pathlib import Path

import numpy as np

import tfps
from wires.security import Security
from wires.store import Array

_PYTHON = Path(__file__).parents[3] / ".venv/bin/python"


def serve(port: int, security: Security) -> None:
    """Serve for ever; this process becomes the server."""
    flags = ["--optimizer=sgd", "--learning_rate=1", f"--model_dir={security.directory}/{port}"]
    if security.is_encrypted:
        flags += [f"--tls_cert={security.cert}", f"--tls_key={security.key}"]
    command = [str(_PYTHON), "-m", "tfps", "run", "--serve", f"--ps_hosts=127.0.0.1:{port}", "--task_index=0", *flags]
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    os.execve(command[0], command, {**os.environ, "TFPS_TOKEN": security.token})  # noqa: S606


class Client:
    """One client."""

    def __init__(self, port: int, security: Security) -> None:
        tls = security.client_context()
        self._ps = tfps.connect(f"127.0.0.1:{port}", token=security.token, tls=tls)
        self._is_new = True

    def push_pull(self, name: str, array: Array) -> Array:
        """Send an array as a gradient, and return the parameter: the sum, but for the sign."""
        if self._is_new:
            self._ps.init({name: np.zeros_like(array)})
            self._is_new = False
        return self._ps.push_pull({name: array})[name]
