"""Run a platform's own client, and pass on its output. Users know its configuration, its login and its errors."""

import shutil
import signal
import subprocess
from collections.abc import Iterator, Mapping, Sequence

from tfps.errors import ClientMissingError, PlatformError
from tfps.timeouts import CLIENT_SECS


def require_tool(tool: str, to_get_it: str) -> str:
    """Return the path of a program.

    Raises:
            ClientMissingError: If it is not installed; the message has ``to_get_it``.
    """
    path = shutil.which(tool)
    if path is None:
        raise ClientMissingError(f"{tool} is not installed: {to_get_it}.")
    return path


def run_client(
    argv: Sequence[str],
    given: str = "",
    env: Mapping[str, str] | None = None,
    timeout_secs: float | None = CLIENT_SECS,
    complained: list[str] | None = None,
) -> str:
    """Return the output of a program that gets ``given`` as its standard input.

    Args:
        argv: The program and its arguments.
        given: Its standard input.
        env: Its environment; by default this process's.
        timeout_secs: The longest time that it may take; ``None`` for no limit.
        complained: Gets the lines of its standard error, if the program succeeds.

    Raises:
        PlatformError: If it fails, in its own words, or takes longer than ``timeout_secs``.
    """
    try:
        ended = subprocess.run(
            argv,
            input=given,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout_secs,
            env=env,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise PlatformError(f"{_named(argv)} has not answered for {timeout_secs:g} s: is the platform up?") from None
    if ended.returncode:
        said = ended.stderr.strip() or ended.stdout.strip() or f"exit code {ended.returncode}"
        raise PlatformError([f"{_named(argv)}: {line}" for line in said.splitlines()[-10:] if line.strip()])
    if complained is not None:
        complained += ended.stderr.splitlines()
    return ended.stdout


def lines(argv: Sequence[str], env: Mapping[str, str] | None = None) -> Iterator[str]:
    """Yield the lines of a program's standard output and standard error as they arrive; closing this stops it."""
    with subprocess.Popen(
        argv,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        env=env,
        start_new_session=True,
    ) as process:
        assert process.stdout is not None
        try:
            for line in process.stdout:
                yield line.rstrip("\n")
        finally:
            process.send_signal(signal.SIGTERM)


def _named(argv: Sequence[str]) -> str:
    """Return the name of a command in an error: the program and its first plain arguments."""
    return " ".join([argv[0].rpartition("/")[2], *[word for word in argv[1:3] if not word.startswith("-")]])
