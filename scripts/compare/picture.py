"""Draw the comparison: picture.py RESULTS.json PICTURE. Runs in .venv/bench/plot."""

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import matplotlib as mpl
from curves import by_bytes, longest
from matplotlib import pyplot

mpl.use("svg")
mpl.rcParams["svg.hashsalt"] = "tfps"
mpl.rcParams["svg.fonttype"] = "none"  # text, which a browser draws, instead of outlines


def draw_loss(axes: Any, runs: Mapping[str, Mapping[str, Any]], colors: Mapping[str, str], column: int) -> None:
    """Draw the loss of each run against a column of its curve: 0 is seconds, 1 is batches."""
    for name, run in runs.items():
        axes.plot([point[column] for point in run["curve"]], [p[2] for p in run["curve"]], color=colors[name], lw=1.2)
    axes.set_yscale("log")
    axes.set_ylabel("training loss", fontsize=8)


def main(source: str, picture: str) -> None:
    """Draw the four parts."""
    told = json.loads(Path(source).read_text())
    trials = told["trials"]
    colors = {name: f"C{index}" for index, name in enumerate(dict.fromkeys(trial["name"] for trial in trials))}
    figure, ((calm, slowed), (steps, sizes)) = pyplot.subplots(2, 2, figsize=(10, 7))
    draw_loss(calm, longest(trials, "undisturbed"), colors, 0)
    draw_loss(slowed, longest(trials, "slowed"), colors, 0)
    draw_loss(steps, longest(trials, "undisturbed"), colors, 1)
    for name, points in by_bytes(trials).items():
        sizes.plot(*zip(*points, strict=True), color=colors[name], marker="o", ms=3, lw=1.2)
    sizes.set_xscale("log")
    sizes.set_ylabel("accuracy", fontsize=8)
    slow = f"one of {told['setting']['num_workers']} workers {told['setting']['slowdown']:g} times slower"
    titles: tuple[str, ...] = ("loss against seconds, undisturbed", f"loss against seconds, {slow}")
    titles += ("loss against steps of all workers, undisturbed", "accuracy against megabytes sent, undisturbed")
    for axes, title in zip((calm, slowed, steps, sizes), titles, strict=True):
        axes.set_title(title, fontsize=9, loc="left")
        axes.tick_params(labelsize=8)
        axes.spines[["top", "right"]].set_visible(False)
    calm.legend([pyplot.Line2D([], [], color=color) for color in colors.values()], list(colors), fontsize=7)
    figure.tight_layout()
    figure.savefig(picture, metadata={"Date": None})


if __name__ == "__main__":
    main(*sys.argv[1:])
