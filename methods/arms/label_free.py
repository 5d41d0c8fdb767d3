"""What rewards without labels do to a policy: a plot, and the tables of methods/{ttrl,intuitor,rent}.

python methods/arms/run.py --arms label_free --jobs 16 --eval_steps 10 --machine "16 CPU cores"
python methods/arms/label_free.py [RESULTS.json…]       default: docs/evidence/*.json
"""

import argparse
import re
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[0] = str(ROOT)

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt

from methods.arms import report

SET, METHODS = "label_free", ("ttrl", "intuitor", "rent")
AFTER = "sft_then_"
FOLDER = ROOT / "docs/evidence"
PICTURES = {"": "label_free.png", AFTER: "label_free_after_sft.png"}  # by the beginning of the arms' names
ROWS = {  # what a row of the plot shows: (key in the log, None for validation; factor, label)
    "validation score, %": (None, 1),
    "right in rollouts, %": ("completions/correct", 100),
    "readable in rollouts, %": ("completions/parsed", 100),
    "reward": ("reward", 1),
}
KEPT, COLLAPSE = "#1f5fa8", "#c1442e"


def arm_results(results: dict, arm: str) -> list[dict[str, Any]]:
    return [results[arm, seed] for seed in report.seeds_of(results, arm)]


def collapse_step(result: dict[str, Any]) -> int | None:
    """The update of the first log line with a sign of a collapse."""
    return next((line["step"] for line in result["log"] if line.get("collapse")), None)


# --- the plots


def columns(results: dict) -> dict[str, list[str]]:
    """The arms of each picture that there are results of."""
    found = {
        name: [prefix + arm for arm in ("main", *METHODS) if report.seeds_of(results, prefix + arm)]
        for prefix, name in PICTURES.items()
    }
    return {name: arms for name, arms in found.items() if arms}


def draw(results: dict, arms: list[str], picture: Path) -> None:
    """A column for each arm, a line for each seed; a dot where the kept policy was validated, a dashed line
    where --collapse_watch would have ended the run."""
    figure, axes = plt.subplots(
        len(ROWS), len(arms), figsize=(3 * len(arms), 2 * len(ROWS)), sharex=True, squeeze=False,
        layout="constrained",
    )  # fmt: skip
    for column, arm in enumerate(arms):
        for row, (title, (key, factor)) in enumerate(ROWS.items()):
            axis = axes[row][column]
            for result in arm_results(results, arm):
                draw_line(axis, result, key, factor)
            axis.grid(alpha=0.25)
            axis.spines[["top", "right"]].set_visible(False)
            if key != "reward":
                axis.set_ylim(-3, 103)
            if column == 0:
                axis.set_ylabel(title, fontsize=9)
        axes[0][column].set_title(arm, fontsize=11)
    figure.supxlabel("update (dots: what is kept; dashed: --collapse_watch would end it)", fontsize=10)
    figure.savefig(picture, dpi=110)
    plt.close(figure)


def draw_line(axis, result: dict[str, Any], key: str | None, factor: float) -> None:
    points = result["log"] if key else result["curve"]
    values = {point["step"]: factor * point[key or "score"] for point in points}
    (line,) = axis.plot(list(values), list(values.values()), linewidth=1.2)
    if key is None and result["submitted_step"] in values:
        kept = result["submitted_step"]
        axis.plot(kept, values[kept], "o", color=line.get_color(), markersize=6)
    if step := collapse_step(result):
        axis.axvline(step, color=line.get_color(), linestyle="--", linewidth=0.8)


# --- the tables


def method_table(results: dict, method: str) -> str:
    """A line for each seed: without and with the KL term, main's for comparison, and both after SFT."""
    header = ["arm", "seed", "base", "kept", "at update", "last", "watch ends it at", "readable, last",
              "right in rollouts, first to last", "reward, first to last"]  # fmt: skip
    rows = []
    for arm in (method, f"{method}_kl", "main", AFTER + method, AFTER + "main"):
        for result in arm_results(results, arm):
            log, step = result["log"], collapse_step(result)
            kept, last = (mean_accuracy(result, name) for name in ("submission", "last"))
            start = (result["after"], result["seed"]) if "after" in result else ("base", 0)
            base = mean_accuracy(results[start], "submission")
            rows.append([
                arm, str(result["seed"]), f"{base:.1f}", f"{kept:.1f}", str(result["submitted_step"]),
                f"{last:.1f}", str(step) if step else "–", f"{100 * log[-1]['completions/parsed']:.0f} %",
                " to ".join(f"{100 * one['completions/correct']:.0f} %" for one in (log[0], log[-1])),
                " to ".join(f"{one['reward']:.2f}" for one in (log[0], log[-1])),
            ])  # fmt: skip
    return report.table(header, rows)


def mean_accuracy(result: dict[str, Any], model: str) -> float:
    """In percent, the mean over the test sets; where the last policy is the kept one, it stands for both."""
    numbers = result["models"].get(model, result["models"]["submission"])["numbers"]
    return sum(numbers[name]["accuracy_pct"] for name in report.SETS) / len(report.SETS)


def readme_part(results: dict, files: list[dict[str, Any]], method: str) -> str:
    """`files` are what the results stand in."""
    about = (
        f"On [the demo](../demo/README.md), {files[-1]['max_steps']} updates from one base, with no watch to "
        "end them. `base`, `kept` and `last` are accuracies in percent, means over the sets that chose "
        "nothing: of the base, of the policy that validation kept, and of the one after the last update. "
        "`_kl` has `--beta 0.01`; `main` is rewarded by the true counts; `sft_then_` begins from what SFT on "
        "written-out counting has made of the base."
    )
    ratio = report.slower(files, method, "main")
    cost = f"An update takes {ratio:.2f} times main's on the demo." if ratio else ""
    pictures = [
        f"![What {', '.join(arms)} do while training](../../docs/evidence/{name})"
        for name, arms in columns(results).items()
    ]
    parts = [about, method_table(results, method), cost, *pictures, report.provenance(files)]
    return "\n\n".join(part for part in parts if part)


def write_readme(path: Path, made: str) -> None:
    pattern = r"(<!-- results -->\n).*?(\n<!-- end of results -->)"
    path.write_text(re.sub(pattern, lambda m: m[1] + made + m[2], path.read_text(), flags=re.S))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("results", type=Path, nargs="*", help="what run.py wrote (docs/evidence/*.json)")
    parser.add_argument("--readmes", type=Path, default=ROOT / "methods", help="folder of the methods")
    parser.add_argument("--pictures", type=Path, default=FOLDER, help="folder of the plots")
    args = parser.parse_args()
    files = report.read(args.results or sorted(FOLDER.glob("*.json")))
    files = [file for file in files if any(one["name"] == SET for one in file["sets"])]
    results = report.merge(files)["results"] if files else {}
    found = [method for method in METHODS if report.seeds_of(results, method)]
    if not found or ("base", 0) not in results:
        sys.exit(f"label_free.py: there are no results of base and of one of {', '.join(METHODS)} in {SET}")
    args.pictures.mkdir(parents=True, exist_ok=True)
    for name, arms in columns(results).items():
        draw(results, arms, args.pictures / name)
    for method in found:
        write_readme(args.readmes / method / "README.md", readme_part(results, files, method))
    print(f"The plots in {args.pictures} and README.md of {', '.join(found)} in {args.readmes} are written")


if __name__ == "__main__":
    main()
