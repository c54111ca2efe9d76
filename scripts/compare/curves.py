"""Choose what the picture shows from the figures of all runs, as they are in results.json."""

from collections.abc import Mapping, Sequence
from typing import Any

Trials = Sequence[Mapping[str, Any]]


def longest(trials: Trials, case: str) -> dict[str, Mapping[str, Any]]:
    """Return the longest run of each candidate in a case, the first of several."""
    found: dict[str, Mapping[str, Any]] = {}
    for trial in trials:
        if trial["case"] == case and not trial["problem"]:
            name = trial["name"]
            found[name] = max(found.get(name, trial), trial, key=lambda one: one["batches"])
    return found


def by_bytes(trials: Trials) -> dict[str, list[tuple[float, float]]]:
    """Return the points (megabytes, accuracy) of the undisturbed runs of each candidate, in the order of bytes."""
    found: dict[str, list[tuple[float, float]]] = {}
    for trial in trials:
        if trial["case"] == "undisturbed" and not trial["problem"]:
            found.setdefault(trial["name"], []).append((trial["sent"] / 1e6, trial["accuracy"]))
    return {name: sorted(points) for name, points in found.items()}
