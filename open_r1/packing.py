"""Groups of completions -> packed rows -> per-token log-probs.

A packed row is [prompt_1 | c_11 .. c_1G | prompt_2 | c_21 .. ] with one rule: a token sees what stands
before it in its own prompt and its own completion. The prompt (and its image) is computed once for its G
completions, nothing is padded, and the result is exact: log-probs and gradients equal those of separate
rows.

Legend
  L  tokens of the row                N  completion tokens of the row (the scored ones)
  C  completions of the row           H  hidden size        V  vocabulary        D  head size
A completion's last token is scored but never fed: nothing stands behind it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention
from transformers import AttentionInterface

from .data import Prompt

ATTENTION = "packed"  # the name under which packed_attention is registered with transformers
PADDING_GROUP = -1
LOGITS_CHUNK = 1024  # tokens whose [chunk, V] logits exist at once: 0.6 GB in float32 at V = 151,936


@dataclass
class PackedRow:
    """One row, batch dimension left out. Everything the model's scoring forward takes."""

    input_ids: Tensor  # [L]
    position_ids: Tensor  # [3, L] M-RoPE; each completion restarts at the end of its prompt
    group_ids: Tensor  # [L] which prompt of the row; PADDING_GROUP for padding
    completion_ids: Tensor  # [L] 0 for the prompt, 1..G for its completions
    sources: Tensor  # [N] index in the row of the hidden state that predicts the target
    targets: Tensor  # [N] completion tokens, completion after completion
    owners: Tensor  # [N] which completion of the row (0..C-1) a target belongs to
    pixel_values: Tensor | None  # [patches, channels * temporal * patch * patch]
    image_grid_thw: Tensor | None  # [images, 3]

    def to(self, device: torch.device | str) -> "PackedRow":
        moved = {f.name: getattr(self, f.name) for f in fields(self)}
        return replace(
            self, **{k: v.to(device, non_blocking=True) for k, v in moved.items() if v is not None}
        )

    def model_inputs(self) -> dict[str, Tensor | None]:
        return {f.name: getattr(self, f.name) for f in fields(self) if f.name != "owners"}


def pack(groups: Sequence[tuple[Prompt, Sequence[Tensor]]], length: int | None = None) -> PackedRow:
    """Packs prompts, each with its completions ([T] token ids; none at all for a prefill), into one row.

    `length` pads the row at its end, so that compiled attention meets few different shapes.
    """
    ids, positions, group_ids, completion_ids, sources, targets, owners = [], [], [], [], [], [], []
    offset = completions_so_far = 0
    for group, (prompt, completions) in enumerate(groups):
        prompt_length = prompt.input_ids.numel()
        ids.append(prompt.input_ids)
        positions.append(prompt.position_ids)
        completion_ids.append(torch.zeros(prompt_length, dtype=torch.long))
        last_of_prompt = offset + prompt_length - 1
        start, offset = offset, offset + prompt_length
        for number, completion in enumerate(completions, start=1):
            fed = completion.numel() - 1
            ids.append(completion[:-1])
            positions.append((prompt.next_position + torch.arange(fed)).expand(3, -1))  # [3, T-1]
            completion_ids.append(torch.full((fed,), number))
            sources += [torch.tensor([last_of_prompt]), offset + torch.arange(fed)]
            targets.append(completion)
            owners.append(torch.full((fed + 1,), completions_so_far))
            completions_so_far += 1
            offset += fed
        group_ids.append(torch.full((offset - start,), group))
    padding = 0 if length is None else length - offset
    if padding < 0:
        raise ValueError(f"a packed row of {offset} tokens does not fit into {length}")
    images = [prompt for prompt, _ in groups if prompt.pixel_values is not None]
    no_tokens = torch.zeros(0, dtype=torch.long)
    return PackedRow(
        input_ids=F.pad(torch.cat(ids), (0, padding)),
        position_ids=F.pad(torch.cat(positions, dim=1), (0, padding)),
        group_ids=F.pad(torch.cat(group_ids), (0, padding), value=PADDING_GROUP),
        completion_ids=F.pad(torch.cat(completion_ids), (0, padding)),
        sources=torch.cat(sources or [no_tokens]),
        targets=torch.cat(targets or [no_tokens]),
        owners=torch.cat(owners or [no_tokens]),
        pixel_values=torch.cat([p.pixel_values for p in images]) if images else None,
        image_grid_thw=torch.cat([p.image_grid_thw for p in images]) if images else None,
    )


def bucket_length(tokens: int) -> int:
    """`tokens` rounded up to one of few lengths (eight an octave, multiples of 128): at most 12.5 % padding
    above 1024."""
    step = max(128, 1 << max(0, (tokens - 1).bit_length() - 4))
    return -(-tokens // step) * step


# --- the mask rule, and its two kernels -------------------------------------------------------------------


def sees(query_group, key_group, query_completion, key_completion, query_index, key_index):
    """The one rule. Works on tensors of any shape and, inside FlexAttention, on scalars."""
    same_completion = (key_completion == 0) | (query_completion == key_completion)
    return (query_index >= key_index) & (query_group == key_group) & same_completion


def build_mask(group_ids: Tensor, completion_ids: Tensor) -> "BlockMask | list[tuple[int, int, Tensor]]":
    """CUDA: FlexAttention's block mask. CPU: per group (start, end, [n, n] boolean), since groups see
    nothing of each other."""
    if group_ids.is_cuda:

        def rule(batch, head, query, key):
            return sees(
                group_ids[query], group_ids[key], completion_ids[query], completion_ids[key], query, key
            )

        length = group_ids.numel()
        return _create_block_mask()(rule, None, None, length, length, device=group_ids.device)
    blocks, start = [], 0
    for size in torch.unique_consecutive(group_ids, return_counts=True)[1].tolist():
        index = torch.arange(size)
        completion = completion_ids[start : start + size]
        same = torch.zeros((), dtype=torch.long)
        mask = sees(same, same, completion[:, None], completion[None], index[:, None], index[None])  # [n, n]
        blocks.append((start, start + size, mask))
        start += size
    return blocks


_compiled: dict[str, object] = {}


def _flex_attention():
    """Compiled once. A shape too many must stop the run: the uncompiled kernel would silently take 100
    times longer."""
    if not _compiled:
        torch._dynamo.config.recompile_limit = 256
        torch._dynamo.config.fail_on_recompile_limit_hit = True
        _compiled["attention"] = torch.compile(flex_attention, dynamic=False)
    return _compiled["attention"]


def _create_block_mask():
    if "mask" not in _compiled:
        _flex_attention()
        _compiled["mask"] = torch.compile(create_block_mask, dynamic=False)
    return _compiled["mask"]


def packed_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask, scaling: float, **kwargs
) -> tuple[Tensor, None]:
    """Attention of transformers' interface: query [B, heads, Q, D], key and value [B, kv heads, K, D] ->
    [B, Q, heads, D].

    The mask decides: a BlockMask or a list of blocks (a packed row), or a boolean [B, 1, 1, K] (a decode
    step).
    """
    query, key = (
        query.to(value.dtype),
        key.to(value.dtype),
    )  # under autocast rotary embeddings leave them in float32
    if isinstance(attention_mask, BlockMask):
        out = _flex_attention()(query, key, value, block_mask=attention_mask, scale=scaling, enable_gqa=True)
        return out.transpose(1, 2), None
    batch, heads, _, size = query.shape
    kv_heads = key.shape[1]
    if isinstance(attention_mask, list):
        key = key.repeat_interleave(heads // kv_heads, dim=1)
        value = value.repeat_interleave(heads // kv_heads, dim=1)
        out = torch.cat(
            [
                F.scaled_dot_product_attention(
                    query[:, :, a:b], key[:, :, a:b], value[:, :, a:b], attn_mask=mask, scale=scaling
                )
                for a, b, mask in attention_mask
            ],
            dim=2,
        )
        return out.transpose(1, 2), None
    # Decode: the query heads of one kv head stand as its query rows, so that keys and values are read once,
    # unrepeated.
    query = query.view(batch, kv_heads, heads // kv_heads, size)
    out = F.scaled_dot_product_attention(query, key, value, attn_mask=attention_mask, scale=scaling)
    return out.reshape(batch, 1, heads, size), None


AttentionInterface.register(ATTENTION, packed_attention)


# --- hidden states and log-probs --------------------------------------------------------------------------


def row_hidden_states(
    model: nn.Module,
    input_ids: Tensor,
    position_ids: Tensor,
    group_ids: Tensor,
    completion_ids: Tensor,
    pixel_values: Tensor | None,
    image_grid_thw: Tensor | None,
    **cache,
) -> Tensor:
    """Hidden states [L, H] of a packed row. The text tower must have been switched to ATTENTION."""
    inner = model.model
    embeds = inner.get_input_embeddings()(input_ids[None])  # [1, L, H]
    if pixel_values is None:
        # Under ZeRO-3 (and DDP) every rank must run the same modules: a row without images looks at one
        # blank patch square.
        embeds = embeds + 0.0 * _blank_image_features(inner, embeds).sum().to(embeds.dtype)
    else:
        features = torch.cat(tuple(inner.get_image_features(pixel_values, image_grid_thw).pooler_output))
        placeholders = (input_ids == model.config.image_token_id)[None, :, None]  # [1, L, 1]
        embeds = embeds.masked_scatter(placeholders, features.to(embeds.dtype))
    return inner.language_model(
        inputs_embeds=embeds,
        position_ids=position_ids[:, None],  # [3, 1, L]
        attention_mask={"full_attention": build_mask(group_ids, completion_ids)},
        **(cache or {"use_cache": False}),
    ).last_hidden_state[0]


def _blank_image_features(inner: nn.Module, like: Tensor) -> Tensor:
    config = inner.config.vision_config
    merge = config.spatial_merge_size
    patch_values = config.in_channels * config.temporal_patch_size * config.patch_size**2
    pixels = torch.zeros(merge * merge, patch_values, device=like.device)
    grid = torch.tensor([[1, merge, merge]], device=like.device)
    return torch.cat(tuple(inner.get_image_features(pixels, grid).pooler_output))  # [1, H]


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
            logits = chunk_logits(hidden[part], weight, temperature)  # [chunk, V]
            log_z[part] = logits.logsumexp(-1)
            logps[part] = logits.gather(1, targets[part, None])[:, 0] - log_z[part]
        ctx.save_for_backward(hidden, weight, targets, log_z)
        ctx.temperature = temperature
        return logps

    @staticmethod
    def backward(ctx, grad_logps: Tensor):
        hidden, weight, targets, log_z = ctx.saved_tensors
        grad_hidden = torch.empty_like(hidden)
        grad_weight = torch.zeros_like(weight, dtype=torch.float32) if ctx.needs_input_grad[1] else None
        for part in _chunks(hidden.shape[0]):
            logits = chunk_logits(hidden[part], weight, ctx.temperature)
            grad = logits.sub_(log_z[part, None]).exp_().neg_()  # minus the probabilities, [chunk, V]
            grad.scatter_add_(1, targets[part, None], torch.ones_like(grad[:, :1]))
            grad = grad.mul_(grad_logps[part, None] / ctx.temperature).to(hidden.dtype)
            grad_hidden[part] = grad @ weight
            if grad_weight is not None:
                grad_weight += (grad.T @ hidden[part]).float()
        return grad_hidden, None if grad_weight is None else grad_weight.to(weight.dtype), None, None


def chunk_logits(hidden: Tensor, weight: Tensor, temperature: float) -> Tensor:
    """Float32 logits [chunk, V]."""
    return (hidden @ weight.T).float().div_(temperature)


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
    head: nn.Linear, hidden: Tensor, targets: Tensor, temperature: float, statistic: str | None
):
    """Replaces lm_head.forward on the policy: the head's weight is used inside this one module call."""
    weight = head.weight
    if torch.is_autocast_enabled(hidden.device.type):
        dtype = torch.get_autocast_dtype(hidden.device.type)
        hidden, weight = hidden.to(dtype), weight.to(dtype)
    if statistic is None:
        return ChunkedLogps.apply(hidden, weight, targets, temperature)
    function = TOKEN_STATISTICS[statistic]
    return torch.cat(
        [function(chunk_logits(hidden[part], weight, temperature)) for part in _chunks(hidden.shape[0])]
    )


def add_scoring_forward(model: nn.Module) -> nn.Module:
    """Turns the model's forward into packed row -> per-token log-probs [N], in place, and returns the model.

    forward(**PackedRow.model_inputs(), temperature=…, statistic=None); a statistic ("entropy",
    "self_certainty") returns that number per token instead, without gradient. The instance is patched, not
    the class: a subclass of Qwen2VLForConditionalGeneration would load with a silently re-initialised text
    tower.
    """

    def forward(sources, targets, temperature: float = 1.0, statistic: str | None = None, **row) -> Tensor:
        hidden = row_hidden_states(model, **row)[sources]  # [N, H]
        return model.lm_head(hidden, targets, temperature, statistic)

    model.model.language_model.set_attn_implementation(ATTENTION)
    model.lm_head.forward = lambda *args: _head_forward(model.lm_head, *args)
    model.forward = forward
    return model
