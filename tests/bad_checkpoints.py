"""Checkpoints that are damaged, incomplete or of another kind: each with the words of its refusal.

A case is (a function that damages the public form of the tiny model, what the first of load_policy,
load_processor and PromptEncoder that notices says); None stands for "loads".
"""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from tests.bad_inputs import cut
from tests.tiny import tiny_tokenizer

INDEX = "model.safetensors.index.json"
FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


def edit(folder: Path, name: str, **changes) -> None:
    content = json.loads((folder / name).read_text())
    (folder / name).write_text(json.dumps(content | changes))


def write(folder: Path, name: str, text: str) -> None:
    (folder / name).write_text(text)


def put_value(folder: Path, value: float, file: str = SECOND, name: str = "model.norm.weight") -> None:
    tensors = load_file(folder / file)
    tensors[name].view(-1)[3] = value
    save_file(tensors, folder / file, metadata={"format": "pt"})


def remove(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).unlink()


def as_pickles(folder: Path) -> None:
    """The weights as pytorch_model.bin, the form that can hold code."""
    tensors = load_file(folder / FIRST) | load_file(folder / SECOND)
    remove(folder, FIRST, SECOND, INDEX)
    torch.save(tensors, folder / "pytorch_model.bin")


def adapter(folder: Path) -> None:
    for file in list(folder.iterdir()):
        file.unlink()
    config = {"peft_type": "LORA", "base_model_name_or_path": "owner/base", "r": 8}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    save_file({"base_model.model.lora_A.weight": torch.zeros(2, 2)}, folder / "adapter_model.safetensors")


def adapter_beside(folder: Path) -> None:
    config = {"peft_type": "LORA", "base_model_name_or_path": "owner/base", "r": 8}
    (folder / "adapter_config.json").write_text(json.dumps(config))


def code_in_config(folder: Path) -> None:
    """Whatever reads auto_map with trust would import this."""
    (folder / "evil.py").write_text(f"open({str(folder / 'ran')!r}, 'w')\n")
    kinds = ("Config", "ModelForImageTextToText", "Processor", "Tokenizer", "ImageProcessor")
    mapping = {f"Auto{kind}": "evil.Evil" for kind in kinds}
    for file in ("config.json", "preprocessor_config.json", "tokenizer_config.json"):
        edit(folder, file, auto_map=mapping)


def point_index_outside(folder: Path) -> None:
    index = json.loads((folder / INDEX).read_text())
    index["weight_map"] = {name: f"../{file}" for name, file in index["weight_map"].items()}
    for file in (FIRST, SECOND):
        shutil.copy(folder / file, folder.parent / file)
    (folder / INDEX).write_text(json.dumps(index))


def name_missing_file(folder: Path) -> None:
    index = json.loads((folder / INDEX).read_text())
    index["weight_map"]["model.norm.weight"] = "model-00003-of-00003.safetensors"
    (folder / INDEX).write_text(json.dumps(index))


def add_head(folder: Path, factor: float) -> None:
    """lm_head in the file of a model whose config.json ties it to the embedding."""
    tensors, index = load_file(folder / SECOND), json.loads((folder / INDEX).read_text())
    tensors["lm_head.weight"] = load_file(folder / FIRST)["model.embed_tokens.weight"] * factor
    index["weight_map"]["lm_head.weight"] = SECOND
    save_file(tensors, folder / SECOND, metadata={"format": "pt"})
    (folder / INDEX).write_text(json.dumps(index))


def untie(folder: Path) -> None:
    add_head(folder, 2.0)
    edit(folder, "config.json", tie_word_embeddings=False)


def more_tokens(folder: Path) -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.add_tokens([f"<new_{n}>" for n in range(100)])
    template = (folder / "chat_template.json").read_bytes()
    tokenizer.save_pretrained(folder)
    (folder / "chat_template.json").write_bytes(template)


NOT_WHOLE, NO_PROCESSOR = "cannot be loaded", "has no processor that loads"
NO_CONFIG, OTHER_SIZE = "has no readable config.json", "does not fit its config.json"
NOT_FINITE = "not finite, first in model.language_model.norm.weight"
NO_WEIGHTS = "holds neither model.safetensors"
CHECKPOINTS: dict[str, tuple[Callable[[Path], object], str | None]] = {
    "whole": (lambda d: None, None),
    "code that nothing may run": (code_in_config, None),
    "head twice, the same": (lambda d: add_head(d, 1.0), None),
    "head twice, different": (lambda d: add_head(d, 2.0), "lm_head"),
    "head of its own": (untie, None),
    "half copied: no weights": (lambda d: remove(d, FIRST, SECOND, INDEX), NO_WEIGHTS),
    "half copied: a shard is missing": (lambda d: remove(d, SECOND), SECOND),
    "half copied: no index": (lambda d: remove(d, INDEX), NO_WEIGHTS),
    "a shard cut short": (lambda d: cut(d / SECOND), "bytes and its header says"),
    "a shard of zero bytes": (lambda d: os.truncate(d / SECOND, 0), f"{SECOND} has no readable header"),
    "a shard that is a Git LFS pointer": (
        lambda d: write(d, SECOND, "version https://git-lfs.github.com/spec/v1\n"),
        f"{SECOND} has no readable header",
    ),
    "index is garbage": (lambda d: write(d, INDEX, "{"), INDEX),
    "index names a missing file": (name_missing_file, "model-00003-of-00003.safetensors"),
    "index points outside": (point_index_outside, "outside"),
    "NaN": (lambda d: put_value(d, float("nan")), NOT_FINITE),
    "inf": (lambda d: put_value(d, float("inf")), NOT_FINITE),
    "weights that are pickles": (as_pickles, NO_WEIGHTS),
    "adapter only": (adapter, "is a LoRA adapter"),
    "adapter beside a model": (adapter_beside, "is a LoRA adapter"),
    "quantized": (
        lambda d: edit(d, "config.json", quantization_config={"quant_method": "gptq", "bits": 4}),
        "is quantized",
    ),
    "another architecture": (lambda d: edit(d, "config.json", model_type="llava"), "'llava'"),
    "no architecture": (lambda d: edit(d, "config.json", model_type=None), "None"),
    "config.json is missing": (lambda d: remove(d, "config.json"), NO_CONFIG),
    "config.json is garbage": (lambda d: write(d, "config.json", "<html>"), NO_CONFIG),
    "config.json is a list": (lambda d: write(d, "config.json", "[]"), NO_CONFIG),
    "config.json of another size": (lambda d: edit(d, "config.json", hidden_size=32), OTHER_SIZE),
    "config.json with text for a number": (lambda d: edit(d, "config.json", hidden_size="wide"), NOT_WHOLE),
    "vocabulary of another size": (lambda d: edit(d, "config.json", vocab_size=300), OTHER_SIZE),
    "tokenizer of another vocabulary": (more_tokens, "364 tokens"),
    "image token of another number": (lambda d: edit(d, "config.json", image_token_id=7), "<|image_pad|>"),
    "tokenizer is missing": (
        lambda d: remove(d, "tokenizer.json", "tokenizer_config.json"),
        "has no tokenizer",
    ),
    "tokenizer.json is garbage": (lambda d: write(d, "tokenizer.json", "{"), NO_PROCESSOR),
    "processor is missing": (lambda d: remove(d, "preprocessor_config.json"), "has no"),
    "processor is garbage": (lambda d: write(d, "preprocessor_config.json", "]"), NO_PROCESSOR),
    "chat template is missing": (lambda d: remove(d, "chat_template.json"), "has no chat template"),
}
