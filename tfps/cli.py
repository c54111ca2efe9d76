"""The command line. Prints for people, as the verbs do, and exits. Does not import TensorFlow until a verb needs it."""

import os
import shutil
import sys
import textwrap
from collections.abc import Sequence

import tfps
from tfps import config, models
from tfps.errors import ConfigError, StoppedError, TfpsError
from tfps.verbs import VERBS
from tfps.verbs.problems import CHOICES, tell
from tfps.verbs.run import ROLE


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    args = _as_flag(list(sys.argv[1:] if argv is None else argv))
    verb, rest = (args[0], args[1:]) if args and not args[0].startswith("-") else ("run", args)
    try:
        if "--version" in args or args == ["version"]:
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
        return tell(error, sys.stderr)
    except (KeyboardInterrupt, BrokenPipeError):  # BrokenPipeError: tfps ... | head
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return StoppedError.exit_code


def _as_flag(args: list[str]) -> list[str]:
    """Return ``help [VERB]`` as ``[VERB] --help``."""
    return [*args[1:], "--help"] if args[:1] == ["help"] else args


def _in_a_cluster() -> bool:
    return bool({"TF_CONFIG", "SLURM_STEP_NUM_TASKS"} & set(os.environ))


def _usage() -> str:
    verbs = "\n".join(f"  {name:<8} {verb.summary}" for name, verb in VERBS.items())
    return (
        "TensorFlow 1.x-style parameter-server training, on today's TensorFlow.\n\n"
        f"usage: tfps VERB [--flag=value ...]\n\n{verbs}\n\n"
        f"Try it:\n  {VERBS['launch'].example}\n\n"
        f"Without a verb it is run, so the classic command line works unchanged:\n  python -m tfps {ROLE}\n\n"
        "tfps VERB --help tells a verb's flags."
    )


def _help(verb: str) -> str:
    told = VERBS[verb]
    choices = {**CHOICES, "model": tuple(models.BUILTIN)}
    width = max(60, min(100, shutil.get_terminal_size((100, 24)).columns))
    flags = config.describe(told.flags, choices, width)
    details = textwrap.fill(told.details, width)
    return f"tfps {verb}: {told.summary}\n\n{details}\n\n  {told.example}\n{flags}"
