"""``--serve`` and the other flags: what does not belong to a service is refused before anything starts."""

import pytest
from support.processes import run_tfps

from tfps.cli.serving import check_flags
from tfps.cli.validation import ProblemCollector
from tfps.config.job_config import JobConfig
from tfps.errors import ConfigError


def problems(**flags: object) -> str:
    """Return the problems of a service's flags."""
    collector = ProblemCollector("launch")
    check_flags(JobConfig(**{"serve": True, **flags}), collector)  # type: ignore[arg-type]
    try:
        collector.settle()
    except ConfigError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    "flags",
    [
        {},
        {"mode": "sync", "num_workers": 25, "aggregate": "sum", "backup_workers": 2},
        {"mode": "ssp", "staleness": 0},
        {"optimizer": "adam", "learning_rate": 0.1, "num_ps": 3, "max_steps": 5, "worker_timeout_secs": 1.0},
        {"tls_cert": "c", "tls_key": "k"},
        {"tls_cert": "c", "tls_key": "k", "tls_ca": "a"},
        {"serve": False},
    ],
)
def test_what_a_service_takes(flags: dict[str, object]) -> None:
    """Nothing is wrong with it."""
    assert problems(**flags) == ""


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        ({"model": "mnist"}, "--model=mnist is not for --serve, which trains no model: leave it out."),
        ({"batch_size": 7}, "--batch_size=7 is not for --serve"),
        ({"wire": "plain"}, "--wire=plain is not for --serve"),
        ({"worker_hosts": "h:1"}, "--worker_hosts=h:1 is not for --serve"),
        ({"mode": "local"}, "--mode=local is not for --serve: give --mode=async, --mode=sync or --mode=ssp."),
        ({"mode": "sync", "staleness": 3}, "--staleness=3 is for --mode=ssp"),
        ({"mode": "sync", "num_workers": 2, "backup_workers": 2}, "--backup_workers=2"),
        ({"mode": "sync", "aggregate": "krum"}, "--aggregate=krum is not for --serve"),
        ({"job_name": "worker"}, "--job_name=worker is not for --serve, whose tasks are all PS: give ps."),
        ({"num_ps": 0}, "--num_ps=0 is not for --serve: give 1 or more."),
        ({"serve": False, "worker_timeout_secs": 5.0}, "--worker_timeout_secs=5 is for --serve: add it"),
        ({"serve": False, "tls_cert": "c"}, "--tls_cert=c is for --serve: add it"),
        ({"tls_cert": "c"}, "--tls_cert=c needs --tls_key: give both."),
        ({"tls_key": "k"}, "--tls_key=k needs --tls_cert: give both."),
        ({"tls_ca": "a"}, "--tls_ca=a needs --tls_cert and --tls_key: give all three."),
    ],
)
def test_what_a_service_does_not_take(flags: dict[str, object], problem: str) -> None:
    """Each is named, with the fix."""
    assert problem in problems(**flags)


def test_launch_and_run_check_the_flags() -> None:
    """With exit code 2, and nothing started."""
    launch = run_tfps("launch", "--serve", "--model=mnist", "--num_ps=0")
    assert launch.returncode == 2
    assert "--model=mnist is not for --serve" in launch.stderr
    assert "--num_ps=0" in launch.stderr
    run = run_tfps("run", "--serve", "--worker_hosts=h:1", "--ps_hosts=h:2")
    assert run.returncode == 2
    assert "--worker_hosts=h:1 is not for --serve" in run.stderr
    assert "--task_index is missing" in run.stderr
    ports = run_tfps("launch", "--port_base=2222")
    assert ports.returncode == 2
    assert "--port_base is for --serve" in ports.stderr


@pytest.mark.parametrize("command", [["launch"], ["run", "--ps_hosts=127.0.0.1:1", "--task_index=0"]])
def test_the_files_of_tls_are_checked_first(command: list[str]) -> None:
    """With exit code 2, and nothing started."""
    done = run_tfps(*command, "--serve", "--tls_cert=/no/cert", "--tls_key=/no/key", "--tls_ca=/no/ca")
    assert done.returncode == 2
    assert "--tls_cert=/no/cert cannot be read: No such file or directory." in done.stderr
    assert "--tls_ca=/no/ca cannot be read" in done.stderr
