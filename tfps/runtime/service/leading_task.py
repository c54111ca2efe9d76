"""The process of the first server: it begins, saves, watches the other servers, and ends the service."""

import contextlib
import logging
import socket
import time
from dataclasses import replace
from typing import Any

import tfps
from tfps.client.connection import Connection, Identity
from tfps.cluster.spec import Cluster, Task
from tfps.config.converters import INT64_MAX
from tfps.config.job_config import JobConfig
from tfps.config.launch_protocol import RECORDED, give_sign
from tfps.errors import NotReadyError, RetryableError, ServiceEndedError, StoppedError, StorageError, TfpsError
from tfps.progress import format_progress
from tfps.runtime.checkpoint.background import BackgroundThread
from tfps.runtime.checkpoint.directory import step_in
from tfps.runtime.checkpoint.manager import CheckpointManager
from tfps.runtime.checkpoint.ownership import Ownership, check_launch, hosts_of
from tfps.runtime.process.shutdown import StopRequest
from tfps.runtime.results import run_record
from tfps.runtime.service.checkpoints import ServiceSaver
from tfps.runtime.service.first_server import FirstServer
from tfps.runtime.service.listener import Listener
from tfps.runtime.service.pushes import Rules
from tfps.runtime.service.service_task import Encryption, store_of, terms_of, token
from tfps.runtime.service.session import FIRST_SERVER
from tfps.storage import JobDirectory, remove
from tfps.summary import DONE, FAILED, STOPPED, JobSummary
from tfps.summary_entries import ChiefReport, TaskSummary
from tfps.text import utc

_POLL_SECS, _WATCH_EVERY_SECS, _REPORT_EVERY_SECS = 0.05, 0.5, 1.0
_NO_SESSION: Any = None  # the values of a service are in no session
_LINGER_SECS = 10.0  # at the end, for clients that still read the parameters

log = logging.getLogger(__name__)


class LeadingTask:
    """The first server's process.

    Args:
        config: The job.
        cluster: Its servers.
        stop: The request to end early.
        bound: The socket, which listens.
        encryption: How to encrypt.
    """

    def __init__(
        self, config: JobConfig, cluster: Cluster, stop: StopRequest, bound: socket.socket, encryption: Encryption
    ) -> None:
        self._config, self._cluster, self._stop = config, cluster, stop
        self._encryption = encryption
        others = [cluster.address(Task("ps", index)) for index in range(1, cluster.num_ps)]
        self._others, self._watches = ([self._connection(address) for address in others] for _ in range(2))
        self._server = FirstServer(store_of(config), rules_of(config), self._others, terms_of(config))
        self._listener = Listener(self._server, bound, token(), encryption.own)
        self._saver, self._background = ServiceSaver(self._server), BackgroundThread()
        self._owner = Ownership(config.model_dir, cluster, config.force, self._save_anew, lambda: self._saves.others)
        secs, fix = config.save_checkpoint_secs, "try a smaller learning rate"
        self._saves = CheckpointManager(config.model_dir, secs, owner=self._owner, remedy=fix, saver=self._saver)
        self._began, self._began_at = time.monotonic(), time.time()
        self._has_saved_first, self._next_watch = False, 0.0
        self._resumed_from: str | None = None
        self._reported, self._reported_at = 0, time.monotonic()

    def _connection(self, address: str) -> Connection:
        own = Identity(FIRST_SERVER, 0, token(), tfps.__version__, checks_run=False)
        patience = self._config.patience_secs
        return Connection(address, own, patience, patience, self._encryption.to_others)

    def run(self) -> None:
        """Serve until the last step.

        Raises:
            TfpsError: See ``service_task.serve``.
        """
        self._owner.claim()
        self._owner.check()
        check_launch(self._config.model_dir)
        self._listener.start()
        try:
            self._begin()
            while not self._is_saved_at_end():
                self._begin()
            self._finish()
        except TfpsError as error:
            self._fail(error)
            if not isinstance(error, RetryableError):
                self._server.dismiss_others(error)
            raise
        finally:
            self._listener.close()
            for connection in (*self._others, *self._watches):
                connection.close()
            self._owner.release()

    def _begin(self) -> None:
        """Let all servers begin with the newest checkpoint, which may be about to be published."""
        with contextlib.suppress(NotReadyError):
            self._background.wait()
        self._saver.found = None
        found = self._saves.restore_latest(_NO_SESSION)
        if not found and self._server.has_parameters:
            log.warning("a server was lost, and there is no checkpoint: clients have to give first values again.")
        self._server.restart(self._saver.found)
        step = self._server.now.step
        if found and not self._has_saved_first and (changed := run_record.changes(self._config, self._cluster)):
            log.info("resuming with %s", ", ".join(changed))
        log.info("resumed from %s", found) if found else log.info("no checkpoint: clients give the first values")
        if not self._has_saved_first:
            self._resumed_from, self._reported = found, step
            self._has_saved_first = found is not None
            self._write_job()
        log.info("training: serving on %s", ",".join(self._cluster.ps))

    def _write_job(self) -> None:
        if self._config.model_dir:
            remove(JobDirectory(self._config.model_dir).summary)
            run_record.write_job(self._config, self._cluster, self._server.run)
            give_sign(RECORDED)

    def _save_anew(self) -> None:
        """Save again after the directory was removed and made again."""
        self._saves.make_due()

    def _serve(self) -> None:
        """Return at the last step."""
        while self._server.now.step < self._config.max_steps:
            if self._stop.error:
                raise self._stop.error
            if time.monotonic() > self._next_watch:
                self._watch()
                self._next_watch = time.monotonic() + _WATCH_EVERY_SECS
            self._save_if_due()
            self._report()
            time.sleep(_POLL_SECS)

    def _is_saved_at_end(self) -> bool:
        """Serve until the last step, and save; return whether that was possible, and no server was lost."""
        self._serve()
        self._report(is_last=True)
        try:
            self._save()
        except NotReadyError:
            return False
        return True

    def _watch(self) -> None:
        self._owner.check()
        if not self._server.is_whole(self._watches):
            log.info("a server was lost: all of them begin again from the last checkpoint")
            self._begin()

    def _save_if_due(self) -> None:
        """Save every ``save_checkpoint_secs``, and when clients have given the first values."""
        if not (self._background.is_idle() and self._server.has_parameters):
            return
        if self._saves.is_due or not self._has_saved_first:
            self._has_saved_first = True
            self._background.start(self._try_save)

    def _try_save(self) -> None:
        try:
            self._saves.try_save(_NO_SESSION, self._server.now.step)
        except NotReadyError:
            self._saves.make_due()

    def _report(self, is_last: bool = False) -> None:
        """Log a progress line after every ``steps_to_validate`` updates, at most one a second."""
        step, secs = self._server.now.step, time.monotonic() - self._reported_at
        is_due = step - self._reported >= self._config.steps_to_validate and secs > _REPORT_EVERY_SECS
        if step > self._reported and (is_due or is_last):
            rate = (step - self._reported) / secs
            log.info(format_progress(step, {"updates/s": rate, "clients": self._server.num_clients}))
            self._reported, self._reported_at = step, time.monotonic()

    def _save(self) -> None:
        """Save now, if there is anything to save.

        Raises:
            TfpsError: If that fails.
        """
        self._background.wait()
        if self._server.has_parameters:
            self._saves.save(_NO_SESSION, self._server.now.step)

    def _finish(self) -> None:
        """Let clients read the last parameters."""
        self._server.end(ServiceEndedError(f"the service has come to its last step, {self._config.max_steps}."))
        self._write_summary(None)
        deadline = time.monotonic() + _LINGER_SECS
        while self._server.num_clients and time.monotonic() < deadline and not self._stop.error:
            time.sleep(_POLL_SECS)
        self._server.dismiss_others()

    def _fail(self, error: TfpsError) -> None:
        """Save what can be saved, and say why the service ends. Clients wait for one that may be started again."""
        may_return = isinstance(error, RetryableError)
        self._server.end(
            NotReadyError(f"the service has been interrupted: {error}")
            if may_return
            else ServiceEndedError(f"the service ends: {error}")
        )
        if isinstance(error, StoppedError):
            try:
                self._save()
            except TfpsError as problem:
                log.info("nothing more is saved: %s", problem)
        try:
            self._write_summary(error)
        except StorageError as problem:
            log.info("%s", problem)

    def _write_summary(self, error: TfpsError | None) -> None:
        if self._config.model_dir:
            summary = self._summary(error)
            summary.write(JobDirectory(self._config.model_dir).summary)

    def _summary(self, error: TfpsError | None) -> JobSummary:
        status = DONE if error is None else STOPPED if isinstance(error, StoppedError) else FAILED
        dropped = self._server.dropped()
        return JobSummary(
            status=status,
            exit_code=error.exit_code if error else 0,
            began=utc(self._began_at),
            ended=utc(time.time()),
            model_dir=self._config.model_dir,
            model=self._config.model,
            mode=self._config.mode,
            global_step=self._server.now.step,
            max_steps=None if self._config.max_steps == INT64_MAX else self._config.max_steps,
            checkpoint=self._saves.newest,
            tasks={f"worker/{index}": replace(TaskSummary(), gradients_dropped=n) for index, n in dropped.items() if n},
            error=str(error) if error else None,
            chief=ChiefReport(
                versions=run_record.versions(),
                hosts=hosts_of(self._cluster),
                is_blocking=self._config.mode == "sync",
                resumed_from_step=step_in(self._resumed_from) if self._resumed_from else 0,
                resumed_from=self._resumed_from,
                seconds=round(time.monotonic() - self._began, 3),
                gradients_dropped=sum(dropped.values()) or None,
            ),
        )


def rules_of(config: JobConfig) -> Rules:
    """Return when updates are made, as the flags ask."""
    return Rules(
        mode=config.mode,
        num_workers=config.num_workers or 2,
        backup_workers=config.backup_workers or 0,
        staleness=3 if config.staleness is None else config.staleness,
        worker_timeout_secs=config.worker_timeout_secs,
        stall_timeout_secs=config.stall_timeout_secs,
        max_steps=config.max_steps,
    )
