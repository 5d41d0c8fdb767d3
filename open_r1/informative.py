"""Which groups of a rollout are trained on, where more were rolled out than an update needs (--oversample).

A group of equal rewards has no advantage, and soon most groups are such. Of the groups of all ranks those
whose rewards vary most are kept (as variance-aware sampling does, arXiv 2509.21268; DAPO's dynamic sampling,
arXiv 2503.14476, rolls out again instead), each update getting as many as ever. The choice looks at the
rollout as a whole, so it is the same on any number of ranks; groups go to the rank that trains on them.
Choosing by variance prefers prompts that are answered right half of the time.

Legend
  R  groups rolled out on all ranks     G  completions a group
"""

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from .advantages import equal_rewards
from .arguments import GRPOArguments
from .data_loader import prompt_places

Item = TypeVar("Item")


def most_informative(rewards: Tensor, places: Sequence[int], count: int) -> list[int]:
    """The `count` groups, numbers of rewards [R, G], whose rewards vary most, in the order of their places in
    the rollout. Among equals the first place wins; NaN is left out of a group's variance."""
    known = ~rewards.isnan()
    means = rewards.nansum(1, keepdim=True) / known.sum(1, keepdim=True).clamp(min=1)
    variance = torch.where(known, rewards - means, 0.0).square().sum(1) / known.sum(1).clamp(min=1)  # [R]
    variance = variance.masked_fill(equal_rewards(rewards), 0.0)
    variance = variance.nan_to_num(torch.inf)  # of infinite rewards: they are to be found, not passed over
    # Three of eight and five of eight vary alike, but for the last digits; and rewards may be small numbers.
    ranked = sorted(range(len(rewards)), key=lambda i: (-float(f"{variance[i]:.4g}"), places[i]))
    return sorted(ranked[:count], key=lambda i: places[i])


def kept_groups(args: GRPOArguments, rewards: Tensor) -> list[int]:
    """Which of all ranks' groups (numbers of rewards [R, G], one rank's behind the other's) are trained on,
    one rank's share behind the other's."""
    kept = most_informative(rewards, prompt_places(args, args.prompts_drawn), args.prompts_per_rollout)
    return [kept[place] for place in prompt_places(args, args.prompts_per_rollout)]


def share_out(
    items: Sequence[Item], kept: Sequence[int], rank: int, ranks: int, collect: Callable[[list], list]
) -> list[Item]:
    """This rank's share of `kept`, where `items` are what this rank rolled out; `collect` joins all ranks'
    lists. Every rank calls it; only what changes ranks is sent."""
    made, trained = len(items), len(kept) // ranks
    moves = [(i, number) for i, number in enumerate(kept) if number // made != i // trained]
    sent = [(i, items[number % made]) for i, number in moves if number // made == rank]
    received = dict(collect(sent)) if moves else {}
    own = range(rank * trained, (rank + 1) * trained)
    return [received[i] if i in received else items[kept[i] % made] for i in own]
