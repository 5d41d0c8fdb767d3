"""What is refused of the flags: fields of transformers' and TRL's configurations that this trainer does not
honour, which would be ignored otherwise, and the combinations of flag_rules.py."""

from dataclasses import MISSING, fields

from transformers import TrainingArguments
from trl import GRPOConfig, ModelConfig

from . import lora
from .arguments import GRPOArguments, ModelArguments, RecipeArguments
from .flag_rules import places, rules, values

# The fields of TRL's GRPOConfig that do what TRL says they do.
HONOURED = {
    "num_generations", "max_completion_length", "temperature", "top_p", "top_k", "min_p", "beta",
    "num_iterations", "epsilon", "epsilon_high", "reward_weights", "scale_rewards", "loss_type",
    "mask_truncated_completions", "steps_per_generation", "use_bias_correction_kl", "shuffle_dataset",
    "importance_sampling_level",
}  # fmt: skip
# Fields of TrainingArguments that nothing here reads: data order, loaders and loss are the project's own.
NOT_HONOURED = (
    "data_seed", "dataloader_drop_last", "dataloader_prefetch_factor", "dataloader_persistent_workers",
    "group_by_length", "label_smoothing_factor", "neftune_noise_alpha", "use_liger_kernel", "fsdp",
    "eval_on_start", "eval_accumulation_steps", "batch_eval_metrics", "metric_for_best_model", "past_index",
    "include_for_metrics",
)  # fmt: skip
HONOURED_MODEL = {
    "model_name_or_path", "use_peft", "lora_r", "lora_alpha", "lora_target_modules", "lora_dropout",
    "use_rslora", "lora_vision", "freeze_vision_tower",
}  # fmt: skip


def check_args(recipe: RecipeArguments, args: GRPOArguments, model: ModelArguments) -> None:
    """Refuses every combination that cannot do what it says. ValueError, one sentence each, all of them at
    once."""
    found = *values(recipe, args), *rules(recipe, args), *places(recipe, args, model), *lora.rules(model)
    faults = [sentence for bad, sentence in found if bad]
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
        "the model is trained from its own weights with packed attention; leave it out",
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
