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
    if "reward_funcs" in one["may_differ"]:
        logs = {
            arm: [r["log"] for (name, _), r in sorted(results.items()) if name == arm and r.get("log")]
            for arm in one["arms"]
        }
        if any(logs.values()):
            path = folder / f"{one['name']}_rewards.png"
            draw_rewards({arm: log for arm, log in logs.items() if log}, path)
            drawn.append(("what is rewarded, and what is right, while training", path))
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
    figure, axes = panels(len(curves))
    for axis, (arm, seeds) in zip(axes, curves.items(), strict=False):
        if arm != reference and reference in curves:
            axis.plot(*mean_curve(curves[reference]), color=REFERENCE, linewidth=1.5, linestyle="--")
        for curve in seeds:
            axis.plot(
                [p["step"] for p in curve], [p["score"] for p in curve], color=ARM, alpha=0.3, linewidth=1
            )
        axis.plot(*mean_curve(seeds), color=ARM, linewidth=2)
        axis.set_title(arm, fontsize=10)
    figure.supxlabel(f"update (dashed: the mean of {reference})", fontsize=9)
    figure.supylabel("validation score, mean of val and OOD, %", fontsize=9)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def draw_rewards(logs: dict[str, list[list[dict]]], path: Path) -> None:
    """A panel for each arm: means over seeds of its reward, on a scale of its own, and of the shares of its
    completions that are right, that can be read, and that were cut."""
    shares = {"correct": ARM, "parsed": "#3a9d5d", "truncated": "#c1442e"}
    figure, axes = panels(len(logs))
    for axis, (arm, seeds) in zip(axes, logs.items(), strict=False):
        for share, color in shares.items():
            steps, values = mean_curve(seeds, f"completions/{share}")
            axis.plot(steps, [100 * value for value in values], color=color, label=share)
        own = axis.twinx()
        own.plot(*mean_curve(seeds, "reward"), color=SEED, linestyle="--")
        own.tick_params(axis="y", labelcolor=SEED, labelsize=8)
        own.spines["top"].set_visible(False)
        axis.plot([], [], color=SEED, linestyle="--", label="reward (right scale)")
        axis.set_ylim(-3, 103)
        axis.set_title(arm, fontsize=10)
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside upper center", ncols=4, frameon=False)
    figure.supxlabel("update", fontsize=9)
    figure.supylabel("share of completions, %", fontsize=9)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def panels(number: int) -> tuple[plt.Figure, list[plt.Axes]]:
    columns = min(4, number)
    rows = -(-number // columns)
    figure, axes = plt.subplots(
        rows, columns, figsize=(3.0 * columns, 2.5 * rows + 0.5), sharex=True, sharey=True, squeeze=False,
        layout="constrained",
    )  # fmt: skip
    for place, axis in enumerate(axes.flat):
        axis.set_visible(place < number)
        axis.grid(alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
        axis.xaxis.set_tick_params(labelbottom=place + columns >= number)  # where none stands below
    return figure, list(axes.flat)


def mean_curve(curves: list[list[dict]], key: str = "score") -> tuple[list[int], list[float]]:
    """At the updates that all curves have."""
    by_step = [{p["step"]: p[key] for p in curve} for curve in curves]
    steps = sorted(set.intersection(*(set(one) for one in by_step)))
    return steps, [sum(one[step] for one in by_step) / len(by_step) for step in steps]
