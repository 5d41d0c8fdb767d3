"""One arm with one seed: trains in JOB, measures what came out, deletes the weights. run.py starts it.

python methods/arms/job.py JOB        JOB/job.json says what; JOB/result.json is written last
"""

import argparse
import json
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[0] = str(ROOT)

from methods.arms import plan
from methods.arms.run import end_with_parent

SETS = ("test_val", "test_B", "test_ood")
FINALIZE_ROWS = 150  # of each validation set, for each candidate


# --- training


def train(job: Path, todo: dict[str, Any]) -> dict[str, Path]:
    """The models that come out of it, by name: what is submitted, and the last policy where it is another."""
    run = job / "run"
    if todo["kind"] == "base":
        return {"submission": Path(todo["base"])}
    if todo["kind"] == "sft":
        continue_sft(job, todo, run)
        return {"submission": run}
    run_script("open_r1/grpo.py", *todo["command"])
    if plan.given(todo["command"], "finalize"):  # as train.sh does
        run_script("open_r1/finalize.py", run, "--limit", str(FINALIZE_ROWS))
    models = {"submission": run / "submission"}
    last = max(run.glob("checkpoint-*"), key=step_of)  # of the last update, also where a watch ended the run
    if submitted_step(run) != step_of(last):
        models["last"] = last
    return models


def run_script(script: str, *words: str | Path) -> None:
    """Ends this process with its exit code where it fails; why then stands at the end of the log."""
    command = [sys.executable, ROOT / script, *words]
    if code := subprocess.run(command, preexec_fn=end_with_parent).returncode:
        sys.exit(code)


def step_of(checkpoint: Path) -> int:
    return int(checkpoint.name.partition("-")[2])


def submitted_step(run: Path) -> int:
    """The update whose policy was submitted; 0 for the base."""
    from open_r1.submission import read_record

    return read_record(run / "submission").get("step", 0)


def baseline(run: Path) -> float:
    """The base's score on the validation rows."""
    from open_r1.submission import read_record

    return read_record(run / "submission")["baseline"]


def continue_sft(job: Path, todo: dict[str, Any], run: Path) -> None:
    """SFT for a number of steps or of seconds, or for as long as the reference's updates took without its
    validations."""
    from methods.demo.measure import continue_sft
    from methods.demo.pace import PROBE

    seed = todo["seed"] + 1000 * ("after" in todo)  # not the rows of the first time again, in their order
    how = {"column": todo["column"], "out": run, "seed": seed, "base": Path(todo["start"])}
    how |= {"rows": Path(todo["data"]) / "train", "use_cpu": not todo["gpu"]} | todo["sft"]
    done = {key: todo.get(key) for key in ("steps", "budget")}
    if not done["steps"]:
        if not done["budget"]:
            other = job.parents[1] / todo["as_long_as"] / f"seed_{todo['seed']}/result.json"
            done["budget"] = json.loads(other.read_text())["seconds"]["updates"]
        done["steps"] = continue_sft(steps=PROBE, **how).steps_within(done["budget"])
    done["updates"] = continue_sft(steps=done["steps"], **how).total
    (run / "sft.json").write_text(json.dumps(done))


# --- what a run wrote


def history(run: Path) -> dict[str, Any]:
    """Of OUT/logs.jsonl: the validation curve, what was logged last, and the seconds."""
    if (run / "sft.json").exists():
        sft = json.loads((run / "sft.json").read_text())
        return {"seconds": {"updates": sft["updates"]}, "steps": sft["steps"]}
    if not (run / "logs.jsonl").exists():
        return {"seconds": {}}
    lines = [json.loads(line) for line in (run / "logs.jsonl").open()]
    updates = [line for line in lines if "reward" in line]
    steps = [line["time/step_s"] for line in updates]
    validated = map(json.loads, (run / "validation.jsonl").open())
    sure = {line["step"]: line["confidence"] for line in validated if line["name"].startswith("update")}
    curve = [
        {"step": line["step"], "score": line["eval_score"], "confidence": sure.get(line["step"])}
        | {key.removeprefix("eval_"): value for key, value in line.items() if key.endswith(VALIDATED)}
        for line in lines
        if "eval_score" in line
    ]
    return {
        "seconds": {
            "updates": updates[-1]["step"] * sum(steps) / len(steps),
            "update": sum(steps) / len(steps),
        },
        "curve": [{"step": 0, "score": baseline(run)}, *curve],
        "log": [
            {"step": line["step"]} | {k: round(line[k], 4) for k in LOGGED if line.get(k) is not None}
            for line in updates
        ],
    }


VALIDATED = ("_accuracy_pct", "_parsed_pct", "_mean_tokens")  # of each validation set
LOGGED = (
    "reward", "reward_std", "zero_variance", "completions/mean_length", "completions/parsed",
    "completions/truncated", "completions/correct", "completions/entropy", "completions/malformed",
    "completions/distinct_4", "completions/answer_entropy", "reward_truth_correlation", "collapse",
)  # fmt: skip


# --- measuring


def measure(job: Path, todo: dict[str, Any], models: dict[str, Path]) -> dict[str, Any]:
    import selfcheck

    measured = {}
    for name, folder in models.items():
        out = job / f"{name}_check"
        words = [
            "--model",
            str(folder),
            "--out",
            str(out),
            "--batch_size",
            "250",
            "--dataloader_num_workers",
            "0",
        ]
        words += ["--limit", str(todo["test_limit"])] if todo["test_limit"] else []
        args = selfcheck.parse(words)
        selfcheck.answer(0, 1, args, {name: f"{todo['data']}/{name}" for name in SETS})
        measured[name] = read_check(out)
    if not todo["readout_rows"]:
        return {"models": measured}
    return {"models": measured, "readouts": read_out(job, todo, list(models.values())[-1], list(models)[-1])}


def read_check(folder: Path) -> dict[str, Any]:
    """A string of 0 and 1 for the rows of each set, and the summary's plain numbers."""
    from open_r1.keep_best import numbers_of

    summaries = json.loads((folder / "selfcheck.json").read_text())
    rows = {
        name: "".join(str(int(json.loads(line)["correct"])) for line in (folder / f"{name}.jsonl").open())
        for name in SETS
    }
    return {"rows": rows, "numbers": {name: numbers_of(summaries[name]) for name in SETS}}


def read_out(job: Path, todo: dict[str, Any], folder: Path, name: str) -> dict[str, Any]:
    """The readouts, of the last policy."""
    import torch

    from methods.arms import binding, readouts
    from open_r1.checkpoint import load_policy
    from open_r1.data import PromptEncoder, load_rows
    from open_r1.processor import load_processor
    from open_r1.rollout import FastEngine
    from open_r1.scoring import add_scoring_forward
    from open_r1.validation import pick_rows

    base, rows = Path(todo["base"]), Path(todo["data"])
    processor, policy = load_processor(base), load_policy(folder, torch.float32)
    engine = FastEngine(policy, processor)
    encoder = PromptEncoder(processor, policy.config, prompt_mix=0, keep_images=False, seed=0)
    val = load_rows(str(rows / "test_val"))
    few = todo["readout_rows"]
    prompts = [encoder.encode(val, row) for row in pick_rows(len(val), few // 2)]
    score_base = add_scoring_forward(load_policy(base, torch.float32)).eval()
    found = {
        "kl": readouts.kl_to_base(engine, score_base, prompts, completions=4, new_tokens=48),
        "image": readouts.image_gap(engine, encoder, val, pick_rows(len(val), few), batch_size=250),
        "printed": binding.probe(engine, processor, policy.config, figures=few // 4, seed=0, new_tokens=48),
    }
    for short in ("test_val", "test_ood"):
        data = load_rows(str(rows / short))
        lines = [json.loads(line) for line in (job / f"{name}_check/{short}.jsonl").open()]
        shown = [data.columns(line["row"])["completion"] for line in lines]
        found[f"numbering {short}"] = readouts.numbering([line["text"] for line in lines], shown)
    return found


# --- the job


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("job", type=Path, help="folder with job.json")
    job = parser.parse_args().job.resolve()
    if not (job / "job.json").exists():
        sys.exit(f"job.py: {job} has no job.json, which run.py writes")
    todo = json.loads((job / "job.json").read_text())
    start, run = time.time(), job / "run"
    shutil.rmtree(run, ignore_errors=True)  # of this job, cut before it ended: it begins anew
    models = train(job, todo)
    trained = time.time()
    result = todo | history(run) | measure(job, todo, models)
    if (run / "run.json").exists():
        result["identity"] = json.loads((run / "run.json").read_text())
        result["submitted_step"] = submitted_step(run)
    result["seconds"] |= {"all": time.time() - start, "measuring": time.time() - trained}
    part = job / "result.json.part"
    part.write_text(json.dumps(result))
    part.rename(job / "result.json")
    for folder in (*run.glob("checkpoint-*"), run / "submission"):  # what is large, and measured by now
        shutil.rmtree(folder, ignore_errors=True)
    (run / "rollouts.jsonl").unlink(missing_ok=True)


if __name__ == "__main__":
    main()
