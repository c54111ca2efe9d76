"""Draw results.svg from the raw figures: plot.py RESULTS.json PICTURE. Runs in .venv/bench/plot."""

import json
import statistics
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib import pyplot
from workloads import WORKLOADS

mpl.use("svg")
mpl.rcParams["svg.hashsalt"] = "tfps"
mpl.rcParams["svg.fonttype"] = "none"  # text, which a browser draws, instead of outlines
COLUMNS = 2
COLOURS = {"tfps": "#d1495b", "tfps_bf16": "#d1495b", "limit": "#b8b8b8", "raw_tcp": "#b8b8b8"}
OTHER = "#30638e"


def good_values(results: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, list[float]]]:
    """Return the figures that count, by workload and program."""
    found: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for result in results:
        if not result["problem"]:
            found[result["workload"]][result["program"]].append(result["value"])
    return found


def draw(axes: Any, name: str, values: Mapping[str, Sequence[float]]) -> None:
    """Draw one workload: a bar for each program's median, a whisker from min to max."""
    order = [program for program in reversed(WORKLOADS[name].programs) if program in values]
    medians = [statistics.median(values[program]) for program in order]
    low = [median - min(values[program]) for program, median in zip(order, medians, strict=True)]
    high = [max(values[program]) - median for program, median in zip(order, medians, strict=True)]
    colours = [COLOURS.get(program, OTHER) for program in order]
    axes.barh(order, medians, xerr=[low, high], color=colours, error_kw={"lw": 1, "capsize": 2})
    axes.set_title(f"{name}, {WORKLOADS[name].unit}", fontsize=10, loc="left")
    axes.tick_params(labelsize=8)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.10g}")
    axes.spines[["top", "right"]].set_visible(False)


def main(source: str, picture: str) -> None:
    """Draw everything."""
    found = good_values(json.loads(Path(source).read_text()))
    names = [name for name in WORKLOADS if name in found]
    lines = -(-len(names) // COLUMNS) or 1
    figure, all_axes = pyplot.subplots(lines, COLUMNS, figsize=(10, 2.2 * lines), squeeze=False)
    for axes, name in zip(all_axes.flat, names, strict=False):
        draw(axes, name, found[name])
    for axes in all_axes.flat[len(names) :]:
        axes.set_visible(False)
    figure.tight_layout()
    figure.savefig(picture, metadata={"Date": None})


if __name__ == "__main__":
    main(*sys.argv[1:])
