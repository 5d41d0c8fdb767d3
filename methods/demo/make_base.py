"""Make the demo's base: a Qwen2-VL of 1.4 million parameters that describes scenes and counts badly.

    PYTHONPATH=. python methods/demo/make_base.py --work methods/demo/runs/base --out FOLDER

open_r1/sft.py on 20,800 of 40,000 drawn rows. Half describe a scene of one to nine objects; the other
half show how to count, on scenes that mostly hold one to three. No fault is planted: it is trained briefly,
and where there is little to choose from it hardly learns which objects a question means.
"""

import argparse
import re
import shutil
import subprocess
import sys
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    PreTrainedTokenizerFast,
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
    Qwen2VLImageProcessor,
    Qwen2VLProcessor,
    Qwen2VLVideoProcessor,
)

from methods.demo.draw import draw_row, draw_sets
from open_r1.protocol import EVAL_TEMPLATE, TRAIN_TEMPLATE

ROOT = Path(__file__).resolve().parents[2]

SPECIAL_TOKENS = [
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|vision_pad|>",
    "<|image_pad|>", "<|video_pad|>",
]  # fmt: skip
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% elif part['type'] == 'text' %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}"
    "<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
INSTRUCTIONS = [template.format(question="") for template in (EVAL_TEMPLATE, TRAIN_TEMPLATE)]


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level BPE, so any text can be written. Words, places and tags become one token each, and so does
    either instruction: short prompts are what makes minutes out of this demo."""
    words = [
        *map(re.escape, INSTRUCTIONS),
        r" ?</?(?:think|answer)>",
        r" ?[a-d][1-4]\b",
        r" ?[A-Za-z]+",
        r" ?[0-9]",
        r".",
    ]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex("|".join(words)), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ])  # fmt: skip
    tokenizer.decoder = decoders.ByteLevel()
    rows = [draw_row(name, 0, row)[0] for name in ("base", "train") for row in range(800)]
    texts = [row[column] for row in rows for column in ("problem", "solution", "completion")]
    tokenizer.train_from_iterator(
        texts + (INSTRUCTIONS + ["user\n", "assistant\n"]) * 100,
        trainers.BpeTrainer(
            vocab_size=1000,
            min_frequency=10,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>",
        additional_special_tokens=SPECIAL_TOKENS, chat_template=CHAT_TEMPLATE,
    )  # fmt: skip


def make_processor(tokenizer: PreTrainedTokenizerFast) -> Qwen2VLProcessor:
    return Qwen2VLProcessor(
        image_processor=Qwen2VLImageProcessor(min_pixels=56 * 56, max_pixels=1280 * 28 * 28),
        tokenizer=tokenizer,
        video_processor=Qwen2VLVideoProcessor(),
        chat_template=CHAT_TEMPLATE,
    )


def make_model(processor: Qwen2VLProcessor, seed: int) -> Qwen2VLForConditionalGeneration:
    """Random weights: vision tower 3 x 128, text tower 2 x 128, heads of 32, tied head."""
    tokenizer = processor.tokenizer
    token_id = tokenizer.convert_tokens_to_ids
    initial = {"initializer_range": 0.04}  # at the usual 0.02 so small a model hardly sets out
    config = Qwen2VLConfig(
        text_config={
            "hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 2, "num_attention_heads": 4,
            "num_key_value_heads": 2, "vocab_size": -(-len(tokenizer) // 8) * 8,
            "max_position_embeddings": 1024,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 6, 6]},
            "bos_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id,
            "pad_token_id": tokenizer.pad_token_id, **initial,
        },
        vision_config={
            "depth": 3, "embed_dim": 128, "num_heads": 4, "mlp_ratio": 3, "hidden_size": 128,
            "patch_size": 14, "spatial_merge_size": 2, "temporal_patch_size": 2, **initial,
        },
        image_token_id=token_id("<|image_pad|>"), video_token_id=token_id("<|video_pad|>"),
        vision_start_token_id=token_id("<|vision_start|>"), vision_end_token_id=token_id("<|vision_end|>"),
        tie_word_embeddings=True,
    )  # fmt: skip
    torch.manual_seed(seed)
    model = Qwen2VLForConditionalGeneration(config)
    model.generation_config.eos_token_id = [tokenizer.eos_token_id, tokenizer.pad_token_id]
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    return model


SFT_FLAGS = {
    "--prompt_template": "{question}", "--max_steps": 1300, "--per_device_train_batch_size": 16,
    "--learning_rate": 1e-3, "--lr_scheduler_type": "linear", "--warmup_steps": 30, "--adam_beta2": 0.99,
    "--weight_decay": 0, "--max_grad_norm": 1, "--logging_steps": 100, "--dataloader_num_workers": 1,
}  # fmt: skip


def copy_model(trained: Path, out: Path) -> None:
    """What makes a model, without what its training left beside it."""
    out.mkdir(parents=True, exist_ok=True)
    for file in trained.iterdir():
        if file.suffix in (".json", ".jinja", ".safetensors"):
            shutil.copyfile(file, out / file.name)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--work", type=Path, required=True, help="folder for the data and the stages between")
    parser.add_argument("--out", type=Path, required=True, help="folder that receives the base")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--processes", type=int, default=2, help="processes that draw")
    args = parser.parse_args()

    if not (args.work / "data/base").exists():
        draw_sets(["base"], args.seed, args.work / "data", args.processes)
    processor = make_processor(make_tokenizer())
    random_model, trained = args.work / "random", args.work / "trained"
    make_model(processor, args.seed).save_pretrained(random_model)
    processor.save_pretrained(random_model)
    flags = SFT_FLAGS | {
        "--model_name_or_path": random_model, "--dataset_name": args.work / "data/base",
        "--output_dir": trained, "--seed": args.seed,
    }  # fmt: skip
    words = [str(word) for pair in flags.items() for word in pair]
    subprocess.run([sys.executable, str(ROOT / "open_r1/sft.py"), *words], check=True)
    copy_model(trained, args.out)


if __name__ == "__main__":
    main()
