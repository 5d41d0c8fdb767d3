"""What a decode step does around the attention, and the attention, on CUDA in Triton.

Keys and values are read once for all heads that share them, unrepeated, and only as far as they are filled.

Legend
  B  rows of the decode batch    S  slots of the cache     D  head size
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

# Compiled for cards of 48 GB, which have 99 KB of shared memory: 72 KB in 16 bits, 76 KB in 32. Blocks of 128
# (139 KB) are 7 % faster on an H200.
BLOCK = {2: 64, 4: 32}  # slots at once, by the bytes of a number
LAUNCH = {"num_warps": 4, "num_stages": 3}


@triton.jit
def _rotate(
    joint, cos, sin, slot, query, keys, values, slots,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    row, head, size = tl.program_id(0), tl.program_id(1), tl.arange(0, D)
    inputs = joint + (row * (HEADS + 2 * KV_HEADS) + head) * D
    x = tl.load(inputs + size)
    if head < HEADS + KV_HEADS:  # a value is not rotated
        partner = tl.load(inputs + (size + D // 2) % D).to(tl.float32)
        partner = tl.where(size < D // 2, -partner, partner)
        c, s = tl.load(cos + row * D + size).to(tl.float32), tl.load(sin + row * D + size).to(tl.float32)
        x = (x.to(tl.float32) * c + partner * s).to(x.dtype)
    newest = tl.load(slot)
    if head < HEADS:
        tl.store(query + (row * HEADS + head) * D + size, x)
    elif head < HEADS + KV_HEADS:
        place = (row * KV_HEADS + head - HEADS).to(tl.int64) * slots + newest
        tl.store(keys + place * D + size, x)
    else:
        place = (row * KV_HEADS + head - HEADS - KV_HEADS).to(tl.int64) * slots + newest
        tl.store(values + place * D + size, x)


def rotate_and_store(
    joint: Tensor, cos: Tensor, sin: Tensor, keys: Tensor, values: Tensor, slot: Tensor
) -> Tensor:
    """joint [B, 1, (heads + 2 kv heads) D] are query, key and value of a new token before the rotation by
    cos and sin [B, 1, D]. Key and value go to keys and values [B, kv heads, S, D] at `slot`; returns the
    query [B, heads, 1, D]."""
    rows, kv_heads, slots, size = keys.shape
    heads = joint.shape[-1] // size - 2 * kv_heads
    query = joint.new_empty(rows, heads, 1, size)
    _rotate[(rows, heads + 2 * kv_heads)](
        joint, cos, sin, slot, query, keys, values, slots, HEADS=heads, KV_HEADS=kv_heads, D=size, num_warps=1
    )
    return query


@triton.jit
def _attend(
    query, key, value, lengths, first_new, newest, out, slots, scale,
    GROUP: tl.constexpr, GROUP_ROWS: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr,
    BLOCK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    row, head = tl.program_id(0), tl.program_id(1)
    of_group, of_head, of_block = tl.arange(0, GROUP_ROWS), tl.arange(0, D), tl.arange(0, BLOCK)
    place = ((row * KV_HEADS + head) * GROUP + of_group[:, None]) * D + of_head[None]  # [GROUP_ROWS, D]
    inside = of_group[:, None] < GROUP
    q = tl.load(query + place, mask=inside, other=0.0)
    start_of_row = (row * KV_HEADS + head).to(tl.int64) * slots * D
    length = tl.load(lengths + row)
    hidden = tl.load(first_new) - length  # slots between the prompt and the new tokens
    used = tl.load(newest) + 1 - hidden
    highest = tl.full([GROUP_ROWS], -1e30, tl.float32)
    total = tl.zeros([GROUP_ROWS], tl.float32)
    sums = tl.zeros([GROUP_ROWS, D], tl.float32)
    for start in range(0, used, BLOCK):
        number = start + of_block  # of the slots that the row uses
        slot = tl.where(number < length, number, number + hidden)
        seen = number < used
        where = start_of_row + slot[:, None] * D + of_head[None]  # [BLOCK, D]
        k = tl.load(key + where, mask=seen[:, None], other=0.0)
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale
        scores = tl.where(seen[None], scores, -1e30)  # [GROUP_ROWS, BLOCK]
        raised = tl.maximum(highest, tl.max(scores, 1))
        weights = tl.exp(scores - raised[:, None])  # 0 where unseen: every block has a seen slot
        shrink = tl.exp(highest - raised)
        v = tl.load(value + where, mask=seen[:, None], other=0.0)
        total = total * shrink + tl.sum(weights, 1)
        sums = sums * shrink[:, None] + tl.dot(weights.to(v.dtype), v, input_precision=PRECISION)
        highest = raised
    tl.store(out + place, (sums / total[:, None]).to(q.dtype), mask=inside)


def decode_attention(
    query: Tensor, key: Tensor, value: Tensor, lengths: Tensor, first: Tensor, newest: Tensor, scale: float
) -> Tensor:
    """query [B, heads, 1, D], key and value [B, kv heads, S, D] -> [B, 1, heads, D]. A row sees the slots
    below its `lengths` [B] and those from `first` to `newest`, [1] each."""
    batch, heads, _, size = query.shape
    kv_heads, slots = key.shape[1:3]
    group = heads // kv_heads
    out = torch.empty_like(query)
    _attend[(batch, kv_heads)](
        query, key, value, lengths, first, newest, out, slots, scale,
        GROUP=group, GROUP_ROWS=max(16, triton.next_power_of_2(group)), KV_HEADS=kv_heads, D=size,
        BLOCK=BLOCK[query.element_size()],
        PRECISION="ieee" if query.dtype == torch.float32 else "tf32", **LAUNCH,
    )  # fmt: skip
    return out.view(batch, 1, heads, size)
