"""What a verb is."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tfps import config
from tfps.runtime import logs, task
from tfps.verbs.problems import Problems

JOB = ("job", "training", "mode", "placement", "speed", "time limits")  # the groups of flags that training takes


@dataclass(frozen=True)
class Verb:
    """One thing that ``tfps`` does.

    Attributes:
        act: Does it, given the flags; returns the exit code.
        groups: The groups of flags that it takes.
        summary: What it does, in a few words.
        details: And in two sentences.
        example: A command.
        argument: What it takes beside flags.
    """

    act: Callable[[Sequence[str]], int]
    groups: Sequence[str]
    summary: str
    details: str
    example: str
    argument: str = ""

    @property
    def flags(self) -> Sequence[str]:
        """The names of its flags."""
        return config.fields_of(self.groups)


def with_tensorflow(problems: Problems) -> None:
    """Settle the problems, then import TensorFlow, quietly: for verbs that work on a model without a cluster."""
    problems.of(task.require_tensorflow)
    problems.settle()
    logs.open_log(None)
    task.load_tensorflow()
