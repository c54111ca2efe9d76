"""Progress lines are for people, and are read back."""

import math

import pytest

from tfps.progress import format_progress, parse_progress

NEARLY = ["", "step", "step=", "step=x", "step=nan", "step=inf", "step=-1", "step=1.5", "step=1e3", "step=٣", "step=5,"]


def test_a_progress_line_as_people_see_it() -> None:
    """A progress line has the step, then each value as short as it can be read."""
    values = {"loss": 0.53219, "accuracy": 1.0, "examples/s": 12345.6, "tiny": 1.5e-7, "nan": math.nan}
    assert format_progress(100, values) == "step=100 loss=0.5322 accuracy=1 examples/s=12346 tiny=1.5e-07 nan=nan"
    assert format_progress(0, {}) == "step=0"
    assert format_progress(7, {"a": 9999.4, "b": 9999.6, "c": -123456.7}) == "step=7 a=9999 b=10000 c=-123457"


@pytest.mark.parametrize("value", [0.0, -1.5, 0.25, 9999.0, 12345.0, 1e-30, 1e30, math.inf, -math.inf])
def test_a_progress_line_is_read_back(value: float) -> None:
    """What one task writes, the launcher reads."""
    line = format_progress(2**53, {"loss": value, "examples/s": 3.0})
    assert parse_progress(line) == {"step": 2.0**53, "loss": value, "examples/s": 3.0}


def test_not_a_number_is_read_back_too() -> None:
    """A loss that is NaN is a value like others."""
    known = parse_progress(format_progress(3, {"loss": math.nan}))
    assert known is not None
    assert math.isnan(known["loss"])


@pytest.mark.parametrize("name", ["my loss", "a=b", "tab\tand\nline", "step"])
def test_a_users_own_names_do_not_break_the_line(name: str) -> None:
    """A scalar that a model logs, whatever its name, leaves the line readable and its step untouched."""
    line = format_progress(5, {"loss": 1.0, name: 9.0})
    assert "\n" not in line
    known = parse_progress(line)
    assert known is not None
    assert (known["step"], known["loss"]) == (5, 1.0)
    assert 9.0 in known.values() or name == "step"


@pytest.mark.parametrize("line", [*NEARLY, "step=5 loss=low", " step=5", "loss=3 step=5", "step=" + "9" * 400])
def test_other_lines_are_not_taken_for_progress(line: str) -> None:
    """A user's own print, however like a progress line, is left alone."""
    assert parse_progress(line) is None
