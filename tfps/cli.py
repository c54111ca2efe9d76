"""The verbs. The only place that prints for people, or exits. Does not import TensorFlow until a verb needs it."""

import atexit
import contextlib
import os
import shutil
import sys
import textwrap
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import tfps
from tfps import cluster, config, models
from tfps.config import JobConfig
from tfps.errors import ConfigError, DataError, StoppedError, TfpsError
from tfps.models.optimizers import OPTIMIZERS
from tfps.modes import MODES
from tfps.report import JOB, SUMMARY, final_lines, format_progress, one_line, read_json
from tfps.runtime import logs, model_dir, net, task

_T = TypeVar("_T")

MOST_LOCAL_TASKS = 256

CHOICES = {"mode": tuple(MODES), "optimizer": tuple(OPTIMIZERS), "ps_strategy": ("greedy", "round_robin")}


@dataclass(frozen=True)
class Verb:
    """One thing that ``tfps`` does."""

    act: Callable[[Sequence[str]], int]
    groups: Sequence[str]
    summary: str
    details: str
    example: str


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    args = list(sys.argv[1:] if argv is None else argv)
    verb, rest = (args[0], args[1:]) if args and not args[0].startswith("-") else ("run", args)
    try:
        if "--version" in args:
            print(f"tfps {tfps.__version__}")
            return 0
        if verb not in VERBS:
            raise ConfigError(
                f"{config.show(verb)} is not a command of tfps.{config.did_you_mean(verb, VERBS)} See tfps --help."
            )
        if {"-h", "--help", "-help", "--helpfull"} & set(rest) or (not args and not _in_a_cluster()):
            print(_usage() if not args or args[0].startswith("-") else _help(verb))
            return 0
        return VERBS[verb].act(rest)
    except TfpsError as error:
        return _fail(error, sys.stderr)
    except (KeyboardInterrupt, BrokenPipeError):  # BrokenPipeError: tfps ... | head
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return StoppedError.exit_code


def _fail(error: TfpsError, stream: Any) -> int:
    """Print an error, each problem on its own line, and return its exit code."""
    if isinstance(error, StoppedError):
        print(error, file=stream, flush=True)
        return error.exit_code
    for line in _lines(error):
        print(f"error: {line}", file=stream, flush=True)
    return error.exit_code


def _lines(error: TfpsError) -> Sequence[str]:
    return error.problems if isinstance(error, ConfigError) else [str(error)]


def _in_a_cluster() -> bool:
    return bool({"TF_CONFIG", "SLURM_STEP_NUM_TASKS"} & set(os.environ))


def _usage() -> str:
    verbs = "\n".join(f"  {name:<8} {verb.summary}" for name, verb in VERBS.items())
    return (
        "TensorFlow 1.x-style parameter-server training, on today's TensorFlow.\n\n"
        f"usage: tfps VERB [--flag=value ...]\n\n{verbs}\n\n"
        f"Try it:\n  {VERBS['launch'].example}\n\n"
        f"Without a verb it is run, so the classic command line works unchanged:\n  python -m tfps {_ROLE}\n\n"
        "tfps VERB --help tells a verb's flags."
    )


def _help(verb: str) -> str:
    told = VERBS[verb]
    choices = {**CHOICES, "model": tuple(models.BUILTIN)}
    width = max(60, min(100, shutil.get_terminal_size((100, 24)).columns))
    flags = config.describe(config.fields_of(told.groups), choices, width)
    details = textwrap.fill(told.details, width)
    return f"tfps {verb}: {told.summary}\n\n{details}\n\n  {told.example}\n{flags}"


class _Problems:
    """Gathers what several checks complain of, so that all of it is told at once."""

    def __init__(self) -> None:
        self._errors: list[TfpsError] = []
        self._flags: set[str] = set()

    def read(self, verb: str, argv: Sequence[str], defaults: JobConfig | None = None) -> JobConfig:
        """Read a verb's flags."""
        parsed = config.parse(argv, config.fields_of(VERBS[verb].groups), CHOICES, defaults)
        self._flags |= set(parsed.problems)
        self._errors += [ConfigError(problem) for problem in parsed.problems.values()]
        return parsed.config

    def of(self, check: Callable[..., _T], *args: Any) -> _T | None:
        """Return what a check returns, or ``None`` if it complains."""
        try:
            return check(*args)
        except (ConfigError, DataError) as error:
            self._errors.append(error)
            return None

    def add(self, problem: str) -> None:
        """Take in a problem."""
        self._errors.append(ConfigError(problem))

    def settle(self) -> None:
        """Raise what was gathered: a ``DataError`` if it is all about data, else a ``ConfigError`` with every line."""
        lines = [line for error in self._errors for line in _lines(error) if not self._follows(line)]
        if lines and all(isinstance(error, DataError) for error in self._errors):
            raise DataError("\n".join(lines))
        if lines:
            raise ConfigError(lines)

    def _follows(self, line: str) -> bool:
        """Tell whether a line only says that a flag is missing whose value was bad."""
        return any(line.startswith(f"--{name} is missing") for name in self._flags)


def _run(argv: Sequence[str]) -> int:
    """Be one task."""
    problems = _Problems()
    job = problems.read("run", argv)
    problems.of(models.check, job.model)
    sizes = job.num_ps, job.num_workers
    place = problems.of(
        cluster.resolve, job.ps_hosts, job.worker_hosts, job.job_name, job.task_index, *sizes, os.environ
    )
    problems.of(models.check_data, job.model, job.data_dir, place[0].num_workers if place else 1)
    if place and place[1].job == "evaluator" and not job.model_dir:
        problems.add("--model_dir is missing: the evaluator reads the checkpoints there.")
    problems.of(task.require_tensorflow)
    problems.settle()
    assert place is not None
    return _be_task(job, *place)


def _be_task(job: JobConfig, members: cluster.Cluster, me: cluster.Task) -> int:
    if me.job != "evaluator":
        net.check_port(members.address(me), f"--{me.job}_hosts")
    console = logs.open_log(logs.log_file(job.model_dir, str(me)))
    try:
        task.run(job, members, me)
        code = 0
    except TfpsError as error:
        code = _fail(error, console)
    except Exception as error:
        traceback.print_exc()
        console.write(f"error: {type(error).__name__}: {one_line(str(error))} (a bug in tfps: see the log)\n")
        code = 1
    atexit._run_exitfuncs()  # autograph and others remove their temporary files here
    for stream in (sys.stdout, sys.stderr, console):
        with contextlib.suppress(OSError):  # whoever read it may be gone
            stream.flush()
    os._exit(code)  # TensorFlow's server cannot be stopped, and its threads do not let the interpreter end in order


def _launch(argv: Sequence[str]) -> int:
    """Run a whole cluster on this machine."""
    began = time.monotonic()
    problems = _Problems()
    job = problems.read("launch", argv)
    job = job.replace(num_ps=job.num_ps or 1, num_workers=job.num_workers or 2)
    problems.of(models.check, job.model)
    problems.of(models.check_data, job.model, job.data_dir, job.num_workers or 1)
    problems.of(task.require_tensorflow)
    if (job.num_ps or 1) + (job.num_workers or 2) > MOST_LOCAL_TASKS:
        problems.add(
            f"--num_ps={job.num_ps} and --num_workers={job.num_workers} are more than the {MOST_LOCAL_TASKS} tasks "
            "that launch starts on one machine: give fewer."
        )
    problems.settle()
    job = job.replace(model_dir=job.model_dir or _new_model_dir(job.model))
    return _follow(job, began)


def _follow(job: JobConfig, began: float) -> int:
    from tfps.launchers import follow, local, view  # noqa: PLC0415  other verbs have no use for it

    (Path(job.model_dir or ".") / SUMMARY).unlink(missing_ok=True)  # that of an earlier run
    with local.held_ports((job.num_ps or 1) + (job.num_workers or 2)) as ports:
        plan = local.plan(job, ports)
        running = local.submit(plan)
        print(
            f"{job.model}: {job.num_ps} ps, {job.num_workers} workers, {job.mode}; model_dir {job.model_dir}",
            flush=True,
        )
        shown = view.job_view(job, plan.commands, began)
        outcome = follow.follow(running, shown)
    summary = follow.write_summary(job, shown, outcome)
    if outcome.exit_code == StoppedError.exit_code:
        print(f"stopped at step {summary.get('global_step', 0)}; the same flags and --model_dir={job.model_dir} go on.")
    elif outcome.exit_code:
        print("\n".join([f"error: {outcome.error}", *follow.log_tail(job, shown, outcome)]), file=sys.stderr)
    else:
        print("\n".join(["", *final_lines(summary, job.model_dir)]))
    return outcome.exit_code


def _new_model_dir(model: str) -> str:
    """Return a new directory's name, so that a job without ``--model_dir`` starts afresh."""
    return str(Path("runs") / f"{Path(model).stem}-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}")


def _plan(argv: Sequence[str]) -> int:
    """Print what goes where."""
    problems = _Problems()
    job = problems.read("plan", argv)
    _check_model(job, problems)
    from tfps.runtime import plan  # noqa: PLC0415  imports TensorFlow
    from tfps.tables import print_plan  # noqa: PLC0415

    hosts = [f"task{index}:2222" for index in range((job.num_ps or 1) + (job.num_workers or 2))]
    members = cluster.Cluster(tuple(hosts[: job.num_ps or 1]), tuple(hosts[job.num_ps or 1 :]))
    print_plan(job, members, plan.make(job, members, models.load(job.model)))
    return 0


def _check_model(job: JobConfig, problems: _Problems) -> None:
    """Check what the verbs that work on a model without a cluster need; then import TensorFlow, quietly."""
    problems.of(models.check, job.model)
    problems.of(models.check_data, job.model, job.data_dir, job.num_workers or 1)
    problems.of(task.require_tensorflow)
    problems.settle()
    logs.open_log(None)
    task.load_tensorflow()


def _trained(verb: str, argv: Sequence[str]) -> tuple[JobConfig, models.Model, str]:
    """Return the job that a directory holds, as ``job.json`` and the flags tell, its model, and the checkpoint."""
    problems = _Problems()
    given = problems.read(verb, argv)
    problems.settle()
    if not (given.model_dir or given.checkpoint_path):
        raise ConfigError("--model_dir is missing: give the directory of a trained job.")
    directory = Path(given.model_dir or str(Path(given.checkpoint_path or "").parent))
    stored = read_json(directory / JOB) or {}
    defaults = JobConfig(**{name: value for name, value in stored.items() if name in config.FIELDS})
    job = problems.read(verb, argv, defaults.replace(model_dir=str(directory)))
    path = model_dir.chosen(job)
    _check_model(job, problems)
    return job, models.load(job.model), path


def _eval(argv: Sequence[str]) -> int:
    """Evaluate a checkpoint on this machine."""
    job, model, path = _trained("eval", argv)
    from tfps.runtime import checkpoint, evaluation  # noqa: PLC0415  imports TensorFlow

    values = evaluation.of_checkpoint(job, model, path)
    print(format_progress(checkpoint.step_of(path), {k: v for k, v in values.items() if isinstance(v, float)}))
    return 0


def _export(argv: Sequence[str]) -> int:
    """Write a SavedModel."""
    job, model, path = _trained("export", argv)
    from tfps.runtime import export  # noqa: PLC0415  imports TensorFlow

    print(export.saved_model(job, model, path))
    return 0


_ROLE = "--ps_hosts=h0:2222 --worker_hosts=h1:2222,h2:2222 --job_name=worker --task_index=0"
_JOB = ("job", "training", "mode", "placement", "time limits")

VERBS: Mapping[str, Verb] = {
    "run": Verb(
        _run,
        ("cluster", "size", *_JOB),
        "be one task of a cluster",
        "Start it once for each task, on any machines, with the same flags but --job_name and --task_index. All tasks "
        "end by themselves when the job is done.",
        f"tfps run {_ROLE} --issync=1",
    ),
    "launch": Verb(
        _launch,
        ("size", *_JOB),
        "run a whole cluster on this machine",
        "Shows the job while it runs; Ctrl-C saves and stops it. Without --model_dir it makes a new one in runs/.",
        "tfps launch --num_ps=1 --num_workers=2 --model=mnist --issync=1",
    ),
    "plan": Verb(
        _plan,
        ("size", "job", "training", "mode", "placement"),
        "show what goes where, without starting",
        "Prints each variable's parameter server, the bytes of each, and what one step moves over the wire.",
        "tfps plan --model=mnist --num_ps=2",
    ),
    "eval": Verb(
        _eval,
        ("job", "checkpoint"),
        "measure a checkpoint",
        "Prints one line, step=... loss=... and the model's own metrics. The model, its data and its flags are those "
        "of the job that wrote the directory, where they are not given here.",
        "tfps eval --model_dir=DIR",
    ),
    "export": Verb(
        _export,
        ("job", "checkpoint", "export"),
        "write a SavedModel",
        "Prints the directory of the SavedModel. The model and its flags are those of the job that wrote the "
        "checkpoint, where they are not given here.",
        "tfps export --model_dir=DIR",
    ),
}
