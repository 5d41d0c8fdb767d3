"""Qwen2-VL's decoder layer and vision block as pure functions around the attention.

transformers' modules launch some forty small kernels a layer, and the time of an update on a fast card is
the time to launch them. The functions here are compiled on CUDA (fused to about ten kernels), and work on
the very weights of the modules: names, hooks and checkpoints stay what they are.

Legend
  B  rows (1 for a packed row)     L  tokens of a row       H  hidden size     D  head size
  N  patches of all images         W  hidden size of the vision tower
  r  rank of an adapter            O, I  outputs and inputs of a linear layer
"""

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .attention import CACHE, compiled, packed_attention, vision_attention
from .lora import active_adapter

ACTIVATIONS = "silu", "quick_gelu"  # of the decoder layers and of the vision blocks
# Of a linear layer: weight [O, I] and bias, and with LoRA also A [r, I], B [O, r] and the scale.
Weight = tuple[Tensor, Tensor | None] | tuple[Tensor, Tensor | None, Tensor, Tensor, float]


def linear(x: Tensor, weight: Weight) -> Tensor:
    """x [..., I] -> [..., O]."""
    out = F.linear(x, *weight[:2])
    if len(weight) == 2:
        return out
    a, b, scale = weight[2:]
    return out + F.linear(F.linear(x, a), b) * scale


def thirds(weight: Weight) -> list[Weight]:
    """Three layers with the same input that one weight holds, one below the other."""
    parts = zip(*(part.chunk(3) for part in weight[:2]), strict=True)
    if len(weight) == 2:
        return list(parts)
    a, b, scale = weight[2:]
    return [(*part, a, some, scale) for part, some in zip(parts, b.chunk(3), strict=True)]


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.float()
    return weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(x.dtype)


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of x [..., D], the halves of D being the pairs: x cos + (-second, first) sin."""
    sign = torch.arange(2, device=x.device)[:, None] * 2 - 1  # -1 for the first half, 1 for the second
    x, cos, sin = (part.unflatten(-1, (2, -1)) for part in (x, cos, sin))  # [..., 2, D / 2]
    return (x * cos + x.flip(-2) * (sin * sign)).flatten(-2)


def decoder_inputs(
    x: Tensor, norm: Tensor, eps: float, projections: list[Weight], cos: Tensor, sin: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """x [B, L, H] -> query [B, heads, L, D], key and value [B, kv heads, L, D], by their `projections`."""
    x, size = rms_norm(x, norm, eps), cos.shape[-1]
    query, key, value = (
        linear(x, projection).unflatten(-1, (-1, size)).transpose(1, 2) for projection in projections
    )
    cos, sin = cos[:, None], sin[:, None]  # [B, 1, L, D]
    return rotated(query, cos, sin), rotated(key, cos, sin), value


def decoder_outputs(
    x: Tensor, attended: Tensor, out: Weight, norm: Tensor, eps: float, gate_up: list[Weight], down: Weight
) -> Tensor:
    """x [B, L, H] and what its tokens attended to, [B, L, heads, D] -> [B, L, H]. `gate_up` are the
    weights of both, or one of the two stacked."""
    x = x + linear(attended.flatten(-2), out)
    inner = rms_norm(x, norm, eps)
    parts = [linear(inner, weight) for weight in gate_up]
    gate, up = parts if len(parts) == 2 else parts[0].chunk(2, dim=-1)
    return x + linear(F.silu(gate) * up, down)


def vision_inputs(
    x: Tensor, norm: Weight, eps: float, qkv: Weight, cos: Tensor, sin: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """x [N, W] -> query, key, value [N, heads, D]; the rotation is in float32, as in transformers."""
    x = F.layer_norm(x, x.shape[-1:], *norm, eps)
    # Three products: the backward pass of one would stack three gradients, in a kernel of 0.4 ms.
    query, key, value = (linear(x, part).unflatten(-1, (-1, cos.shape[-1])) for part in thirds(qkv))
    cos, sin = cos[:, None].float(), sin[:, None].float()  # [N, 1, D]
    query, key = (rotated(part.float(), cos, sin).to(value.dtype) for part in (query, key))
    return query, key, value


def vision_outputs(
    x: Tensor, attended: Tensor, proj: Weight, norm: Weight, eps: float, fc1: Weight, fc2: Weight
) -> Tensor:
    """x [N, W] and what its patches attended to, [N, heads, D] -> [N, W]."""
    x = x + linear(attended.flatten(1), proj)
    inner = linear(F.layer_norm(x, x.shape[-1:], *norm, eps), fc1)
    return x + linear(inner * torch.sigmoid(1.702 * inner), fc2)  # quick GELU


def fused(function: Callable, device: torch.device) -> Callable:
    """The function itself on the CPU, where compiling would take longer than it saves."""
    return compiled(function.__name__, function) if device.type == "cuda" else function


# --- in a model -------------------------------------------------------------------------------------------


def use_fused_layers(model: nn.Module) -> None:
    """Replaces the forward of each decoder layer and vision block of this instance, in place."""
    found = model.config.get_text_config().hidden_act, model.config.vision_config.hidden_act
    if found != ACTIVATIONS:
        raise ValueError(f"config.json names the activations {found}; set MODEL to one with {ACTIVATIONS}.")
    for layer in model.model.language_model.layers:
        layer.forward = partial(_decoder_layer, layer)
    for block in model.model.visual.blocks:
        block.forward = partial(_vision_block, block)


def _decoder_layer(
    layer: nn.Module, hidden_states: Tensor, *, attention_mask, position_embeddings, **kwargs
) -> Tensor:
    attention, mlp, device = layer.self_attn, layer.mlp, hidden_states.device
    projections = [weight_of(p) for p in (attention.q_proj, attention.k_proj, attention.v_proj)]
    query, key, value = fused(decoder_inputs, device)(
        hidden_states, layer.input_layernorm.weight, layer.input_layernorm.variance_epsilon, projections,
        *position_embeddings,
    )  # fmt: skip
    if kwargs.get(CACHE) is not None:
        key, value = kwargs[CACHE].update(key, value, attention.layer_idx)
    attended, _ = packed_attention(attention, query, key, value, attention_mask, attention.scaling)
    norm = layer.post_attention_layernorm
    return fused(decoder_outputs, device)(
        hidden_states, attended, weight_of(attention.o_proj), norm.weight, norm.variance_epsilon,
        [weight_of(mlp.gate_proj), weight_of(mlp.up_proj)], weight_of(mlp.down_proj),
    )  # fmt: skip


def _vision_block(
    block: nn.Module, hidden_states: Tensor, *, cu_seqlens: Tensor, longest_image: int, position_embeddings,
    **_,
) -> Tensor:  # fmt: skip
    device, norm1, norm2 = hidden_states.device, block.norm1, block.norm2
    query, key, value = fused(vision_inputs, device)(
        hidden_states, (norm1.weight, norm1.bias), norm1.eps, weight_of(block.attn.qkv), *position_embeddings
    )
    attended = vision_attention(query, key, value, cu_seqlens, longest_image)
    return fused(vision_outputs, device)(
        hidden_states, attended, weight_of(block.attn.proj), (norm2.weight, norm2.bias), norm2.eps,
        weight_of(block.mlp.fc1), weight_of(block.mlp.fc2),
    )  # fmt: skip


def weight_of(layer: nn.Module) -> Weight:
    """Of a linear layer, with its adapter where that is on."""
    return layer.weight, layer.bias, *active_adapter(layer)
