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
    """An update of the real shape on a GPU beside TRL's, and peaks of memory: benchmarks/measured."""
    files = (ROOT / f"benchmarks/measured/h200_{name}.json" for name in ("zero3_128", "memory"))
    step, memory = (json.loads(file.read_text()) for file in files)
    asked, product = step["settings"], step["product"]
    prompts = f"{asked['prompts']} prompts x {asked['group']} completions x {asked['new_tokens']} new tokens"
    lines = [
        "| on one H200, zero3.json, random weights of the real shape, 480x320 images | |",
        "|---|---|",
        f"| an update of {prompts}, in one row | {step['product_s']:.2f} s; TRL: {step['trl_s']:.2f} s |",
        f"| the first update, which compiles | {product['first_update_s']:.0f} s |",
        f"| mean gap between rollout and trainer log-probs (bf16) | {product['logps_gap']:.3f} |",
    ]
    peaks = [p for p in memory["peaks"] if (p["mode"], p["prompts_per_row"]) == ("zero3", 1)]
    for peak in peaks:
        flag = f"--gradient_checkpointing {str(peak['gradient_checkpointing']).lower()}"
        lines.append(
            f"| peak at {peak['new_tokens']} new tokens, a prompt a row, `{flag}`, all optimizer states on "
            f"this one card | {peak['allocated']:.1f} GiB allocated, {peak['reserved']:.1f} GiB reserved |"
        )
    versions = "torch {torch}, transformers {transformers}, TRL {trl}, DeepSpeed {deepspeed}".format(
        **step["versions"]
    )
    return "\n".join([
        *lines, "",
        f"Commits {step['commit']} (times) and {peaks[0]['commit']} (memory), {step['date']}; {versions}.",
    ])  # fmt: skip


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
