"""``tfps submit``: submit a job to a platform."""

import os
import re
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from tfps.cli import serving
from tfps.cli.command import JOB, Command, check_utf8, stem_of, working_directory
from tfps.cli.validation import ProblemCollector, check_mode
from tfps.cli.watch import Result, run_to_completion, wait_for
from tfps.cluster import rendezvous, resolver
from tfps.config.command_line import FLAGS, Parsed, flags_of
from tfps.config.command_options import SubmitOptions
from tfps.config.job_config import JobConfig
from tfps.errors import ConfigError, DataError
from tfps.jobs.handle import RunningJob
from tfps.jobs.spec import Job
from tfps.launchers.base import Launcher, Plan
from tfps.launchers.registry import LAUNCHERS
from tfps.models import loader, static_check
from tfps.modes import registry
from tfps.text import show

_PLATFORM = ("platform", "ports", "resources", "cluster")


def _submit(argv: Sequence[str]) -> int:
    problems = ProblemCollector(COMMAND.name)
    parsed = problems.read(COMMAND.flags, argv)
    asked, options = registry.sized(parsed.config), parsed.options(SubmitOptions)
    if options.to is None:
        problems.add(f"--to is missing: say where the job runs, one of {', '.join(LAUNCHERS)}.")
    problems.settle()
    launcher = LAUNCHERS.load(options.to or "")
    _check_flags(parsed, launcher, problems)
    serving.check_flags(asked, problems)
    serving.check_platform(asked.serve, options, launcher, problems)
    if asked.num_ps == 0:
        for flag in ("ps_cpu", "ps_memory"):
            if getattr(options, flag) is not None:
                problems.add(f"--{flag} is for PS, and this job has none: leave it out.")
    job = _service(asked, options, launcher) if asked.serve else _job(asked, options, launcher, problems)
    if not asked.serve:
        check_mode(job.config, job.worker.replicas, problems)
    plan = problems.of(launcher.plan, job)
    if plan is not None:
        problems.of(launcher.check_files, plan)
        _check_wait(options, launcher, plan, problems)
    problems.settle()
    assert plan is not None  # else settle() has raised a problem
    if missing := static_check.beside(Path(asked.model)) if job.model_source else []:
        rest = f"{rendezvous.first_few(missing)}, which it imports, must be in the image, or on a volume in PYTHONPATH."
        print(f"warning: {asked.model} is copied into the containers alone: {rest}", file=sys.stderr)
    if options.dry_run or plan.is_printed_only:
        return _print(launcher, plan, job)
    return _send(launcher, plan, job)


def _print(launcher: Launcher[Plan], plan: Plan, job: Job) -> int:
    """Print what would be sent, and on standard error what else there is to say."""
    print(plan, flush=True)
    if not job.options.dry_run:
        fix = ": run each line on its host, or give --ssh" if "ssh" in launcher.features else ""
        print(f"nothing was started, as --to={launcher.name} only prints{fix}.", file=sys.stderr)
    if job.config.serve:
        serving.print_addresses(launcher.client_addresses(plan), "", sys.stderr)
    return 0


def _send(launcher: Launcher[Plan], plan: Plan, job: Job) -> int:
    began = time.monotonic()
    result = Result(job.config.model_dir if launcher.shares_files else None)
    addresses = launcher.client_addresses(plan) if job.config.serve else None
    submitted = launcher.submit(plan)
    if isinstance(submitted, RunningJob):  # no platform runs it: the job ends with this command
        if addresses:
            serving.print_addresses(addresses, "", sys.stdout)
        return run_to_completion(submitted, job, began, result)
    for warning in submitted.warnings:
        print(warning, file=sys.stderr)
    print(submitted.handle, flush=True)
    if job.config.serve:
        serving.print_addresses(addresses, submitted.handle, sys.stdout)
    return wait_for(submitted, job, began, result) if job.options.wait else 0


def _check_flags(parsed: Parsed, launcher: Launcher[Plan], problems: ProblemCollector) -> None:
    """Check that the platform has the flags that were given."""
    for flag in flags_of(_PLATFORM):
        default, feature = FLAGS[flag].default, FLAGS[flag].feature
        if parsed.given.get(flag, default) != default and feature not in (None, *launcher.features):
            problems.add(f"--{flag} is not supported with --to={launcher.name}: leave it out.")
    for flag, value in parsed.given.items():
        problems.of(check_utf8, f"--{flag}=", str(value))
    if parsed.given.get("worker_gpu") and "image" not in parsed.given and "containers" in launcher.features:
        problems.add(
            f"--worker_gpu={parsed.given['worker_gpu']}, but the default image has TensorFlow for CPUs only: "
            "give --image with one that has TensorFlow for GPUs."
        )


def _check_wait(options: SubmitOptions, launcher: Launcher[Plan], plan: Plan, problems: ProblemCollector) -> None:
    """Check that there is a job to wait for."""
    if options.wait and options.dry_run:
        problems.add("--wait has nothing to watch, as --dry_run sends nothing: leave one of them out.")
    elif options.wait and plan.is_printed_only:
        fix = "leave it out, or add --ssh" if "ssh" in launcher.features else "leave it out"
        problems.add(f"--wait has nothing to watch, as --to={launcher.name} only prints: {fix}.")


def _job(asked: JobConfig, options: SubmitOptions, launcher: Launcher[Plan], problems: ProblemCollector) -> Job:
    """Return the job, checked as far as this machine can check it."""
    name, directory = options.name or _name(asked.model), working_directory()
    problems.of(check_utf8, "the working directory ", directory)
    is_file = asked.model.endswith(".py")
    if not launcher.shares_files:
        if is_file or asked.model in loader.BUILTIN:  # a dotted module may exist only in the image
            problems.of(static_check.check, asked.model)
        return Job(name, asked, options, _source(asked.model) if is_file else None, directory=directory)
    problems.of(static_check.check, asked.model)
    problems.of(_check_data, asked.data_dir)
    config = _sized(_with_absolute_paths(asked, name))
    return Job(name, config, options, python=sys.executable, directory=directory)


def _service(asked: JobConfig, options: SubmitOptions, launcher: Launcher[Plan]) -> Job:
    """Return the job of a parameter service."""
    name, directory = options.name or _name(serving.NAME), working_directory()
    config = asked.replace(model=serving.NAME)
    if not launcher.shares_files:
        return Job(name, config, options, directory=directory)
    return Job(name, _sized(_with_absolute_paths(config, name)), options, python=sys.executable, directory=directory)


def _source(model: str) -> str | None:
    """Return the content of a model's file, byte for byte: see ``Job.model_source``; ``None`` if it cannot be read."""
    try:
        return Path(model).read_bytes().decode(errors="surrogateescape")
    except OSError:
        return None


def _check_data(data_dir: str) -> None:
    """Check that the data exists; the tasks check its content."""
    if data_dir and "://" not in data_dir and not Path(data_dir).exists():
        raise DataError(f"--data_dir={show(data_dir)} does not exist: give the directory that the model reads.")


def _sized(config: JobConfig) -> JobConfig:
    """Return the job with the sizes of its lists of hosts; the launcher reports lists that are missing or wrong."""
    num_ps = replace(registry.num_ps_of(config), has_workers=not config.serve)
    role, num_workers = ("ps", None) if config.serve else ("worker", config.num_workers)
    try:
        members, _ = resolver.resolve(config.ps_hosts, config.worker_hosts, role, 0, num_ps, num_workers, {})
    except ConfigError:
        return config
    return config.replace(
        num_ps=members.num_ps, num_workers=config.num_workers if config.serve else members.num_workers
    )


def _with_absolute_paths(asked: JobConfig, name: str) -> JobConfig:
    """Return the job with absolute paths, for machines that share this machine's directories."""
    paths = {"model_dir": asked.model_dir or str(Path("runs") / name)}
    paths |= {"model": asked.model} if loader.is_path(asked.model) else {}
    paths |= {"data_dir": asked.data_dir} if asked.data_dir else {}
    return asked.replace(
        **{flag: path if "://" in path else str(Path(path).absolute()) for flag, path in paths.items()}
    )


def _name(model: str) -> str:
    """Return a job name of up to 40 characters, made of the model's name, the time and this process's id.

    The id tells apart the jobs of one second: where no ``--model_dir`` is given, it is named after the job.
    """
    plain = re.sub("[^a-z0-9]+", "-", stem_of(model).lower()).strip("-")
    stem = (plain if plain[:1].isalpha() else f"job-{plain}")[:20].rstrip("-")
    return f"{stem}-{time.strftime('%m%d-%H%M%S')}-{os.getpid()}"


COMMAND = Command(
    "submit",
    _submit,
    ("platform", "size", "ports", "resources", "cluster", *JOB, "service", "restarts"),
    "submit a job to a platform",
    "Prints the job's handle for tfps status, logs and cancel. The platform's client must be installed and logged in, "
    "except for --dry_run.",
    "tfps submit --to=slurm --num_ps=1 --num_workers=2 --worker_gpu=8 --model=mnist --model_dir=DIR",
)
