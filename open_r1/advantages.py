"""Rewards -> advantages -> loss: the algorithm, on plain tensors.

Legend
  R  prompts (groups) of the update, on all ranks     G  completions a group
  C  completions of a packed row                      N  their tokens
"""

from dataclasses import dataclass

import torch
from torch import Tensor

LOSS_TYPES = ("grpo", "dapo", "dr_grpo")
SCALES = ("group", "batch", "none")
LEVELS = ("token", "sequence")
STD_EPSILON = 1e-4


def combine_rewards(per_function: Tensor, weights: Tensor) -> Tensor:
    """Weighted sum over reward functions, [R, G, F] and [F] -> [R, G].

    NaN is "cannot judge": such a function is left out for that completion; NaN when none could judge. A
    function of weight 0 is only logged: it judges nothing.
    """
    per_function, weights = per_function[..., weights != 0], weights[weights != 0]
    total = (per_function * weights).nansum(-1)
    return total.masked_fill(per_function.isnan().all(-1), torch.nan)


def group_advantages(rewards: Tensor, scale_rewards: str) -> Tensor:
    """Advantages [R, G] of rewards [R, G]: reward minus the group's mean, divided by a standard deviation.

    scale_rewards "group" divides by the group's (GRPO, arXiv 2402.03300), "batch" by that of all rewards of
    the rollout (arXiv 2508.08221), "none" by nothing (Dr. GRPO, arXiv 2503.20783). Deviations are the
    unbiased ones plus 1e-4, as in TRL. A NaN reward is left out of every statistic and its completion gets
    0.

    >>> group_advantages(torch.tensor([[1.0, 0.0, 1.0, 0.0]]), "none").tolist()
    [[0.5, -0.5, 0.5, -0.5]]
    """
    known = ~rewards.isnan()
    count = known.sum(1, keepdim=True)  # [R, 1]
    centred = torch.where(known, rewards - rewards.nansum(1, keepdim=True) / count.clamp(min=1), 0.0)
    # Exactly: the mean of eight times 0.1 is not 0.1, and a group that teaches nothing must be seen to.
    centred = centred.masked_fill(equal_rewards(rewards)[:, None], 0.0)
    if scale_rewards == "none":
        return centred
    if scale_rewards == "batch":
        values = rewards[known]
        deviation = values.std() if values.numel() > 1 else torch.zeros(())
    else:
        deviation = (centred.square().sum(1, keepdim=True) / (count - 1).clamp(min=1)).sqrt()
    return centred / (deviation + STD_EPSILON)


def equal_rewards(rewards: Tensor) -> Tensor:
    """Whether all known rewards of a group are the same, [R] from [R, G]; True where none is known."""
    highest, lowest = rewards.nan_to_num(-torch.inf).amax(1), rewards.nan_to_num(torch.inf).amin(1)
    return highest <= lowest


def token_weights(
    lengths: Tensor, truncated: Tensor, loss_type: str, max_completion_length: int, mask_truncated: bool,
    update_completions: int, update_tokens: int,
) -> Tensor:  # fmt: skip
    """What one token of each completion weighs in the loss of the update, [C]. The weights of an update sum
    to about 1.

    lengths and truncated are [C]; update_completions and update_tokens count all rows of all ranks, so the
    loss does not depend on how an update is cut into rows and ranks (update_tokens leaves masked
    completions out).

    grpo     every completion counts the same: the mean over completions of their token means
    dapo     every token counts the same (arXiv 2503.14476, eq. 8)
    dr_grpo  the sum over tokens by a constant, so that length cannot bias it (arXiv 2503.20783)
    """
    if loss_type == "grpo":
        weights = 1.0 / (lengths * update_completions)
    elif loss_type == "dapo":
        weights = torch.full(lengths.shape, 1.0 / max(1, update_tokens))
    else:
        weights = torch.full(lengths.shape, 1.0 / (update_completions * max_completion_length))
    return weights.masked_fill(truncated, 0.0) if mask_truncated else weights


@dataclass(frozen=True)
class LossSettings:
    epsilon: float = 0.2
    epsilon_high: float = 0.2
    beta: float = 0.0
    use_bias_correction_kl: bool = False
    importance_sampling_level: str = "token"


def grpo_loss(
    logps: Tensor, old_logps: Tensor | None, ref_logps: Tensor | None, advantages: Tensor, weights: Tensor,
    owners: Tensor, settings: LossSettings,
) -> tuple[Tensor, dict[str, Tensor]]:  # fmt: skip
    """The clipped objective of one packed row, and sums for the log.

    All tensors are [N]; advantages and weights are those of the token's completion, whose number in the row
    owners has. Without old_logps the policy that sampled is the policy that learns: the ratio is 1 and only
    its gradient acts. At level "sequence" every token has the ratio of its completion, the geometric mean of
    its tokens' (GSPO, arXiv 2507.18071). With beta, k3
    = exp(r) - r - 1 with r = ref - logps (http://joschu.net/blog/kl-approx.html) is added, times the ratio
    under use_bias_correction_kl (DeepSeek-V3.2), as in TRL.
    """
    log_ratio = logps - (logps.detach() if old_logps is None else old_logps)
    if settings.importance_sampling_level == "sequence":
        log_ratio = completion_means(log_ratio, owners)
    ratio = log_ratio.exp()
    clipped = ratio.clamp(1 - settings.epsilon, 1 + settings.epsilon_high)
    surrogate = torch.minimum(ratio * advantages, clipped * advantages)
    loss = -surrogate
    below = (ratio < 1 - settings.epsilon) & (advantages < 0)
    above = (ratio > 1 + settings.epsilon_high) & (advantages > 0)
    sums = {"tokens": torch.tensor(float(logps.numel())), "clipped": (below | above).sum().float()}
    if settings.beta:
        difference = ref_logps - logps
        kl = difference.exp() - difference - 1
        sums["kl"] = kl.detach().sum()
        loss = loss + settings.beta * (kl * ratio if settings.use_bias_correction_kl else kl)
    return (loss * weights).sum(), sums


def completion_means(values: Tensor, owners: Tensor) -> Tensor:
    """Each token's value replaced by the mean over its completion, [N]. Of N places at most, since asking a
    GPU how many completions there are would wait for it."""
    sums = torch.zeros_like(values).index_add(0, owners, values)
    counts = torch.zeros_like(values).index_add(0, owners, torch.ones_like(values))
    return (sums / counts.clamp(min=1))[owners]
