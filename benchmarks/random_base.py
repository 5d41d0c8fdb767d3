"""Makes a Qwen2-VL-2B checkpoint of the real shape with random weights, and rows of noise images, to
measure speed and memory where the real model cannot be had.

    python benchmarks/random_base.py FOLDER [--rows 256] [--width 480 --height 320]

Writes FOLDER/base (the form of the public checkpoint: flat config, bf16 shards, tied head absent),
FOLDER/train, FOLDER/val and FOLDER/ood_val. The tokenizer is byte-level, so a prompt has more tokens than
with the real one.
"""

import argparse
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from datasets import Dataset
from transformers import Qwen2VLConfig, Qwen2VLForConditionalGeneration

from tests.tiny import SPECIAL_IDS, noise_image, save_public_form

TEXT = {
    "hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28, "num_attention_heads": 12,
    "num_key_value_heads": 2, "vocab_size": 151936, "max_position_embeddings": 32768, "max_window_layers": 28,
    "initializer_range": 0.02,
}  # fmt: skip
VISION = {"depth": 32, "embed_dim": 1280, "num_heads": 16, "mlp_ratio": 4, "hidden_size": 1536}


def make_base(folder: Path, layers: int = 28, blocks: int = 32) -> None:
    """The tiny fixture's files with the real shape in config.json, and shards of random bf16 weights in
    that shape; with fewer decoder layers and vision blocks, what is quick to make and to save."""
    save_public_form(folder)
    config = json.loads((folder / "config.json").read_text())
    config |= TEXT | {"num_hidden_layers": layers, "max_window_layers": layers}
    config["vision_config"] |= VISION | {"depth": blocks}
    config["rope_scaling"]["mrope_section"] = [16, 24, 24]
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    for shard in folder.glob("model*.safetensors*"):
        shard.unlink()
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    with torch.device(device):
        torch.set_default_dtype(torch.bfloat16)
        model = Qwen2VLForConditionalGeneration(Qwen2VLConfig.from_pretrained(folder))
        torch.set_default_dtype(torch.float32)
    model.save_pretrained(folder / "shards", max_shard_size="4GB")
    for file in (folder / "shards").glob("model*"):
        file.rename(folder / file.name)
    for rest in (folder / "shards").iterdir():
        rest.unlink()
    (folder / "shards").rmdir()


def make_rows(folder: Path, seed: int, count: int, width: int, height: int) -> None:
    rows = {
        "image": [noise_image(seed * 100_000 + i, width, height) for i in range(count)],
        "problem": ["How many items are there in the image?"] * count,
        "solution": [f"<answer> {3 + i % 7} </answer>" for i in range(count)],
    }
    Dataset.from_dict(rows).save_to_disk(folder)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--width", type=int, default=480)
    parser.add_argument("--height", type=int, default=320)
    args = parser.parse_args()
    make_base(args.folder / "base")
    for seed, (name, count) in enumerate({"train": args.rows, "val": 16, "ood_val": 16}.items()):
        make_rows(args.folder / name, seed, count, args.width, args.height)
    print(f"{args.folder}: image token {SPECIAL_IDS['image_token_id']}, {args.rows} training rows")


if __name__ == "__main__":
    main()
