"""The command line. Prints for people, as the verbs do, and exits. Does not import TensorFlow until a verb needs it."""

import errno
import io
import os
import shutil
import signal
import sys
import textwrap
from collections.abc import Sequence

import tfps
from tfps.cli.registry import COMMANDS
from tfps.cli.run import ROLE
from tfps.cli.validation import CHOICES, print_error
from tfps.config import job_config
from tfps.errors import ConfigError, StoppedError, StorageError, TfpsError, error_for_limits
from tfps.models import loader

_NOT_WRITTEN = (errno.EPIPE, errno.ENOSPC, errno.EFBIG, errno.EIO)  # a file's own errors are told where they are met


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    _open_streams()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a terminal, file or pipe that takes ASCII alone
            stream.reconfigure(errors="backslashreplace")
    _take_signals()
    return _written(_act(list(sys.argv[1:] if argv is None else argv)))


def _open_streams() -> None:
    """Let standard streams that are closed lead nowhere: a file that is opened would be taken for one of them."""
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        if getattr(sys, name) is None:
            nowhere = os.open(os.devnull, os.O_RDWR)
            os.dup2(nowhere, number)
            if nowhere != number:
                os.close(nowhere)
            setattr(sys, name, open(number, mode, closefd=False))  # noqa: SIM115


def _take_signals() -> None:
    """Take the signals that whoever started this may have blocked: else it could not be stopped, nor see tasks end."""
    if signal.getsignal(signal.SIGCHLD) == signal.SIG_IGN:  # then no exit code of a program is known
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGCHLD, signal.SIGINT, signal.SIGTERM, signal.SIGHUP])


def _act(argv: list[str]) -> int:
    args = _as_flag(argv)
    verb, rest = (args[0], args[1:]) if args and not args[0].startswith("-") else ("run", args)
    try:
        if "--version" in args or args == ["version"]:
            print(f"tfps {tfps.__version__}")
            return 0
        if verb not in COMMANDS:
            meant = job_config.did_you_mean(verb, COMMANDS)
            raise ConfigError(f"{job_config.show(verb)} is not a command of tfps.{meant} See tfps --help.")
        if {"-h", "--help", "-help", "--helpfull"} & set(rest) or (not args and not _in_a_cluster()):
            print(_usage() if not args or args[0].startswith("-") else _help(verb))
            return 0
        return COMMANDS[verb].act(rest)
    except (TfpsError, RuntimeError) as error:
        return print_error(_of_user(error), sys.stderr)
    except KeyboardInterrupt:
        return StoppedError.exit_code
    except OSError as error:
        if error.errno not in _NOT_WRITTEN or error.filename:
            raise
        return _not_written(error)


def _of_user(error: TfpsError | RuntimeError) -> TfpsError:
    """Return an error for the user; raises one that is none."""
    found = error if isinstance(error, TfpsError) else error_for_limits(error)
    if found is None:
        raise error
    return found


def _written(code: int) -> int:
    """Write what is still in the buffer of standard output; returns the exit code, that of an error if it fails."""
    try:
        if sys.stdout:
            sys.stdout.flush()
    except OSError as error:
        return code or _not_written(error)
    return code


def _not_written(error: OSError) -> int:
    """Say that standard output takes no more, unless nobody reads it any more: tfps ... | head."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    if isinstance(error, BrokenPipeError):
        return StoppedError.exit_code
    return print_error(StorageError(f"standard output cannot be written: {error.strerror}."), sys.stderr)


def _as_flag(args: list[str]) -> list[str]:
    """Return ``help [COMMAND]`` as ``[COMMAND] --help``."""
    return [*args[1:], "--help"] if args[:1] == ["help"] else args


def _in_a_cluster() -> bool:
    return bool({"TF_CONFIG", "SLURM_STEP_NUM_TASKS"} & set(os.environ))


def _usage() -> str:
    verbs = "\n".join(f"  {name:<8} {verb.summary}" for name, verb in COMMANDS.items())
    return (
        "TensorFlow 1.x-style parameter-server training, on today's TensorFlow.\n\n"
        f"usage: tfps COMMAND [--flag=value ...]\n\n{verbs}\n\n"
        f"Try it:\n  {COMMANDS['launch'].example}\n\n"
        f'Without a command, tfps runs "run"; the classic command line works unchanged:\n  python -m tfps {ROLE}\n\n'
        'Run "tfps COMMAND --help" for its flags.'
    )


def _help(verb: str) -> str:
    told = COMMANDS[verb]
    choices = {**CHOICES, "model": tuple(loader.BUILTIN)}
    width = max(60, min(100, shutil.get_terminal_size((100, 24)).columns))
    flags = job_config.describe(told.flags, choices, width)
    details = textwrap.fill(told.details, width)
    return f"tfps {verb}: {told.summary}\n\n{details}\n\n  {told.example}\n{flags}"
