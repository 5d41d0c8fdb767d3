"""Which model is submitted, and which rows choose it.

    python open_r1/selection.py FOLDER [FOLDER …] --out rows.json [--share 0.5] [--seed 0]

splits data sets into rows that choose (--selection_rows rows.json in training) and rows that report
(--report_rows rows.json in selfcheck.py), so that what chooses never reports.
"""

import argparse
import json
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

if __package__ in (None, ""):  # run as a file
    sys.path[0] = str(Path(__file__).resolve().parent.parent)
    from open_r1.versions import check_versions

    check_versions()

import numpy as np

from open_r1.validation import Example, pick_rows, score

BASE, STANDING = "base", "submission"  # the names of two candidates
DRAWS = 10_000  # bootstrap samples
PARTS = ("selection", "report")


# --- What a model got right


@dataclass(frozen=True)
class Outcome:
    """{set: {row: whether the answer was right}}."""

    sets: dict[str, dict[int, bool]]

    @property
    def accuracies(self) -> dict[str, float]:
        """In percent."""
        return {name: 100 * sum(rows.values()) / len(rows) for name, rows in self.sets.items()}

    @property
    def score(self) -> float:
        return score({"accuracy_pct": accuracy} for accuracy in self.accuracies.values())

    def to_json(self) -> dict[str, dict[str, list[int]]]:
        return {
            name: {"right": [r for r in rows if rows[r]], "wrong": [r for r in rows if not rows[r]]}
            for name, rows in self.sets.items()
        }

    @classmethod
    def from_json(cls, sets: dict[str, dict[str, list[int]]]) -> "Outcome":
        return cls({
            name: dict.fromkeys(rows["right"], True) | dict.fromkeys(rows["wrong"], False)
            for name, rows in sets.items()
        })  # fmt: skip


def rows_right(examples: Iterable[Example]) -> dict[int, bool]:
    return {example.row: example.correct for example in examples}


# --- The choice


def gains(one: Outcome, other: Outcome) -> np.ndarray:
    """By how many points of the score `one` is better than `other` in each of DRAWS paired bootstrap samples
    (Efron and Tibshirani, 1993): rows are drawn with replacement within each set, the same for both.

    A sample's gain depends only on how many of its rows are won, tied and lost, which are multinomial.
    Raises ValueError where the two were not measured on the same rows.
    """
    random, total = np.random.default_rng(0), np.zeros(DRAWS)
    if one.sets.keys() != other.sets.keys():
        raise ValueError(f"Measured on {', '.join(one.sets)} and on {', '.join(other.sets)}: not comparable.")
    for name, rows in one.sets.items():
        if rows.keys() != other.sets[name].keys():
            raise ValueError(f"Not measured on the same rows of {name}: not comparable.")
        differences = np.array([int(right) - int(other.sets[name][row]) for row, right in rows.items()])
        shares = [(differences == kind).mean() for kind in (1, 0, -1)]
        won, _, lost = random.multinomial(len(differences), shares, size=DRAWS).T
        total += 100 * (won - lost) / len(differences)
    return total / len(one.sets)


def confidence(one: Outcome, other: Outcome) -> float:
    """The share of paired bootstrap samples in which `one` scores higher than `other`."""
    return float((gains(one, other) > 1e-9).mean())  # rounding is no gain


def choose(candidates: dict[str, Outcome], level: float) -> str:
    """The name of the candidate to submit: the highest score of those that beat the base at this level of
    confidence, else the base. On equal scores the first one.

    What stands in the submission folder already loses its place to a better one only: it stays where nothing
    beats both it and the base, unless the base itself scores higher.
    """
    best = BASE
    if STANDING in candidates and candidates[STANDING].score >= candidates[BASE].score:
        best = STANDING
    for name, outcome in candidates.items():
        if outcome.score > candidates[best].score and confidence(outcome, candidates[BASE]) >= level:
            best = name
    return best


# --- The rows


def split(folders: list[str], share: float, seed: int, of: str = "test") -> dict[str, dict[str, Any]]:
    """{name of the folder: its number of rows, those that choose, those that report}; the same for the same
    seed. `of` is the split of data sets that have several. Raises ValueError for a share that leaves a part
    empty and for two folders of one name."""
    from open_r1.data import load_rows

    parts: dict[str, dict[str, Any]] = {}
    for folder in folders:
        name, total = Path(folder).resolve().name, len(load_rows(folder, of))
        if name in parts:
            raise ValueError(f"{folder}: a data set {name} came before; rename one of the folders")
        chosen = round(share * total)
        if not 0 < chosen < total:
            raise ValueError(f"--share {share:g} of {total} rows of {folder} leaves no rows to one part")
        order = np.random.default_rng(seed).permutation(total).tolist()
        halves = sorted(order[:chosen]), sorted(order[chosen:])
        parts[name] = {"rows": total, **dict(zip(PARTS, halves, strict=True))}
    return parts


def refuse_strange(file: str | None, sources: Iterable[str]) -> None:
    """Raises ValueError for a file that `split` made of none of these data sets: all rows would count."""
    names = [Path(source).resolve().name for source in sources]
    if not file or not names:
        return
    try:
        known = set(json.loads(Path(file).read_bytes()))
    except (OSError, ValueError, TypeError) as error:
        raise ValueError(f"{file} is no file of open_r1/selection.py: {error}") from error
    if known.isdisjoint(names):
        raise ValueError(f"{file} splits {', '.join(sorted(known)) or 'nothing'}, and not {', '.join(names)}")


def rows_of(file: str | None, source: str, total: int, limit: int | None = None, part: str = PARTS[0]):
    """The rows of a data set to measure on: of its part in the file that `split` made (all, without a file,
    and of a set that the file does not name), at most `limit`, evenly spaced.

    Raises ValueError for a file that cannot be read or that is of another set of this name.
    """
    rows: list[int] = list(range(total))
    if file:
        try:
            entry = json.loads(Path(file).read_bytes()).get(Path(source).resolve().name)
            fits = entry is None or entry["rows"] == total
            chosen = rows if entry is None else list(entry[part])
            there = bool(chosen) and set(chosen) <= set(rows)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{file} is no file of open_r1/selection.py: {error}") from error
        if not fits:
            raise ValueError(f"{file} splits {entry['rows']} rows, and {source} has {total}: split it anew")
        if not there:
            raise ValueError(f"{file} names rows to {part} that {source} lacks, or none: split it anew")
        rows = chosen
    return [rows[i] for i in pick_rows(len(rows), limit)]


def main() -> int:
    parser = argparse.ArgumentParser(description="Splits data sets: rows that choose, rows that report.")
    parser.add_argument("folders", nargs="+", metavar="FOLDER", help="data sets to split")
    parser.add_argument("--out", required=True, help="the file to write")
    parser.add_argument("--share", type=float, default=0.5, help="of the rows, to choose by (default: 0.5)")
    parser.add_argument("--seed", type=int, default=0, help="of the split (default: 0)")
    parser.add_argument(
        "--split", default="test", help="of sets that have several, as --dataset_test_split (default: test)"
    )
    args = parser.parse_args()
    try:
        if Path(args.out).exists():
            raise ValueError(f"--out {args.out} exists: what was split by it would no longer fit")
        parts = split(args.folders, args.share, args.seed, args.split)
    except ValueError as refusal:
        print(f"selection.py: {refusal}", file=sys.stderr)
        return 2
    Path(args.out).write_text(json.dumps(parts) + "\n")
    for name, part in parts.items():
        print(f"{name}: {len(part['selection'])} rows choose, {len(part['report'])} report")
    return 0


if __name__ == "__main__":
    sys.exit(main())
