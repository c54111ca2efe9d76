"""The verbs of the command line: a file each, or one for a few that belong together, and this one table."""

from collections.abc import Mapping

from tfps.verbs import doctor, launch, plan, run, submit, submitted, trained
from tfps.verbs.verb import Verb

VERBS: Mapping[str, Verb] = {
    "run": run.VERB,
    "launch": launch.VERB,
    "submit": submit.VERB,
    "status": submitted.STATUS,
    "logs": submitted.LOGS,
    "cancel": submitted.CANCEL,
    "plan": plan.VERB,
    "doctor": doctor.VERB,
    "eval": trained.EVAL,
    "export": trained.EXPORT,
}
