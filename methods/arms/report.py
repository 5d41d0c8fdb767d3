"""Writes docs/evidence.md and its plots from what run.py measured.

python methods/arms/report.py                            from docs/evidence/*.json
python methods/arms/report.py RESULTS.json… --out DIR    DIR/evidence.md and DIR/evidence/*.png

What somebody has concluded from the tables stands in DIR/evidence/findings.md, and goes into the page.
"""

import argparse
import itertools
import json
import sys
from collections.abc import Collection
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[0] = str(ROOT)

import numpy as np

from methods.arms import plan, plots
from methods.arms.paired import Comparison, compare

DOCS = ROOT / "docs"
SETS = {"test_val": "val", "test_B": "B", "test_ood": "OOD"}
DEMO = plan.Study().about  # of files that do not say what they are about

INTRODUCTION = """# Evidence

What each arm and each ingredient does to {about}, {steps}
updates. Every arm of GRPO starts from the same base (or after SFT, where it says so), draws on the same rows
with the same seeds, and differs in the named flags only (`methods/arms/run.py` refuses others); SFT takes 16
rows a step, as many as an update has prompts. These figures tell which effects the code has; they say
nothing about the size of such effects on Qwen2-VL-2B.

Accuracy in percent, greedy, on {rows} rows of each set that nothing was chosen by. `submitted` is the policy
that validation chose, `last` the one after the last update. The effect is the arm minus its reference, the
mean over the three sets: first with a 95 % interval for another seed (Student's t over the seeds'
differences), then one for these very models (paired bootstrap over rows, a row with the answers of all
seeds). p is McNemar's exact test (mid-p) with rows x seeds as independent, so it too is about these models.
A difference counts as shown where the interval for another seed leaves out 0. `in train.sh` says whether
the recipe has the arm's flags."""

READOUTS = """\
The readouts are of the last policy, means over seeds with their range. KL to the base: k3, nats a token, on
its own samples; `far` is the share of tokens whose log ratio is beyond 1. `image gap`: accuracy with the
image minus accuracy with an evenly gray one. `labels`: of the numerals in written-out counting, those that
stand at an object asked for (at random places {1:.0f} % on val and {2:.0f} % on OOD would); `bound`: of the
rows with the right count, those whose numerals label exactly the objects. `printed`: right answers to
"Which number labels the red cube?" on drawn figures, `both` those of a pair; this model was never taught to
read digits, and chance is {0:.0f} %."""


# --- reading


def read(paths: Collection[Path]) -> list[dict[str, Any]]:
    """What run.py wrote. SystemExit, with a sentence, for other files and where no job is done yet."""
    files, me = [], Path(sys.argv[0]).name
    for path in paths:
        try:
            files.append(json.loads(path.read_text()))
            done = files[-1]["results"]
        except (OSError, ValueError, TypeError, KeyError) as error:
            why = f"{type(error).__name__}: {error}"
            raise SystemExit(f"{me}: {path} is no results.json of run.py ({why})") from error
        if not done:
            raise SystemExit(f"{me}: no job of {path} is done yet; run.py goes on with them")
    return files


def merge(files: list[dict[str, Any]]) -> dict[str, Any]:
    """The results of several runs as one. A set is compared within the files that name it; of an arm with a
    seed that is in two of them, the later counts."""
    steps, about = {file["max_steps"] for file in files}, {file.get("about", DEMO) for file in files}
    if len(steps) > 1:
        raise SystemExit(f"report.py: runs of {sorted(steps)} updates cannot stand in one table")
    if len(about) > 1:
        raise SystemExit(f"report.py: runs of {' and of '.join(sorted(about))} cannot stand on one page")
    sets: dict[str, dict] = {}
    for file in files:
        for one in file["sets"]:
            known = sets.setdefault(one["name"], one | {"arms": {}, "results": {}})
            known["arms"] |= one["arms"]
            known["results"] |= {
                (r["arm"], r["seed"]): r for r in file["results"] if r["arm"] in ("base", *one["arms"])
            }
    results = {(r["arm"], r["seed"]): r for file in files for r in file["results"]}
    common = {"max_steps": steps.pop(), "about": about.pop()}
    return {"sets": list(sets.values()), "results": results, "files": files} | common


def correct(results: dict, arm: str, seeds: list[int], model: str) -> dict[str, np.ndarray]:
    """{test set: [seeds, rows]} of 0 and 1. Where the submitted policy is the last one, it stands for
    both."""

    def bits(seed: int, name: str) -> list[int]:
        models = results[arm, 0 if arm == "base" else seed]["models"]
        return [int(bit) for bit in models.get(model, models["submission"])["rows"][name]]

    return {name: np.array([bits(seed, name) for seed in seeds]) for name in SETS}


def seeds_of(results: dict, arm: str) -> list[int]:
    return sorted(seed for name, seed in results if name == arm)


def against(
    results: dict, arm: str, reference: str, sets: Collection[str] = tuple(SETS), model: str = "submission"
) -> Comparison | None:
    """What is submitted of an arm (or its last model) against the reference's, over the seeds that both have;
    the base stands against each. None where there is nothing to compare."""
    seeds = set(seeds_of(results, reference))
    seeds &= seeds if arm == "base" and seeds_of(results, "base") else set(seeds_of(results, arm))
    if not seeds or arm == reference:
        return None
    sides = [correct(results, name, sorted(seeds), model) for name in (arm, reference)]
    return compare(*({name: side[name] for name in sets} for side in sides))


# --- tables


def table(header: list[str], rows: list[list[str]]) -> str:
    lines = [f"| {' | '.join(cells)} |" for cells in (header, *rows)]
    return "\n".join([lines[0], f"|{'---|' * len(header)}", *lines[1:]])


def span(interval: tuple[float, float] | None) -> str:
    return "one seed" if interval is None else f"{interval[0]:+.1f} to {interval[1]:+.1f}"


def effects(one: dict, results: dict) -> str:
    """A line for each arm of a set: accuracies of what is submitted, and the effect."""
    header = [
        "arm",
        "seeds",
        *SETS.values(),
        "submitted",
        "last",
        "effect",
        "another seed",
        "these models",
        "p",
    ]
    header += ["outcome", "in train.sh"]
    rows = []
    for arm in ["base", *one["arms"]]:
        seeds = seeds_of(results, arm)
        if not seeds:
            rows.append([arm, "0", *["–"] * (len(header) - 2)])
            continue
        sets = [100 * bits.mean() for bits in correct(results, arm, seeds, "submission").values()]
        last = [100 * bits.mean() for bits in correct(results, arm, seeds, "last").values()]
        cells = [arm, str(len(seeds)), *(f"{value:.1f}" for value in (*sets, np.mean(sets), np.mean(last)))]
        if found := against(results, arm, one["reference"]):
            p = f"{found.p:.3f}" if found.p >= 0.0005 else "<0.001"
            cells += [f"{found.effect:+.1f}", span(found.seeds), span(found.rows), p, found.verdict]
        else:
            cells += ["reference" if arm == one["reference"] else "", "", "", "", ""]
        rows.append([*cells, in_recipe(one["arms"].get(arm, {}))])
    return table(header, rows)


def by_set(one: dict, results: dict) -> str:
    """The effects of each test set, with the interval for another seed."""
    rows = []
    for arm in ["base", *one["arms"]]:
        found = [against(results, arm, one["reference"], [name]) for name in SETS]
        if all(found):
            rows.append([arm, *(f"{c.effect:+.1f} ({span(c.seeds)})" for c in found)])
    return table(["effect", *SETS.values()], rows) if rows else ""


def after_the_same(one: dict, results: dict) -> str:
    """Arms of GRPO against those of SFT that start from the same model and take as long as the reference."""
    of = {arm: results[arm, seeds[0]] for arm in one["arms"] if (seeds := seeds_of(results, arm))}
    rows = []
    for arm, control in itertools.permutations(of, 2):
        kinds, starts = [(of[a]["kind"], of[a].get("after")) for a in (arm, control)], of[arm].get("after")
        if starts and kinds == [("grpo", starts), ("sft", starts)]:
            for model in ("submission", "last"):
                found = [against(results, arm, control, [name], model) for name in SETS]
                both = against(results, arm, control, model=model)
                cells = [f"{c.effect:+.1f} ({span(c.seeds)})" for c in (*found, both)]
                rows.append([f"{arm}, {'submitted' if model == 'submission' else model}", control, *cells])
    return table(["after the same SFT", "against", *SETS.values(), "effect"], rows) if rows else ""


def in_recipe(arm: dict) -> str:
    """Whether train.sh sets what the arm sets."""
    flags = arm.get("flags")
    if not flags:
        return ""
    names = ("MODEL", "DATA", "VAL", "OOD_VAL", "OUT", "SUBMISSION")
    numbers = {"prompts_per_row": "1", "accumulation": "16", "max_steps": "600"}
    line = plan.recipe(ROOT / "train.sh", **dict.fromkeys(names, "x"), **numbers)
    return (
        "yes"
        if all(
            plan.given(line, name) == plan.given(plan.words({name: value}), name)
            for name, value in flags.items()
        )
        else "no"
    )


# What the readouts table shows: (column, where it stands in a result, digits)
COLUMNS = [
    ("KL", ("kl", "k3"), 3), ("far, %", ("kl", "far"), 1), ("image gap", ("image", "gap"), 1),
    ("labels val", ("numbering test_val", "labels_right"), 1),
    ("labels OOD", ("numbering test_ood", "labels_right"), 1),
    ("bound val", ("numbering test_val", "bound_of_correct"), 1),
    ("printed", ("printed", "right"), 1), ("both", ("printed", "both"), 1),
]  # fmt: skip


def readouts(one: dict, results: dict) -> str:
    """A line for each arm: means over seeds, and where they range."""
    rows = []
    for arm in ["base", *one["arms"]]:
        found = [results[arm, seed] for seed in seeds_of(results, arm)]
        found = [result for result in found if "readouts" in result]
        if not found:
            continue
        cells = []
        for name, (part, key), digits in COLUMNS:
            values = [r["readouts"][part][key] for r in found if r["readouts"][part][key] is not None]
            values = [100 * value for value in values] if name == "far, %" else values
            cells.append(ranged(values, digits))
        of_val = [last_numbers(r)["test_val"] for r in found]
        cells += [ranged([n[key] for n in of_val], 1) for key in ("parsed_pct", "mean_tokens")]
        rows.append([arm, *cells])
    return table(["arm", *(name for name, _, _ in COLUMNS), "parsed val", "tokens val"], rows) if rows else ""


def last_numbers(result: dict) -> dict[str, dict]:
    return result["models"].get("last", result["models"]["submission"])["numbers"]


def ranged(values: list[float], digits: int) -> str:
    if not values:
        return "–"
    mean, low, high = (f"{value:.{digits}f}" for value in (np.mean(values), min(values), max(values)))
    return mean if low == high else f"{mean} ({low} to {high})"


def slower(files: list[dict], arm: str, reference: str) -> float | None:
    """Seconds of an update as a multiple of the reference's, seed by seed within a file: on one machine."""
    ratios = []
    for file in files:
        took = {
            (r["arm"], r["seed"]): r["seconds"]["update"]
            for r in file["results"]
            if r["arm"] in (arm, reference) and "update" in r["seconds"]
        }
        both = {seed for _, seed in took if {(arm, seed), (reference, seed)} <= took.keys()}
        ratios += [took[arm, seed] / took[reference, seed] for seed in both]
    return float(np.mean(ratios)) if ratios else None


def cost(one: dict, files: list[dict]) -> str:
    ratios = {arm: slower(files, arm, one["reference"]) for arm in one["arms"] if arm != one["reference"]}
    lines = [f"{arm} {ratio:.2f}" for arm, ratio in ratios.items() if ratio]
    return f"Seconds an update as a multiple of {one['reference']}'s: {', '.join(lines)}." if lines else ""


def budgets(one: dict, results: dict) -> str:
    """Steps and seconds of SFT, and the reference's, seed by seed."""
    lines = []
    for arm in one["arms"]:
        done = [results[arm, seed] for seed in seeds_of(results, arm)]
        if done and done[0]["kind"] == "sft":
            steps = ", ".join(f"{r['steps']} in {r['seconds']['updates']:.0f} s" for r in done)
            lines.append(f"{arm} {steps}")
    if not lines:
        return ""
    reference = one["reference"]
    took = [f"{results[reference, seed]['seconds']['updates']:.0f}" for seed in seeds_of(results, reference)]
    return f"Steps of SFT: {'; '.join(lines)}. The updates of {reference} took {', '.join(took)} s."


# --- the gate

LEVELS = (0.0, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99)  # of --select_level
GATE = """\
`--select_level` asks how sure validation is that a model beats the one that its run began from. Had each of
the {runs} runs above offered its last model alone, on {rows}: what would have been submitted, and what that
gains on the test rows (mean over the three sets and over runs; 0 where the gate keeps what there was)."""


def gate(data: dict[str, Any]) -> str:
    """For each level, what it lets through and what that gains."""
    results, found = data["results"], []
    for (arm, seed), run in results.items():
        sure = run["curve"][-1].get("confidence") if run.get("curve") else None
        if sure is None or run["curve"][-1]["step"] < run["max_steps"]:
            continue
        start = (run["after"], seed) if run.get("after") else ("base", 0)
        last, before = (correct(results, *one, "last") for one in ((arm, [seed]), (start[0], [start[1]])))
        gain = 100 * np.mean([last[name].mean() - before[name].mean() for name in SETS])
        found.append((sure, gain))
    if not found:
        return ""
    rows = []
    for level in LEVELS:
        through = [gain for sure, gain in found if sure >= level]
        cells = [f"{sum(through) / len(found):+.2f}", str(sum(gain < 0 for gain in through))]
        cells += [f"{min(through):+.1f}" if through else "–"]
        kept = [gain for sure, gain in found if sure < level and gain > 0]
        rows.append([f"{level:g}", str(len(through)), *cells, f"{len(kept)} (-{sum(kept) / len(found):.2f})"])
    header = ["level", "submitted", "mean gain", "of these worse", "the worst", "better ones kept back"]
    limits = " or ".join(map(str, sorted({file["eval_limit"] for file in data["files"]})))
    text = GATE.format(runs=len(found), rows=f"{limits} rows of each validation set")
    return f"## The gate\n\n{text}\n\n{table(header, rows)}"


# --- the page


def page(data: dict[str, Any], pictures: Path) -> str:
    results = data["results"]
    rows = {tuple(len(r["models"]["submission"]["rows"][name]) for name in SETS) for r in results.values()}
    if len(rows) > 1:
        raise SystemExit(f"report.py: results on {sorted(rows)} rows of {', '.join(SETS)} cannot be compared")
    tested = {len(bits) for r in results.values() for bits in r["models"]["submission"]["rows"].values()}
    counts = {"steps": data["max_steps"], "rows": " or ".join(map(str, sorted(tested)))}
    parts = [INTRODUCTION.format(about=data["about"], **counts)]
    if (findings := pictures / "findings.md").exists():
        parts.append(f"## Findings\n\n{findings.read_text().strip()}")
    read_out = [r["readouts"] for r in results.values() if "readouts" in r]
    chances = {
        part: np.mean([c for r in read_out if (c := r[part]["chance"]) is not None] or 0)
        for part in ("printed", "numbering test_val", "numbering test_ood")
    }
    for number, one in enumerate(data["sets"]):
        results = one["results"]
        title = one["name"].replace("_", " ").capitalize()
        what = [f"- `{name}`: {arm['what']}" + flags_shown(arm["flags"]) for name, arm in one["arms"].items()]
        parts += [f"## {title}", "\n".join(what), effects(one, results), by_set(one, results)]
        parts.append(after_the_same(one, results))
        drawn = plots.draw_set(
            one, results, {a: against(results, a, one["reference"]) for a in one["arms"]}, pictures
        )
        parts += [f"![{title}: {about}]({pictures.name}/{file.name})" for about, file in drawn]
        if number == 0 and read_out:
            parts.append(READOUTS.format(*chances.values()))
        parts += [readouts(one, results), cost(one, data["files"]), budgets(one, results)]
    parts.append(gate(data))
    parts.append(f"## How it was made\n\n{provenance(data['files'])}")
    return "\n\n".join(part for part in parts if part) + "\n"


def flags_shown(flags: dict[str, Any]) -> str:
    return f" (`{' '.join(plan.words(flags))}`)" if flags else ""


def provenance(files: list[dict]) -> str:
    lines = []
    for file in files:
        lines.append(f"- Commit {file['commit']}, {file['date']}, {file['machine']}: `{file['command']}`")
        left_out = [f"not run: {name}" for name in file["missing"]]
        left_out += [f"refused: {why}" for why in file["refused"].values()]
        lines += [f"  - {line}" for line in left_out]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("results", type=Path, nargs="*", help="what run.py wrote (docs/evidence/*.json)")
    parser.add_argument("--out", type=Path, default=DOCS, help="folder that receives evidence.md")
    args = parser.parse_args()
    paths = args.results or sorted((DOCS / "evidence").glob("*.json"))
    if not paths:
        sys.exit("report.py: there are no results in docs/evidence; name run.py's results.json")
    data, pictures = merge(read(paths)), args.out / "evidence"
    try:
        pictures.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        sys.exit(f"report.py: --out {args.out} cannot be made ({error.strerror}); set a folder")
    (args.out / "evidence.md").write_text(page(data, pictures))
    print(f"{args.out / 'evidence.md'} has the tables, {pictures} the plots")


if __name__ == "__main__":
    main()
