"""Cold start: trains Qwen2-VL to imitate written completions, before GRPO or in its place.

    python open_r1/sft.py --model_name_or_path BASE --dataset_name ROWS --output_dir OUT --max_steps 200

The rows are those of grpo.py with one text column more, the completion to imitate (--completion_column). The
prompt is the grader's, through the same conversation and processor, and the loss is on the completion alone.
TRL's SFTTrainer does the work, with float32 weights (bf16 compute on a GPU); images are decoded when a batch
asks for them. OUT is a model folder for grpo.py: weights, configurations, processor. More GPUs: `accelerate
launch`, as train.sh does.
"""

import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

if __package__ in (None, ""):  # run as a file, as accelerate launch does
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from open_r1.versions import check_versions

check_versions()

import torch
from datasets import Dataset
from transformers import TrainerCallback
from trl import ModelConfig, SFTConfig, SFTTrainer

from open_r1.checkpoint import load_policy
from open_r1.data import CountingData, DataError, load_rows
from open_r1.flag_parser import FlagParser
from open_r1.processor import load_processor
from open_r1.protocol import EVAL_TEMPLATE, TRAIN_TEMPLATE, conversation


@dataclass
class DemonstrationArguments:
    """What to imitate."""

    dataset_name: str = field(
        metadata={"help": "Rows: a save_to_disk or parquet folder, a JSONL file, or a hub name."}
    )
    dataset_config: str | None = field(default=None, metadata={"help": "Configuration of a hub data set."})
    dataset_train_split: str = field(default="train", metadata={"help": "Split to train on."})
    completion_column: str = field(
        default="completion", metadata={"help": "Column with the text to imitate."}
    )
    prompt_mix: float = field(
        default=0.2, metadata={"help": "Share of prompts in R1-V's phrasing; the others are the grader's."}
    )
    prompt_template: str | None = field(
        default=None,
        metadata={"help": "Another prompt for all rows, with {question} in it. None: the two phrasings."},
    )


@dataclass
class SFTArguments(SFTConfig):
    """TRL's SFTConfig with the defaults that fit images and a single final model."""

    max_length: int | None = field(
        default=None, metadata={"help": "None: a cut prompt would lose image tokens."}
    )
    gradient_checkpointing: bool = field(
        default=False, metadata={"help": "Recompute activations: less memory, slower."}
    )
    save_strategy: str = field(
        default="no", metadata={"help": "Checkpoints on the way; the final model is always saved."}
    )
    report_to: str = field(default="none", metadata={"help": "Where to report to, tensorboard for example."})
    bf16: bool | None = field(
        default=None, metadata={"help": "bf16 compute over float32 weights. Default: on a GPU."}
    )

    def __post_init__(self) -> None:
        if self.bf16 is None:
            self.bf16 = torch.cuda.is_available() and not self.use_cpu
        self.use_cache = True  # the Trainer saves it in config.json; TRL's forward passes leave it off
        self.remove_unused_columns = False  # the one stored column, the row's number, stands for all of them
        super().__post_init__()


def demonstrations(rows: CountingData, recipe: DemonstrationArguments, seed: int) -> Dataset:
    """The rows in TRL's prompt-completion form, made when they are asked for: nothing is decoded here.

    Raises DataError, before training, for the first row without a completion.
    """
    for row in range(len(rows)):
        completion = rows.columns(row).get(recipe.completion_column)
        if not isinstance(completion, str) or not completion.strip():
            raise DataError(
                f"row {row} of {rows.source}: {recipe.completion_column} is {completion!r}, not a text to "
                "imitate; set --completion_column to the column that has it"
            )

    def example(row: int) -> dict:
        columns, images = rows.columns(row), rows.images(row)
        other = random.Random(f"{seed} {row}").random() < recipe.prompt_mix
        template = recipe.prompt_template or (TRAIN_TEMPLATE if other else EVAL_TEMPLATE)
        return {
            "prompt": conversation(columns["question"], len(images), template),
            "completion": [{"role": "assistant", "content": columns[recipe.completion_column]}],
            "images": images,
        }

    def batch(stored: dict[str, list[int]]) -> dict[str, list]:
        examples = [example(row) for row in stored["row"]]
        return {name: [e[name] for e in examples] for name in examples[0]}

    return Dataset.from_dict({"row": list(range(len(rows)))}).with_transform(batch)


def run(
    recipe: DemonstrationArguments,
    args: SFTArguments,
    model_args: ModelConfig,
    callbacks: Sequence[TrainerCallback] = (),
) -> SFTTrainer:
    """Loads, trains, saves; returns the trainer."""
    if recipe.prompt_template is not None and "{question}" not in recipe.prompt_template:
        raise ValueError(f"--prompt_template {recipe.prompt_template!r} has no {{question}} in it: add it")
    rows = load_rows(recipe.dataset_name, recipe.dataset_train_split, recipe.dataset_config)
    processor = load_processor(model_args.model_name_or_path)
    trainer = SFTTrainer(
        load_policy(model_args.model_name_or_path, torch.float32),
        args,
        train_dataset=demonstrations(rows, recipe, args.seed),
        processing_class=processor,
        callbacks=list(callbacks),
    )
    trainer.train()
    # With the processor, and on all ranks: gathering the weights takes them all.
    trainer.save_model(args.output_dir)
    return trainer


def main() -> None:
    try:
        flags = FlagParser((DemonstrationArguments, SFTArguments, ModelConfig)).parse()
    except ValueError as refusal:
        sys.exit(f"sft.py: {refusal}")
    run(*flags)


if __name__ == "__main__":
    main()
