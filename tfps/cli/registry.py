"""The table of commands. Each command has its own module; a few related ones share one."""

from collections.abc import Mapping

from tfps.cli import doctor, evaluate, jobs, launch, plan, run, submit
from tfps.cli.command import Command

COMMANDS: Mapping[str, Command] = {
    "run": run.COMMAND,
    "launch": launch.COMMAND,
    "submit": submit.COMMAND,
    "status": jobs.STATUS,
    "logs": jobs.LOGS,
    "cancel": jobs.CANCEL,
    "plan": plan.COMMAND,
    "doctor": doctor.COMMAND,
    "eval": evaluate.EVAL,
    "export": evaluate.EXPORT,
}
