"""What is logged of a rollout, as plain functions.

Legend
  R  prompts (groups)     G  completions a group     F  reward functions
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from .advantages import equal_rewards
from .data import Prompt
from .protocol import extract_answer
from .rollout import Completion

COMPLETION_NUMBERS = ("mean_length", "parsed", "truncated", "correct", "entropy")


def completion_numbers(prompts: Sequence[Prompt], groups: Sequence[Sequence[Completion]]) -> Tensor:
    """COMPLETION_NUMBERS of each completion, [R * G, 5]. The entropy is an estimate, minus the mean
    log-prob."""
    rows = []
    for prompt, group in zip(prompts, groups, strict=True):
        for completion in group:
            answer = extract_answer(completion.text)
            rows.append(
                [
                    float(completion.token_ids.numel()),
                    float(answer is not None),
                    float(completion.truncated),
                    float(answer == prompt.columns["answer"]),
                    float(-completion.logps.mean()),
                ]
            )
    return torch.tensor(rows)


def shares_right(prompts: Sequence[Prompt], groups: Sequence[Sequence[Completion]]) -> Tensor:
    """The share of each group that answers right, [R]."""
    numbers = completion_numbers(prompts, groups)[:, COMPLETION_NUMBERS.index("correct")]
    return numbers.view(len(prompts), -1).mean(1)


def rollout_metrics(
    numbers: Tensor, rewards: Tensor, per_function: Tensor, names: Sequence[str]
) -> dict[str, float]:
    """Means over a rollout: numbers [R * G, 5], rewards [R, G], per_function [R, G, F], all of all ranks.

    A group has zero variance when all its rewards are equal; of these, those that answer right throughout
    are told from those that never do.
    """
    means = numbers.mean(0).tolist()
    metrics = {f"completions/{n}": value for n, value in zip(COMPLETION_NUMBERS, means, strict=True)}
    metrics["completions/max_length"] = float(numbers[:, 0].max())
    metrics |= {f"rewards/{name}": float(per_function[..., i].nanmean()) for i, name in enumerate(names)}
    spread = torch.stack([_std(group[~group.isnan()]) for group in rewards])  # [R]
    correct = numbers[:, 3].view(rewards.shape).bool()
    same = equal_rewards(rewards)
    return metrics | {
        "reward": float(rewards.nanmean()),
        "reward_std": float(spread.mean()),
        "zero_variance": float(same.float().mean()),
        "zero_variance/all_right": float((same & correct.all(1)).float().mean()),
        "zero_variance/all_wrong": float((same & ~correct.any(1)).float().mean()),
    }


def _std(values: Tensor) -> Tensor:
    return values.std() if values.numel() > 1 else torch.zeros(())


def best_and_worst(
    prompts: Sequence[Prompt],
    groups: Sequence[Sequence[Completion]],
    per_function: Tensor,
    rewards: Tensor,
    advantages: Tensor,
    names: Sequence[str],
) -> list[dict]:
    """The lowest and the highest reward of each group with its text: a line each of rollouts.jsonl."""
    samples = []
    for i, (prompt, group) in enumerate(zip(prompts, groups, strict=True)):
        order = rewards[i].nan_to_num(-torch.inf).argsort()
        for which, j in (("worst", int(order[0])), ("best", int(order[-1]))):
            samples.append(
                {
                    "row": prompt.row,
                    "question": prompt.columns["question"],
                    "answer": prompt.columns["answer"],
                    "which": which,
                    "text": group[j].text,
                    "rewards": dict(zip(names, per_function[i, j].tolist(), strict=True)),
                    "advantage": round(float(advantages[i, j]), 4),
                    "tokens": group[j].token_ids.numel(),
                    "truncated": group[j].truncated,
                }
            )
    return samples
