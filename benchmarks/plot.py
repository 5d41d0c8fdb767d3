"""Draws how the cost of an update grows, from the points of step.py's sweeps.

    python benchmarks/plot.py SWEEP.json… PICTURE.png
"""

import argparse
import json
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt

PANELS = {  # what --sweep varies: (its setting, title)
    "prompts": ("prompts", "Prompts an update"),
    "group": ("group", "Completions a prompt"),
    "new_tokens": ("new_tokens", "New tokens a completion"),
    "side": ("width", "Side of the square images, pixels"),
}
LINES = {  # key: (label, style)
    "trl_s": ("TRL GRPOTrainer", {"color": "#c1442e", "marker": "s"}),
    "product_s": ("this project", {"color": "#1f5fa8", "marker": "o"}),
    "floor_s": ("floor of the machine", {"color": "#777777", "linestyle": "--"}),
}


def draw(points: list[dict[str, Any]], picture: Path) -> None:
    """A panel for each sweep that was measured, seconds an update against what was varied, on log axes."""
    measured = [name for name in PANELS if any(point.get("sweep") == name for point in points)]
    figure, axes = plt.subplots(2, 2, figsize=(10, 7.5), sharey=True, layout="constrained")
    for axis, name in zip(axes.flat, PANELS, strict=True):
        if name in measured:
            panel(axis, name, [point for point in points if point.get("sweep") == name])
        else:
            axis.set_visible(False)
    for row in axes:
        row[0].set_ylabel("seconds an update")
    handles, labels = axes.flat[list(PANELS).index(measured[0])].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=len(handles), frameon=False, fontsize=11)
    figure.supxlabel(caption(points), fontsize=9, color="#555555")
    figure.savefig(picture, dpi=130)
    plt.close(figure)


def panel(axis, name: str, points: list[dict[str, Any]]) -> None:
    setting, title = PANELS[name]
    found: dict[int, dict[str, Any]] = {}  # sides may come from different commands; the newest counts
    for point in points:
        of = found.setdefault(point["settings"][setting], {"trl": {}})
        of |= {key: point[key] for key in ("trl", *LINES) if point.get(key)}
    values = sorted(found)
    for key, (label, style) in LINES.items():
        at = [value for value in values if key in found[value]]
        axis.plot(at, [found[value][key] for value in at], label=label, linewidth=2, markersize=6, **style)
    for value, of in found.items():
        beside = {"textcoords": "offset points", "color": LINES["trl_s"][1]["color"]}
        if "trl_s" in of and "product_s" in of:
            text, place = f"{of['trl_s'] / of['product_s']:.1f}x", (value, of["trl_s"])
            axis.annotate(text, place, xytext=(0, 7), ha="center", fontsize=9, **beside)
        elif "error" in of["trl"] and "product_s" in of:
            text, place = f"TRL: {of['trl']['error']}", (value, of["product_s"])
            axis.annotate(text, place, xytext=(0, 9), ha="right", fontsize=8, **beside)
    axis.set_xscale("log")
    axis.set_yscale("log")
    axis.yaxis.set_major_formatter("{x:g}")
    axis.set_xticks(values, [str(value) for value in values])
    axis.minorticks_off()
    axis.margins(x=0.08, y=0.12)
    axis.set_title(title, fontsize=11)
    axis.grid(alpha=0.25)
    axis.spines[["top", "right"]].set_visible(False)


def caption(points: list[dict[str, Any]]) -> str:
    """Each panel varies one of these, and the others stay."""
    fixed = {}
    for setting in ("prompts", "group", "new_tokens", "width", "height"):
        values = [point["settings"][setting] for point in points]
        fixed[setting] = max(set(values), key=values.count)
    point, size = points[0], points[0]["settings"]["size"]
    return (
        f"{size}, mode {point['settings']['mode']}; where it is not varied: {fixed['prompts']} prompts, "
        f"{fixed['group']} completions, {fixed['new_tokens']} new tokens, {fixed['width']}x{fixed['height']} "
        f"images\n{point['machine']}, commit {point['commit']}, {point['date']}; "
        "red numbers: TRL's time over this project's"
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("sweeps", type=Path, nargs="+", help="what step.py --sweep … --json wrote")
    parser.add_argument("picture", type=Path, help="the PNG to write")
    args = parser.parse_args()
    draw([point for file in args.sweeps for point in json.loads(file.read_text())], args.picture)
