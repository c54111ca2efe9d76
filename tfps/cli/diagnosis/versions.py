"""Check what is installed, without importing it."""

import contextlib
import platform
import socket
from collections.abc import Mapping
from importlib import metadata

import tfps
from tfps.cli.diagnosis.check import OK, WRONG, Check
from tfps.errors import ConfigError

_PACKAGES = ("tensorflow", "tensorflow-cpu", "tensorflow-intel", "tf-nightly", "tf-nightly-cpu")


def check() -> Check:
    """Check that TensorFlow is installed."""
    here = installed()
    found = f"tfps {here['tfps']}, Python {platform.python_version()} on {here['host']}"
    if here["TensorFlow"]:
        return Check(OK, "versions", f"TensorFlow {here['TensorFlow']}, {found}")
    fix = "TensorFlow is not installed: pip install tensorflow (or tensorflow-cpu)."
    return Check(WRONG, "versions", f"{found}. {fix}", ConfigError.exit_code)


def installed() -> Mapping[str, str]:
    """Return this host's name, and the versions of tfps and TensorFlow; an empty one if it is not installed."""
    found = ""
    for package in reversed(_PACKAGES):
        with contextlib.suppress(metadata.PackageNotFoundError):
            found = metadata.version(package)
    return {"host": socket.gethostname(), "tfps": tfps.__version__, "TensorFlow": found}
