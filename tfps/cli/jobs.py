"""``tfps status``, ``logs`` and ``cancel``: commands that take the handle of a submitted job."""

from collections.abc import Sequence

from tfps.cli.command import Command, split_arguments
from tfps.cli.tables import print_status
from tfps.cli.validation import ProblemCollector
from tfps.cluster.spec import Task
from tfps.config.command_options import LogsOptions
from tfps.jobs.handle import FAILED, PENDING, RUNNING, SUCCEEDED, Status, SubmittedJob
from tfps.launchers.registry import LAUNCHERS
from tfps.storage import JobDirectory
from tfps.text import plural, show

_EXAMPLE = "slurm:4711"


_GIVE = f"give the one that tfps submit printed, like {_EXAMPLE}"


def _find(verb: Command, argv: Sequence[str]) -> tuple[SubmittedJob, LogsOptions]:
    """Return the job whose handle is among the arguments, and the flags."""
    problems = ProblemCollector(verb.name)
    handles, flags = split_arguments(argv, verb.flags)
    parsed = problems.read(verb.flags, flags)
    if len(handles) != 1:
        problem = f"{len(handles)} handles are given" if handles else "the job's handle is missing"
        problems.add(f"{problem}: {_GIVE}.")
    elif handles[0].partition(":")[0] not in LAUNCHERS:
        problems.add(f"{show(handles[0])} is not a job handle: {_GIVE}.{_of_local_job(handles[0])}")
    problems.settle()
    platform, _, name = handles[0].partition(":")
    return LAUNCHERS.load(platform).find(name), parsed.options(LogsOptions)


def _of_local_job(path: str) -> str:
    """Return where to look instead if the path is the directory of a job of ``tfps launch``, else nothing."""
    directory = JobDirectory(path)
    logs = f" Its logs are in {show(str(directory.logs))}." if directory.logs.is_dir() else ""
    if directory.summary.is_file():
        return f" A job of tfps launch has none. This one has ended: see {show(str(directory.summary))}.{logs}"
    ends = "it runs in its terminal, and Ctrl-C there, or SIGTERM to the launcher, ends it"
    return f" A job of tfps launch has none: {ends}.{logs}" if logs or directory.job.is_file() else ""


def _status(argv: Sequence[str]) -> int:
    job, _ = _find(STATUS, argv)
    print_status(job.handle, job.status())
    return 0


def _logs(argv: Sequence[str]) -> int:
    job, options = _find(LOGS, argv)
    task = Task.parse(options.task) if options.task else None
    for line in job.logs(task, options.follow):
        print(line.text if task else f"{line.task!s:<9} | {line.text}", flush=True)
    return 0


def _cancel(argv: Sequence[str]) -> int:
    job, _ = _find(CANCEL, argv)
    before = job.status()
    job.cancel()  # also of a job that has ended: some of it may be left on the platform
    print(f"{job.handle} {_what_was_done(before)}")
    return 0


def _what_was_done(before: Status) -> str:
    """Return what ``cancel`` has done; of a job that had failed, some tasks may still have run."""
    if before.state not in (SUCCEEDED, FAILED):
        return "is cancelled"
    left = sum(known.state in (PENDING, RUNNING) for known in before.tasks.values())
    stopped = f"; stopped {plural(left, 'task')} that still ran" if left else ""
    return f"had ended before: {before.state}{stopped}"


_HANDLE = "HANDLE is what tfps submit printed."

STATUS = Command(
    "status",
    _status,
    (),
    "show a submitted job's tasks",
    f"{_HANDLE} Asks the platform.",
    f"tfps status {_EXAMPLE}",
    "HANDLE",
)
LOGS = Command(
    "logs",
    _logs,
    ("logs",),
    "show the logs of a submitted job",
    f"{_HANDLE} Each line starts with the name of its task.",
    f"tfps logs {_EXAMPLE} --task=worker:1 --follow",
    "HANDLE",
)
CANCEL = Command(
    "cancel",
    _cancel,
    (),
    "end a submitted job",
    f"{_HANDLE} The tasks save and exit; their files stay.",
    f"tfps cancel {_EXAMPLE}",
    "HANDLE",
)
