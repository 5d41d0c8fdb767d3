"""How far the policy is from its base, measured without a second model in memory.

Every --kl_readout_steps updates the rollout copy scores the rollout that it has just made, takes the base's
weights from their files, scores it again, and takes the policy's weights back.

Legend
  R  prompts of this rank's rollout     N  completion tokens
"""

import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .data import Prompt
from .scoring import row_logps
from .training_rows import Group, pack_groups
from .weights import load_weights

if TYPE_CHECKING:
    from .trainer import Qwen2VLGRPOTrainer

NAMES = ("kl_to_base", "kl_to_base/k1", "kl_to_base/far")
LARGEST = 10.0  # of a token's log ratio and of its estimate, as EasyR1's: one token must not make the mean
FAR = 1.0  # of a log ratio


def kl_to_base(
    trainer: "Qwen2VLGRPOTrainer", base: Path, prompts: list[Prompt], groups: list[Group]
) -> dict[str, float]:
    """Means over the tokens of all ranks' completions, which the policy in the rollout copy has sampled:
    `kl_to_base` (Schulman's k3, never negative), `kl_to_base/k1` (the plain log ratio, whose mean can be),
    and `kl_to_base/far`, the share of tokens whose log ratio is beyond FAR. Every rank calls it."""
    started, model, args = time.perf_counter(), trainer.engine.model, trainer.args
    parts = [slice(i, i + args.prompts_per_row) for i in range(0, len(prompts), args.prompts_per_row)]
    prompts = [replace(prompt, image_features=None) for prompt in prompts]  # the base's tower looks itself
    rows = [pack_groups(prompts[part], groups[part], args.device).to(args.device) for part in parts]
    policy = [row_logps(model, row, args.temperature) for row in rows]
    load_weights(model, base)
    of_base = [row_logps(model, row, args.temperature) for row in rows]
    trainer.refresh(again=True)
    numbers = token_numbers(torch.cat(policy), torch.cat(of_base))
    tokens = trainer.sum_over_ranks(float(numbers.shape[1]))
    sums = numbers.sum(1).tolist()
    logs = {name: trainer.sum_over_ranks(total) / tokens for name, total in zip(NAMES, sums, strict=True)}
    return logs | {"time/kl_readout_s": time.perf_counter() - started}


def token_numbers(policy: Tensor, base: Tensor) -> Tensor:
    """k3, k1 and far, [3, N], of log-probs [N] of tokens that the policy sampled. The mean of k1 =
    log(policy / base) is the KL; k3 = r - 1 - log r with r = base / policy has the same mean, and is never
    negative."""
    ratio = (base - policy).clamp(-LARGEST, LARGEST)  # of the logarithms
    k3 = (ratio.exp() - 1 - ratio).clamp(max=LARGEST)
    return torch.stack([k3, -ratio, (ratio.abs() > FAR).float()])
