"""Trains Qwen2-VL with GRPO: the reward functions and their registry first, then main().

    bash train.sh                                        the tuned recipe on all GPUs
    accelerate launch open_r1/grpo.py --model_name_or_path … --dataset_name … --output_dir …

To change what is rewarded, edit a function below, or add one to the registry and name it in --reward_funcs.
"""

import sys
from pathlib import Path

if __package__ in (None, ""):  # run as a file, as accelerate launch does
    sys.path[0] = str(Path(__file__).resolve().parent.parent)
    sys.path.append("")  # dotted --reward_funcs are looked up in the current folder too

from open_r1.versions import check_versions

check_versions()

import torch
from accelerate import PartialState
from accelerate.utils import broadcast_object_list
from transformers import PrinterCallback, ProgressCallback, set_seed
from trl import ModelConfig, TrlParser

from open_r1.arguments import GRPOArguments, RecipeArguments, check_args
from open_r1.callbacks import BadRowWatch, JsonLog, StepLine
from open_r1.checkpoint import complete_marker, load_policy, local_model, newest_complete
from open_r1.data import CountingData, PromptEncoder, load_processor, load_rows
from open_r1.data_checks import BackgroundDecode, check_rows, drop_overlap, good_rows, refuse_same_folder
from open_r1.keep_best import KeepBest
from open_r1.protocol import ANSWER, extract_answer
from open_r1.rewards import RewardCaller, RewardError, check_signature, resolve_rewards, try_rewards
from open_r1.rollout import FastEngine, TransformersEngine
from open_r1.trainer import Qwen2VLGRPOTrainer

# --- rewards ----------------------------------------------------------------------------------------------
#
# fn(completions, **columns) -> list[float | None]. completions are [[{"role": "assistant", "content":
# str}], …]; every column of the data set comes as a list, one value per completion, "answer" (the true
# count, int) among them. A function may also name what open_r1/rewards.py lists as EXTRAS. None means
# "cannot judge" and is left out.


def accuracy_reward(completions: list[list[dict]], answer: list[int], **kwargs) -> list[float]:
    """1.0 where the grader's own rule reads the true count, else 0.0."""
    return [float(extract_answer(c[0]["content"]) == a) for c, a in zip(completions, answer, strict=True)]


def format_reward(completions: list[list[dict]], truncated: list[bool], **kwargs) -> list[float]:
    """1.0 for a completion that ends by itself, right behind its one answer block.

    Whatever comes before the block is free: a think block is not rewarded. A policy that repeats
    `</answer>` up to the length cap earns nothing.
    """

    def well_formed(text: str) -> bool:
        blocks = list(ANSWER.finditer(text))
        one = len(blocks) == 1 and text.count("<answer>") == 1 and text.count("</answer>") == 1
        return one and not text[blocks[0].end() :].strip()

    return [
        float(well_formed(c[0]["content"]) and not t) for c, t in zip(completions, truncated, strict=True)
    ]


reward_funcs_registry = {
    "accuracy": accuracy_reward,
    "format": format_reward,
}


# --- the script -------------------------------------------------------------------------------------------


def main() -> None:
    recipe, args, model_args = TrlParser(
        (RecipeArguments, GRPOArguments, ModelConfig)
    ).parse_args_and_config()
    try:
        check_args(recipe, args, model_args)
        run(recipe, args, model_args)
    except (ValueError, RewardError) as refusal:  # sentences for the user, not faults of the code
        sys.exit(f"grpo.py: {refusal}")


def run(recipe: RecipeArguments, args: GRPOArguments, model_args: ModelConfig):
    """Checks, loads, trains, validates; returns the trainer (None after a dry run)."""
    set_seed(args.seed)
    say = print if args.process_index == 0 else lambda *_: None
    out = Path(args.output_dir)
    base = local_model(model_args.model_name_or_path)

    # Data: every row is looked at before the first step.
    processor = load_processor(base, recipe.min_pixels, recipe.max_pixels)
    data = load_rows(recipe.dataset_name, recipe.dataset_train_split, recipe.dataset_config)
    named = {"val": recipe.val_dataset, "ood_val": recipe.ood_val_dataset}
    validation_sets = {
        name: load_rows(source, recipe.dataset_test_split, recipe.dataset_config)
        for name, source in named.items()
        if source
    }
    rows = usable_rows(recipe, args, data, validation_sets, processor, out)

    # Rewards: proved on gold answers.
    rewards = resolve_rewards(recipe.reward_funcs, args.reward_weights, reward_funcs_registry)
    for reward in rewards:
        check_signature(reward, data.columns(rows[0]).keys())
    columns, images = [data.columns(row) for row in rows[:8]], [data.images(row) for row in rows[:8]]
    say(try_rewards(rewards, columns, images, processor.tokenizer))

    if args.max_steps <= 0:
        rollouts = -(-int(len(rows) * args.num_train_epochs) // args.prompts_per_rollout)
        args.max_steps = rollouts * args.updates_per_rollout
    say(derived_numbers(args, len(rows), {name: len(val) for name, val in validation_sets.items()}))
    done = find_checkpoint(args, out)
    if recipe.dry_run:
        say("ready: nothing was launched (--dry_run)")
        return None

    step_line, json_log = StepLine(), JsonLog(out)
    callbacks = [step_line, json_log]
    if args.process_index == 0 and not (recipe.check_data or recipe.skip_bad_rows):
        # Before the models: its processes are forked, which CUDA does not survive.
        callbacks.append(BadRowWatch(data, BackgroundDecode(data, processor, rows=rows), out))

    # Models: the policy, the rollout copy of it, and a reference only for a KL term.
    low = torch.bfloat16 if args.bf16 else torch.float32
    policy = load_policy(
        base, low if args.deepspeed else torch.float32
    )  # DeepSpeed makes the float32 masters itself
    rollout_copy = load_policy(base, low, args.device).requires_grad_(False)
    engine = {"fast": FastEngine, "transformers": TransformersEngine}[args.rollout_engine](
        rollout_copy, processor
    )
    reference = load_policy(base, low, args.device).requires_grad_(False) if args.beta else None

    keep_images = any(reward.wants("images") for reward in rewards)
    encoder = PromptEncoder(
        processor, policy.config, prompt_mix=recipe.prompt_mix, keep_images=keep_images, seed=args.seed
    )
    grader = PromptEncoder(
        load_processor(base), policy.config, prompt_mix=0.0, keep_images=False, seed=args.seed
    )
    trainer = Qwen2VLGRPOTrainer(
        policy,
        args,
        processor,
        engine,
        data,
        rows,
        encoder,
        rewards=RewardCaller(rewards, recipe.max_reward_failures),
        validation_sets=validation_sets,
        eval_encoder=grader,
        keep_best=KeepBest(base, Path(recipe.submission_dir)) if recipe.submission_dir else None,
        ref_model=reference,
        callbacks=callbacks,
    )
    json_log.trainer = step_line.trainer = trainer
    for callback in (PrinterCallback, ProgressCallback):
        trainer.remove_callback(callback)

    if trainer.keep_best:
        trainer.keep_best.start(engine.model, trainer.validate)
    if done and done[1]["step"] >= args.max_steps:
        say(f"{done[0]} has all {args.max_steps} updates: nothing is left to train")
        return trainer
    trainer.train(resume_from_checkpoint=str(done[0]) if done else None)
    if trainer.keep_best:
        say(
            f"{recipe.submission_dir} holds the best validated model: score "
            f"{trainer.keep_best.best_score:.2f}"
        )
    return trainer


def usable_rows(
    recipe: RecipeArguments,
    args: GRPOArguments,
    data: CountingData,
    validation_sets: dict[str, CountingData],
    processor,
    out: Path,
) -> list[int]:
    """The training rows without bad ones and without images that validation has too; looked for on rank 0."""
    found = [None]
    if args.process_index == 0:
        refuse_same_folder(data, list(validation_sets.values()))
        out.mkdir(parents=True, exist_ok=True)
        # Only decoding finds a file cut short, and dropping it must come before the order of rows is drawn.
        bad = check_rows(data, processor, full=recipe.check_data or recipe.skip_bad_rows)
        kept = good_rows(data, bad, skip_bad_rows=recipe.skip_bad_rows, out=out)
        for name, validation in validation_sets.items():
            if bad := check_rows(validation, processor):
                first = "; ".join(f"row {one.index}: {one.reason}" for one in bad[:10])
                raise ValueError(f"{len(bad)} rows of {name} cannot be used: repair them ({first})")
        kept, shared = drop_overlap(data, list(validation_sets.values()), rows=kept)
        print(
            f"{len(kept):,} of {len(data):,} training rows: {len(bad)} bad, {shared} share an image "
            "with validation"
        )
        found = [kept]
    broadcast_object_list(found)
    return found[0]


def find_checkpoint(args: GRPOArguments, out: Path) -> tuple[Path, dict] | None:
    """The checkpoint to go on from: --resume_from_checkpoint, else the newest complete one, since the same
    command continues its run."""
    found = newest_complete(out)
    asked = args.resume_from_checkpoint
    if asked and str(asked).lower() != "true":
        info = complete_marker(asked)
        if info is None:
            raise ValueError(f"--resume_from_checkpoint {asked} is no complete checkpoint; name another")
        found = Path(asked), info
    if found and found[1]["world_size"] != args.world_size:
        raise ValueError(
            f"{found[0]} was written by {found[1]['world_size']} processes and this run has "
            f"{args.world_size}: run "
            "with as many, or start from the submission's weights (MODEL=…) with another OUT"
        )
    return found


def derived_numbers(args: GRPOArguments, num_rows: int, validation_rows: dict[str, int]) -> str:
    per_update = args.prompts_per_update
    epochs = args.max_steps * per_update / args.num_iterations / num_rows
    lines = {
        "training rows": f"{num_rows:,}",
        "validation rows": ", ".join(f"{name} {n:,}" for name, n in validation_rows.items()) or "none",
        "an update": f"{per_update} prompts x {args.num_generations} completions, "
        f"in {args.gradient_accumulation_steps} rows of {args.prompts_per_row} on each of {args.world_size} "
        "processes",
        "a rollout": f"{args.prompts_per_rollout} prompts, {args.updates_per_rollout} updates",
        "the run": f"{args.max_steps:,} updates, {epochs:.2f} epochs",
        "compute": f"{'bf16' if args.bf16 else 'float32'} on {args.device.type}, float32 master weights",
    }
    return "\n".join(f"{name:<16} {value}" for name, value in lines.items())


def leave_together() -> None:
    """Ranks end at the same time: one that leaves earlier tears down connections that others still use."""
    state = PartialState()
    state.wait_for_everyone()
    state.destroy_process_group()


if __name__ == "__main__":
    main()
    leave_together()
