"""The command line: runs a command, prints for users, and exits. Imports TensorFlow only if a command needs it."""

import errno
import io
import os
import signal
import sys
from collections.abc import Sequence

import tfps
from tfps.cli.help import HELP_FLAGS, command_help, show_help, usage
from tfps.cli.registry import COMMANDS
from tfps.cli.validation import print_error
from tfps.cluster.resolver import RESOLVERS
from tfps.errors import ConfigError, StoppedError, StorageError, TfpsError, error_for_limits
from tfps.text import did_you_mean, show

__all__ = ["COMMANDS", "main"]

_NOT_WRITTEN = (errno.EPIPE, errno.ENOSPC, errno.EFBIG, errno.EIO)  # errors of named files are reported elsewhere


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    _open_streams()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a terminal, file or pipe that takes only ASCII
            stream.reconfigure(errors="backslashreplace")
    _take_signals()
    return _written(_act(list(sys.argv[1:] if argv is None else argv)))


def _open_streams() -> None:
    """Redirect closed standard streams to /dev/null: else the next file opened would take the place of one."""
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        if getattr(sys, name) is None:
            nowhere = os.open(os.devnull, os.O_RDWR)
            os.dup2(nowhere, number)
            if nowhere != number:
                os.close(nowhere)
            setattr(sys, name, open(number, mode, closefd=False))  # noqa: SIM115


def _take_signals() -> None:
    """Unblock signals that the parent may have blocked: else tfps could not be stopped, nor see tasks end."""
    if signal.getsignal(signal.SIGCHLD) == signal.SIG_IGN:  # with SIG_IGN, exit codes of child processes are lost
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGCHLD, signal.SIGINT, signal.SIGTERM, signal.SIGHUP])


def _act(args: Sequence[str]) -> int:
    try:
        return _dispatch(args)
    except (TfpsError, RuntimeError) as error:
        return print_error(_of_user(error), sys.stderr)
    except KeyboardInterrupt:
        return StoppedError.exit_code
    except OSError as error:
        if error.errno not in _NOT_WRITTEN or error.filename:
            raise
        return _not_written(error)


def _dispatch(args: Sequence[str]) -> int:
    """Run the command that the arguments name."""
    name, rest = (args[0], args[1:]) if args and not args[0].startswith("-") else ("run", args)
    if "--version" in args or list(args) == ["version"]:
        print(f"tfps {tfps.__version__}")
        return 0
    if name == "help":
        return show_help(rest)
    if name not in COMMANDS:
        meant = did_you_mean(name, COMMANDS)
        raise ConfigError(f"{show(name)} is not a command of tfps.{meant} See tfps --help.")
    if HELP_FLAGS & set(rest) or (not args and not _in_a_cluster()):
        print(usage() if not args or args[0].startswith("-") else command_help(name))
        return 0
    return COMMANDS[name].act(rest)


def _of_user(error: TfpsError | RuntimeError) -> TfpsError:
    """Return the error to show to the user; raises an error again that is a bug."""
    found = error if isinstance(error, TfpsError) else error_for_limits(error)
    if found is None:
        raise error
    return found


def _written(code: int) -> int:
    """Flush standard output; returns the exit code, or if that is 0 and the flush fails, the error's code."""
    try:
        if sys.stdout:
            sys.stdout.flush()
    except OSError as error:
        return code or _not_written(error)
    return code


def _not_written(error: OSError) -> int:
    """Report that standard output cannot be written, unless its reader is gone, as in ``tfps ... | head``."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # so that the interpreter's own flush at exit succeeds
    if isinstance(error, BrokenPipeError):
        return StoppedError.exit_code
    return print_error(StorageError(f"standard output cannot be written: {error.strerror}."), sys.stderr)


def _in_a_cluster() -> bool:
    return any(resolver.variable in os.environ for resolver in RESOLVERS)
