"""Whether the weights at the end are what so many updates make them; see ``models/exact.py``. Pure."""

from collections.abc import Mapping
from typing import Any


def check(summary: Mapping[str, Any], mode: str, num_workers: int) -> tuple[float, str]:
    """Compare a job's final weights with its step.

    Returns:
        By how many updates ``count`` and ``global_step`` differ, and what is wrong with the mean in sync, or nothing.
    """
    step, sums = summary.get("global_step", 0), summary.get("eval") or {}
    if "weight" not in sums:
        return 0.0, ""
    off = abs(-sums["count"] - step)
    mean = (2**num_workers - 1) / num_workers
    wrong = mode == "sync" and (off or sums["weight"] != -mean * step)
    return off, f"not the exact mean: weight {sums['weight']:g}, count {sums['count']:g} at {step}" if wrong else ""
