"""The table of commands. Each command has its own module; a few related ones share one."""

from collections.abc import Mapping

from tfps.cli import doctor, evaluate, jobs, launch, plan, run, submit
from tfps.cli.command import Command

_ALL = (
    run.COMMAND,
    launch.COMMAND,
    submit.COMMAND,
    jobs.STATUS,
    jobs.LOGS,
    jobs.CANCEL,
    plan.COMMAND,
    doctor.COMMAND,
    evaluate.EVAL,
    evaluate.EXPORT,
)

COMMANDS: Mapping[str, Command] = {command.name: command for command in _ALL}
