"""Faults of forming: tasks that never come, that disagree, or that find somebody else where they should be."""

import re
import socket
from collections.abc import Callable, Mapping

import timeline
from attempt import Attempt
from job import Size
from kills import Act

_TIMEOUT_SECS = 5.0
_ALONE = Size(1, 1)
Changed = Callable[[Attempt], Mapping[str, object]]


def task_missing(run: Attempt) -> None:
    """One worker is never started."""
    run.start(under="hand", leave_out=["worker/1"], start_timeout_secs=run.limit(_TIMEOUT_SECS))
    with run.fault("worker/1"):
        pass
    run.ends()
    run.need(set(run.job.codes.values()) == {171}, f"exit codes {run.job.codes}")
    run.need(run.result.detect_secs is not None, "nobody has named worker/1")


def swapped_ps(run: Attempt) -> Mapping[str, object]:
    """Return the flags of a task that has the PS in another order."""
    return {"ps_hosts": ",".join(f"127.0.0.1:{run.job.port(name)}" for name in ("ps/1", "ps/0"))}


def missing_ps(run: Attempt) -> Mapping[str, object]:
    """Return the flags of a task that knows of one PS only."""
    return {"ps_hosts": f"127.0.0.1:{run.job.port('ps/0')}"}


def other_mode(run: Attempt) -> Mapping[str, object]:
    """Return the flags of a task that trains in the other mode."""
    return {"mode": "sync" if run.result.mode == "async" else "async"}


def disagreeing(changed: Changed) -> Act:
    """Return the fault of a worker with other flags than the rest."""

    def act(run: Attempt) -> None:
        run.start(under="hand", leave_out=["worker/1"], start_timeout_secs=run.limit(15))
        flags = changed(run)
        with run.fault("worker/1", says="|".join(f"--{name}" for name in flags)):
            run.platform.start("worker/1", **flags)
        _refused(run, "worker/1")

    return act


def old_ps(run: Attempt) -> None:
    """The workers of a new job find the PS of an old one."""
    run.start(under="hand")
    run.training()
    run.kill("worker/0", "worker/1")
    other = run.model_dir.with_name("other")
    with run.fault("ps/0", "ps/1", says="another run|other run|old run|another job|other job|old job|run id"):
        for name in ("worker/0", "worker/1"):
            run.platform.start(name, model_dir=other, start_timeout_secs=run.limit(15))
    _refused(run, "worker/0")


def _refused(run: Attempt, victim: str) -> None:
    """Wait until a task was turned away, before any step of its own, with the reason named."""
    run.ends_alone(victim)
    after = [line for line in run.lines[run.mark.edge :] if line.task == victim]
    run.need(not timeline.steps(after), "steps were taken")
    named = [line for line in run.lines if line.at >= run.mark.at and re.search(run.mark.says, line.text)]
    run.need(bool(named), "the difference is not named")


def taken_port(run: Attempt) -> None:
    """Another process listens on the PS's port."""
    run.start(_ALONE, under="hand", leave_out=_ALONE.tasks())
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as other:
        for option in (socket.SO_REUSEADDR, socket.SO_REUSEPORT):
            other.setsockopt(socket.SOL_SOCKET, option, 1)
        other.bind(("127.0.0.1", run.job.port("ps/0")))
        other.listen()
        with run.fault("ps/0", says="--ps_hosts: port"):
            run.platform.start("ps/0")
        run.ends()
    run.need(run.said("--ps_hosts: port"), "the flag is not named")


def unknown_host(run: Attempt) -> None:
    """The PS has a name that nobody knows."""
    run.start(_ALONE, under="hand", leave_out=_ALONE.tasks())
    with run.fault("ps/0", says="no-such-host"):
        run.platform.start(
            "worker/0", ps_hosts="no-such-host.invalid:2222", start_timeout_secs=run.limit(_TIMEOUT_SECS)
        )
    run.ends()
    run.need(run.said("no-such-host.invalid"), "the host is not named")
