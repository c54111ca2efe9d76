"""The holder of a ``--model_dir``, and whether its process lives; see ``ownership``. Does not import TensorFlow."""

import errno
import json
import logging
import os
import socket
import stat
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tfps.errors import StorageError
from tfps.runtime.checkpoint import file_clock
from tfps.runtime.process.process_identity import ancestors, lives, machine, started
from tfps.storage import JobDirectory, place_of
from tfps.timeouts import ORPHANED_SECS

GONE = (errno.ENOENT, errno.ENOTDIR, errno.ESTALE)
_DEAD_AFTER_SECS = 20.0
_LOOK_AGAIN_SECS = 3.0  # longer than a living holder takes to renew its claim
_POLL_SECS = 0.1
_TYPES: Mapping[str, type | tuple[type, ...]] = {
    **dict.fromkeys(("id", "job", "host", "machine", "started"), str),
    **dict.fromkeys(("hosts", "ancestors"), list),
    **dict.fromkeys(("pid", "inode"), int),
    "since": (int, float),
}
_LIMITS = {"pid": 1 << 31, "inode": 1 << 64, "since": 1 << 40}  # the system's numbers are less

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Holder:
    """The holder of a directory.

    Attributes:
        id: The id of this claim.
        job: The id of the run; chiefs of one run that take over from each other share it.
        host: The name of its host.
        pid: Its process id.
        machine: Where the process id is valid; empty if that is not known.
        started: When its process started, in the kernel's own count.
        hosts: The addresses of the job's tasks.
        since: When it took the directory, in seconds since 1970.
        inode: The inode of the directory; a copy of the directory has another, and is not held.
        ancestors: The processes that had started it; see ``process_identity.ancestors``.
    """

    id: str = ""
    job: str = ""
    host: str = ""
    pid: int = 0
    machine: str = ""
    started: str = ""
    hosts: Sequence[str] = ()
    since: float = 0.0
    inode: int = 0
    ancestors: Sequence[int] = ()

    def __str__(self) -> str:
        if not self.host:
            return "a chief of another release of tfps"
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self.since))
        hosts = ", ".join(self.hosts[:4]) + (f" and {len(self.hosts) - 4} more" if len(self.hosts) > 4 else "")
        return f"the chief with process id {self.pid} on host {self.host}, of the job at {hosts}, since {when}"


@dataclass(frozen=True)
class Seen:
    """The holder found in a directory, and when it last renewed its claim, by the file system's clock."""

    holder: Holder
    renewed: float


def look(model_dir: str) -> Seen | None:
    """Return the holder of a directory; ``None`` if there is none.

    Raises:
        StorageError: If that cannot be read.
    """
    path = JobDirectory(model_dir).owner
    if is_no_file(path):
        raise StorageError(f"--model_dir: {path} cannot be read: it is not a regular file. Delete it.")
    try:
        with open(path, "rb") as file:  # open it, because NFS looks for newer contents only then
            return Seen(parsed(file.read()), os.fstat(file.fileno()).st_mtime)
    except OSError as error:
        if error.errno in GONE:
            return None
        raise StorageError(f"--model_dir: {path} cannot be read: {error.strerror}.") from None


def is_no_file(path: Path) -> bool:
    """Return whether something other than a regular file is there: opening or reading a FIFO may block forever."""
    try:
        return not stat.S_ISREG(path.stat().st_mode)
    except OSError:  # opening it reports why
        return False


def parsed(text: bytes) -> Holder:
    """Return the holder in an owner's file; a damaged file, or one of an older release, becomes the holder's id."""
    damaged = Holder(id=text.decode(errors="replace"))
    try:
        content = json.loads(text)
        known = {name: content[name] for name in Holder.__dataclass_fields__}
    except (ValueError, TypeError, LookupError, RecursionError):
        return damaged
    if not _has_right_types(known):
        return damaged
    return Holder(**{**known, "hosts": tuple(known["hosts"]), "ancestors": tuple(known["ancestors"])})


def _has_right_types(known: Mapping[str, Any]) -> bool:
    """Return whether the entries of a holder are of its types, and its numbers are ones that the system can give."""
    return (
        all(isinstance(known[name], kind) for name, kind in _TYPES.items())
        and all(0 <= known[name] < limit for name, limit in _LIMITS.items())
        and all(isinstance(host, str) for host in known["hosts"])
        and all(isinstance(pid, int) for pid in known["ancestors"])
    )


def this_process(holder: Holder) -> Holder:
    """Return a copy of a holder as this process, starting now."""
    pid = os.getpid()
    return replace(
        holder,
        host=socket.gethostname(),
        pid=pid,
        machine=machine(),
        started=started(pid) or "",
        since=time.time(),
        ancestors=ancestors(pid),
    )


def is_dead(model_dir: str, seen: Seen) -> bool:
    """Return whether a holder is dead; wait until that is known."""
    if (known := is_here(seen.holder)) is not None:
        return not (known and _is_of(model_dir, seen.holder) and not _orphan_ends(seen.holder))
    silent_secs = max(file_clock.now(model_dir) - seen.renewed, 0.0)
    # One look is not enough: its machine may have been suspended until now, or a clock been set forward.
    wait_secs = max(_DEAD_AFTER_SECS - silent_secs, _LOOK_AGAIN_SECS)
    log.warning("waiting up to %.0f s to check whether %s still holds %s", wait_secs, seen.holder, model_dir)
    return is_silent(model_dir, seen, wait_secs)


def is_known_to_live(model_dir: str, seen: Seen) -> bool:
    """Return whether a holder lives and holds this directory; wait for one on another machine to renew its claim."""
    if (known := is_here(seen.holder)) is not None:
        return known and _is_of(model_dir, seen.holder)
    return not is_silent(model_dir, seen, _LOOK_AGAIN_SECS)


def _is_of(model_dir: str, holder: Holder) -> bool:
    """Return whether a holder holds this directory, and not one from which it was copied."""
    return holder.inode in (0, place_of(model_dir)[1])


def _orphan_ends(holder: Holder) -> bool:
    """Wait for a holder on this machine to end, as it does when its launcher was killed; return whether it has."""
    if holder.ancestors in ((), ancestors(holder.pid)):
        return False
    log.warning("waiting up to %.0f s for %s to end, because its launcher ended", ORPHANED_SECS, holder)
    deadline = time.monotonic() + ORPHANED_SECS
    while is_here(holder) and time.monotonic() < deadline:
        time.sleep(_POLL_SECS)
    return not is_here(holder)


def is_here(holder: Holder) -> bool | None:
    """Return whether a holder on this machine lives; ``None`` if it is on another machine, or that is not known."""
    return lives(holder.pid, holder.started) if holder.machine and holder.machine == machine() else None


def is_silent(model_dir: str, seen: Seen, secs: float) -> bool:
    """Return whether a directory's claim is not renewed for ``secs``, or its holder leaves it in that time."""
    deadline = time.monotonic() + secs
    while (now := look(model_dir)) == seen and time.monotonic() < deadline:
        time.sleep(_POLL_SECS)
    return now in (None, seen)
