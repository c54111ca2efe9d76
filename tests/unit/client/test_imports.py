"""What a client imports: short-lived programs pay for it each time. NumPy is what takes the most."""

import subprocess
import sys

from support.processes import environment

# Slow, or not there where only NumPy and tfps are installed.
_UNWANTED = {"absl", "concurrent", "difflib", "logging", "random", "rich", "ssl", "tensorflow", "uuid", "yaml"}


def imported(program: str) -> set[str]:
    """Return the modules that a program has imported beside those of NumPy alone."""
    script = f"import sys, numpy; before = set(sys.modules); {program}; print(*sorted(set(sys.modules) - before))"
    done = subprocess.run(
        [sys.executable, "-c", script], env=environment(), capture_output=True, text=True, check=True, timeout=60
    )
    return set(done.stdout.split())


def test_a_client_imports_little() -> None:
    """Nothing that is slow; of tfps, the client and what it needs."""
    found = imported("import tfps; tfps.connect")
    packages = {name.partition(".")[0] for name in found}
    assert not packages & _UNWANTED
    assert "numpy" not in packages  # such as numpy.typing
    own = {".".join(name.split(".")[:2]) for name in found if name.startswith("tfps.")}
    assert own == {"tfps.client", "tfps.cluster", "tfps.errors", "tfps.text", "tfps.timeouts"}


def test_the_check_sees_what_is_imported() -> None:
    """A module that is imported on purpose is among them."""
    assert {"uuid", "numpy.typing"} <= imported("import tfps, uuid, numpy.typing; tfps.connect")
