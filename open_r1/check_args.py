"""What is refused of the flags: fields of transformers' and TRL's configurations that this trainer does not
honour, which would be ignored otherwise, and the combinations of flag_rules.py."""

from collections.abc import Iterator
from dataclasses import MISSING, fields

from transformers import Trainer, TrainingArguments
from transformers.integrations import get_available_reporting_integrations
from trl import GRPOConfig, ModelConfig

from . import lora
from .arguments import GRPOArguments, ModelArguments, RecipeArguments
from .flag_rules import places, rules, values
from .images import first_line

# The fields of TRL's GRPOConfig that do what TRL says they do.
HONOURED = {
    "num_generations", "max_completion_length", "temperature", "top_p", "top_k", "min_p", "beta",
    "num_iterations", "epsilon", "epsilon_high", "reward_weights", "scale_rewards", "loss_type",
    "mask_truncated_completions", "steps_per_generation", "use_bias_correction_kl", "shuffle_dataset",
    "importance_sampling_level",
}  # fmt: skip
# Fields of TrainingArguments that nothing here reads (data order, loaders, loss and validation are the
# project's own), or that would be against what it promises: uploads, ranks that write the same files, a
# handler of signals beside its own.
NOT_HONOURED = (
    "data_seed", "dataloader_drop_last", "dataloader_prefetch_factor", "dataloader_persistent_workers",
    "group_by_length", "label_smoothing_factor", "neftune_noise_alpha", "use_liger_kernel", "fsdp",
    "eval_on_start", "eval_accumulation_steps", "batch_eval_metrics", "metric_for_best_model", "past_index",
    "include_for_metrics", "train_sampling_strategy", "include_num_input_tokens_seen", "length_column_name",
    "label_names", "prediction_loss_only", "bf16_full_eval", "fp16_full_eval", "eval_do_concat_batches",
    "eval_use_gather_object", "dataloader_in_order", "dataloader_multiprocessing_context", "use_cache",
    "push_to_hub", "save_on_each_node", "enable_jit_checkpoint",
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
    faults += packages(args)
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


def packages(args: GRPOArguments) -> Iterator[str]:
    """What --report_to and --optim need and is not installed."""
    for name in args.report_to:
        if name not in get_available_reporting_integrations():
            yield f"--report_to {name}: its package is not installed; set tensorboard or none"
    try:
        Trainer.get_optimizer_cls_and_kwargs(args)
    except (ImportError, ValueError, RuntimeError) as error:
        yield f"--optim {args.optim.value}: {first_line(error)}; set adamw_torch"


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
