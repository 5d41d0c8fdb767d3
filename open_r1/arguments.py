"""Every flag, and every refusal of a bad combination.

Names and meanings are those of TRL's GRPOConfig and ModelConfig and of R1-V; a field of theirs that this
trainer does not honour is refused instead of ignored.
"""

import warnings
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path

from transformers import TrainingArguments
from trl import GRPOConfig, ModelConfig

from .advantages import LOSS_TYPES, SCALES
from .protocol import MAX_NEW_TOKENS

ENGINES = ("fast", "transformers")

# The fields of TRL's GRPOConfig that do what TRL says they do.
HONOURED = {
    "num_generations", "max_completion_length", "temperature", "top_p", "top_k", "min_p", "beta",
    "num_iterations", "epsilon", "epsilon_high", "reward_weights", "scale_rewards", "loss_type",
    "mask_truncated_completions", "steps_per_generation", "use_bias_correction_kl", "shuffle_dataset",
}  # fmt: skip
# Fields of TrainingArguments that nothing here reads: data order, loaders and loss are the project's own.
NOT_HONOURED = (
    "data_seed", "dataloader_drop_last", "dataloader_prefetch_factor", "dataloader_persistent_workers",
    "group_by_length", "label_smoothing_factor", "neftune_noise_alpha", "use_liger_kernel", "fsdp",
    "eval_on_start", "eval_accumulation_steps", "batch_eval_metrics", "metric_for_best_model", "past_index",
    "include_for_metrics",
)  # fmt: skip
HONOURED_MODEL = {"model_name_or_path"}


@dataclass
class RecipeArguments:
    """What to train on, for what, and where it goes."""

    dataset_name: str | None = field(
        default=None,
        metadata={"help": "Training rows: a save_to_disk or parquet folder, a JSONL file, or a hub name."},
    )
    dataset_config: str | None = field(default=None, metadata={"help": "Configuration of a hub data set."})
    dataset_train_split: str = field(default="train", metadata={"help": "Split to train on."})
    dataset_test_split: str = field(
        default="test", metadata={"help": "Split of the validation sets, where they have several."}
    )
    val_dataset: str | None = field(
        default=None,
        metadata={"help": "Validation rows like the training rows. Only measured, never trained on."},
    )
    ood_val_dataset: str | None = field(
        default=None,
        metadata={"help": "Validation rows that look different. Only measured, never trained on."},
    )
    submission_dir: str | None = field(
        default=None,
        metadata={"help": "Folder for the best validated model. None: no submission is written."},
    )
    reward_funcs: list[str] = field(
        default_factory=lambda: ["accuracy", "format"],
        metadata={
            "help": "Names of reward_funcs_registry in grpo.py, or dotted paths (package.module.function)."
        },
    )
    max_reward_failures: int = field(
        default=3,
        metadata={"help": "A reward function that fails more often, on all ranks together, stops the run."},
    )
    reward_timeout: float = field(
        default=60.0,
        metadata={"help": "Seconds for a call of a reward function; one that takes longer has failed."},
    )
    prompt_mix: float = field(
        default=0.2,
        metadata={"help": "Share of prompts in R1-V's phrasing ('Output …'); the others are the grader's."},
    )
    min_pixels: int | None = field(
        default=None,
        metadata={"help": "Smallest image area in pixels. None: as the checkpoint's processor says."},
    )
    max_pixels: int | None = field(
        default=None,
        metadata={"help": "Largest image area in pixels. None: as the checkpoint's processor says."},
    )
    check_data: bool = field(
        default=False, metadata={"help": "Decode every image before the first step (else in the background)."}
    )
    skip_bad_rows: bool = field(
        default=False,
        metadata={"help": "Leave bad rows out and list them in OUT/bad_rows.jsonl (else they stop the run)."},
    )
    accept_changes: bool = field(
        default=False,
        metadata={"help": "Go on from OUT's checkpoint with the flags, rows or rewards that are new."},
    )
    dry_run: bool = field(
        default=False, metadata={"help": "Make every check, print the derived numbers, train nothing."}
    )


@dataclass
class GRPOArguments(GRPOConfig):
    """TRL's GRPOConfig with prompts counted per row: per_device_train_batch_size is packed rows (always 1),
    each of prompts_per_row prompts with their num_generations completions. R1-V's `1 x 2 accumulation x 8
    generations` means here what it means there."""

    max_completion_length: int = field(
        default=MAX_NEW_TOKENS, metadata={"help": "New tokens of a completion at most."}
    )
    prompts_per_row: int = field(
        default=1, metadata={"help": "Prompts (with all their completions) in a packed row."}
    )
    rollout_engine: str = field(
        default="fast", metadata={"help": "fast, or transformers (model.generate; slow)."}
    )
    eval_limit: int | None = field(
        default=None, metadata={"help": "Validation rows of each set while training. None: all."}
    )
    use_bias_correction_kl: bool = field(
        default=False,
        metadata={"help": "Multiply the KL term by the probability ratio. R1-V does not, TRL 1.12 on does."},
    )
    per_device_train_batch_size: int = field(
        default=1, metadata={"help": "Packed rows in a forward pass: 1."}
    )
    per_device_eval_batch_size: int = field(
        default=64, metadata={"help": "Prompts decoded together in validation."}
    )
    logging_steps: float = field(default=1, metadata={"help": "Updates between two log lines."})
    eval_steps: float | None = field(default=50, metadata={"help": "Updates between two validations."})
    save_steps: float = field(default=100, metadata={"help": "Updates between two checkpoints."})
    max_hours: float | None = field(
        default=None,
        metadata={
            "help": "Hours after which the run has ended by itself, validated and saved. None or 0: no limit."
        },
    )
    max_hours_cumulative: bool = field(
        default=False, metadata={"help": "Count the hours of the sessions that this one goes on from too."}
    )
    patience: int | None = field(
        default=None,
        metadata={"help": "Validations in a row without a better score that end the run. None: no limit."},
    )
    on_nonfinite: str = field(
        default="stop",
        metadata={"help": "A loss, gradient or reward that is not finite: stop, or skip that update."},
    )
    max_nonfinite: int = field(
        default=3, metadata={"help": "Updates in a row that --on_nonfinite skip may drop; one more stops."}
    )
    gradient_checkpointing: bool = field(
        default=False, metadata={"help": "Recompute activations: less memory, slower."}
    )
    bf16: bool | None = field(
        default=None, metadata={"help": "bf16 compute over float32 master weights. Default: on a GPU."}
    )

    def __post_init__(self) -> None:
        import torch

        if self.bf16 is None:
            self.bf16 = torch.cuda.is_available() and not self.use_cpu
        # GRPOConfig's own __post_init__ counts completions and refuses one prompt group a device; ours
        # counts prompts.
        with warnings.catch_warnings():  # of a new name that only the newest transformers knows
            warnings.filterwarnings("ignore", "`gradient_checkpointing` is deprecated")
            super(GRPOConfig, self).__post_init__()
        if self.steps_per_generation is None:
            self.steps_per_generation = self.gradient_accumulation_steps
        self.scale_rewards = {"True": "group", "False": "none"}.get(
            str(self.scale_rewards), self.scale_rewards
        )
        self.checkpoints_kept = self.save_total_limit or 2
        self.planned_processes: int | None = None  # set by preflight.py in a dry run
        self.save_total_limit = None  # the Trainer's own pruning knows no complete-marker
        self.remove_unused_columns = False
        self.ignore_data_skip = True  # the rollout loader starts at global_step itself
        self.logging_nan_inf_filter = False  # a NaN must be seen, not replaced by the mean

    @property
    def processes(self) -> int:
        """Of the run. A dry run is one process, and counts one for each GPU, as train.sh would start."""
        return self.planned_processes or self.world_size

    @property
    def prompts_per_rollout(self) -> int:
        """Prompts of one rollout, all ranks together."""
        return self.steps_per_generation * self.prompts_per_row * self.processes

    @property
    def prompts_per_update(self) -> int:
        return self.gradient_accumulation_steps * self.prompts_per_row * self.processes

    @property
    def updates_per_rollout(self) -> int:
        return self.steps_per_generation // self.gradient_accumulation_steps * self.num_iterations


def check_args(recipe: RecipeArguments, args: GRPOArguments, model: ModelConfig) -> None:
    """Refuses every combination that cannot do what it says. ValueError, one sentence each, all of them at
    once."""
    faults = [sentence for bad, sentence in _rules(recipe, args) if bad]
    refused = set(NOT_HONOURED) & _names(TrainingArguments)
    honoured = _names(TrainingArguments) - refused
    reason = "this trainer does not honour it; leave it out"
    faults += _not_honoured(args, TrainingArguments, honoured, reason)
    own = {f.name for f in fields(TrainingArguments)} | {
        f.name for f in fields(args) if f.name not in _names(GRPOConfig)
    }
    faults += _not_honoured(args, GRPOConfig, own | HONOURED, "this trainer does not honour it; leave it out")
    faults += _not_honoured(
        model,
        ModelConfig,
        HONOURED_MODEL,
        "the model is trained in full from float32 weights with packed attention; leave it out",
    )
    if faults:
        raise ValueError("\n".join(faults))


def _names(config: type) -> set[str]:
    return {f.name for f in fields(config)}


def _not_honoured(values: object, config: type, honoured: set[str], reason: str) -> list[str]:
    faults = []
    for f in fields(config):
        default = (
            f.default
            if f.default is not MISSING
            else f.default_factory()
            if f.default_factory is not MISSING
            else None
        )
        value = getattr(values, f.name)
        if f.name not in honoured and value != default:
            faults.append(f"--{f.name} {value}: {reason}")
    return faults


def _inside(folder: str, outer: str) -> bool:
    folder, outer = Path(folder).resolve(), Path(outer).resolve()
    return folder == outer or outer in folder.parents


def _rules(recipe: RecipeArguments, args: GRPOArguments) -> list[tuple[bool, str]]:
    accumulation, per_rollout = args.gradient_accumulation_steps, args.updates_per_rollout
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
            (value is not None and value < 1, f"--{name} {value}: set 1 or more")
            for name, value in (
                ("max_completion_length", args.max_completion_length),
                ("steps_per_generation", args.steps_per_generation),
                ("num_iterations", args.num_iterations),
                ("eval_limit", args.eval_limit),
                ("save_total_limit", args.checkpoints_kept),
                ("patience", args.patience),
                ("max_nonfinite", args.max_nonfinite),
            )
        ),
        *(
            (value not in ("no", "steps"), f"--{name} {value.value}: set no or steps")
            for name, value in (("eval_strategy", args.eval_strategy), ("save_strategy", args.save_strategy))
        ),
        *(
            (value is not None and value != int(value), f"--{name} {value:g}: set a whole number of updates")
            for name, value in (("save_steps", args.save_steps), ("eval_steps", args.eval_steps))
        ),
        (
            args.max_steps > 0 and args.max_steps % max(1, per_rollout) != 0,
            f"--max_steps {args.max_steps} is no multiple of the {per_rollout} updates of a "
            "rollout: the run would end, "
            "and be resumed, in the middle of one",
        ),
        (args.prompts_per_row < 1, f"--prompts_per_row {args.prompts_per_row}: set it to 1 or more"),
        (
            args.num_generations < 2,
            f"--num_generations {args.num_generations}: an advantage compares the completions of a "
            "group; set 2 or more",
        ),
        (
            args.steps_per_generation % accumulation != 0 or args.steps_per_generation < accumulation,
            f"--steps_per_generation {args.steps_per_generation} is no multiple of "
            "--gradient_accumulation_steps "
            f"{accumulation}: a rollout must make whole updates",
        ),
        (
            args.save_strategy != "no" and args.save_steps % max(1, per_rollout) != 0,
            f"--save_steps {args.save_steps:g} is no multiple of the {per_rollout} updates of a "
            "rollout: a checkpoint must "
            "fall between two rollouts",
        ),
        (
            args.loss_type not in LOSS_TYPES,
            f"--loss_type {args.loss_type}: set one of {', '.join(LOSS_TYPES)}",
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
            (args.max_hours or 0) < 0,
            f"--max_hours {args.max_hours}: set the hours that the run may take, or 0 for no limit",
        ),
        (
            args.patience is not None and args.eval_strategy == "no",
            f"--patience {args.patience} without validation: set --eval_strategy steps, or leave it out",
        ),
        (
            args.on_nonfinite not in ("stop", "skip"),
            f"--on_nonfinite {args.on_nonfinite}: set stop or skip",
        ),
        (
            args.temperature <= 0,
            f"--temperature {args.temperature}: completions of a group must differ; set it above 0",
        ),
        (not 0 < args.top_p <= 1, f"--top_p {args.top_p}: set it above 0 and up to 1"),
        (args.top_k < 0, f"--top_k {args.top_k}: set 0 (off) or more"),
        (not 0 <= (args.min_p or 0) <= 1, f"--min_p {args.min_p}: set it between 0 and 1"),
        (not 0 <= recipe.prompt_mix <= 1, f"--prompt_mix {recipe.prompt_mix}: a share, between 0 and 1"),
        (
            not 0 < recipe.reward_timeout < float("inf"),
            f"--reward_timeout {recipe.reward_timeout:g}: set the seconds that a reward function may take",
        ),
        (
            recipe.max_reward_failures < 0,
            f"--max_reward_failures {recipe.max_reward_failures}: set 0 or more",
        ),
        (args.beta < 0, f"--beta {args.beta}: set 0 (no KL term) or more"),
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
            args.eval_strategy != "no" and not evaluates,
            f"--eval_strategy {args.eval_strategy.value} without rows: set --val_dataset or "
            "--ood_val_dataset",
        ),
        (
            bool(recipe.submission_dir) and args.eval_strategy == "no",
            f"--submission_dir {recipe.submission_dir} without validation: the best model cannot be "
            "known; set --val_dataset "
            "or --ood_val_dataset and --eval_strategy steps",
        ),
        (
            bool(recipe.submission_dir) and _inside(args.output_dir, recipe.submission_dir),
            f"--output_dir {args.output_dir} lies in --submission_dir {recipe.submission_dir}: the "
            "submission holds a model "
            "and nothing else; set another --output_dir",
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
