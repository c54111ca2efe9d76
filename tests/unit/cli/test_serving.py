"""``--serve`` and the other flags: what does not belong to a service is refused before anything starts."""

import re

import pytest
from support.processes import run_tfps

from tfps.cli import main
from tfps.cli.serving import check_flags
from tfps.cli.validation import ProblemCollector
from tfps.client.connect import TOKEN
from tfps.config import launch_protocol
from tfps.config.job_config import JobConfig
from tfps.errors import ConfigError
from tfps.launchers.registry import LAUNCHERS


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
        {"mode": "sync", "num_workers": 6, "aggregate": "krum", "backup_workers": 1},
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
        ({"mode": "sync", "aggregate": "krum", "num_workers": 4}, "--aggregate=krum needs 5 gradients or more"),
        ({"mode": "async", "aggregate": "krum"}, "--aggregate=krum is for --mode=sync"),
        ({"mode": "ssp", "aggregate": "krum"}, "--aggregate=krum is for --mode=sync"),
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


SUBMIT = ("submit", "--serve", "--num_ps=2", "--optimizer=adam", "--name=svc", "--dry_run")
ADDRESSES = {
    "compose": "ps-0:2222,ps-1:2222",
    "hosts": "h0:2222,h1:2222",
    "kubernetes": "svc-ps-0.svc:2222,svc-ps-1.svc:2222",
    "tfjob": "svc-worker-0:2222,svc-worker-1:2222",
    "volcano": "svc-ps-0.svc:2222,svc-ps-1.svc:2222",
    "jobset": "svc-ps-0-0.svc:2222,svc-ps-0-1.svc:2222",
    "ray": "",
    "slurm": "",
}


def hosts_of(platform: str) -> list[str]:
    """Return the flag with the addresses, where the platform wants it."""
    return ["--ps_hosts=h0:2222,h1:2222"] if platform == "hosts" else []


@pytest.mark.parametrize("platform", LAUNCHERS)
def test_every_platform_plans_a_service(platform: str, capsys: pytest.CaptureFixture[str]) -> None:
    """No worker, no model; the manifest alone on standard output, and beside it the addresses, where they are known."""
    assert main.main([*SUBMIT, f"--to={platform}", *hosts_of(platform)]) == 0
    out, err = capsys.readouterr()
    assert "--serve=1" in out
    assert "--optimizer=adam" in out
    assert "--model=" not in out
    assert "--max_steps" not in out.replace("--max_steps updates", "")
    assert "worker_hosts" not in out
    assert err.startswith(f"TFPS_PS_HOSTS={ADDRESSES[platform]}\n" if ADDRESSES[platform] else "")
    assert bool(err) == bool(ADDRESSES[platform])


@pytest.mark.parametrize("platform", LAUNCHERS)
def test_a_secret_is_written_nowhere(
    platform: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its value is not in what is printed. Where it would be lost on the way, submit says so, and sends nothing."""
    monkeypatch.setenv("TFPS_TOKEN", "hush-hush")
    takes_secrets = "secrets" in LAUNCHERS.load(platform).features
    assert main.main([*SUBMIT, f"--to={platform}", *hosts_of(platform)]) == (2 if takes_secrets else 0)
    out, err = capsys.readouterr()
    assert "hush" not in out + err
    if takes_secrets:
        assert err.startswith("error: TFPS_TOKEN is set here, but does not reach the pods: give --token_secret=NAME")
        assert main.main([*SUBMIT, f"--to={platform}", "--token_secret=ours"]) == 0
        out, err = capsys.readouterr()
        assert "hush" not in out + err
        assert re.search(r"name: TFPS_TOKEN\s+valueFrom:\s+secretKeyRef:\s+name: ours\s+key: token", out)


def test_submit_checks_the_flags(capsys: pytest.CaptureFixture[str]) -> None:
    """With exit code 2: what is for models, for workers, and for services only."""
    flags = ("--model=mnist", "--worker_cpu=1", "--worker_memory=1Gi", "--worker_gpu=1", "--num_ps=0")
    assert main.main(["submit", "--serve", "--to=slurm", *flags]) == 2
    err = capsys.readouterr().err
    assert "--model=mnist is not for --serve, which trains no model: leave it out." in err
    assert "--num_ps=0 is not for --serve" in err
    assert "--mode=allreduce" not in err  # which a service has not
    for flag in ("worker_cpu", "worker_memory", "worker_gpu"):
        assert f"error: --{flag} is for workers, and a service has none: leave it out." in err
    assert main.main(["submit", "--to=kubernetes", "--token_secret=a", "--dry_run"]) == 2
    assert capsys.readouterr().err == "error: --token_secret=a is for --serve: leave it out.\n"
    assert main.main([*SUBMIT, "--to=hosts"]) == 2
    assert "--ps_hosts is missing: give --ps_hosts=host:port,host:port." in capsys.readouterr().err
    assert launch_protocol.TOKEN == TOKEN
