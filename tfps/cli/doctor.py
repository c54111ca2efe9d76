"""``tfps doctor``: check whether this cluster can train. Makes the checks that tasks make, without running one.

A task that has not started yet is no problem: doctor works before the start and for a job that does not form. A host
whose name does not resolve or that does not answer is a problem, and so is an address with another listener. If all
tasks are there, a job runs, and another one cannot start.
"""

import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent import futures
from typing import TypeVar

from tfps.cli.command import JOB, Command
from tfps.cli.diagnosis import directory, versions
from tfps.cli.diagnosis.check import NOT_YET, OK, WARNING, WRONG, Check
from tfps.cli.validation import ProblemCollector, check_job, check_ports
from tfps.cluster import ports, probe, rendezvous, resolver
from tfps.cluster.addresses import split
from tfps.cluster.probe import ProbeResult
from tfps.cluster.spec import Cluster, Task
from tfps.config.job_config import JobConfig
from tfps.errors import ClusterFormError, ConfigError, StorageError
from tfps.modes import registry
from tfps.text import show

_DEAD_AFTER_SECS = 5.0  # a name service or file system that takes longer counts as dead
_TASKS_PER_SEC = 256  # the rate of probes if no task answers
_ALIKE = 10  # tasks with the same finding that get a line each
_PROXIES = ("grpc_proxy", "https_proxy", "http_proxy")  # gRPC uses the first that is set
_PROXY_OF_ADDRESSES = "GRPC_ADDRESS_HTTP_PROXY"
_FIXES = {
    probe.UNKNOWN_HOST: "correct the address, or fix the DNS.",
    probe.UNRESPONSIVE: "if it is a task, it hangs: end it. Otherwise give another port.",
    probe.OTHER: "end that process, or give another port.",
    probe.BUSY: "run doctor again.",
}
_REACH = "is the host up, and does every firewall allow the port?"
_T = TypeVar("_T")


def _doctor(argv: Sequence[str]) -> int:
    """Run all checks, the directory's in the background; print them and return the lowest exit code of a problem."""
    problems = ProblemCollector(COMMAND.name)
    job = problems.read(COMMAND.flags, argv).config
    place = problems.of(_place, job)
    check_ports(job, problems)
    check_job(job, place[0].num_workers if place else None, problems)
    problems.settle()
    assert place is not None
    enough = threading.Event()
    of_directory = _in_background(lambda: directory.checks(job, place[0], enough))
    patience_secs = directory.STAY_SECS + _DEAD_AFTER_SECS
    try:
        checks = [versions.check(), *_network(*place), _proxies(), *_within(patience_secs, of_directory)]
    finally:
        enough.set()
        futures.wait([of_directory], 1)  # it deletes its file, on Ctrl-C too
    _print(checks)
    return min((check.code for check in checks if check.code), default=0)


def _print(checks: Sequence[Check]) -> None:
    width = max(len(check.what) for check in checks)
    for check in checks:
        print(f"{check.state:<7}  {check.what:<{width}}  {check.finding}")
    if any(check.state == WRONG for check in checks):
        print("\nnot ready to train: fix what is wrong above")
    else:
        print("\nready to train: no problem found; when tasks start, they compare the flags that must agree")


def _place(job: JobConfig) -> tuple[Cluster, Task | None, str]:
    """Return the cluster, this process's task if one is given, and the flag that sets the task's port.

    Raises:
        ConfigError: Lists every problem.
    """
    found = resolver.find_resolver(job.ps_hosts, job.worker_hosts, os.environ)
    members, me = _resolve(job)
    members = found.locate(members, job.port_base, os.environ) if found else members
    return members, me, (found.port_flag if found else "") or f"--{(me or members.tasks()[0]).job}_hosts"


def _resolve(job: JobConfig) -> tuple[Cluster, Task | None]:
    def resolve(name: str | None, index: int | None) -> tuple[Cluster, Task]:
        sizes = registry.num_ps_of(job), job.num_workers
        return resolver.resolve(job.ps_hosts, job.worker_hosts, name, index, *sizes, os.environ)

    try:
        return resolve(job.job_name, job.task_index)
    except ConfigError as error:
        if (job.job_name, job.task_index) != (None, None):
            raise
        problems = error.problems
    try:
        return resolve("worker", 0)[0], None
    except ConfigError as error:  # keep what is wrong with or without a role, or that no cluster is given
        raise ConfigError([line for line in problems if line in error.problems] or problems) from None


def _network(members: Cluster, me: Task | None, flag: str) -> Iterator[Check]:
    """Probe every task's address."""
    tasks = members.tasks()
    answers = probe.probe_all(members, tasks, _DEAD_AFTER_SECS + len(tasks) / _TASKS_PER_SEC)
    yield _names(members, answers)
    found = {task: _task(task, members.address(task), answer) for task, answer in answers.items()}
    alike: dict[tuple[str, str], list[Check]] = {}
    for check in found.values():
        alike.setdefault((check.state, check.finding), []).append(check)
    for checks in alike.values():
        yield from checks[:_ALIKE]
        if len(checks) > _ALIKE:
            yield Check(checks[0].state, f"{len(checks) - _ALIKE:,} more", checks[0].finding, checks[0].code)
    if all(check.state == OK for check in found.values()):
        fix = "for another job, end that one first, or give other addresses."
        yield Check(WARNING, "job", f"a job already runs there, with all tasks: {fix}")
    if me and me.job != "evaluator":
        yield _port(members.address(me), flag, found[me])


def _names(members: Cluster, answers: Mapping[Task, ProbeResult]) -> Check:
    hosts = {split(members.address(task))[0]: answer.problem for task, answer in answers.items()}
    unknown = [show(host) for host, problem in hosts.items() if problem == probe.UNKNOWN_HOST]
    if not unknown:
        return Check(OK, "names", f"{len(hosts)} of {len(hosts)} hosts resolve")
    finding = f"{rendezvous.first_few(unknown)}: {probe.UNKNOWN_HOST}, {_FIXES[probe.UNKNOWN_HOST]}"
    return Check(WRONG, "names", finding, ClusterFormError.exit_code)


def _task(task: Task, address: str, answer: ProbeResult) -> Check:
    what = f"{task} {address}"
    if answer.task == task:
        return Check(OK, what, "running as the expected task")
    if answer.problem == probe.REFUSED:
        return Check(NOT_YET, what, "not started yet: no process listens there")
    problem = f"{answer.problem}: {_FIXES.get(answer.problem, _REACH)}"
    finding = rendezvous.wrong_task_message(answer.task) if answer.task else problem
    return Check(WRONG, what, finding, ClusterFormError.exit_code)


def _port(address: str, flag: str, found: Check) -> Check:
    port = str(split(address)[1])
    if found.state == OK:
        return Check(OK, "port", f"{port} is in use by this task, which already runs")
    try:
        ports.check_port(address, flag)
    except ConfigError as error:
        return Check(WRONG, "port", str(error), ClusterFormError.exit_code)
    return Check(OK, "port", f"{port} is free on this machine")


def _proxies() -> Check:
    """Check for proxies that gRPC would use. Their addresses may contain a password and are not shown."""
    if os.environ.get(_PROXY_OF_ADDRESSES):
        fix = f"unset it, unless the cluster is not in {_PROXY_OF_ADDRESSES}_ENABLED_ADDRESSES."
        return Check(WARNING, "proxies", f"{_PROXY_OF_ADDRESSES} is set, and tasks use it: {fix}")
    named = [name for name in _PROXIES if os.environ.get(name)]
    finding = f"{', '.join(named)} is set: tasks bypass it to reach each other" if named else "none is set"
    return Check(OK, "proxies", finding)


def _in_background(act: Callable[[], _T]) -> "futures.Future[_T]":
    """Run a function in a thread that does not keep the process alive."""
    future: futures.Future[_T] = futures.Future()

    def work() -> None:
        try:
            future.set_result(act())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=work, daemon=True).start()
    return future


def _within(secs: float, of_directory: "futures.Future[list[Check]]") -> list[Check]:
    if futures.wait([of_directory], secs).done:
        return of_directory.result()
    finding = "does not answer: is its file system mounted, and its server up?"
    return [Check(WRONG, "model_dir", finding, StorageError.exit_code)]


COMMAND = Command(
    "doctor",
    _doctor,
    ("cluster", "task", "size", "ports", *JOB, "restarts"),
    "check whether a cluster is ready to train",
    "Takes the flags of run, starts nothing, and answers in seconds. Checks whether each address resolves, and which "
    "task answers there; whether this task's port is free (with --job_name and --task_index); proxies, versions and "
    "clocks; and, if run on all hosts together, whether they share --model_dir. Exits with 0 if it finds no problem, "
    "2 if TensorFlow is not installed, 74 if --model_dir cannot be written or another job holds it, 171 if a host or a "
    "task is wrong; with the lowest of these if there are several. A task that has not started is no problem.",
    "tfps doctor --ps_hosts=h0:2222 --worker_hosts=h1:2222,h2:2222 --model_dir=runs/a",
)
