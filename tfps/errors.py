"""The exceptions of tfps, as one tree; each class has the exit code that a task ends with.

::

    TfpsError                    1
    ├── ConfigError              2   a flag, TF_CONFIG or the environment is wrong; lists all problems together
    │   └── ModelError           2   the user's model file is wrong; shows the user's own line
    ├── DataError               65   training data missing or damaged
    ├── CheckpointError         65   no usable checkpoint
    ├── DivergedError           66   the loss became NaN or Inf
    ├── WorkerFailedError       67   a parameter server ends because a worker has failed for good
    ├── PlatformError           69   a platform does not answer, or refuses; quotes its messages
    │   ├── ClientMissingError  69   the platform's own program or package is not installed
    │   └── JobNotFoundError    69   the platform knows no such job, or tfps did not submit it
    ├── ServiceError            76   a parameter service refuses a request; nothing has changed there
    │   ├── ProtocolError       76   what arrives is no message of tfps, or of another release
    │   ├── NotReadyError       76   the service begins again from its last checkpoint; clients ask again
    │   └── ServiceEndedError   76   the service has come to its last step
    ├── StorageError            74   model_dir cannot be written
    └── RetryableError         128+  the same command may succeed if it is run again
        ├── KilledError        137   a signal killed the process that imports TensorFlow
        ├── StoppedError       143   stopped by a signal (SIGTERM, SIGINT, SIGHUP); state is saved
        ├── PeerLostError      170   another task of the cluster is gone
        ├── ClusterFormError   171   the cluster did not form in time
        └── StallError         172   a worker no longer takes steps, or evaluates no more batches

Kubeflow's ``ExitCode`` restart policy retries 128 and up and gives up below. Imports nothing from tfps.
"""

import errno
import re
import signal
from collections.abc import Sequence

# Errors that come from the limits of this process, whatever it asked for.
OWN_LIMITS = (errno.EAGAIN, errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


def without_colors(text: str) -> str:
    """Return a text without terminal codes for colors or bold, which Keras puts into its errors."""
    return re.sub(r"\x1b\[[0-9;]*[A-Za-z]", "", text)


class TfpsError(Exception):
    """Base of every error that tfps raises on purpose; its text is for the user, without a traceback."""

    exit_code = 1


class ConfigError(TfpsError):
    """The job cannot start as requested. Holds every problem found, one plain line each."""

    exit_code = 2

    def __init__(self, problems: str | Sequence[str]) -> None:
        self.problems = [problems] if isinstance(problems, str) else list(problems)
        super().__init__("\n".join(self.problems))


class ModelError(ConfigError):
    """The user's model cannot be loaded, built or run; the text names the user's own line."""


class DataError(TfpsError):
    """Training data is missing, damaged, or not what the model reads."""

    exit_code = 65


class CheckpointError(TfpsError):
    """There is no checkpoint, or it does not fit the model."""

    exit_code = 65


class DivergedError(TfpsError):
    """The loss is NaN or Inf."""

    exit_code = 66


class PlatformError(TfpsError):
    """A platform that jobs are submitted to does not answer, or refuses. Holds its messages, one plain line each.

    ``sysexits.h`` calls the exit code EX_UNAVAILABLE. The command line may be correct, and may work later.
    """

    exit_code = 69

    def __init__(self, problems: str | Sequence[str]) -> None:
        self.problems = [problems] if isinstance(problems, str) else list(problems)
        super().__init__("\n".join(self.problems))


class ClientMissingError(PlatformError):
    """The program or package that tfps uses to call a platform is not installed on this machine."""


class JobNotFoundError(PlatformError):
    """The platform knows no job with this handle, or tfps did not submit that job."""


class ServiceError(TfpsError):
    """A parameter service refuses a request, and has changed nothing. ``sysexits.h`` calls the code EX_PROTOCOL."""

    exit_code = 76


class ProtocolError(ServiceError):
    """What arrives is no message of tfps, or one of another release."""


class NotReadyError(ServiceError):
    """A parameter service begins again from its last checkpoint; nothing has changed, and clients ask again."""


class ServiceEndedError(ServiceError):
    """A parameter service has come to its last step, and takes no further gradients."""


class StorageError(TfpsError):
    """The model directory cannot be written."""

    exit_code = 74


class WorkerFailedError(TfpsError):
    """A worker has failed for good with a code that a parameter server must not repeat.

    From 128 up a parameter server would be restarted. 1 and 69 would hide its own errors, other codes are not of tfps.
    """

    exit_code = 67


_FAILED_WORKER = re.compile(r"(?:error: )?worker/(\d+) has failed with exit code (\d+)\.")


def error_for_failed_worker(index: int, code: int) -> TfpsError:
    """Return the error that ends a parameter server because worker ``index`` has failed for good with ``code``."""
    text = f"worker/{index} has failed with exit code {code}."
    kinds = (ConfigError, DataError, DivergedError, StorageError)
    return next((kind(text) for kind in kinds if kind.exit_code == code), WorkerFailedError(text))


def failed_worker(line: str) -> tuple[int, int] | None:
    """Return index and exit code from a line with an error of ``error_for_failed_worker``; ``None`` for other lines."""
    found = _FAILED_WORKER.fullmatch(line)
    return (int(found[1]), int(found[2])) if found else None


class RetryableError(TfpsError):
    """Something outside this task went wrong; the same command may succeed if it is run again."""

    exit_code = 128


class StoppedError(RetryableError):
    """A signal (SIGTERM, SIGINT or SIGHUP) stopped the task, and the task has saved its state."""

    exit_code = 143


class KilledError(RetryableError):
    """A signal killed the process that imports TensorFlow; for another one than SIGKILL the code is 128 + its number.

    Args:
        killer: The number of the signal.
        name: Its name.
    """

    exit_code = 128 + signal.SIGKILL

    def __init__(self, killer: int, name: str) -> None:
        self.signal, self.exit_code = killer, RetryableError.exit_code + killer
        why = ": is memory short?" if killer == signal.SIGKILL else "."
        super().__init__(f"the process that imports TensorFlow was killed by {name}{why}")


def error_for_limits(error: BaseException) -> ConfigError | None:
    """Return the error to show if a limit on processes caused a Python error; ``None`` for any other error."""
    message = (
        "no more threads or processes can be started: raise the limit on them, see ulimit -u, or that of the container"
    )
    of_thread = isinstance(error, RuntimeError) and str(error) == "can't start new thread"
    of_process = isinstance(error, OSError) and error.errno == errno.EAGAIN and not error.filename
    return ConfigError(f"{message}.") if of_thread or of_process else None


def stopping_signals() -> Sequence[signal.Signals]:
    """Return the signals that stop a process; SIGHUP, from a closed terminal, unless ``nohup`` ignores it."""
    ignored = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    return [signal.SIGTERM, signal.SIGINT, *([] if ignored else [signal.SIGHUP])]


class PeerLostError(RetryableError):
    """Another task of the cluster no longer answers."""

    exit_code = 170


class ClusterFormError(RetryableError):
    """Some tasks never answered within ``--start_timeout_secs``."""

    exit_code = 171


class StallError(RetryableError):
    """A worker has taken no step, or an evaluation has finished no batch, for ``--stall_timeout_secs``."""

    exit_code = 172
