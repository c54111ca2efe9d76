"""The verbs of the command line: a file each, or one for a few that belong together, and this one table."""

from collections.abc import Mapping

from tfps.cli import doctor, evaluate, jobs, launch, plan, run, submit
from tfps.cli.command import Verb

VERBS: Mapping[str, Verb] = {
    "run": run.VERB,
    "launch": launch.VERB,
    "submit": submit.VERB,
    "status": jobs.STATUS,
    "logs": jobs.LOGS,
    "cancel": jobs.CANCEL,
    "plan": plan.VERB,
    "doctor": doctor.VERB,
    "eval": evaluate.EVAL,
    "export": evaluate.EXPORT,
}
