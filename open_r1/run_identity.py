"""OUT/run.json: which run a folder is of. The same run goes on in it; another one is refused with the list.

A run is what decides its result: the flags below, the weights it starts from, the rows, the code of the
rewards. Where these lie, how much is logged and how long it may take is not; versions and commit are noted.
"""

import hashlib
import inspect
import json
import secrets
import subprocess
from collections.abc import Callable, Iterable
from dataclasses import fields
from enum import Enum
from pathlib import Path
from typing import Any

from trl import GRPOConfig

from . import versions
from .arguments import GRPOArguments, ModelArguments, RecipeArguments
from .check_args import HONOURED
from .checkpoint import read_header, weight_files, write_atomically
from .data import CountingData
from .lock import lock_out
from .validation import pick_rows

FILE, LOGS = "run.json", "logs.jsonl"
PACKAGES = ("torch", "transformers", "trl", "deepspeed", "accelerate")
# Flags of ours that do not decide the result. Data and model count by content, not by name.
NOT_DEFINING = {
    "dataset_name", "dataset_config", "dataset_train_split", "dataset_test_split", "val_dataset",
    "ood_val_dataset", "submission_dir", "max_reward_failures", "reward_timeout", "check_data",
    "select_level", "keep_top", "finalize", "finalize_minutes", "wise_alphas",
    "skip_bad_rows", "dry_run", "accept_changes", "max_hours", "max_hours_cumulative", "patience",
    "per_device_train_batch_size", "per_device_eval_batch_size", "logging_steps", "save_steps",
    "gradient_checkpointing", "on_nonfinite", "max_nonfinite", "rehearse",
    "collapse_watch", "probe_steps", "probe_rows", "kl_readout_steps",
}  # fmt: skip
# The Trainer's own flags that do.
DEFINING = {
    "seed", "learning_rate", "weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon", "max_grad_norm",
    "optim", "optim_args", "lr_scheduler_type", "lr_scheduler_kwargs", "warmup_steps", "warmup_ratio", "bf16",
    "tf32", "gradient_accumulation_steps", "eval_strategy", "eval_steps",
}  # fmt: skip
# Flags that cut an update into rows: only their products count.
ROWS = ("prompts_per_row", "gradient_accumulation_steps", "steps_per_generation")
# What of the model is trained.
FROZEN = ("use_peft", "freeze_vision_tower")
LORA = (*FROZEN, "lora_r", "lora_alpha", "lora_target_modules", "lora_vision", "use_rslora")
# What decides which tensors a checkpoint holds, and how they are cut.
STAGE = "deepspeed.zero_optimization.stage"
FORM = (*FROZEN, "lora_r", "lora_target_modules", "lora_vision", "optim")
SAMPLED_ROWS, SAMPLED_BLOCKS, BLOCK = 256, 64, 4096  # of a data set; of a weight file, with their bytes


# What a run is


def describe(
    recipe: RecipeArguments, args: GRPOArguments, model: ModelArguments, base: Path, rewards: Iterable,
    data: CountingData, rows: list[int], validation_sets: dict[str, CountingData],
) -> dict[str, Any]:  # fmt: skip
    """What decides the result, ready for JSON, with what is good to know later."""
    sets = {"train": (data, rows)} | {name: (val, range(len(val))) for name, val in validation_sets.items()}
    identity = {
        "flags": defining_flags(recipe, args, model),
        "model": {"path": str(base), "content": model_content(base)},
        "data": {
            name: {"path": one.source, "rows": len(used), "content": data_content(one, used)}
            for name, (one, used) in sets.items()
        },
        "rewards": {reward.name: digest(_source(reward.function)) for reward in rewards},
        "versions": {name: versions.installed(name) for name in PACKAGES},
        "commit": _commit(),
    }
    return json.loads(json.dumps(identity))


def defining_flags(recipe: RecipeArguments, args: GRPOArguments, model: ModelArguments) -> dict[str, Any]:
    """Flags by name, and the entries of the DeepSpeed configuration."""
    inherited = {f.name for f in fields(GRPOConfig)}
    own = {f.name for f in fields(args) if f.name not in inherited or f.name in GRPOArguments.__annotations__}
    names = (own | HONOURED | DEFINING) - NOT_DEFINING
    flags = {name: getattr(args, name) for name in names if hasattr(args, name)}
    flags |= {f.name: getattr(recipe, f.name) for f in fields(recipe) if f.name not in NOT_DEFINING}
    flags |= {name: getattr(model, name) for name in (LORA if model.use_peft else FROZEN)}
    if _schedule_depends_on_the_end(args) or args.noisy_rollout:
        flags["max_steps"] = args.max_steps
    if args.deepspeed:
        flags |= _flat("deepspeed", args.deepspeed_settings)
    plain = {name: value.value if isinstance(value, Enum) else value for name, value in flags.items()}
    return json.loads(json.dumps(dict(sorted(plain.items())), default=str))


def _schedule_depends_on_the_end(args: GRPOArguments) -> bool:
    kind = getattr(args.lr_scheduler_type, "value", args.lr_scheduler_type)
    share = getattr(args, "warmup_ratio", None) or (0 < args.warmup_steps < 1)
    return kind not in ("constant", "constant_with_warmup") or kind != "constant" and bool(share)


def _flat(name: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        return {name: value}
    return {key: one for part, inner in value.items() for key, one in _flat(f"{name}.{part}", inner).items()}


def model_content(folder: Path) -> str:
    """A digest of the configuration, the headers and evenly spaced blocks of the weight files."""
    parts = [(folder / "config.json").read_bytes()]
    for name in weight_files(folder):
        path = folder / name
        size = path.stat().st_size
        parts += [read_header(path)[0], str(size).encode()]
        with open(path, "rb") as file:
            for number in range(SAMPLED_BLOCKS):
                file.seek(number * max(0, size - BLOCK) // max(1, SAMPLED_BLOCKS - 1))
                parts.append(file.read(BLOCK))
    return digest(*parts)


def data_content(data: CountingData, rows: Iterable[int]) -> str:
    """A digest of evenly spaced rows with their images; what changes one row alone may be missed."""
    rows, parts = list(rows), []
    for place in pick_rows(len(rows), SAMPLED_ROWS):
        parts.append(json.dumps(data.columns(rows[place]), sort_keys=True, default=str).encode())
        parts += [file.read() for file in data.open_images(rows[place])]
    return digest(*parts)


def _source(function: Callable) -> bytes:
    try:
        return inspect.getsource(function).encode()
    except (OSError, TypeError):  # made at run time, or no plain function
        return getattr(getattr(function, "__code__", None), "co_code", b"")


def digest(*parts: bytes) -> str:
    made = hashlib.sha256()
    for part in parts:
        made.update(len(part).to_bytes(8, "little") + part)
    return made.hexdigest()[:16]


def _commit() -> str | None:
    root = Path(__file__).resolve().parent.parent
    if not (root / ".git").exists():
        return None
    command = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None


# What differs


def differences(then: dict, now: dict) -> list[str]:
    """What decides the result and is not the same, one short line each."""
    lines = []
    alike = ROWS if same_updates(then["flags"], now["flags"]) else ()
    for name, value in now["flags"].items():
        before = then["flags"].get(name, value)  # a flag that did not exist then had its default
        if before != value and name not in alike:
            lines.append(f"--{name} {_shown(before)} -> {_shown(value)}")
    gone = set(then["flags"]) - set(now["flags"]) - {"max_steps"}
    lines += [f"--{name} {_shown(then['flags'][name])} -> not set" for name in sorted(gone)]
    if then["model"]["content"] != now["model"]["content"]:
        lines.append(f"the model's weights: {_moved(then['model']['path'], now['model']['path'])}")
    for name in sorted(then["data"].keys() | now["data"].keys()):
        before, after = then["data"].get(name), now["data"].get(name)
        if before is None or after is None:
            lines.append(f"{name} rows: {'none' if before is None else before['path']} -> "
                         f"{'none' if after is None else after['path']}")  # fmt: skip
        elif (before["rows"], before["content"]) != (after["rows"], after["content"]):
            count = f"{before['rows']:,} -> {after['rows']:,}, " if before["rows"] != after["rows"] else ""
            lines.append(f"{name} rows: {count}{_moved(before['path'], after['path'])}")
    lines += [
        f"the code of {name} has changed"
        for name, source in now["rewards"].items()
        if then["rewards"].get(name, source) != source
    ]
    return lines


def same_updates(then: dict, now: dict) -> bool:
    """Whether updates and rollouts have the same prompts, in whatever rows."""
    return all(
        then["prompts_per_row"] * then[times] == now["prompts_per_row"] * now[times]
        for times in ("gradient_accumulation_steps", "steps_per_generation")
    )


def notes(then: dict, now: dict) -> list[str]:
    """What differs and lets results differ in the last digits only: versions, and how rows are cut."""
    pairs = {"commit": (then["commit"], now["commit"])}
    pairs |= {name: (then["versions"].get(name), version) for name, version in now["versions"].items()}
    if same_updates(then["flags"], now["flags"]):
        pairs["--prompts_per_row"] = (then["flags"]["prompts_per_row"], now["flags"]["prompts_per_row"])
    return [f"{name} {before} -> {after}" for name, (before, after) in pairs.items() if before != after]


def of_another_form(then: dict, now: dict) -> bool:
    """Whether a checkpoint of one cannot be gone on from in the other."""
    both = [name for name in FORM if name in then and name in now]
    return any(then[name] != now[name] for name in both) or then.get(STAGE) != now.get(STAGE)


def _shown(value: Any) -> str:
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)


def _moved(before: str, after: str) -> str:
    return f"{before} -> {after}" if before != after else f"what is in {after} has changed"


# The folder


def read(out: Path) -> dict | None:
    """OUT/run.json; None without one. ValueError when it cannot be read, or somebody else wrote it."""
    try:
        found = json.loads((out / FILE).read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise ValueError(f"{out / FILE} cannot be read ({error}); set another OUT") from error
    if not (isinstance(found, dict) and {"run", "flags", "model", "data", "rewards"} <= found.keys()):
        raise ValueError(f"{out / FILE} describes no run of this trainer; set another OUT")
    return found


def strangers(out: Path) -> list[str]:
    """What a run would mix with its own or write over, in a folder without run.json: checkpoints, a model, or
    what finalize.py reads and writes. All else may lie there, a log that the shell writes say."""
    names = sorted(path.name for path in out.iterdir()) if out.is_dir() else []
    taken = ("config.json", "selection.json", "finalize.json", "finalize.txt")
    return [name for name in names if name.startswith("checkpoint-") or name in taken]


def judge(
    out: Path, now: dict, done: tuple[Path, dict] | None, accept_changes: bool
) -> tuple[dict, list[str]]:
    """What OUT/run.json is to hold, and lines to show. `done` is the checkpoint to go on from.

    Raises ValueError, with what differs and what to do, where OUT is of another run or holds a stranger's.
    """
    source = done[0].parent if done else out
    then = read(source)
    if done:
        ways = f"set another OUT, or --accept_changes true to go on from {done[0]} all the same"
    else:
        ways = "set another OUT, or --accept_changes true to begin anew in this one"
    if then is None:
        if strangers(out) and not accept_changes:
            raise ValueError(
                f"OUT {out} holds {strangers(out)[0]} and no {FILE}: whether a run like this one wrote it "
                f"cannot be known; {ways}"
            )
        return new_run(now), [f"goes on from {done[0]}" if done else f"a new run in {out}"]
    changed = differences(then, now)
    if done and of_another_form(then["flags"], now["flags"]):
        listed = "\n".join(f"  {line}" for line in changed)
        raise ValueError(
            f"{source} is of another run:\n{listed}\n{done[0].name} holds other tensors than this run's "
            "parameters and optimizer need; set another OUT"
        )
    begun = done is not None or (out / LOGS).exists()
    if changed and begun and not accept_changes:
        listed = "\n".join(f"  {line}" for line in changed)
        left = "" if done else f", which left {LOGS} and no checkpoint"
        raise ValueError(f"{source} is of another run{left}:\n{listed}\n{ways}")
    if done is None:
        if changed:
            return new_run(now), [f"a new run in {out}; one that left no checkpoint there had other settings"]
        return then | now, [f"anew: {out} has no checkpoint of this run yet"]
    identity = (then if source == out else new_run({})) | now
    if changed:
        identity["changes"] = then.get("changes", []) + [{"step": done[1]["step"], "changed": changed}]
    lines = [f"goes on from {done[0]}", *changed]
    if noted := notes(then, now):
        lines.append(f"not as before: {', '.join(noted)}")
    return identity, lines


def new_run(now: dict) -> dict:
    """With an id: what a run deletes in OUT carries it."""
    return {"run": secrets.token_hex(6)} | now


def measured_in(identity: dict, rows: dict[str, list[int]]) -> str:
    """Names the run and the rows of its validation: scores with the same name can be compared."""
    sets = {name: one["content"] for name, one in identity["data"].items() if name != "train"}
    return f"{identity['run']} {digest(json.dumps([sets, rows], sort_keys=True).encode())}"


def claim(out: Path, identity: dict) -> None:
    """Write OUT/run.json. ValueError while another process trains there."""
    out.mkdir(parents=True, exist_ok=True)
    lock_out(out)
    write_atomically(out / FILE, f"{json.dumps(identity, indent=2)}\n".encode())
