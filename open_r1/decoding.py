"""One token for every row of a batch: the step that a rollout repeats.

Legend
  B  rows of the batch       H  hidden size       V  vocabulary       D  head size
  S  slots of the key/value cache (longest prompt + new tokens)
Prompts fill slots 0..P-1; the t-th new token of every row stands in the same slot, `longest prompt + t`, and
the slots between a shorter prompt and those are hidden.
"""

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .attention import packed_attention
from .layers import decoder_outputs, fused, rms_norm, rotated, weight_of
from .sampling import Sampling, keyed_uniform, sample


class DecodeLayers:
    """The decoder layers' weights, those of one input side by side: one product instead of two or three.

    The modules' parameters become views of the joint tensors, so that whoever writes them in place writes
    both.
    """

    def __init__(self, text: nn.Module):
        self.layers = list(text.layers)
        self.joined = [(self._qkv(layer.self_attn), self._gate_up(layer.mlp)) for layer in self.layers]

    @staticmethod
    def _qkv(attention: nn.Module) -> tuple[Tensor, Tensor]:
        projections = attention.q_proj, attention.k_proj, attention.v_proj
        return joined([p.weight for p in projections]), joined([p.bias for p in projections])

    @staticmethod
    def _gate_up(mlp: nn.Module) -> Tensor:
        return joined([mlp.gate_proj.weight, mlp.up_proj.weight])


def joined(parameters: list[nn.Parameter]) -> Tensor:
    """The parameters one below the other in a new tensor, of which they become views."""
    whole = torch.cat([p.data for p in parameters])
    for parameter, part in zip(parameters, whole.split([len(p) for p in parameters]), strict=True):
        parameter.data = part
    return whole


class SlotCache:
    """Keys and values of all rows, [B, kv heads, S, D] for each layer, at fixed addresses."""

    def __init__(self, model: nn.Module, rows: int, slots: int):
        text = model.config.get_text_config()
        weight = model.model.language_model.layers[0].self_attn.k_proj.weight
        size = text.hidden_size // text.num_attention_heads
        shape = (rows, text.num_key_value_heads, slots, size)
        layers = range(text.num_hidden_layers)
        self.keys, self.values = ([weight.new_zeros(shape) for _ in layers] for _ in range(2))
        # Slots that a row uses: those below its length, and first..slot, where its newest token is written.
        self.lengths = torch.zeros(rows, dtype=torch.long, device=weight.device)
        self.first, self.slot = torch.zeros(2, 1, dtype=torch.long, device=weight.device).unbind(0)

    def used(self, visible: int) -> Tensor:
        """Which of the first `visible` slots a row uses, [B, visible]. None of them is behind the newest."""
        slots = torch.arange(visible, device=self.slot.device)
        return (slots < self.lengths[:, None]) | (slots >= self.first)


class PrefillWriter:
    """The cache that a prefill row writes to: each prompt's keys and values go to the G rows of its group.
    Quacks like a transformers Cache."""

    def __init__(self, cache: SlotCache, lengths: list[int], first_prompt: int, num_generations: int):
        self.cache = cache
        prompts, longest = len(lengths), max(lengths)
        starts = torch.tensor(lengths).cumsum(0) - torch.tensor(lengths)
        places = (starts[:, None] + torch.arange(longest)).clamp(max=sum(lengths) - 1)  # [R, longest]
        self.places = places.to(cache.slot.device)
        self.rows = slice(first_prompt * num_generations, (first_prompt + prompts) * num_generations)
        self.shape = (prompts, num_generations)

    def update(self, key: Tensor, value: Tensor, layer: int) -> tuple[Tensor, Tensor]:
        """key and value are [1, kv heads, L, D]. What lies behind a shorter prompt is hidden by the mask."""
        for whole, part in ((self.cache.keys[layer], key), (self.cache.values[layer], value)):
            target = whole[self.rows].unflatten(0, self.shape)[:, :, :, : self.places.shape[1]]
            target.copy_(part[0][:, self.places].transpose(0, 1)[:, None])  # [R, G, kv heads, longest, D]
        return key, value

    def get_seq_length(self, *args) -> int:
        return 0


class DecodeBatch:
    """The state of one decode batch: every tensor keeps its address for the batch's life, so a step can be
    a graph."""

    def __init__(self, model: nn.Module, rows: int, slots: int, max_new_tokens: int):
        device = model.device
        self.cache = SlotCache(model, rows, slots)
        self.tokens = torch.zeros(rows, dtype=torch.long, device=device)  # the newest token of each row
        self.positions = torch.zeros(rows, dtype=torch.long, device=device)  # its M-RoPE position
        self.done = torch.zeros(rows, dtype=torch.bool, device=device)
        self.keys = torch.zeros(rows, dtype=torch.long, device=device)
        self.t = torch.zeros((), dtype=torch.long, device=device)  # index of the next new token
        self.token_ids = torch.zeros(rows, max_new_tokens, dtype=torch.long, device=device)
        self.logps = torch.zeros(rows, max_new_tokens, device=device)
        self.seen = None  # [B, V], only with a repetition penalty
        self.graphs: dict[Sampling, torch.cuda.CUDAGraph] = {}

    def state(self) -> list[Tensor]:
        """What a step changes, apart from keys and values that it writes before it reads them."""
        tensors = [
            self.tokens, self.positions, self.done, self.t, self.token_ids, self.logps,
            self.cache.lengths, self.cache.first, self.cache.slot,
        ]  # fmt: skip
        return tensors if self.seen is None else [*tensors, self.seen]


def decode_step(model: nn.Module, layers: DecodeLayers, batch: DecodeBatch, visible: int) -> Tensor:
    """Feeds the newest token of every row: the logits [B, V] of the next ones. The CPU looks at the first
    `visible` slots only; a captured graph cannot know how many there are, and its kernel does."""
    text, cache, device = model.model.language_model, batch.cache, batch.tokens.device
    if device.type == "cuda":
        attend = attend_on_cuda
    else:
        attend = partial(attend_on_cpu, used=cache.used(visible)[:, None, None])
    x = text.embed_tokens(batch.tokens[:, None])  # [B, 1, H]
    cos, sin = text.rotary_emb(x, batch.positions[None, :, None].expand(3, -1, -1))  # [B, 1, D]
    for number, (layer, (qkv, gate_up)) in enumerate(zip(layers.layers, layers.joined, strict=True)):
        norm = layer.input_layernorm
        joint = fused(normed_linear, device)(x, norm.weight, norm.variance_epsilon, *qkv)
        attended = attend(layer.self_attn, joint, cos, sin, cache, number)  # [B, 1, heads, D]
        norm = layer.post_attention_layernorm
        x = fused(decoder_outputs, device)(
            x, attended, weight_of(layer.self_attn.o_proj), norm.weight, norm.variance_epsilon,
            [(gate_up, None)], weight_of(layer.mlp.down_proj),
        )  # fmt: skip
    cache.slot.add_(1)
    batch.positions.add_(1)
    return model.lm_head(text.norm(x)[:, 0])


def normed_linear(x: Tensor, norm: Tensor, eps: float, weight: Tensor, bias: Tensor) -> Tensor:
    return F.linear(rms_norm(x, norm, eps), weight, bias)


def attend_on_cuda(attention: nn.Module, joint: Tensor, cos, sin, cache: SlotCache, number: int) -> Tensor:
    from .decode_kernel import decode_attention, rotate_and_store  # Triton comes with CUDA builds of torch

    keys, values = cache.keys[number], cache.values[number]
    query = rotate_and_store(joint, cos, sin, keys, values, cache.slot)
    used = cache.lengths, cache.first, cache.slot
    return decode_attention(query, keys, values, *used, attention.scaling)


def attend_on_cpu(
    attention: nn.Module, joint: Tensor, cos, sin, cache: SlotCache, number: int, used: Tensor
) -> Tensor:
    """As attend_on_cuda; `used` [B, 1, 1, visible] says which slots are looked at."""
    keys, values = cache.keys[number], cache.values[number]
    kv_heads, size, visible = keys.shape[1], keys.shape[3], used.shape[-1]
    joint = joint.unflatten(-1, (-1, size)).transpose(1, 2)  # [B, heads + 2 kv heads, 1, D]
    query, key, value = joint.split((joint.shape[1] - 2 * kv_heads, kv_heads, kv_heads), dim=1)
    cos, sin = cos[:, None], sin[:, None]  # [B, 1, 1, D]
    keys.index_copy_(2, cache.slot, rotated(key, cos, sin))
    values.index_copy_(2, cache.slot, value)
    query, keys, values = rotated(query, cos, sin), keys[:, :, :visible], values[:, :, :visible]
    return packed_attention(attention, query, keys, values, used, attention.scaling)[0]


def choose(
    batch: DecodeBatch, logits: Tensor, sampling: Sampling, penalty: float, eos: Tensor, suppressed: Tensor
) -> None:
    """Picks the next token of every row from logits [B, V] and records it. `eos` and `suppressed` are token
    ids: those that end a completion, and those that must not be sampled."""
    if sampling.greedy:
        tokens, logps = fused(greedy, logits.device)(logits, batch.seen, penalty)
    else:
        uniform = keyed_uniform(batch.keys, batch.t)
        tokens, logps = fused(sampled, logits.device)(logits, uniform, suppressed, sampling)
    tokens = torch.where(batch.done, eos[0], tokens)
    if batch.seen is not None:
        batch.seen.scatter_(1, tokens[:, None], True)
    batch.token_ids.index_copy_(1, batch.t[None], tokens[:, None])
    batch.logps.index_copy_(1, batch.t[None], logps[:, None])
    batch.tokens.copy_(tokens)
    batch.done.logical_or_(torch.isin(tokens, eos))
    batch.t.add_(1)


def greedy(logits: Tensor, seen: Tensor | None, penalty: float) -> tuple[Tensor, Tensor]:
    """Token ids and their log-probs [B] from logits [B, V]; a penalty acts on the tokens `seen` [B, V]."""
    logits = scores = logits.float()
    if seen is not None:
        punished = torch.where(logits < 0, logits * penalty, logits / penalty)
        scores = torch.where(seen, punished, logits)
    tokens = scores.argmax(-1)
    return tokens, logits.gather(1, tokens[:, None])[:, 0] - logits.logsumexp(-1)


def sampled(
    logits: Tensor, uniform: Tensor, suppressed: Tensor, sampling: Sampling
) -> tuple[Tensor, Tensor]:
    """Token ids and their log-probs [B] from logits [B, V] and a uniform number per row."""
    logits = logits.float() / sampling.temperature
    log_z = logits.logsumexp(-1)
    probs = (logits - log_z[:, None]).exp().index_fill(1, suppressed, 0)
    tokens = sample(probs, uniform, sampling)
    return tokens, logits.gather(1, tokens[:, None])[:, 0] - log_z
