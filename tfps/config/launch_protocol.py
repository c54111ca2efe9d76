"""What a launcher and its tasks send each other: environment variables, and single bytes on a pipe.

The supervisor of one task is such a launcher, too. A task that was started by hand has none of the variables, and its
signs go nowhere.
"""

import contextlib
import os

FORK_SERVER_PARENT = "TFPS_FORK_SERVER_PARENT"  # of a fork server: the process id of its launcher
LAUNCH = "TFPS_LAUNCH"  # of a task: an id of its launcher's process
STARTED_AGAIN = "TFPS_STARTED_AGAIN"  # of a task: set if it replaces a lost one
HAS_RECORD = "TFPS_HAS_RECORD"  # of a task: the directory (place_of) for which an earlier process gave RECORDED
SIGNS = "TFPS_SIGNS"  # of a task: the file descriptor for its signs
TOKEN = "TFPS_TOKEN"  # noqa: S105  of a server of a service, and of its clients: the variable with their secret

ALIVE = b"."  # Python runs in the task
BUILT = b"B"  # a worker has built its graph
RECORDED = b"R"  # the chief has written the id of its launcher to job.json
SIGNED_OFF = b"D"  # the task has come to its end


def give_sign(sign: bytes) -> None:
    """Send a sign to the task's launcher, if it has one that still runs."""
    if place := os.environ.get(SIGNS):
        with contextlib.suppress(OSError):
            os.write(int(place), sign)
