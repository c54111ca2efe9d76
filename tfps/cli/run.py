"""``tfps run``: run one task."""

import atexit
import contextlib
import dataclasses
import logging
import os
import signal
import sys
import threading
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn, TextIO

from tfps.cli import serving
from tfps.cli.command import JOB, Command, found_from_anywhere, new_model_dir
from tfps.cli.validation import ProblemCollector, check_mode, check_ports, print_error
from tfps.cluster import ports, resolver
from tfps.cluster.spec import Cluster, Task
from tfps.config.job_config import JobConfig
from tfps.config.launch_protocol import ALIVE, BUILT, SIGNED_OFF, SIGNS, STARTED_AGAIN, give_sign
from tfps.errors import PeerLostError, StorageError, TfpsError, error_for_limits
from tfps.models import loader, static_check
from tfps.modes import registry
from tfps.runtime import task
from tfps.runtime.checkpoint import ownership
from tfps.runtime.checkpoint.ownership import HeldError
from tfps.runtime.coordination import failure_notice
from tfps.runtime.process import task_log
from tfps.storage import make_dir
from tfps.text import one_line

ROLE = "--ps_hosts=h0:2222 --worker_hosts=h1:2222,h2:2222 --job_name=worker --task_index=0"

_EXIT_HOOKS_SECS = 2.0


def _run(argv: Sequence[str]) -> int:
    """Run one task."""
    problems = ProblemCollector(COMMAND.name)
    job = problems.read(COMMAND.flags, argv).config
    serving.check_flags(job, problems)
    serving.check_files(job, problems)
    check_ports(job, problems)
    num_workers = None if job.serve else job.num_workers
    num_ps = dataclasses.replace(registry.num_ps_of(job), has_workers=not job.serve)
    given = job.ps_hosts, job.worker_hosts, "ps" if job.serve else job.job_name, job.task_index
    place = problems.of(resolver.resolve, *given, num_ps, num_workers, os.environ)
    job = job.replace(model=serving.NAME) if job.serve else _checked(job, place, problems)
    problems.of(task.require_tensorflow)
    problems.settle()
    assert place is not None
    members, me = place
    found = resolver.find_resolver(job.ps_hosts, job.worker_hosts, os.environ)
    members = found.locate(members, job.port_base, os.environ) if found else members
    port_flag = (found.port_flag if found else "") or f"--{me.job}_hosts"
    if job.max_restarts:
        return _supervise(job.replace(num_ps=members.num_ps), members, me)
    return _be_task(job, members, me, port_flag)


def _checked(job: JobConfig, place: tuple[Cluster, Task] | None, problems: ProblemCollector) -> JobConfig:
    """Return the config of a job that trains a model, checked."""
    num_workers = place[0].num_workers if place else None
    problems.of(static_check.check, job.model)
    check_mode(job, num_workers, problems)
    problems.of(loader.check_data, job.model, job.data_dir, num_workers or 1)
    if place and place[1].job == "evaluator" and not job.model_dir:
        problems.add("--model_dir is missing: the evaluator reads the checkpoints there.")
    return job


def _supervise(job: JobConfig, members: Cluster, me: Task) -> int:
    """Run the task in a child process, and restart it when it is lost."""
    from tfps.launchers.local.supervisor import Supervisor  # noqa: PLC0415  an unsupervised task does not need it

    if _leads(job, me):  # all its processes use the same directory
        job, kept = _with_directory(found_from_anywhere(job))
        if kept:
            print(kept, flush=True)
    supervisor = Supervisor(job, members, me)
    code = supervisor.run()
    if code and me.job == "worker" and not supervisor.has_reported(code):
        failure_notice.send(job, members, me, code)
    return code


def _leads(job: JobConfig, me: Task) -> bool:
    """Return whether a task has the directory: the chief, or the first PS of a service."""
    return me == Task("ps", 0) if job.serve else me.is_chief


def _be_task(given: JobConfig, members: Cluster, me: Task, port_flag: str) -> int:
    if me.job != "evaluator":
        ports.check_port(members.address(me), port_flag)
    job, kept = _with_directory(found_from_anywhere(given)) if _leads(given, me) else (found_from_anywhere(given), "")
    console = _open_log(job, members, me)
    _log_if_any(kept)
    try:
        task.run(job, members, me, bool(kept), on_built=lambda: give_sign(BUILT))
        _log_if_any(kept)
        code = 0
        give_sign(SIGNED_OFF)
    except SystemExit as ended:  # raised by the model or by a library that it uses
        code = ended.code if isinstance(ended.code, int) and ended.code else PeerLostError.exit_code
        with contextlib.suppress(OSError):
            print_error(
                PeerLostError(f"the model ended the process with sys.exit({ended.code}) before it was done."),
                console,
            )
    except TfpsError as error:
        code = error.exit_code
        with contextlib.suppress(OSError):  # the reader may be gone
            print_error(error, console)
    except Exception as error:
        limit = error_for_limits(error)
        code = limit.exit_code if limit else 1
        with contextlib.suppress(OSError):
            if limit:
                print_error(limit, console)
            else:
                traceback.print_exc()
                console.write(f"error: {type(error).__name__}: {one_line(str(error))} (a bug in tfps: see the log)\n")
    _end_within(_EXIT_HOOKS_SECS, code)
    atexit._run_exitfuncs()  # autograph and others remove their temporary files here
    for stream in (sys.stdout, sys.stderr, console):
        with contextlib.suppress(OSError, ValueError, AttributeError):  # a model may have closed or replaced it
            stream.flush()
    _exit(code)


def _open_log(job: JobConfig, members: Cluster, me: Task) -> TextIO:
    """Route the task's output to its log; return the stream for errors that the user must see.

    A task that replaces a lost one continues, as the others do, where ``--model_dir`` can be neither read nor written.
    """
    is_again = STARTED_AGAIN in os.environ
    try:
        if _leads(job, me):
            ownership.check_launch(job.model_dir)
            ownership.check(job.model_dir, members, job.force)  # before this job writes to another job's log
    except StorageError as error:
        if isinstance(error, HeldError) or not is_again:
            raise
    try:
        return task_log.open_log(task_log.log_file(job.model_dir, str(me)))
    except StorageError as error:
        if not is_again:
            raise
        console = task_log.open_log(None)
        _log_if_any(f"this task was started again and writes no log: {error}")
        return console


def _exit(code: int) -> NoReturn:
    """End the process: TensorFlow's server cannot be stopped, and its threads prevent an orderly exit of Python.

    If the launcher is gone, also kill the processes that the model has left; otherwise the launcher does so.
    """
    if place := os.environ.get(SIGNS):
        with contextlib.suppress(OSError):  # in a program that a model started, the descriptor may be closed
            try:
                os.write(int(place), ALIVE)
            except BrokenPipeError:
                os.killpg(0, signal.SIGKILL)  # the task's own process group, with this process
    os._exit(code)


def _end_within(secs: float, code: int) -> None:
    """End the process after ``secs``, whatever the exit hooks of a model or a library do."""
    timer = threading.Timer(secs, _exit, [code])
    timer.daemon = True
    with contextlib.suppress(RuntimeError):  # the limit on threads may be reached
        timer.start()


def _with_directory(job: JobConfig) -> tuple[JobConfig, str]:
    """Return a chief's job with a directory, and a message if that was missing: it was made, or cannot be."""
    if job.model_dir:
        return job, ""
    made = job.replace(model_dir=os.path.abspath(new_model_dir(job.model)))
    try:
        make_dir(Path(made.model_dir or ""))
    except StorageError as error:
        why = str(error).removeprefix("--model_dir: ")
        return job, f"this job saves nothing: there is no --model_dir, and {why}"
    return made, f"there is no --model_dir: this job writes to {made.model_dir}"


def _log_if_any(text: str) -> None:
    if text:
        logging.getLogger("tfps").info(text)


COMMAND = Command(
    "run",
    _run,
    ("cluster", "task", "size", "ports", *JOB, "service", "restarts"),
    "run one task of a cluster",
    "Start it once for each task, on any machines, with the same flags except --job_name and --task_index. All tasks "
    "exit when the job is done.",
    f"tfps run {ROLE} --issync=1",
)
