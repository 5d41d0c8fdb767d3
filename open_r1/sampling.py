"""How tokens are chosen, and where the noise comes from.

Legend: B rows of the decode batch, V vocabulary.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

STRETCH = 256  # tokens of the vocabulary that sampling sums up together


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen. Explicit in full: nothing is taken over from a checkpoint's generation_config,
    whose top_k 1 makes every rollout greedy in silence. Greedy decoding is the exception: it follows the
    checkpoint's repetition_penalty, as the grader's does."""

    greedy: bool
    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0: off
    min_p: float = 0.0  # 0: off


def sampling_keys(seed: int, step: int, prompts: Sequence[int], num_generations: int) -> list[list[int]]:
    """A 63-bit key per completion from (seed, step, prompt's number in the update, completion): the
    sampling noise is a function of it and of the token's index, so it does not depend on how prompts are
    spread over processes."""
    numbers = range(num_generations)
    return [[noise_key(seed, step, prompt, number) for number in numbers] for prompt in prompts]


def noise_key(*parts: int | str) -> int:
    """63 bits."""
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def keyed_uniform(keys: Tensor, t: Tensor) -> Tensor:
    """Uniform numbers in (0, 1), [B] float64, from keys [B] int64 and the token index t: the finaliser of
    SplitMix64."""

    def mix(x: Tensor, shift: int, factor: int) -> Tensor:
        logical = (x >> shift) & ((1 << (64 - shift)) - 1)  # int64 shifts drag the sign along
        return (x ^ logical) * factor

    x = keys + (t + 1) * -0x61C8864680B583EB  # the golden ratio in 64 bits, signed; products wrap around
    x = mix(x, 30, -0x40A7B892E31B1A47)
    x = mix(x, 27, -0x6B2FB644ECCEEE15)
    x = mix(x, 31, 1)
    return (((x >> 32) & 0xFFFFFFFF).double() + 0.5) / 2**32


def filter_probs(probs: Tensor, sampling: Sampling) -> Tensor:
    """probs [B, V] with the tokens that top_k, top_p or min_p exclude set to 0, in this order, each on what
    is left."""
    if sampling.top_k:
        kth = probs.topk(min(sampling.top_k, probs.shape[-1])).values[:, -1:]
        probs = probs.masked_fill(probs < kth, 0)
    if sampling.top_p < 1:
        probs = probs / probs.sum(-1, keepdim=True)
        ordered, order = probs.sort(dim=-1, descending=True)
        outside = ordered.cumsum(-1) - ordered >= sampling.top_p  # the token that crosses top_p stays
        probs = probs.masked_fill(outside.scatter(1, order, outside), 0)
    if sampling.min_p:
        probs = probs.masked_fill(probs < sampling.min_p * probs.max(-1, keepdim=True).values, 0)
    return probs


def sample(probs: Tensor, uniform: Tensor, sampling: Sampling) -> Tensor:
    """Token ids [B] from probs [B, V] and a uniform number per row, by the inverse of the distribution.

    Found in two steps, a stretch of STRETCH tokens and the token in it: sums over stretches are many small
    ones, and one long running sum would be as slow as all of a decode step's other work.
    """
    probs = filter_probs(probs, sampling)
    stretches = F.pad(probs, (0, -probs.shape[1] % STRETCH)).unflatten(1, (-1, STRETCH)).double()
    sums = stretches.sum(-1)  # [B, V / STRETCH]
    ends = sums.cumsum(-1)
    goal = uniform[:, None] * ends[:, -1:]  # [B, 1]
    stretch = torch.searchsorted(ends, goal, right=True)  # [B, 1]
    size = sums.gather(1, stretch)
    share = (goal - (ends.gather(1, stretch) - size)) / size  # of the stretch that lies before the goal
    inside = stretches.gather(1, stretch[..., None].expand(-1, -1, STRETCH))[:, 0].cumsum(-1)  # [B, STRETCH]
    # Rounding must not lead past the stretch's last token with a probability.
    goal = share.clamp(0, 1 - 2**-53) * inside[:, -1:]
    return (stretch * STRETCH + torch.searchsorted(inside, goal, right=True))[:, 0]
