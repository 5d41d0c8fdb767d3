"""Fills the results of README.md, between its <!-- name --> marks, from the committed JSON files.

    python tools/readme.py            write README.md
    python tools/readme.py --check    exit code 1 when README.md does not say what the JSON files say
"""

import json
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from methods.demo.report import readme_table


def demo() -> str:
    """Accuracies of the demo: a line a run, from methods/demo/results.json."""
    return readme_table(json.loads((ROOT / "methods/demo/results.json").read_text()))


def h200() -> str:
    """The run of the real shape on a GPU, from benchmarks/results.json."""
    results = json.loads((ROOT / "benchmarks/results.json").read_text())
    run, long = results["h200"], results["h200_long"]
    seconds, peak = run["seconds_an_update"], long["peak_gib"]
    lines = ["| on one H200, zero3.json, random weights of the real shape, 480x320 images | |", "|---|---|"]
    prompts = f"{run['prompts']} prompts x {run['generations']} completions"
    lines += [
        f"| an update of {prompts}, {run['new_tokens']} new tokens (median of updates 3 to 20) | "
        f"{seconds['median']} s: rollout {seconds['rollout']} s, update {seconds['update']} s |",
        f"| the first update, which compiles | {seconds['first']} s |",
        f"| mean gap between rollout and trainer log-probs (bf16) | {run['gap_of_log_probs']} |",
    ]
    for name, value in peak.items():
        lines.append(
            f"| peak at 256 new tokens, `--{name}`, all optimizer states on this one card | "
            f"{value['allocated']} GiB allocated, {value['reserved']} GiB reserved |"
        )
    return "\n".join([*lines, "", f"Commit {run['commit']}, {run['date']}; {run['machine']}."])


def filled(text: str) -> str:
    for name, make in (("demo", demo), ("h200", h200)):
        marks = re.compile(rf"(<!-- {name} -->\n).*?(\n<!-- end {name} -->)", re.S)
        made = make()
        text, found = marks.subn(lambda m, made=made: m[1] + made + m[2], text)
        if found != 1:
            raise SystemExit(f"README.md has {found} places for the results named {name}: it must have one")
    return text


def main() -> None:
    path = ROOT / "README.md"
    text = path.read_text()
    if sys.argv[1:] == ["--check"]:
        if filled(text) != text:
            raise SystemExit("README.md does not say what the JSON files say: run python tools/readme.py")
    else:
        path.write_text(filled(text))


if __name__ == "__main__":
    main()
