"""Progress lines, the same on every platform. Does not import TensorFlow.

A progress line is ``name=value`` pairs, one line per report. ``parse_progress`` reads it back, so that a launcher can
follow a task through its output alone.
"""

import re
from collections.abc import Mapping

from tfps.text import number

RATES = ("loss", "updates/s")  # a progress line with one of these reports on training or on a service
# The first word of a task's line, if the line starts a new state of that task.
STATES = ("waiting", "training", "evaluating", "done", "stopped", "stalled", "restarted", "error")


def format_progress(step: int, values: Mapping[str, float]) -> str:
    """Return a progress line like ``step=100 loss=0.53 examples/s=12345``."""
    named = ((re.sub(r"[\s=]", "_", name), value) for name, value in values.items())
    return " ".join([f"step={step}", *(f"{name}={number(value)}" for name, value in named)])


def parse_progress(line: str) -> dict[str, float] | None:
    """Return the pairs of a progress line, or ``None`` for any other line."""
    if not re.match(r"step=[0-9]{1,19}(\s|\Z)", line):
        return None
    first, *others = (word.partition("=") for word in line.split())
    try:
        return {**{name: float(value) for name, _, value in others}, "step": float(first[2])}
    except ValueError:
        return None


def state_of(line: str) -> str:
    """Return the state that a task's line starts, one of ``STATES``; empty if it starts none."""
    word = line.partition(" ")[0].rstrip().rstrip(":")
    return word if word in STATES else ""


def is_reserved(line: str) -> bool:
    """Return whether a line begins like one of a task's own: with a state, or as a progress line."""
    return bool(state_of(line) or re.match(r"step=[0-9]", line))
