"""Half of each group answers a noised image: NoisyRollout (arXiv 2504.13055), for more varied groups.

The halves are one group: rewards are compared over both. The update is on the clean image throughout: the
rows are made of the clean prompt, and so are the old log-probs of a rollout's later updates; as in the paper
no importance ratio corrects for what sampled. With one update a rollout the ratio is 1. The noise is that of
a diffusion step, which falls over the run along a sigmoid: the paper's schedule. Departures:

1. The noise is put on the resized image that the model sees, not on the stored one.
2. --noisy_rollout gives the first noise as its standard deviation on pixels of 0 .. 1 (the paper's step 500
   is 0.5); the run's rollouts stand for the paper's 60.
3. The completions of the clean half are those that a run without noise draws.

`logps_gap` then shows how much the noise moves the log-probs of the noised half.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import numpy as np
from torch import Tensor

from .arguments import GRPOArguments
from .data import Prompt
from .rollout import Completion, Engine
from .sampling import Sampling
from .views import ImageViews, noised

STEEPNESS, MIDDLE = 30.0, 40 / 60  # of the sigmoid; the share of the run at which half of the steps is left


def sigmoid(x: np.ndarray | float) -> np.ndarray | float:
    return 1 / (1 + np.exp(-x))


# Standard deviation after 1, 2, ... 1,000 diffusion steps, on pixels of 0 .. 1; the image fades by
# sqrt(1 - its square).
BETAS = sigmoid(np.linspace(-6, 6, 1000)) * (5e-3 - 1e-5) + 1e-5
DEVIATIONS = np.sqrt(1 - np.cumprod(1 - BETAS))


def deviation(first: float, progress: float) -> float:
    """The noise at `progress`, 0 .. 1, of a run that begins with the noise `first`.

    >>> [round(deviation(0.5, k / 60), 2) for k in (0, 30, 40, 50, 60)]
    [0.5, 0.49, 0.15, 0.01, 0.0]
    """
    steps = np.searchsorted(DEVIATIONS, first) + 1
    left = int(steps * (1 - sigmoid(STEEPNESS * (progress - MIDDLE))))
    return float(DEVIATIONS[left - 1]) if left else 0.0


class NoisyRollout:
    """Generates as its engine does, with half of each group on a noised image. The noise follows from (seed,
    rollout, row): a resumed run and other numbers of processes see the same."""

    def __init__(self, args: GRPOArguments, engine: Engine, image_processor):
        self.args, self.engine = args, engine
        self.views = ImageViews(image_processor, args.seed, args.device)

    def noise(self, rollout: int) -> float:
        args = self.args
        return deviation(args.noisy_rollout, rollout * args.updates_per_rollout / args.max_steps)

    def generate(
        self, rollout: int, prompts: Sequence[Prompt], num_generations: int, sampling: Sampling,
        keys: list[list[int]], interrupted: Callable[[], bool] | None = None,
    ) -> list[list[Completion]]:  # fmt: skip
        """A group for each prompt, the clean half first."""
        noise, half = self.noise(rollout), num_generations // 2
        if not noise:
            return self.engine.generate(prompts, num_generations, sampling, keys, interrupted)
        both = [*prompts, *(self.noised(prompt, rollout, noise) for prompt in prompts)]
        keys = [key[:half] for key in keys] + [key[half:] for key in keys]
        halves = self.engine.generate(both, half, sampling, keys, interrupted)
        return [[*clean, *other] for clean, other in zip(halves, halves[len(prompts) :], strict=False)]

    def noised(self, prompt: Prompt, rollout: int, noise: float) -> Prompt:
        """A prompt without an image stays as it is."""
        if prompt.pixel_values is None:
            return prompt
        view = self.views.view(prompt, rollout, "noisy_rollout", partial(noised, noise))
        return replace(view, pixel_values=view.pixel_values.cpu())  # beside the clean ones

    def metrics(self, rollout: int, rewards: Tensor) -> dict[str, float]:
        """Of all ranks' rewards [R, G], each half's mean."""
        clean, other = rewards.chunk(2, dim=1)
        return {
            "noisy_rollout/noise": self.noise(rollout),
            "noisy_rollout/reward_clean": float(clean.nanmean()),
            "noisy_rollout/reward_noised": float(other.nanmean()),
        }
