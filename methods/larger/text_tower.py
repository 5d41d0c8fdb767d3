"""A Llama model's weights and tokenizer as Qwen2-VL's text tower, beside a vision tower of random weights.

Qwen2's layer is Llama's with biases on query, key and value: they start at 0. Rotary positions of text are
the same in M-RoPE's three sections, so with Llama's base they are Llama's: on text, the logits are equal.

The vocabulary can be cut after its first tokens. The tokenizer is cut with it: byte-level BPE adds its tokens
in the order of its merges, so what is left is what the same training would have made of that size. Any text
can still be written; rarer words take more tokens than the model was trained on.
"""

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import PreTrainedTokenizerFast, Qwen2VLConfig, Qwen2VLForConditionalGeneration

from methods.demo.make_base import CHAT_TEMPLATE, SPECIAL_TOKENS
from methods.larger.gguf import GGUF

END, PAD = "<|im_end|>", "<|endoftext|>"
VISION = {
    "depth": 4, "embed_dim": 384, "num_heads": 6, "mlp_ratio": 4, "patch_size": 14, "spatial_merge_size": 2,
    "temporal_patch_size": 2,
}  # fmt: skip
TENSORS = {
    "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm", "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
}  # fmt: skip


def llama_of(file: GGUF, vocabulary: int) -> tuple[dict[str, Tensor], dict]:
    """The weights under transformers' names, with the vocabulary's first tokens, and Llama's settings."""
    about = {name.removeprefix("llama."): value for name, value in file.about.items()}
    heads, kv_heads = about["attention.head_count"], about["attention.head_count_kv"]
    weights = {
        "embed_tokens.weight": file.tensor("token_embd.weight")[:vocabulary],
        "norm.weight": file.tensor("output_norm.weight"),
    }
    for layer in range(about["block_count"]):
        for theirs, ours in TENSORS.items():
            weight = file.tensor(f"blk.{layer}.{theirs}.weight")
            if theirs in ("attn_q", "attn_k"):
                weight = halves(weight, heads if theirs == "attn_q" else kv_heads)
            weights[f"layers.{layer}.{ours}.weight"] = weight
    settings = {
        "hidden_size": about["embedding_length"], "intermediate_size": about["feed_forward_length"],
        "num_hidden_layers": about["block_count"], "num_attention_heads": heads,
        "num_key_value_heads": kv_heads, "rms_norm_eps": about["attention.layer_norm_rms_epsilon"],
        "max_position_embeddings": about["context_length"], "rope_theta": about["rope.freq_base"],
    }  # fmt: skip
    return weights, settings


def halves(weight: Tensor, heads: int) -> Tensor:
    """GGUF has the two numbers that rotate together side by side; transformers has them half a head apart."""
    return weight.unflatten(0, (heads, -1, 2)).transpose(1, 2).flatten(0, 2)


def cut_tokenizer(tokens: list[str], merges: list[str], size: int) -> PreTrainedTokenizerFast:
    """SmolLM2's, with its first `size` tokens and then the special tokens of Qwen2-VL that it lacks."""
    known = {token: number for number, token in enumerate(tokens[:size])}
    pairs = [tuple(merge.split(" ")) for merge in merges]
    kept = [pair for pair in pairs if {*pair, "".join(pair)} <= known.keys()]
    tokenizer = Tokenizer(models.BPE(vocab=known, merges=kept))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, normalized=False) for token in SPECIAL_TOKENS])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=END, pad_token=PAD, additional_special_tokens=SPECIAL_TOKENS,
        chat_template=CHAT_TEMPLATE,
    )  # fmt: skip


def qwen_config(llama: dict, tokenizer: PreTrainedTokenizerFast, vision: dict) -> Qwen2VLConfig:
    """Of Llama's settings (llama_of) and those of a vision tower."""
    token_id = tokenizer.convert_tokens_to_ids
    text = {name: value for name, value in llama.items() if name != "rope_theta"}
    pairs = llama["hidden_size"] // llama["num_attention_heads"] // 2  # of numbers that rotate together
    sections = [pairs - 2 * (pairs * 3 // 8), pairs * 3 // 8, pairs * 3 // 8]  # as Qwen2-VL's 16, 24, 24
    rope = {"rope_type": "default", "rope_theta": llama["rope_theta"], "mrope_section": sections}
    return Qwen2VLConfig(
        text_config=text
        | {
            "vocab_size": -(-len(tokenizer) // 64) * 64, "rope_parameters": rope,
            "bos_token_id": token_id(PAD), "eos_token_id": token_id(END), "pad_token_id": token_id(PAD),
        },
        vision_config=vision | {"hidden_size": llama["hidden_size"]},
        image_token_id=token_id("<|image_pad|>"), video_token_id=token_id("<|video_pad|>"),
        vision_start_token_id=token_id("<|vision_start|>"), vision_end_token_id=token_id("<|vision_end|>"),
        tie_word_embeddings=True,
    )  # fmt: skip


def make_model(
    weights: dict[str, Tensor],
    llama: dict,
    tokenizer: PreTrainedTokenizerFast,
    seed: int,
    vision: dict = VISION,
) -> Qwen2VLForConditionalGeneration:
    """Tokens that Llama has not start as the mean of its embeddings."""
    torch.manual_seed(seed)
    model = Qwen2VLForConditionalGeneration(qwen_config(llama, tokenizer, vision))
    text, known = model.model.language_model, weights["embed_tokens.weight"]
    embedding = known.mean(0).repeat(model.config.text_config.vocab_size, 1)
    embedding[: len(known)] = known
    own = text.state_dict().items()
    biases = {name: torch.zeros_like(tensor) for name, tensor in own if name.endswith("_proj.bias")}
    text.load_state_dict(weights | biases | {"embed_tokens.weight": embedding})
    end, pad = tokenizer.eos_token_id, tokenizer.pad_token_id
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = [end, pad], pad
    return model
