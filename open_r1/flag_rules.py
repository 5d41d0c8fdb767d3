"""What check_args.py refuses: every bad value and combination of flags with its one sentence."""

import math
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from .advantages import LEVELS, LOSS_TYPES, SCALES
from .protocol import MAX_NEW_TOKENS

if TYPE_CHECKING:
    from .arguments import GRPOArguments, ModelArguments, RecipeArguments

ENGINES = ("fast", "transformers")
ROLLOUTS_AHEAD = 8  # that rows may be drawn under --difficulty_sampling: see row_sampler.py
MOST_OVERSAMPLED = 100  # beyond, a typing error would roll out for days
LONGEST_NAME = 230  # bytes of a folder's name; what lies beside it adds to that, and file systems stop at 255
COUNTS = (
    "max_completion_length", "prompts_per_row", "gradient_accumulation_steps", "steps_per_generation",
    "num_iterations", "per_device_eval_batch_size", "eval_limit", "vocab_limit", "save_total_limit",
    "patience", "max_nonfinite", "probe_rows", "min_pixels", "max_pixels",
)  # fmt: skip
NOT_NEGATIVE = (
    "learning_rate", "weight_decay", "max_grad_norm", "warmup_steps", "beta", "epsilon", "epsilon_high",
    "adam_epsilon", "top_k", "max_reward_failures", "dataloader_num_workers", "seed", "eval_delay",
    "count_balance", "probe_steps", "kl_readout_steps",
)  # fmt: skip


def values(recipe: "RecipeArguments", args: "GRPOArguments") -> Iterator[tuple[bool, str]]:
    """As `rules`, of each number for itself. NaN is neither below nor above anything: it must not pass."""
    given = vars(recipe) | vars(args) | {"save_total_limit": args.checkpoints_kept}
    numbers = {name: value for name, value in given.items() if isinstance(value, int | float)}
    for name in COUNTS:
        if name in numbers:
            yield not numbers[name] >= 1, f"--{name} {numbers[name]}: set 1 or more"
    for name in NOT_NEGATIVE:
        if name in numbers:
            yield not 0 <= numbers[name] < math.inf, f"--{name} {numbers[name]}: set 0 or more"
    for name in ("adam_beta1", "adam_beta2"):
        yield not 0 <= numbers[name] < 1, f"--{name} {numbers[name]}: set 0 or more, and below 1"
    for name, used in (
        ("logging_steps", True),
        ("eval_steps", args.eval_strategy != "no"),
        ("save_steps", args.save_strategy != "no"),
    ):
        number = numbers.get(name, 1)
        whole = number >= 1 and number == number // 1
        yield used and not whole, f"--{name} {number:g}: set a whole number of updates, 1 or more"
    weights = args.reward_weights or []
    shown = " ".join(map(str, weights))
    yield not all(map(math.isfinite, weights)), f"--reward_weights {shown}: set finite numbers"
    epochs = args.num_train_epochs
    yield (
        args.max_steps <= 0 and not 0 < epochs < math.inf,
        f"--max_steps {args.max_steps} and --num_train_epochs {epochs:g}: set one of them above 0",
    )


def places(
    recipe: "RecipeArguments", args: "GRPOArguments", model: "ModelArguments"
) -> Iterator[tuple[bool, str]]:
    """As `rules`, of folders that lie in each other. OUT gets files which a data set would take for rows."""
    for name, folder in (("output_dir", args.output_dir), ("submission_dir", recipe.submission_dir)):
        longest = max(Path(folder or ".").parts, key=len, default="")
        long = f"--{name} with a name of {len(os.fsencode(longest))} bytes ({longest:.20}…)"
        yield len(os.fsencode(longest)) > LONGEST_NAME, f"{long}: set {LONGEST_NAME} at most"
    out, submission = f"--output_dir {args.output_dir}", f"--submission_dir {recipe.submission_dir}"
    for name, folder in (
        ("submission_dir", recipe.submission_dir),
        ("model_name_or_path", model.model_name_or_path),
        ("dataset_name", recipe.dataset_name),
        ("val_dataset", recipe.val_dataset),
        ("ood_val_dataset", recipe.ood_val_dataset),
    ):
        if folder and (os.path.isdir(folder) or name == "submission_dir"):
            inside = f"{out} lies in --{name} {folder}, which is for other files; set another --output_dir"
            yield _inside(args.output_dir, folder), inside
    if recipe.submission_dir and _inside(recipe.submission_dir, args.output_dir):
        below = Path(_real(recipe.submission_dir)).relative_to(_real(args.output_dir)).parts
        taken = below and below[0].startswith((".", "checkpoint-"))
        yield bool(taken), f"{submission} lies where checkpoints come and go; set another --submission_dir"


def rules(recipe: "RecipeArguments", args: "GRPOArguments") -> list[tuple[bool, str]]:
    """What must not be, each with its sentence."""
    accumulation = max(1, args.gradient_accumulation_steps)
    per_rollout = max(1, args.steps_per_generation // accumulation * args.num_iterations)
    oversampled = args.prompts_per_update * args.oversample / args.processes  # prompts on each process
    weighted = args.difficulty_sampling or args.count_balance > 0
    evaluates = bool(recipe.val_dataset or recipe.ood_val_dataset)
    return [
        (
            not recipe.dataset_name,
            "--dataset_name is missing: set it to a folder, a JSONL file or a hub name",
        ),
        (
            args.per_device_train_batch_size != 1,
            f"--per_device_train_batch_size {args.per_device_train_batch_size}: a forward pass "
            "takes one packed row; set it "
            "to 1 and put more prompts into a row with --prompts_per_row",
        ),
        *(
            (value not in ("no", "steps"), f"--{name} {value.value}: set no or steps")
            for name, value in (("eval_strategy", args.eval_strategy), ("save_strategy", args.save_strategy))
        ),
        (
            args.max_steps > 0 and args.max_steps % per_rollout != 0,
            f"--max_steps {args.max_steps} is no multiple of the {per_rollout} updates of a "
            "rollout: the run would end, "
            "and be resumed, in the middle of one",
        ),
        (
            args.num_generations < 2,
            f"--num_generations {args.num_generations}: an advantage compares the completions of a "
            "group; set 2 or more",
        ),
        (
            args.vote_generations is not None and args.vote_generations < args.num_generations,
            f"--vote_generations {args.vote_generations}: those that are trained on vote too; set at least "
            f"--num_generations {args.num_generations}",
        ),
        (
            args.steps_per_generation % accumulation != 0 or args.steps_per_generation < accumulation,
            f"--steps_per_generation {args.steps_per_generation} is no multiple of "
            "--gradient_accumulation_steps "
            f"{accumulation}: a rollout must make whole updates",
        ),
        (
            args.save_strategy != "no" and args.save_steps % per_rollout != 0,
            f"--save_steps {args.save_steps:g} is no multiple of the {per_rollout} updates of a "
            "rollout: a checkpoint must "
            "fall between two rollouts",
        ),
        (
            args.loss_type not in LOSS_TYPES,
            f"--loss_type {args.loss_type}: set one of {', '.join(LOSS_TYPES)}",
        ),
        (
            args.dynamic_sampling < 0,
            f"--dynamic_sampling {args.dynamic_sampling}: set 0 (off) or the number of tries",
        ),
        (
            not 1 <= args.oversample <= MOST_OVERSAMPLED or not whole(oversampled),
            f"--oversample {args.oversample:g}: an update of {args.prompts_per_update} prompts on "
            f"{args.processes} processes would roll out {oversampled:g} on each; set 1 up to "
            f"{MOST_OVERSAMPLED}, so that it is a whole number",
        ),
        (
            args.oversample > 1 and args.dynamic_sampling > 0,
            f"--oversample {args.oversample:g} with --dynamic_sampling {args.dynamic_sampling}: both put "
            "other groups in the place of those that teach nothing; set one",
        ),
        (
            not 0 <= args.noisy_rollout <= 0.95,  # what its 1,000 diffusion steps reach
            f"--noisy_rollout {args.noisy_rollout:g}: a standard deviation on pixels of 0 to 1; set 0 (off) "
            "to 0.95",
        ),
        (
            args.noisy_rollout > 0 and (args.num_generations % 2 != 0 or args.vote_generations is not None),
            f"--noisy_rollout {args.noisy_rollout:g}: half of each group is noised; set an even "
            "--num_generations and leave out --vote_generations",
        ),
        (
            args.noisy_rollout > 0 and recipe.token_weights is not None,
            f"--noisy_rollout {args.noisy_rollout:g} with --token_weights {recipe.token_weights}: these "
            "compare log-probs of the sampled image, and half of the group has another; set one",
        ),
        (
            weighted and not args.shuffle_dataset,
            "--shuffle_dataset false: --difficulty_sampling and --count_balance draw rows at random",
        ),
        (
            args.difficulty_sampling and args.dataloader_num_workers > ROLLOUTS_AHEAD,
            f"--dataloader_num_workers {args.dataloader_num_workers}: --difficulty_sampling draws rows at "
            f"most {ROLLOUTS_AHEAD} rollouts ahead; set at most that",
        ),
        (
            args.importance_sampling_level not in LEVELS,
            f"--importance_sampling_level {args.importance_sampling_level}: set one of {', '.join(LEVELS)}",
        ),
        (
            recipe.token_weights is not None and args.importance_sampling_level == "sequence",
            f"--token_weights {recipe.token_weights} with --importance_sampling_level sequence: one ratio a "
            "completion spreads each token's weight over all of its tokens; set token",
        ),
        (
            recipe.token_weights is not None and args.rollout_engine != "fast",
            f"--token_weights {recipe.token_weights} with --rollout_engine {args.rollout_engine}: the fast "
            "engine's model scores the views; set fast",
        ),
        (
            not 0 <= args.epsilon < 1 or (args.epsilon_high or 0) < 0,
            f"--epsilon {args.epsilon}, --epsilon_high {args.epsilon_high}: ratios are clipped at 1 - "
            "epsilon and 1 + epsilon_high; set 0 or more, --epsilon below 1",
        ),
        (
            args.use_bias_correction_kl and not args.beta,
            "--use_bias_correction_kl true without a KL term: set --beta above 0, or leave it out",
        ),
        (
            args.scale_rewards not in SCALES,
            f"--scale_rewards {args.scale_rewards}: set one of {', '.join(SCALES)}",
        ),
        (
            args.rollout_engine not in ENGINES,
            f"--rollout_engine {args.rollout_engine}: set one of {', '.join(ENGINES)}",
        ),
        (
            not 0 <= (args.max_hours or 0) < math.inf,
            f"--max_hours {args.max_hours}: set the hours that the run may take, or 0 for no limit",
        ),
        (
            args.patience is not None and args.eval_strategy == "no",
            f"--patience {args.patience} without validation: set --eval_strategy steps, or leave it out",
        ),
        *(
            (
                getattr(args, name) % per_rollout != 0,
                f"--{name} {getattr(args, name)} is no multiple of the {per_rollout} updates of a rollout, "
                "before which it is measured",
            )
            for name in ("probe_steps", "kl_readout_steps")
        ),
        (
            bool(args.probe_steps) and not evaluates,
            f"--probe_steps {args.probe_steps} without rows: set --val_dataset or --ood_val_dataset",
        ),
        (
            bool(args.kl_readout_steps) and args.rollout_engine != "fast",
            f"--kl_readout_steps {args.kl_readout_steps}: the copy that --rollout_engine "
            f"{args.rollout_engine} decodes with cannot score; set --rollout_engine fast, or leave it out",
        ),
        (
            args.on_nonfinite not in ("stop", "skip"),
            f"--on_nonfinite {args.on_nonfinite}: set stop or skip",
        ),
        (
            not 0 < args.temperature < math.inf,
            f"--temperature {args.temperature}: completions of a group must differ; set it above 0",
        ),
        (not 0 < args.top_p <= 1, f"--top_p {args.top_p}: set it above 0 and up to 1"),
        (not 0 <= (args.min_p or 0) <= 1, f"--min_p {args.min_p}: set it between 0 and 1"),
        (not 0 <= recipe.prompt_mix <= 1, f"--prompt_mix {recipe.prompt_mix}: a share, between 0 and 1"),
        (
            not 0 < recipe.reward_timeout < float("inf"),
            f"--reward_timeout {recipe.reward_timeout:g}: set the seconds that a reward function may take",
        ),
        (
            args.max_completion_length > MAX_NEW_TOKENS,
            f"--max_completion_length {args.max_completion_length}: the grader cuts completions "
            f"after {MAX_NEW_TOKENS} "
            f"tokens; set at most that",
        ),
        (
            bool(args.fp16),
            "--fp16: rewards of policies trained in fp16 are noise more often than not; use --bf16",
        ),
        (
            bool(args.auto_find_batch_size),
            "--auto_find_batch_size: a row is never cut; lower --prompts_per_row",
        ),
        (
            bool(args.torch_compile),
            "--torch_compile: attention is compiled already, the rest has changing shapes",
        ),
        (
            _needs_compiler(args.deepspeed_settings) and not (shutil.which("g++") and shutil.which("ninja")),
            f"--deepspeed {args.deepspeed} offloads to DeepSpeed's own AdamW, which g++ and ninja compile: "
            'install them, or set "zero_force_ds_cpu_optimizer": false in it, as zero3_offload.json does',
        ),
        (
            args.eval_strategy != "no" and not evaluates,
            f"--eval_strategy {args.eval_strategy.value} without rows: set --val_dataset or "
            "--ood_val_dataset",
        ),
        (
            recipe.init_from == "submission" and not recipe.submission_dir,
            "--init_from submission without --submission_dir: set it to the folder of the last round's model",
        ),
        (
            bool(recipe.selection_rows) and not os.path.isfile(recipe.selection_rows),
            f"--selection_rows {recipe.selection_rows} does not exist; python open_r1/selection.py makes it",
        ),
        (
            not 0 <= recipe.select_level < 1,
            f"--select_level {recipe.select_level:g}: a share; set 0 (any higher score) up to 0.99",
        ),
        (recipe.keep_top < 0, f"--keep_top {recipe.keep_top}: set 0 (none) or the number of models"),
        (
            recipe.keep_top > 0 and not recipe.submission_dir,
            f"--keep_top {recipe.keep_top} without --submission_dir: nothing is averaged then; leave it out",
        ),
        (
            not 0 < recipe.finalize_minutes < math.inf,
            f"--finalize_minutes {recipe.finalize_minutes:g}: set the minutes, or --finalize false",
        ),
        (
            not all(0 < alpha < 1 for alpha in recipe.wise_alphas),
            f"--wise_alphas {' '.join(map(str, recipe.wise_alphas))}: shares between 0 and 1",
        ),
        (
            bool(recipe.submission_dir) and args.eval_strategy == "no",
            f"--submission_dir {recipe.submission_dir} without validation: the best model cannot be "
            "known; set --val_dataset "
            "or --ood_val_dataset and --eval_strategy steps",
        ),
        (
            bool(args.save_only_model) and args.save_strategy != "no",
            "--save_only_model: such a checkpoint cannot be resumed; leave it out (the submission "
            "is the full model)",
        ),
        (
            bool(args.load_best_model_at_end),
            "--load_best_model_at_end: the best validated model goes into --submission_dir; leave it out",
        ),
    ]


def whole(number: float) -> bool:
    """Up to the rounding of a factor such as 1.1."""
    return math.isfinite(number) and abs(number - round(number)) < 1e-6


def _needs_compiler(deepspeed: dict) -> bool:
    """accelerate replaces AdamW by DeepSpeed's for the CPU unless the configuration says otherwise."""
    offload = deepspeed.get("zero_optimization", {}).get("offload_optimizer", {}).get("device", "none")
    return offload != "none" and deepspeed.get("zero_force_ds_cpu_optimizer", True)


def _inside(folder: str, outer: str) -> bool:
    return Path(_real(folder)).is_relative_to(_real(outer))


def _real(folder: str) -> str:
    return os.path.realpath(folder)  # unlike Path.resolve, of a loop of links too
