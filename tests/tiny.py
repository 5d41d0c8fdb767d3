"""A tiny Qwen2-VL for the tests: random weights, the real architecture, the real Qwen2VLProcessor.

Text tower: 2 layers, hidden 64, 4 heads of 16, 2 key-value heads. Vision tower: 2 blocks of 64; patches of 14
are merged 2 x 2, as in the real model. The tokenizer knows the 256 bytes and 8 special tokens (264 ids); the
vocabulary of the model is padded to 320, as the real one's is padded beyond its tokenizer.
"""

import json
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    PreTrainedTokenizerFast,
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
    Qwen2VLImageProcessor,
    Qwen2VLProcessor,
    Qwen2VLVideoProcessor,
)

SPECIAL_TOKENS = [
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|vision_pad|>",
    "<|image_pad|>",
    "<|video_pad|>",
]
TOKEN_ID = {token: 256 + i for i, token in enumerate(SPECIAL_TOKENS)}
EOS, PAD = TOKEN_ID["<|im_end|>"], TOKEN_ID["<|endoftext|>"]
VOCABULARY = 320
MIN_PIXELS, MAX_PIXELS = 56 * 56, 16384 * 28 * 28

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if loop.first and message['role'] != 'system' %}"
    "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n"
    "{% endif %}"
    "<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}"
    "{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% elif part['type'] == 'video' %}<|vision_start|><|video_pad|><|vision_end|>"
    "{% elif part['type'] == 'text' %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}"
    "<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

TEXT_CONFIG = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 4096,
    "max_window_layers": 2,
    "sliding_window": 4096,
    "use_sliding_window": False,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "attention_dropout": 0.0,
    "initializer_range": 0.3,  # at the usual 0.02 a random model says the same token for ever
    "use_cache": True,
    "bos_token_id": PAD,
    "eos_token_id": EOS,
}
VISION_CONFIG = {
    "depth": 2,
    "embed_dim": 64,
    "num_heads": 4,
    "mlp_ratio": 2,
    "hidden_size": 64,
    "patch_size": 14,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
}
SPECIAL_IDS = {
    "image_token_id": TOKEN_ID["<|image_pad|>"],
    "video_token_id": TOKEN_ID["<|video_pad|>"],
    "vision_start_token_id": TOKEN_ID["<|vision_start|>"],
    "vision_end_token_id": TOKEN_ID["<|vision_end|>"],
}


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={char: i for i, char in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(token, normalized=False) for token in SPECIAL_TOKENS])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=SPECIAL_TOKENS[1:],
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )


def tiny_processor() -> Qwen2VLProcessor:
    return Qwen2VLProcessor(
        image_processor=Qwen2VLImageProcessor(min_pixels=MIN_PIXELS, max_pixels=MAX_PIXELS),
        tokenizer=tiny_tokenizer(),
        video_processor=Qwen2VLVideoProcessor(),
        chat_template=CHAT_TEMPLATE,
    )


def tiny_config() -> Qwen2VLConfig:
    rope = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [2, 3, 3]}
    vision = VISION_CONFIG | {"initializer_range": TEXT_CONFIG["initializer_range"]}
    config = Qwen2VLConfig(
        text_config=TEXT_CONFIG | {"rope_parameters": rope, "pad_token_id": PAD},
        vision_config=vision,
        tie_word_embeddings=True,
        **SPECIAL_IDS,
    )
    config._attn_implementation = "sdpa"
    return config


def tiny_model(seed: int = 0, dtype: torch.dtype = torch.float32) -> Qwen2VLForConditionalGeneration:
    """In eval mode. Another dtype's weights are the float32 ones, rounded; RoPE frequencies stay float32."""
    torch.manual_seed(seed)
    model = Qwen2VLForConditionalGeneration(tiny_config()).eval()
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    model.generation_config.eos_token_id = [EOS, PAD]
    model.generation_config.pad_token_id = PAD
    return model


def public_name(name: str) -> str:
    """The name of a module's parameter in the public checkpoint."""
    return name.replace("model.visual.", "visual.").replace("model.language_model.", "model.")


def save_public_form(folder: str | Path, seed: int = 0) -> None:
    """Write tiny_model(seed) as the public Qwen2-VL-2B-Instruct is written.

    A flat config.json from before transformers 5, two bfloat16 shards with an index, the old tensor names, no
    lm_head, a generation_config that makes sampling greedy, and the old processor files.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)

    def write(name: str, content: dict) -> None:
        (folder / name).write_text(json.dumps(content, indent=2) + "\n")

    write("config.json", {
        "architectures": ["Qwen2VLForConditionalGeneration"],
        "model_type": "qwen2_vl",
        **TEXT_CONFIG,
        **SPECIAL_IDS,
        "vision_token_id": TOKEN_ID["<|vision_pad|>"],
        "rope_theta": 1000000.0,
        "rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]},
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "transformers_version": "4.41.2",
        "vision_config": VISION_CONFIG | {"in_chans": 3, "spatial_patch_size": 14},
    })  # fmt: skip
    write("generation_config.json", {
        "bos_token_id": PAD,
        "pad_token_id": PAD,
        "do_sample": True,
        "eos_token_id": [EOS, PAD],
        "temperature": 0.01,
        "top_k": 1,
        "top_p": 0.001,
        "transformers_version": "4.37.0",
    })  # fmt: skip
    write("preprocessor_config.json", {
        "min_pixels": MIN_PIXELS,
        "max_pixels": MAX_PIXELS,
        "patch_size": 14,
        "temporal_patch_size": 2,
        "merge_size": 2,
        "image_mean": [0.48145466, 0.4578275, 0.40821073],
        "image_std": [0.26862954, 0.26130258, 0.27577711],
        "image_processor_type": "Qwen2VLImageProcessor",
        "processor_class": "Qwen2VLProcessor",
    })  # fmt: skip
    write("chat_template.json", {"chat_template": CHAT_TEMPLATE})
    tiny_tokenizer().save_pretrained(folder)
    (folder / "chat_template.jinja").unlink()

    tensors = {  # torch shares the tied head's storage: named_parameters() lists it once
        public_name(name): parameter.detach().contiguous()
        for name, parameter in tiny_model(seed, torch.bfloat16).named_parameters()
    }
    names = sorted(tensors)
    shards = {}
    # The public file's second shard holds the last text layers.
    second = [name for name in names if name.startswith(("model.layers.1.mlp", "model.norm"))]
    for number, part in enumerate(([n for n in names if n not in second], second), start=1):
        file = f"model-{number:05}-of-00002.safetensors"
        save_file({name: tensors[name] for name in part}, folder / file, metadata={"format": "pt"})
        shards |= dict.fromkeys(part, file)
    size = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    index = {"metadata": {"total_size": size}, "weight_map": dict(sorted(shards.items()))}
    write("model.safetensors.index.json", index)


def noise_image(seed: int, width: int, height: int) -> Image.Image:
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels)
