"""Ownership of ``--model_dir``: by one job at a time, and by one chief of that job. Does not import TensorFlow.

``MODEL_DIR/.chief`` names the holder of the directory. The chief writes it before it trains, renews its modification
time, and deletes it when it ends. So a holder that was killed is known to be dead:

- on the same machine, if its process is gone. A machine is one boot of a kernel and one namespace of processes, because
  containers reuse the same names and process ids;
- elsewhere, if the file was not renewed for 20 s, by the clock of the file system.

The file is written under a lock (``owner_lock``), so one of two simultaneous claims wins.
"""

import contextlib
import logging
import os
import threading
import uuid
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from tfps.cluster.spec import Cluster
from tfps.errors import PeerLostError, StorageError, TfpsError
from tfps.runtime.checkpoint import job_record
from tfps.runtime.checkpoint.lock_holder import (
    GONE,
    Holder,
    Seen,
    is_dead,
    is_here,
    is_no_file,
    is_silent,
    look,
    parsed,
    this_process,
)
from tfps.runtime.checkpoint.owner_lock import locked
from tfps.storage import JobDirectory, UnreadableError, make_dir, place_of, write_json
from tfps.text import show

_RENEW_SECS = 2.0
_QUIET_SECS = 6.0  # a chief of the same addresses that is silent for this long was restarted as this one

log = logging.getLogger(__name__)


class HeldError(StorageError):
    """Another job holds the directory."""


def check(model_dir: str | None, cluster: Cluster | None = None, force: bool = False) -> None:
    """Check that no other job holds a directory; may take 20 s, and leaves nothing there.

    Args:
        model_dir: The directory.
        cluster: The cluster of the asking job; a holder at the same addresses is not another job.
        force: Whether to take the directory over in any case.

    Raises:
        HeldError: If another job holds it.
        StorageError: If that cannot be read.
    """
    seen = look(model_dir) if model_dir else None
    if not (seen is None or force or seen.holder.hosts == hosts_of(cluster) or is_dead(model_dir or "", seen)):
        raise _held(model_dir or "", seen.holder)


def check_launch(model_dir: str | None) -> None:
    """Check that a directory holds the run of this task's launcher, where an earlier process of the task recorded it.

    The directory may have been replaced since, or its mount may be gone, so that an older run appears in its place.

    Raises:
        HeldError: If it holds another run.
    """
    is_other = False
    with contextlib.suppress(StorageError, UnreadableError):  # what cannot be read is not known to be another run's
        is_other = bool(model_dir) and job_record.is_of_other_launch(model_dir or "")
    if is_other:
        raise HeldError(job_record.other_run_error(model_dir or ""))


def is_free_for(model_dir: str | None, hosts: Sequence[str]) -> bool:
    """Return whether a directory has no holder, or only a job at the addresses ``hosts``."""
    try:
        seen = look(model_dir) if model_dir else None
    except StorageError:
        return False
    return seen is None or list(seen.holder.hosts) == list(hosts)


def hosts_of(cluster: Cluster | None) -> Sequence[str]:
    """Return the addresses of a job's tasks."""
    return (*cluster.ps, *cluster.workers) if cluster else ()


def _held(model_dir: str, holder: Holder) -> HeldError:
    return HeldError(
        f"--model_dir={show(model_dir, 200)} is held by another job: {holder}. Give each job its own directory, "
        "or end that job first; --force takes the directory over and ends that job."
    )


@dataclass
class Ownership:
    """One chief's hold on a directory.

    Attributes:
        model_dir: The directory; ``None`` for none, which has no holder.
        cluster: The chief's cluster.
        force: Whether to take the directory over from any holder.
        on_loss: Called after the directory was removed, and then recreated by this chief.
        others: Returns the checkpoints there that this chief has neither saved nor tried to resume from.
        this_chief: The claim that this chief writes.
        error: Why the chief has to end, once another has taken the directory.
    """

    model_dir: str | None
    cluster: Cluster
    force: bool = False
    on_loss: Callable[[], None] = lambda: None
    others: Callable[[], Sequence[str]] = lambda: ()
    this_chief: Holder = field(default_factory=lambda: Holder(id=uuid.uuid4().hex, job=uuid.uuid4().hex))
    error: TfpsError | None = None
    _ended: threading.Event = field(default_factory=threading.Event)
    _wanted: bool = False
    _claimed: bool = False
    _known: bool = False
    _run: str = ""
    _is_loss_logged: bool = False
    _place: tuple[int, int] | None = None  # device and inode, which identify the directory whatever its name
    _summary: tuple[int, int] | None = None  # an earlier run's; this chief writes its own as it ends

    def claim(self, job: str = "", run: str = "") -> None:
        """Take the directory and keep it; from now on, no chief that claimed it before saves there.

        Args:
            job: The ``Holder.job`` that this chief continues; earlier chiefs of that job are dead, or cut off.
            run: The id of that run in ``job.json``.

        Raises:
            HeldError: If another job holds it.
            StorageError: If it cannot be written.
        """
        if not self.model_dir:
            return
        self.this_chief = this_process(
            replace(self.this_chief, job=job or self.this_chief.job, hosts=hosts_of(self.cluster))
        )
        self._known, self._run = bool(job), run
        if self._known:
            self._tend()  # tries again if nothing can be written now
            self.check_run()
        self._take(self.model_dir)
        self._tend()

    def _take(self, model_dir: str) -> None:
        """Take a directory from its holder, if there is one."""
        make_dir(Path(model_dir))
        while not self._claimed:
            seen = look(model_dir)
            if seen and not self._may_take(model_dir, seen):
                raise _held(model_dir, seen.holder)
            with locked(model_dir):
                now = look(model_dir)
                if now is None or (seen and now.holder.id == seen.holder.id):  # else another chief was faster
                    self._write(model_dir)
                    self._claimed = True

    def _write(self, model_dir: str) -> None:
        self._place, self._summary = place_of(model_dir), job_record.summary_id(model_dir)
        self.this_chief = replace(self.this_chief, inode=self._place[1])
        write_json(JobDirectory(model_dir).owner, asdict(self.this_chief))

    def _may_take(self, model_dir: str, seen: Seen) -> bool:
        if self.force or (self._known and self._is_same_job(seen.holder)):
            return True
        if seen.holder.hosts == self.this_chief.hosts and is_here(seen.holder) is None:
            return is_silent(model_dir, seen, _QUIET_SECS) or is_dead(model_dir, seen)
        return is_dead(model_dir, seen)

    def _is_same_job(self, holder: Holder) -> bool:
        return holder.job == self.this_chief.job or holder.hosts == self.this_chief.hosts

    def check(self) -> None:
        """Raise an error if another chief has taken the directory."""
        if self.model_dir and self._wanted:
            self._look_after(self.model_dir)
        if self.error:
            raise self.error

    def _look_after(self, model_dir: str) -> None:
        try:
            if self._claimed:
                self._renew(model_dir)
            else:
                self.check_run()
                self._take(model_dir)
        except HeldError as error:
            self.error = error
        except (OSError, StorageError):
            return  # the next renewal tries again

    def check_run(self) -> None:
        """Check that a directory that could not be claimed until now, as it was not there, does not hold another run.

        Raises:
            HeldError: If it does.
            StorageError: If that cannot be read.
        """
        if not (self.model_dir and self._wanted) or self._claimed:
            return
        try:
            is_other = job_record.is_of_other_launch(self.model_dir) or job_record.is_of_other_run(
                self.model_dir, self._run
            )
        except UnreadableError as error:
            raise StorageError(str(error)) from None
        if is_other:
            raise HeldError(job_record.other_run_error(self.model_dir))

    def _compare(self, holder: Holder) -> None:
        """Set the error if the directory belongs to another chief; an empty file is just being written."""
        if holder.id not in (self.this_chief.id, "") and self.error is None:
            self.error = self._taken(holder)

    def _taken(self, holder: Holder) -> TfpsError:
        event = f"--model_dir={show(self.model_dir or '', 200)} was taken over by {holder}"
        if self._is_same_job(holder):
            return PeerLostError(f"{event}: this chief was presumed lost and restarted there. This process exits.")
        return HeldError(f"{event}: this job saves nothing more there. Give each job its own directory.")

    def _tend(self) -> None:
        if not self._wanted:
            self._wanted = True
            threading.Thread(target=self._keep, daemon=True, name="owner").start()

    def _keep(self) -> None:
        while not self._ended.wait(_RENEW_SECS) and self.error is None:
            self._look_after(self.model_dir or "")

    def _renew(self, model_dir: str) -> None:
        path = JobDirectory(model_dir).owner
        if is_no_file(path):
            return
        try:
            descriptor = os.open(path, os.O_RDWR)
        except OSError as error:
            if error.errno in GONE:
                self._make_again(model_dir)
            return
        with open(descriptor, "rb") as file:
            holder = parsed(file.read())
            self._compare(holder)
            if self.error is None:
                os.utime(file.fileno())
        if holder.id == self.this_chief.id and holder.inode != place_of(model_dir)[1]:
            self._move(model_dir)

    def _move(self, model_dir: str) -> None:
        """Write the new inode after a copy has replaced the directory, because other chiefs compare the inode."""
        with locked(model_dir):
            seen = look(model_dir)
            if seen and seen.holder.id == self.this_chief.id:
                self._write(model_dir)

    def _make_again(self, model_dir: str) -> None:
        """Recreate the directory if it is gone, unless another chief has recreated it.

        Raises:
            HeldError: If another directory took its place, with checkpoints of another run.
        """
        if self._ended.is_set():  # it is gone because this chief has released it
            return
        is_same = self._place == place_of(model_dir)
        if is_same and job_record.summary_id(model_dir) not in (None, self._summary):
            self.error = PeerLostError(job_record.ended_error(model_dir))  # another chief has ended the run and left
            return
        if others := () if is_same else self.others():
            raise HeldError(job_record.other_directory_error(model_dir, others[-1]))
        if not self._is_loss_logged:
            self._is_loss_logged = True
            log.info("--model_dir=%s, or its content, is gone. This job recreates it and saves immediately.", model_dir)
        make_dir(Path(model_dir))
        with locked(model_dir):
            if look(model_dir) or self._ended.is_set():
                return
            self._write(model_dir)
        self._is_loss_logged = False
        self.on_loss()

    def release(self) -> None:
        """Give the directory up for other jobs."""
        self._ended.set()
        with contextlib.suppress(OSError, StorageError):
            if self.model_dir and (seen := look(self.model_dir)) and seen.holder.id == self.this_chief.id:
                with locked(self.model_dir):
                    if (seen := look(self.model_dir)) and seen.holder.id == self.this_chief.id:
                        os.unlink(JobDirectory(self.model_dir).owner)
