"""The verbs of the command line: a file each, or one for a few that belong together, and this one table."""

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
