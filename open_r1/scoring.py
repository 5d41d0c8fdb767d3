"""Packed rows -> hidden states -> per-token log-probs, entropy, self-certainty.

Legend
  L  tokens of the row       N  completion tokens of the row (the scored ones)
  H  hidden size             V  vocabulary
"""

import torch
from torch import Tensor, nn
from transformers.vision_utils import get_vision_cu_seqlens, get_vision_position_ids

from .attention import ATTENTION, build_mask
from .layers import fused, use_fused_layers
from .packing import PackedRow, to_device

LOGITS_CHUNK = 4096  # tokens whose [chunk, V] logits exist at once: 1.2 GB in bf16 at V = 151,936


def row_hidden_states(
    model: nn.Module,
    input_ids: Tensor,
    position_ids: Tensor,
    group_ids: Tensor,
    completion_ids: Tensor,
    pixel_values: Tensor | None,
    image_grid_thw: Tensor | None,
    block_kinds: Tensor | None,
    image_features: Tensor | None = None,
    **cache,
) -> Tensor:
    """Hidden states [L, H] of a packed row. The text tower must have been switched to ATTENTION.

    With `image_features` the vision tower is not run: a row of a rollout has them on every rank, or on none.
    """
    inner = model.model
    embeds = inner.get_input_embeddings()(input_ids[None])  # [1, L, H]
    placeholders = (input_ids == model.config.image_token_id)[None, :, None]  # [1, L, 1]
    if image_features is not None:
        embeds = embeds.masked_scatter(placeholders, image_features.to(embeds.dtype))
    elif pixel_values is None:
        # Under ZeRO-3 (and DDP) every rank must run the same modules: a row without images looks at one
        # blank patch square.
        features = look_at(inner.visual, *blank_image(inner.config.vision_config, embeds.device))
        embeds = embeds + 0.0 * features.sum().to(embeds.dtype)
    else:
        features = look_at(inner.visual, pixel_values, image_grid_thw)
        embeds = embeds.masked_scatter(placeholders, features.to(embeds.dtype))
    return inner.language_model(
        inputs_embeds=embeds,
        position_ids=position_ids[:, None],  # [3, 1, L]
        attention_mask={"full_attention": build_mask(group_ids, completion_ids, block_kinds)},
        **(cache or {"use_cache": False}),
    ).last_hidden_state[0]


def look_at(visual: nn.Module, pixel_values: Tensor, image_grid_thw: Tensor) -> Tensor:
    """The image tokens' embeddings [patches / 4, H], image after image. image_grid_thw is on the CPU, so
    that nothing waits for the GPU."""
    starts = get_vision_cu_seqlens(image_grid_thw)
    positions = get_vision_position_ids(image_grid_thw, visual.spatial_merge_size)  # [patches, 2]
    return visual(
        pixel_values,
        grid_thw=image_grid_thw,
        position_ids=to_device(positions, pixel_values.device),
        cu_seqlens=to_device(starts, pixel_values.device),
        longest_image=int(starts.diff().max()),
    ).pooler_output


def blank_image(config, device: torch.device) -> tuple[Tensor, Tensor]:
    """pixel_values and image_grid_thw of the smallest image there is."""
    merge = config.spatial_merge_size
    patch_values = config.in_channels * config.temporal_patch_size * config.patch_size**2
    return torch.zeros(merge * merge, patch_values, device=device), torch.tensor([[1, merge, merge]])


class ChunkedLogps(torch.autograd.Function):
    """log softmax(hidden @ weight.T / temperature)[targets] without ever holding [N, V].

    Forward and backward walk over chunks of tokens; backward recomputes the logits of a chunk and adds its
    share of the head's gradient in float32. A Function and not a checkpoint, because under ZeRO-3 this
    reads the head through one module: gathered once in the forward pass and once in the backward pass, not
    once a chunk.
    """

    @staticmethod
    def forward(ctx, hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float) -> Tensor:
        logps, log_z = hidden.new_empty(2, hidden.shape[0], dtype=torch.float32).unbind(0)  # [N], [N]
        for part in _chunks(hidden.shape[0]):
            logps[part], log_z[part] = fused(chunk_logps, hidden.device)(
                hidden[part], weight, targets[part], temperature
            )
        ctx.save_for_backward(hidden, weight, targets, log_z)
        ctx.temperature = temperature
        return logps

    @staticmethod
    def backward(ctx, grad_logps: Tensor):
        hidden, weight, targets, log_z = ctx.saved_tensors
        grad_hidden = torch.empty_like(hidden)
        grad_weight = torch.zeros_like(weight, dtype=torch.float32) if ctx.needs_input_grad[1] else None
        for part in _chunks(hidden.shape[0]):
            grad = fused(chunk_grad, hidden.device)(
                hidden[part], weight, targets[part], log_z[part], grad_logps[part], ctx.temperature
            )  # [chunk, V]
            grad_hidden[part] = grad @ weight
            if grad_weight is not None:
                grad_weight += grad.T @ hidden[part]
            del grad  # or the next chunk's would be a second one
        return grad_hidden, None if grad_weight is None else grad_weight.to(weight.dtype), None, None


def chunk_logits(hidden: Tensor, weight: Tensor, temperature: float) -> Tensor:
    """Float32 logits [chunk, V]."""
    return (hidden @ weight.T).float() / temperature


def chunk_logps(
    hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float
) -> tuple[Tensor, Tensor]:
    """Log-probs of the targets and the log of the normaliser, [chunk] each."""
    logits = chunk_logits(hidden, weight, temperature)
    log_z = logits.logsumexp(-1)
    return logits.gather(1, targets[:, None])[:, 0] - log_z, log_z


def chunk_grad(
    hidden: Tensor, weight: Tensor, targets: Tensor, log_z: Tensor, grad_logps: Tensor, temperature: float
) -> Tensor:
    """The gradient of the head's product, [chunk, V] in its type: (one-hot target - probabilities) x what
    comes from behind."""
    probs = (chunk_logits(hidden, weight, temperature) - log_z[:, None]).exp()
    hit = torch.arange(weight.shape[0], device=weight.device) == targets[:, None]
    return ((hit.float() - probs) * (grad_logps / temperature)[:, None]).to(hidden.dtype)


def _chunks(tokens: int) -> list[slice]:
    return [slice(start, start + LOGITS_CHUNK) for start in range(0, tokens, LOGITS_CHUNK)]


def entropy_of(logits: Tensor) -> Tensor:
    """Entropy of the next-token distribution in nats, [N]."""
    logps = logits.log_softmax(-1)
    return -(logps.exp() * logps).sum(-1)


def self_certainty_of(logits: Tensor) -> Tensor:
    """KL(uniform || policy) = log Z - mean logit - log V, [N] (Intuitor, arXiv 2505.19590, eq. 3)."""
    return logits.logsumexp(-1) - logits.mean(-1) - torch.log(torch.tensor(float(logits.shape[-1])))


TOKEN_STATISTICS = {"entropy": entropy_of, "self_certainty": self_certainty_of}


def _head_forward(
    head: nn.Linear, hidden: Tensor, targets: Tensor, temperature: float, statistic: str | None,
    vocab_limit: int | None,
):  # fmt: skip
    """Replaces lm_head.forward on the policy: the head's weight is used inside this one module call."""
    weight = head.weight
    if torch.is_autocast_enabled(hidden.device.type):
        dtype = torch.get_autocast_dtype(hidden.device.type)
        hidden, weight = hidden.to(dtype), weight.to(dtype)
    if statistic is None:
        return ChunkedLogps.apply(hidden, weight, targets, temperature)
    function, weight = TOKEN_STATISTICS[statistic], weight[:vocab_limit]
    return torch.cat(
        [function(chunk_logits(hidden[part], weight, temperature)) for part in _chunks(hidden.shape[0])]
    )


def add_scoring_forward(model: nn.Module) -> nn.Module:
    """Turns the model's forward into packed row -> per-token log-probs [N], in place, and returns the model.

    forward(**PackedRow.model_inputs(), temperature=…, statistic=None, vocab_limit=None); a statistic
    ("entropy", "self_certainty") returns that number per token instead, without gradient, of the first
    `vocab_limit` logits. The instance is patched, not the class: a subclass of
    Qwen2VLForConditionalGeneration would load with a silently re-initialised text tower.
    """

    def forward(
        sources, targets, temperature: float = 1.0, statistic: str | None = None,
        vocab_limit: int | None = None, **row,
    ) -> Tensor:  # fmt: skip
        hidden = row_hidden_states(model, **row)[sources]  # [N, H]
        return model.lm_head(hidden, targets, temperature, statistic, vocab_limit)

    use_fused_layers(model)
    model.model.language_model.set_attn_implementation(ATTENTION)
    model.lm_head.forward = lambda *args: _head_forward(model.lm_head, *args)
    model.forward = forward
    return model


@torch.no_grad()
def row_logps(model: nn.Module, row: PackedRow, temperature: float) -> Tensor:
    """Log-probs [N] of a row on the model's device, under a model that keeps its own forward: a rollout
    copy."""
    inputs = row.model_inputs()
    sources, targets = inputs.pop("sources"), inputs.pop("targets")
    hidden = row_hidden_states(model, **inputs)[sources]  # [N, H]
    return ChunkedLogps.apply(hidden, model.lm_head.weight, targets, temperature)
