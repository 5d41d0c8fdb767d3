"""How much each sampled token depends on the image: the policy's log-probs under other views of it, and the
token weights that follow.

A view changes what is seen and nothing else: the grid of patches, the positions and the temperature stay. The
rollout copy scores it: it is the policy that sampled, is whole on every rank (so that a rank may have fewer
groups to score than another), and in bf16 its log-probs are exact enough, since a dependency is of second
order in their error (0.01 becomes 1e-4). All views of a row's prompts are one packed row, in which a view is
computed once for the prompt's completions.

Legend
  R  prompts of this rank's rollout     G  completions a prompt     T  tokens of a completion
  P  patches of a prompt's images
"""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn

from .arguments import GRPOArguments
from .data import Prompt
from .packing import to_device
from .rollout import PREFILL_TOKENS
from .sampling import noise_key
from .scoring import row_logps
from .token_weights import VIEWS, TokenWeights, dependency
from .training_rows import Group, pack_groups

BLACK_SHARE = 0.5  # of the patches of a destroyed image, as in VPPO
# Standard deviation of a perturbed image's noise, on pixels of 0 .. 1: the diffusion step 200 of 1,000 of
# NoisyRollout's schedule (arXiv 2504.13055). What there is to count stays.
NOISE = 0.11

# --- views ------------------------------------------------------------------------------------------------


def black_patches(pixels: Tensor, generator: torch.Generator) -> Tensor:
    """pixels [P, channels, frames, values] of 0 .. 1, each patch (14 x 14 pixels of the resized image) black
    with probability BLACK_SHARE."""
    black = torch.rand(pixels.shape[0], generator=generator, device=pixels.device) < BLACK_SHARE
    return pixels.masked_fill(black[:, None, None, None], 0.0)


def noised(deviation: float, pixels: Tensor, generator: torch.Generator) -> Tensor:
    """pixels as above with variance-preserving noise, the same in both frames of a still image."""
    noise = torch.randn(pixels[:, :, :1].shape, generator=generator, device=pixels.device)
    return (math.sqrt(1 - deviation**2) * pixels + deviation * noise).clamp(0, 1)


CHANGES: dict[str, Callable] = {"destroyed": black_patches, "perturbed": partial(noised, NOISE)}


class ImageViews:
    """Changes the pixels of prompts, on the device that scores them: once per prompt, from (seed, rollout,
    row), so that a resumed run and other numbers of processes see the same."""

    def __init__(self, image_processor, seed: int, device: torch.device):
        self.seed, self.device, self.frames = seed, device, image_processor.temporal_patch_size
        mean, std = image_processor.image_mean, image_processor.image_std
        self.mean, self.std = (torch.tensor(one, device=device)[:, None, None] for one in (mean, std))

    def view(self, prompt: Prompt, rollout: int, name: str, change: Callable) -> Prompt:
        """One view, named for its own random numbers."""
        given = to_device(prompt.pixel_values, self.device)
        patches = given.view(len(given), len(self.mean), self.frames, -1)  # [P, channels, frames, values]
        key = noise_key(self.seed, rollout, prompt.row, name)
        generator = torch.Generator(self.device).manual_seed(key)
        changed = (change(patches * self.std + self.mean, generator) - self.mean) / self.std
        return replace(prompt, pixel_values=changed.view_as(given), image_features=None)


def without_image(prompt: Prompt, image_token: int) -> Prompt:
    """The prompt without its image tokens; the others keep their positions. A token that none sees has no
    effect: this is an attention mask of 0 on the image (PGPO, arXiv 2604.01840), without a pass of the vision
    tower."""
    kept = prompt.input_ids != image_token
    ids, positions = prompt.input_ids[kept], prompt.position_ids[:, kept]
    nothing = {"pixel_values": None, "image_grid_thw": None, "image_features": None}
    return replace(prompt, input_ids=ids, position_ids=positions, **nothing)


# --- the weights of a rollout -----------------------------------------------------------------------------

# Of the groups that are scored: their number, |w A|, |A|, tokens, and what these divide: w and two counts.
SUMS = ("scored", "weighed", "unweighed", "tokens", "mean", "above_1", "zero")


class TokenWeigher:
    """Weighs the tokens of a rank's groups. `model` is the rollout copy."""

    def __init__(self, weights: TokenWeights, model: nn.Module, processor, args: GRPOArguments):
        self.weights, self.model, self.args = weights, model, args
        self.views = [name for name in VIEWS if weights.wants(name)]
        self.images = ImageViews(processor.image_processor, args.seed, args.device)

    def weigh(
        self, rollout: int, prompts: Sequence[Prompt], groups: Sequence[Group], advantages: Tensor
    ) -> tuple[list[Tensor], Tensor]:
        """Weights of each group's tokens, completion after completion, for advantages [R, G]; and what
        `metrics` needs of this rank. No collective."""
        started = time.perf_counter()
        weights = [torch.ones(sum(c.token_ids.numel() for c in group)) for group in groups]
        live = advantages.bool().any(1).tolist()
        chosen = [i for i, prompt in enumerate(prompts) if live[i] and prompt.pixel_values is not None]
        numbers = [torch.zeros(len(SUMS) + len(self.views))]
        for part in self.rows(chosen, prompts, groups):
            scored = self.score(rollout, [prompts[i] for i in part], [groups[i] for i in part])
            for i, of_views in zip(part, scored, strict=True):
                given = {  # copies, which a function may change
                    "logps": [c.logps.clone() for c in groups[i]],
                    "completion_ids": [c.token_ids.clone() for c in groups[i]],
                    "advantages": advantages[i].clone(),
                    **of_views,
                }
                weights[i] = torch.cat(self.weights(given))
                numbers.append(group_numbers(weights[i], given, self.views))
        ends = torch.stack([f(torch.cat(weights)) for f in (torch.min, torch.max)])
        more = torch.tensor([len(groups), time.perf_counter() - started])
        return weights, torch.cat([torch.stack(numbers).sum(0), ends, more])

    def view(self, prompt: Prompt, rollout: int, name: str) -> Prompt:
        if name == "hidden":
            return without_image(prompt, self.model.config.image_token_id)
        return self.images.view(prompt, rollout, name, CHANGES[name])

    def rows(
        self, chosen: Sequence[int], prompts: Sequence[Prompt], groups: Sequence[Group]
    ) -> list[list[int]]:
        """The chosen prompts, as many in a row as a prefill has room for: nothing is kept for a backward
        pass, and a short row costs as much to launch as a long one."""
        rows, tokens = [], math.inf
        for i in chosen:
            own = prompts[i].input_ids.numel() + sum(c.token_ids.numel() for c in groups[i])
            tokens += own * len(self.views)
            if tokens > PREFILL_TOKENS[self.args.device.type]:
                rows, tokens = [*rows, []], own * len(self.views)
            rows[-1].append(i)
        return rows

    def score(
        self, rollout: int, prompts: Sequence[Prompt], groups: Sequence[Group]
    ) -> list[dict[str, list[Tensor]]]:
        """For each prompt the log-probs [T] of its completions under each view, by the view's name."""
        if not self.views:
            return [{} for _ in prompts]
        views = [self.view(prompt, rollout, name) for prompt in prompts for name in self.views]
        of_views = [group for group in groups for _ in self.views]
        row = pack_groups(views, of_views, self.args.device).to(self.args.device)
        logps = row_logps(self.model, row, self.args.temperature).cpu()
        parts = iter(logps.split([c.token_ids.numel() for group in of_views for c in group]))
        return [{name: [next(parts) for _ in group] for name in self.views} for group in groups]

    def metrics(self, numbers: Tensor) -> dict[str, float]:
        """What is logged, of all ranks' numbers [ranks, ...]: over the tokens of the groups that were scored,
        NaN where none was; the lowest and highest weight and the slowest rank's seconds."""
        names = (*SUMS, *(f"k3_{name}" for name in self.views))
        *sums, groups = numbers[:, [*range(len(names)), -2]].sum(0).tolist()
        found = dict(zip(names, sums, strict=True))
        scored, weighed, unweighed, tokens = (found.pop(name) for name in SUMS[:4])
        found = {name: value / (tokens or math.nan) for name, value in found.items()}
        found |= {"min": float(numbers[:, -4].min()), "max": float(numbers[:, -3].max())}
        found |= {"advantages": weighed / (unweighed or math.nan), "scored": scored / groups}
        named = {f"token_weights/{name}": value for name, value in found.items()}
        return named | {"time/views_s": float(numbers[:, -1].max())}


def group_numbers(weights: Tensor, given: dict, views: Sequence[str]) -> Tensor:
    """SUMS of one scored group, and the sum of the dependencies under each view."""
    logps = torch.cat(given["logps"])
    lengths = torch.tensor([len(one) for one in given["logps"]])
    sizes = given["advantages"].abs().repeat_interleave(lengths)
    counts = (weights > 1).sum(), (weights == 0).sum()
    k3 = [dependency(logps, torch.cat(given[name])).sum() for name in views]
    one, tokens = torch.ones(()), torch.tensor(float(len(weights)))
    return torch.stack([one, (weights * sizes).sum(), sizes.sum(), tokens, weights.sum(), *counts, *k3])
