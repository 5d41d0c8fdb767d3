"""Tables of accuracies: before and after a run of the demo, and the README's, from results.json.

python methods/demo/report.py FOLDER FOLDER      two results of selfcheck.py, compared
python methods/demo/report.py --readme           write the table of results.json into README.md
"""

import argparse
import json
import math
import re
from pathlib import Path

HERE = Path(__file__).resolve().parent
SETS = {"test_val": "val", "test_B": "B", "test_ood": "OOD"}


def accuracies(selfcheck: dict) -> dict[str, tuple[float, float]]:
    """{set: (accuracy, its standard error)} in percent, and "mean" over the sets."""
    values = {
        short: (selfcheck[name]["accuracy_pct"], selfcheck[name]["standard_error"])
        for name, short in SETS.items()
    }
    mean = sum(accuracy for accuracy, _ in values.values()) / len(values)
    # The sets are independent samples: the variances of their means add.
    error = math.hypot(*(error for _, error in values.values())) / len(values)
    return values | {"mean": (mean, error)}


def table(rows: dict[str, dict[str, tuple[float, float]]]) -> str:
    """A Markdown table with a line for each of `rows`."""
    columns = [*SETS.values(), "mean"]
    width = max(map(len, rows))
    lines = [f"| {'':{width}} | " + " | ".join(f"{column:<12}" for column in columns) + " |"]
    lines.append(f"|{'-' * (width + 2)}|" + "|".join("-" * 14 for _ in columns) + "|")
    for name, values in rows.items():
        cells = [f"{values[c][0]:.1f} ± {values[c][1]:.1f}" for c in columns]
        lines.append(f"| {name:{width}} | " + " | ".join(f"{cell:<12}" for cell in cells) + " |")
    return "\n".join(lines)


def read(folder: Path) -> dict[str, tuple[float, float]]:
    return accuracies(json.loads((folder / "selfcheck.json").read_text()))


def gain(before: dict, after: dict) -> dict[str, tuple[float, float]]:
    """after - before, with the standard error of the difference."""
    return {
        column: (accuracy - before[column][0], math.hypot(error, before[column][1]))
        for column, (accuracy, error) in after.items()
    }


def compare(before: Path, after: Path) -> str:
    rows = {"before": read(before), "after": read(after)}
    return table(rows | {"gain": gain(**rows)})


def readme_table(results: dict) -> str:
    about = f"Commit {results['commit']}, {results['date']}, {results['machine']}: `{results['command']}`."
    return f"{table(results['runs'])}\n\n{about}"


def write_readme() -> None:
    text = (HERE / "README.md").read_text()
    made = readme_table(json.loads((HERE / "results.json").read_text()))
    pattern = r"(<!-- results -->\n).*?(\n<!-- end of results -->)"
    text = re.sub(pattern, lambda match: match[1] + made + match[2], text, flags=re.S)
    (HERE / "README.md").write_text(text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folders", type=Path, nargs="*", help="results of selfcheck.py, before and after")
    parser.add_argument("--readme", action="store_true", help="write results.json into README.md")
    args = parser.parse_args()
    if args.readme:
        write_readme()
    else:
        print(f"\nAccuracy (%) and standard error, greedy, on sets drawn anew\n\n{compare(*args.folders)}\n")


if __name__ == "__main__":
    main()
