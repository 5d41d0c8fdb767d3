"""The plots of docs/evidence.md: effects with their intervals, and validation while training."""

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt

from methods.arms.paired import Comparison

REFERENCE, ARM, SEED = "#777777", "#1f5fa8", "#e08a1e"


def draw_set(
    one: dict, results: dict, comparisons: dict[str, Comparison | None], folder: Path
) -> list[tuple[str, Path]]:
    """The pictures of a set of arms, each with what it shows; those with nothing to show are left out."""
    drawn = []
    found = {arm: c for arm, c in comparisons.items() if c}
    if found:
        path = folder / f"{one['name']}_effects.png"
        draw_effects(one["reference"], found, path)
        drawn.append(("effect of each arm on what is submitted", path))
    curves = {
        arm: [r["curve"] for (name, _), r in sorted(results.items()) if name == arm and r.get("curve")]
        for arm in one["arms"]
    }
    if any(curves.values()):
        path = folder / f"{one['name']}_curves.png"
        draw_curves(one["reference"], {arm: c for arm, c in curves.items() if c}, path)
        drawn.append(("validation score while training", path))
    return drawn


def draw_effects(reference: str, found: dict[str, Comparison], path: Path) -> None:
    """A line for each arm: the interval for another seed thin, that for these models thick, a dot a seed."""
    figure, axis = plt.subplots(figsize=(8, 1.2 + 0.45 * len(found)), layout="constrained")
    for place, c in enumerate(found.values()):
        if c.seeds:
            axis.plot(c.seeds, [place, place], color=ARM, linewidth=1.2, label="95 %, another seed")
        axis.plot(c.rows, [place, place], color=ARM, linewidth=5, alpha=0.45, label="95 %, these models")
        axis.plot(c.by_seed, [place] * len(c.by_seed), "o", color=SEED, markersize=4, label="a seed")
        axis.plot(c.effect, place, "|", color="black", markersize=13, label="mean")
    axis.axvline(0, color=REFERENCE, linewidth=1, linestyle="--")
    axis.set_yticks(range(len(found)), list(found))
    axis.invert_yaxis()
    axis.margins(y=0.1)
    axis.set_xlabel(f"points of accuracy against {reference}, mean over val, B and OOD")
    axis.grid(axis="x", alpha=0.25)
    axis.spines[["top", "right"]].set_visible(False)
    handles = dict(zip(*reversed(axis.get_legend_handles_labels()), strict=True))  # one of each label
    figure.legend(
        handles.values(), handles.keys(), loc="outside upper center", ncols=4, frameon=False, fontsize=9
    )
    figure.savefig(path, dpi=110)
    plt.close(figure)


def draw_curves(reference: str, curves: dict[str, list[list[dict]]], path: Path) -> None:
    """A panel for each arm: its seeds, their mean, and the reference's mean in gray."""
    columns = min(4, len(curves))
    rows = -(-len(curves) // columns)
    figure, axes = plt.subplots(
        rows, columns, figsize=(2.9 * columns, 2.5 * rows + 0.3), sharex=True, sharey=True, squeeze=False,
        layout="constrained",
    )  # fmt: skip
    for axis in axes.flat[len(curves) :]:
        axis.set_visible(False)
    for axis, (arm, seeds) in zip(axes.flat, curves.items(), strict=False):
        if arm != reference and reference in curves:
            axis.plot(*mean_curve(curves[reference]), color=REFERENCE, linewidth=1.5, linestyle="--")
        for curve in seeds:
            axis.plot(
                [p["step"] for p in curve], [p["score"] for p in curve], color=ARM, alpha=0.3, linewidth=1
            )
        axis.plot(*mean_curve(seeds), color=ARM, linewidth=2)
        axis.set_title(arm, fontsize=10)
        axis.grid(alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
    figure.supxlabel(f"update (dashed: the mean of {reference})", fontsize=9)
    figure.supylabel("validation score, mean of val and OOD, %", fontsize=9)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def mean_curve(curves: list[list[dict]]) -> tuple[list[int], list[float]]:
    """At the updates that all curves have."""
    by_step = [{p["step"]: p["score"] for p in curve} for curve in curves]
    steps = sorted(set.intersection(*(set(one) for one in by_step)))
    return steps, [sum(one[step] for one in by_step) / len(by_step) for step in steps]
