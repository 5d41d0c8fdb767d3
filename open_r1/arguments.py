"""Every flag; what is refused stands in check_args.py.

Names and meanings are those of TRL's GRPOConfig and ModelConfig and of R1-V.
"""

import json
import warnings
from dataclasses import dataclass, field
from pathlib import Path

from trl import GRPOConfig, ModelConfig

from .protocol import MAX_NEW_TOKENS


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
    reward_options: list[str] = field(
        default_factory=list,
        metadata={"help": "Parameters of reward functions: NAME.PARAMETER=VALUE …"},
    )
    token_weights: str | None = field(
        default=None,
        metadata={
            "help": "What each token gets of its completion's advantage: a name of token_weights_registry in "
            "token_weights.py (prpo, vppo), or a dotted path. None: all of it."
        },
    )
    token_weight_options: list[str] = field(
        default_factory=list,
        metadata={"help": "Parameters of the token weights' function: PARAMETER=VALUE …"},
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
    augment: bool = field(
        default=False,
        metadata={
            "help": "Change training images so that counts stay true: shrunk by a tenth at most and moved, "
            "brightness, contrast, blur, JPEG."
        },
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
        metadata={"help": "Go on in OUT (anew without a checkpoint) with new flags, rows or rewards."},
    )
    init_from: str | None = field(
        default=None,
        metadata={
            "help": "A further round: start from this model ('submission': what stands in --submission_dir). "
            "--model_name_or_path stays what is to be beaten."
        },
    )
    selection_rows: str | None = field(
        default=None,
        metadata={"help": "A file of open_r1/selection.py: validate on its selection part only."},
    )
    select_level: float = field(
        default=0.0,
        metadata={
            "help": "Share of paired bootstrap samples in which a model must beat the base to be submitted."
        },
    )
    keep_top: int = field(
        default=0,
        metadata={"help": "Keep the float32 weights of so many best models in OUT/masters, to be averaged."},
    )
    finalize: bool = field(
        default=False,
        metadata={"help": "train.sh: after training, score averages and mixtures too, and submit the best."},
    )
    finalize_minutes: float = field(
        default=15.0, metadata={"help": "Minutes that this may take; it then submits the best found so far."}
    )
    wise_alphas: list[float] = field(
        default_factory=lambda: [0.25, 0.5, 0.75],
        metadata={"help": "Shares of the trained weights in the mixtures with the base (WiSE-FT)."},
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
    num_generations: int = field(
        default=8, metadata={"help": "Completions of a prompt, which are compared with each other."}
    )
    steps_per_generation: int | None = field(
        default=None,
        metadata={
            "help": "Accumulation steps that one rollout is made for; twice --gradient_accumulation_steps: "
            "two updates a rollout. None: one update."
        },
    )
    loss_type: str = field(
        default="dapo",
        metadata={
            "help": "What a token weighs: all the same (dapo), one by the length of its completion (grpo), "
            "or a constant (dr_grpo)."
        },
    )
    prompts_per_row: int = field(
        default=1, metadata={"help": "Prompts (with all their completions) in a packed row."}
    )
    vote_generations: int | None = field(
        default=None,
        metadata={
            "help": "Completions of a prompt that vote; the first num_generations of them are trained on. "
            "None: num_generations."
        },
    )
    dynamic_sampling: int = field(
        default=0,
        metadata={
            "help": "Times at most that new prompts replace a rollout's groups of equal rewards. 0: these "
            "stay, and teach nothing."
        },
    )
    oversample: float = field(
        default=1.0,
        metadata={
            "help": "Prompts rolled out for each one that is trained on; the groups whose rewards vary most "
            "are kept. 1: all."
        },
    )
    difficulty_sampling: bool = field(
        default=False,
        metadata={"help": "Draw rows by how much they teach: mean p(1 - p) of their pass rate p + a floor."},
    )
    count_balance: float = field(
        default=0.0,
        metadata={
            "help": "Draw rows by the frequency of their true count to the power of minus this. 0: off; 1: "
            "all counts as often, up to ten times more than by chance."
        },
    )
    noisy_rollout: float = field(
        default=0.0,
        metadata={
            "help": "NoisyRollout: noise on the image that half of each group answers, as a standard "
            "deviation on pixels of 0 to 1 (0.5 in the paper), falling to 0 over the run. 0: off."
        },
    )
    vocab_limit: int | None = field(
        default=None,
        metadata={
            "help": "The first logits that a reward's entropy and self-certainty look at. None: all, "
            "those beyond the tokenizer too."
        },
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
    collapse_watch: bool = field(
        default=False,
        metadata={
            "help": "End the run when it collapses, by the signs that open_r1/collapse_watch.py lists; the "
            "best validated model stays. They are logged in any case."
        },
    )
    probe_steps: int = field(
        default=0,
        metadata={"help": "Updates between two probes of validation rows with blank pictures. 0: none."},
    )
    probe_rows: int = field(
        default=64, metadata={"help": "Validated rows of each set that a probe looks at, twice."}
    )
    kl_readout_steps: int = field(
        default=0,
        metadata={
            "help": "Updates between two measurements of the KL to the base, for which its weights are read "
            "from their files. 0: none."
        },
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
    rehearse: bool | None = field(
        default=None,
        metadata={
            "help": "Make the longest row and rollout before the first update, so that memory fails then or "
            "never. Default: on a GPU."
        },
    )
    bf16: bool | None = field(
        default=None, metadata={"help": "bf16 compute over float32 master weights. Default: on a GPU."}
    )

    def __post_init__(self) -> None:
        import torch

        if self.eval_steps == 0:  # transformers would take --logging_steps instead
            raise ValueError("--eval_steps 0: set 1 or more, or --eval_strategy no")
        if self.bf16 is None:
            self.bf16 = torch.cuda.is_available() and not self.use_cpu
        if self.rehearse is None:
            self.rehearse = torch.cuda.is_available() and not self.use_cpu
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
        self.checkpoints_kept = 2 if self.save_total_limit is None else self.save_total_limit
        self.planned_processes: int | None = None  # set by preflight.py in a dry run
        self.frozen = self.adapters = 0  # parameters that are not trained, and LoRA's; set by preflight.py
        self.vision_learns = True  # likewise
        self.save_total_limit = None  # the Trainer's own pruning knows no complete-marker
        self.remove_unused_columns = False
        self.ignore_data_skip = True  # the rollout loader starts at global_step itself
        self.logging_nan_inf_filter = False  # a NaN must be seen, not replaced by the mean

    @property
    def deepspeed_settings(self) -> dict:
        """DeepSpeed's configuration, as its file has it; empty without one."""
        given = self.deepspeed or {}
        return given if isinstance(given, dict) else json.loads(Path(given).read_bytes())

    @property
    def processes(self) -> int:
        """Of the run. A dry run is one process, and counts one for each GPU, as train.sh would start."""
        return self.planned_processes or self.world_size

    @property
    def completions_drawn(self) -> int:
        """Of each prompt, trained on or not."""
        return self.vote_generations or self.num_generations

    @property
    def prompts_per_rollout(self) -> int:
        """Prompts of one rollout that are trained on, all ranks together."""
        return self.steps_per_generation * self.prompts_per_row * self.processes

    @property
    def prompts_drawn(self) -> int:
        """Prompts of one rollout, all ranks together, with those whose groups are not kept."""
        return round(self.prompts_per_rollout * self.oversample)

    @property
    def prompts_per_update(self) -> int:
        return self.gradient_accumulation_steps * self.prompts_per_row * self.processes

    @property
    def updates_per_rollout(self) -> int:
        return self.steps_per_generation // self.gradient_accumulation_steps * self.num_iterations


@dataclass
class ModelArguments(ModelConfig):
    """TRL's ModelConfig: what the policy is made from, and what of it is trained."""

    lora_dropout: float = field(
        default=0.0, metadata={"help": "0: rollouts come from merged weights, which know no dropout."}
    )
    lora_target_modules: list[str] | None = field(
        default=None,
        metadata={"help": "Names of the linear layers that get adapters. None: all of the text tower."},
    )
    lora_vision: bool = field(
        default=False, metadata={"help": "Adapters in the vision tower and its merger too."}
    )
    freeze_vision_tower: bool = field(
        default=False,
        metadata={
            "help": "Train the text tower alone; an image is looked at once a rollout. The merger is frozen "
            "too. With --use_peft the tower is frozen anyway, unless --lora_vision."
        },
    )
