"""Attention over packed rows and over decode batches: one mask rule, and a kernel for each device.

Legend
  L  tokens of a row      B  rows of a decode batch      K  keys of a decode batch      D  head size
"""

import inspect
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, flex_attention
from torch.nn.attention.varlen import varlen_attn
from transformers import AttentionInterface, Qwen2VLForConditionalGeneration

ATTENTION = "packed"  # the name under which packed_attention is registered with transformers
# transformers 5.24 renamed the argument
CACHE = (
    "cache"
    if "cache" in inspect.signature(Qwen2VLForConditionalGeneration.forward).parameters
    else "past_key_values"
)
BLOCK = 128  # tokens of a block of FlexAttention's mask
RECOMPILE_LIMIT = 64  # of one compiled function
NOTHING, PART, ALL = 0, 1, 2  # what the queries of one block see of the keys of another


def sees(query_group, key_group, query_completion, key_completion, query_index, key_index):
    """The one rule. Works on tensors of any shape and, inside FlexAttention, on scalars."""
    same_completion = (key_completion == 0) | (query_completion == key_completion)
    return (query_index >= key_index) & (query_group == key_group) & same_completion


def block_kinds(group_ids: Tensor, completion_ids: Tensor) -> Tensor:
    """NOTHING, PART or ALL for each pair of blocks of a row, [L / BLOCK, L / BLOCK] uint8.

    Counted from the row's segments (prompts and completions), each of which is seen as a whole or not at
    all: create_block_mask looks at every pair of tokens, in a kernel that is compiled slowly, and for each
    length (a first row of 10,240 tokens took 97 s on an H200's machine).
    """
    starts = torch.ones(group_ids.numel(), dtype=torch.bool)  # of segments, [L]
    starts[1:] = (group_ids.diff() != 0) | (completion_ids.diff() != 0)
    segment_ids = starts.cumsum(0) - 1  # [L]
    groups, completions = group_ids[starts], completion_ids[starts]  # [segments]
    seen = sees(groups[:, None], groups, completions[:, None], completions, 1, 0)  # [segments, segments]
    blocks = group_ids.numel() // BLOCK
    counts = torch.zeros(blocks, len(groups))  # tokens of each segment in each block
    counts.view(-1).index_add_(
        0,
        torch.arange(blocks).repeat_interleave(BLOCK) * len(groups) + segment_ids,
        torch.ones(group_ids.numel()),
    )
    visible = counts @ seen.float() @ counts.T  # pairs of tokens, the order of which is left out
    kinds = torch.where(visible == BLOCK**2, ALL, (visible > 0) * PART).tril(-1)
    return (kinds + PART * torch.eye(blocks, dtype=torch.long)).to(torch.uint8)


def build_mask(
    group_ids: Tensor, completion_ids: Tensor, kinds: Tensor | None
) -> "BlockMask | list[tuple[int, int, Tensor]]":
    """CUDA: FlexAttention's block mask. CPU: per group (start, end, [n, n] boolean), since groups see
    nothing of each other."""
    if group_ids.is_cuda:
        return flex_mask(group_ids, completion_ids, kinds)
    blocks, start = [], 0
    for size in torch.unique_consecutive(group_ids, return_counts=True)[1].tolist():
        index = torch.arange(size)
        completion = completion_ids[start : start + size]
        same = torch.zeros((), dtype=torch.long)
        mask = sees(same, same, completion[:, None], completion[None], index[:, None], index[None])  # [n, n]
        blocks.append((start, start + size, mask))
        start += size
    return blocks


def flex_mask(group_ids: Tensor, completion_ids: Tensor, kinds: Tensor) -> BlockMask:
    """The rule, and from block_kinds where it need not be asked (ALL) and what need not be read (NOTHING)."""

    def rule(batch, head, query, key):
        return sees(group_ids[query], group_ids[key], completion_ids[query], completion_ids[key], query, key)

    part, whole = (kinds == PART)[None, None], (kinds == ALL)[None, None]  # [1, 1, blocks, blocks]
    length = group_ids.numel()
    return BlockMask.from_kv_blocks(
        *_ordered(part), *_ordered(whole), BLOCK_SIZE=BLOCK, mask_mod=rule, seq_lengths=(length, length)
    )


def _ordered(chosen: Tensor) -> tuple[Tensor, Tensor]:
    """Per query block: the number of chosen key blocks, and all key blocks with the chosen ones first."""
    order = chosen.int().argsort(dim=-1, descending=True, stable=True)
    return chosen.sum(-1, dtype=torch.int32), order.to(torch.int32)


_compiled: dict[str, Callable] = {}


def compiled(name: str, function: Callable) -> Callable:
    """`function`, compiled for all shapes: again only for another use (with or without gradient, two sizes
    that happen to be equal). More than RECOMPILE_LIMIT of them must stop the run: the uncompiled kernels
    would silently take up to 100 times longer."""
    if name not in _compiled:
        torch._dynamo.config.recompile_limit = RECOMPILE_LIMIT
        torch._dynamo.config.fail_on_recompile_limit_hit = True
        _compiled[name] = torch.compile(function, dynamic=True)
    return _compiled[name]


def packed_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask, scaling: float, **kwargs
) -> tuple[Tensor, None]:
    """Attention of transformers' interface: query [B, heads, Q, D], key and value [B, kv heads, K, D] ->
    [B, Q, heads, D].

    The mask decides: a BlockMask or a list of blocks (a packed row), or a boolean [B, 1, 1, K] (a decode
    step).
    """
    # under autocast rotary embeddings leave them in float32
    query, key = query.to(value.dtype), key.to(value.dtype)
    batch, heads, _, size = query.shape
    kv_heads = key.shape[1]
    if isinstance(attention_mask, BlockMask):
        # Repeated: in the backward pass a block of keys that all completions see is one program's work, and
        # with the heads that share it, six times as long; the others wait for it.
        key, value = (part.repeat_interleave(heads // kv_heads, dim=1) for part in (key, value))
        attend = compiled("flex", flex_attention)
        return attend(query, key, value, block_mask=attention_mask, scale=scaling).transpose(1, 2), None
    if isinstance(attention_mask, list):
        key, value = (part.repeat_interleave(heads // kv_heads, dim=1) for part in (key, value))
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


def vision_attention(query: Tensor, key: Tensor, value: Tensor, starts: Tensor, longest: int) -> Tensor:
    """Every patch sees its own image: [N, heads, D] each -> [N, heads, D], all images in one call where the
    kernel can (CUDA, 16 bits). starts [images + 1] int32 ends with N; `longest` is the most patches of an
    image."""
    if query.is_cuda and query.dtype != torch.float32:
        return varlen_attn(query, key, value, starts, starts, longest, longest)
    sizes = starts.diff().tolist()
    parts = [part.transpose(0, 1)[None].split(sizes, dim=2) for part in (query, key, value)]
    images = [F.scaled_dot_product_attention(*image) for image in zip(*parts, strict=True)]
    # of [1, heads, n, D] each
    return torch.cat([image[0].transpose(0, 1) for image in images])
