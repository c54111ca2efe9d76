"""What ``--serve`` asks of the other flags, and what ``tfps submit`` says of a service."""

import os
import sys
from typing import Any, TextIO

from tfps.cli.validation import ProblemCollector
from tfps.client.connect import HOSTS
from tfps.config.command_options import SubmitOptions
from tfps.config.job_config import OPTIONS, JobConfig
from tfps.config.launch_protocol import TOKEN
from tfps.launchers.base import ClientAddresses, Launcher
from tfps.modes import registry
from tfps.text import enumerated, show

MODES = ("async", "sync", "ssp")
_FLAGS = (
    *("optimizer", "learning_rate", "max_steps", "steps_to_validate", "save_checkpoint_secs", "force", "model_dir"),
    *("mode", "issync", "backup_workers", "aggregate", "staleness", "serve", "max_restarts", "num_ps", "num_workers"),
    *("start_timeout_secs", "stall_timeout_secs", "worker_timeout_secs", "ps_hosts", "job_name", "task_index"),
    *("port_base", "tls_cert", "tls_key", "tls_ca"),
)
_TLS = "tls_cert", "tls_key", "tls_ca"
NAME = "service"
"""What stands in the place of a model's name."""


def check_flags(job: JobConfig, problems: ProblemCollector) -> None:
    """Check the flags of a service, or that no flag of one is given without ``--serve``."""
    if not job.serve:
        if job.worker_timeout_secs != OPTIONS["worker_timeout_secs"].default:
            problems.add(
                f"--worker_timeout_secs={job.worker_timeout_secs:g} is for --serve: add it, or leave this out."
            )
        for name in _TLS:
            if given := getattr(job, name):
                problems.add(f"--{name}={show(given)} is for --serve: add it, or leave this out.")
        return
    _check_tls(job, problems)
    for name, option in OPTIONS.items():
        value = getattr(job, name)
        if name not in _FLAGS and value not in (option.default, NAME):
            problems.add(f"--{name}={show(str(value))} is not for --serve, which trains no model: leave it out.")
    if problems.has_wrong("mode"):
        return
    if job.mode not in MODES:
        listed = enumerated([f"--mode={mode}" for mode in MODES], "or")
        problems.add(f"--mode={show(job.mode)} is not for --serve: give {listed}.")
        return
    if job.job_name not in (None, "ps"):
        problems.add(f"--job_name={show(job.job_name)} is not for --serve, whose tasks are all PS: give ps.")
    if job.num_ps == 0:
        problems.add("--num_ps=0 is not for --serve: give 1 or more.")
    for problem in problems.of(registry.problems_of, job, job.num_workers or 2) or ():
        problems.add(problem)


def _check_tls(job: JobConfig, problems: ProblemCollector) -> None:
    """Check that a certificate and a key are given together."""
    if bool(job.tls_cert) != bool(job.tls_key):
        given, missing = ("tls_cert", "tls_key") if job.tls_cert else ("tls_key", "tls_cert")
        problems.add(f"--{given}={show(getattr(job, given))} needs --{missing}: give both.")
    elif job.tls_ca and not job.tls_cert:
        problems.add(f"--tls_ca={show(job.tls_ca)} needs --tls_cert and --tls_key: give all three.")


def check_files(job: JobConfig, problems: ProblemCollector) -> None:
    """Check the files of TLS, on the machine where the servers run."""
    if not (job.serve and job.tls_cert and job.tls_key):
        return
    from tfps.client import tls  # noqa: PLC0415  slow to import, and only some need it

    problems.of(tls.server_context, job.tls_cert, job.tls_key)
    problems.of(tls.client_context, "--tls_ca", job.tls_ca or "")


def check_platform(
    is_service: bool, options: SubmitOptions, launcher: Launcher[Any], problems: ProblemCollector
) -> None:
    """Check what a service asks of its platform, or that nothing that only a service has is asked for."""
    if not is_service:
        if options.token_secret is not None:
            problems.add(f"--token_secret={options.token_secret} is for --serve: leave it out.")
        return
    for flag in ("worker_cpu", "worker_memory", "worker_gpu"):
        if getattr(options, flag):
            problems.add(f"--{flag} is for workers, and a service has none: leave it out.")
    if "secrets" in launcher.features and os.environ.get(TOKEN) and options.token_secret is None:
        problems.add(
            f"{TOKEN} is set here, but does not reach the pods: give --token_secret=NAME, made by kubectl create "
            f"secret generic NAME --from-file=token=FILE, or unset {TOKEN}."
        )


def print_addresses(found: ClientAddresses | None, handle: str, stream: TextIO) -> None:
    """Print the addresses for clients, or where to find them.

    Args:
        found: The addresses, if they are known.
        handle: The job's, or an empty string if it has none.
        stream: Where the addresses go; the explanation goes to standard error.
    """
    if found:
        print(f"{HOSTS}={','.join(found.hosts)}", file=stream, flush=True)
        print(f"the servers' addresses, for clients {found.where}.", file=sys.stderr, flush=True)
    elif handle:
        print(
            f"the servers' addresses are in the log of ps/0 when it serves: tfps logs {handle} --task=ps:0",
            file=sys.stderr,
            flush=True,
        )
