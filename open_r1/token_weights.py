"""What each token of a completion gets of its completion's advantage: the functions and their registry.

    fn(logps, ...) -> list[Tensor]          called for one group; the weights [T] of each of its completions

A function gets what it names of GIVEN; what has a default besides is an option (--token_weight_options
PARAMETER=VALUE). The log-probs under a view of the image are computed only for a function that names the
view. Groups without an image, and those whose advantages are all 0, keep weights of 1: it is not called for
them.

To weigh otherwise, edit a function below, or add one to the registry and name it in --token_weights.

Legend
  G  completions of the group     T  tokens of a completion
"""

import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from .user_functions import find_function, option_value

VIEWS = ("destroyed", "hidden", "perturbed")
GIVEN = {
    "logps": "of the tokens under the policy that sampled them, G tensors [T]",
    "destroyed": "the same where half of the image's patches are black",
    "hidden": "the same where no token sees the image",
    "perturbed": "the same where the image has noise that should not matter",
    "advantages": "of the completions, Tensor [G]",
    "completion_ids": "token ids, G tensors [T]",
}
# Spread of per-token dependencies below which they say nothing: the sampler's and the scoring forward's
# bf16 log-probs alone differ by about 0.01, which is 1e-4 here.
SMALLEST_SPREAD = 1e-3


def dependency(logps: Tensor, of_view: Tensor) -> Tensor:
    """k3 estimate of KL(policy || policy with the view), [T]: at least 0, clamped as in VPPO's code."""
    difference = (of_view - logps).clamp(-20, 20)
    return (difference.exp() - difference - 1).clamp(0, 10)


def min_max(values: Tensor) -> Tensor:
    """Stretched to 0 .. 1; all 0 where they hardly differ."""
    low, high = values.min(), values.max()
    return torch.zeros_like(values) if high - low < SMALLEST_SPREAD else (values - low) / (high - low)


def prpo_weights(
    logps: list[Tensor], hidden: list[Tensor], perturbed: list[Tensor], threshold: float = 0.4,
    strength: float = 1.0,
) -> list[Tensor]:  # fmt: skip
    """An interpretation of the abstract of PRPO (arXiv 2606.08708), of which no formula is public: tokens
    that depend on the image (D) and stand firm under a mild perturbation (small S) are amplified, all others
    keep 1.

    The robust dependency R = D^2 / (D + S), as log(1 + R), is stretched to 0 .. 1 over the completion; beyond
    `threshold` the weight rises, up to 1 + strength. methods/prpo/README.md numbers what was chosen.
    """
    if not (0 <= threshold < 1 and strength >= 0):
        raise ValueError(f"threshold={threshold}, strength={strength}: set 0 or more, the threshold below 1")
    weights = []
    for own, without, noised in zip(logps, hidden, perturbed, strict=True):
        depends, moves = dependency(own, without), dependency(own, noised)
        robust = min_max((depends.square() / (depends + moves + 1e-8)).log1p())
        weights.append(1 + strength * ((robust - threshold) / (1 - threshold)).clamp(min=0))
    return weights


def vppo_weights(
    logps: list[Tensor], destroyed: list[Tensor], share: float = 0.4, lowest: float = 0.9,
    renormalise: bool = True,
) -> list[Tensor]:  # fmt: skip
    """VPPO (arXiv 2510.09285): only the `share` of a completion's tokens that depends most on the image is
    learned from, and completions that depend on it more weigh more, from `lowest` up, with a mean of 1 over
    the group (the paper's code: over what one device holds).

    With `renormalise` the tokens that are left weigh T / kept, so that filtering does not lower the learning
    rate; without it they weigh 1, as in the paper. A completion whose dependencies hardly differ keeps all.
    """
    if not (0 < share <= 1 and 0 <= lowest <= 1):
        raise ValueError(f"share={share}, lowest={lowest}: set up to 1, and the share above 0")
    depends = [dependency(own, without) for own, without in zip(logps, destroyed, strict=True)]
    stretched = min_max(torch.stack([one.mean() for one in depends]))  # [G]
    rise = (1 - lowest) / stretched.mean() if stretched.any() else 0.0
    scales = lowest + rise * stretched if stretched.any() else torch.ones_like(stretched)
    weights = []
    for one, scale in zip(depends, scales, strict=True):
        tokens = one.numel()
        kept = math.ceil(share * tokens) if min_max(one).any() else tokens
        mask = torch.zeros(tokens)
        mask[one.argsort(descending=True, stable=True)[:kept]] = tokens / kept if renormalise else 1.0
        weights.append(scale * mask)
    return weights


token_weights_registry = {
    "prpo": prpo_weights,
    "vppo": vppo_weights,
}


# --- calling them -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TokenWeights:
    """A function of the registry, or a user's own, with its options by name."""

    name: str
    function: Callable
    options: dict[str, Any] = field(default_factory=dict)

    def wants(self, given: str) -> bool:
        return given in inspect.signature(self.function).parameters

    def __call__(self, available: dict[str, Any]) -> list[Tensor]:
        """Weights [T] of each completion of a group. ValueError where the function returns anything else."""
        lengths = [one.numel() for one in available["logps"]]
        asked = {name: value for name, value in available.items() if self.wants(name)}
        weights = self.function(**asked, **self.options)
        fits = isinstance(weights, Sequence) and all(isinstance(one, Tensor) for one in weights)
        if not fits or [tuple(one.shape) for one in weights] != [(length,) for length in lengths]:
            raise ValueError(
                f"--token_weights {self.name} must return a list of {len(lengths)} tensors, one weight a "
                f"token ({', '.join(map(str, lengths))}), not {weights!r:.200}"
            )
        return [one.float() for one in weights]


def resolve_token_weights(name: str | None, options: Sequence[str]) -> TokenWeights | None:
    """What --token_weights and --token_weight_options ask for; ValueError names what is wrong."""
    if name is None:
        if options:
            shown = " ".join(options)
            raise ValueError(f"--token_weight_options {shown} without --token_weights: set that too")
        return None
    weights = TokenWeights(name, find_function(name, token_weights_registry, "--token_weights"))
    for parameter, one in inspect.signature(weights.function).parameters.items():
        if one.default is inspect.Parameter.empty and parameter not in GIVEN:
            raise ValueError(
                f"--token_weights {name} asks for {parameter}, which is none of {', '.join(GIVEN)}: "
                "give it a default, or another name"
            )
    for option in options:
        parameter, equals, value = option.partition("=")
        shown = f"--token_weight_options {option}"
        if not equals:
            raise ValueError(f"{shown}: give PARAMETER=VALUE")
        weights.options[parameter] = option_value(
            weights.function, parameter, value, GIVEN, f"{shown}: {name}"
        )
    return weights


def check_token_weights(run) -> tuple[list[str], list[str]]:
    """A check of preflight.py: tries the function on random log-probs."""
    run.token_weights = weights = resolve_token_weights(
        run.recipe.token_weights, run.recipe.token_weight_options
    )
    if weights is None:
        return [], []
    generator = torch.Generator().manual_seed(0)
    lengths = [1 + i % 5 for i in range(run.args.num_generations)]
    ids = [torch.randint(256, (length,), generator=generator) for length in lengths]
    available = {
        name: [-3 * torch.rand(length, generator=generator) for length in lengths]
        for name in ("logps", *VIEWS)
    } | {"advantages": torch.randn(len(lengths), generator=generator), "completion_ids": ids}
    try:
        finite = torch.cat(weights(available)).isfinite().all()
    except Exception as error:  # whatever a user's function raises
        reason = f"{type(error).__name__}: {error}"
        return [], [f"--token_weights {weights.name} failed on random log-probs ({reason}): repair it"]
    if not finite:
        return [], [f"--token_weights {weights.name} gives weights that are not finite: repair it"]
    views = [name for name in VIEWS if weights.wants(name)]
    seen = " and ".join(views) or "no other"
    return [f"shared out over tokens by {weights.name}, which looks at {seen} images"], []
