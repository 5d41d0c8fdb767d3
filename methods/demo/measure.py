"""Measure the demo for its README: three seeds, and SFT continued for as long. Writes results.json.

    PYTHONPATH=. python methods/demo/measure.py --machine "2 CPU cores"

The control starts from the same base and takes the same training rows for as long as GRPO trained; it
imitates the written-out counting, which GRPO never sees.
"""

import argparse
import datetime
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from trl import ModelConfig

from methods.demo import report
from methods.demo.pace import PROBE, StepClock
from open_r1 import sft

DEMO = Path(__file__).resolve().parent
ROOT, WORK = DEMO.parents[1], DEMO / "runs"

CONTROLS = {"SFT continued": "completion"}


def grpo(seed: int) -> tuple[dict, dict, float]:
    """The demo with this seed: accuracies before and after, and its seconds of training with validation."""
    out = WORK / f"seed_{seed}"
    environment = os.environ | {"OUT": str(out), "SUBMISSION": str(out / "submission")}
    if not (out / "after/selfcheck.json").exists():  # seeds may have been run before, side by side
        subprocess.run(["bash", DEMO / "train.sh", "--seed", str(seed)], check=True, env=environment)
    logs = map(json.loads, (out / "logs.jsonl").open())
    seconds = next(line["train_runtime"] for line in logs if "train_runtime" in line)
    return report.read(out / "before"), report.read(out / "after"), seconds


def continue_sft(
    column: str, steps: int, out: Path, seed: int = 42, base: Path = DEMO / "base",
    rows: Path = WORK / "data/train", **settings: Any,
) -> StepClock:  # fmt: skip
    """SFT of `base` on a column of the training rows; the clock of its steps."""
    recipe = sft.DemonstrationArguments(dataset_name=str(rows), completion_column=column)
    usual = {
        "per_device_train_batch_size": 16, "learning_rate": 5e-4, "lr_scheduler_type": "linear",
        "warmup_steps": 5, "adam_beta2": 0.99, "weight_decay": 0, "dataloader_num_workers": 1,
        "use_cpu": True, "logging_steps": 50,
    }  # fmt: skip
    args = sft.SFTArguments(output_dir=str(out), max_steps=steps, seed=seed, **usual | settings)
    clock = StepClock()
    sft.run(recipe, args, ModelConfig(model_name_or_path=str(base)), [clock])
    return clock


def control(column: str, seconds: float) -> tuple[dict, float]:
    """SFT for about `seconds`: accuracies, and the seconds it took."""
    out = WORK / f"sft_{column}"
    steps = continue_sft(column, PROBE, out).steps_within(seconds)
    took = continue_sft(column, steps, out).total
    sets = [WORK / "data" / name for name in report.SETS]
    check = [sys.executable, ROOT / "selfcheck.py", "--model", out, "--out", f"{out}_check", "--data", *sets]
    subprocess.run(check, check=True)
    return report.read(Path(f"{out}_check")), took


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--machine", required=True, help="what it ran on, in words, for the README")
    args = parser.parse_args()
    commit = subprocess.check_output(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, text=True).strip()
    runs, seconds = {}, {}
    for seed in args.seeds:
        runs["base"], runs[f"GRPO, seed {seed}"], seconds[f"GRPO, seed {seed}"] = grpo(seed)
    budget = sum(seconds.values()) / len(seconds)
    for name, column in CONTROLS.items():
        runs[name], seconds[name] = control(column, budget)
    results = {
        "commit": commit,
        "date": datetime.date.today().isoformat(),
        "machine": args.machine,
        "command": f"python methods/demo/measure.py --seeds {' '.join(map(str, args.seeds))}",
        "runs": runs,
        "training_seconds": {name: round(value) for name, value in seconds.items()},
    }
    (DEMO / "results.json").write_text(json.dumps(results, indent=2) + "\n")
    report.write_readme()


if __name__ == "__main__":
    main()
