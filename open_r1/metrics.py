"""What is logged of a rollout, as plain functions.

Legend
  R  prompts (groups)     G  completions a group     F  reward functions
"""

import re
from collections.abc import Sequence

import torch
from torch import Tensor

from .advantages import equal_rewards
from .data import Prompt
from .protocol import extract_answer
from .rollout import Completion

COMPLETION_NUMBERS = (
    "mean_length", "parsed", "truncated", "correct", "entropy", "malformed", "distinct_4", "answer",
)  # fmt: skip
NO_ANSWER = -1.0
ANSWER_PIECE = re.compile(r"<answer|answer>|\\boxed")  # of an answer that was meant


def completion_numbers(prompts: Sequence[Prompt], groups: Sequence[Sequence[Completion]]) -> Tensor:
    """COMPLETION_NUMBERS of each completion, [R * G, 8]. The entropy is an estimate, minus the mean
    log-prob; a malformed one has a piece of an answer block, and no answer."""
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
                    float(answer is None and ANSWER_PIECE.search(completion.text) is not None),
                    distinct_4(completion.token_ids.tolist()),
                    NO_ANSWER if answer is None else float(answer),
                ]
            )
    return torch.tensor(rows)


def shares_right(prompts: Sequence[Prompt], groups: Sequence[Sequence[Completion]]) -> Tensor:
    """The share of each group that answers right, [R]."""
    numbers = completion_numbers(prompts, groups)[:, COMPLETION_NUMBERS.index("correct")]
    return numbers.view(len(prompts), -1).mean(1)


def distinct_4(token_ids: Sequence[int]) -> float:
    """The share of a completion's 4-grams that differ: 1 without repetition, and below five tokens."""
    grams = list(zip(*(token_ids[i:] for i in range(4)), strict=False))
    return len(set(grams)) / len(grams) if grams else 1.0


def answer_numbers(answers: Tensor) -> dict[str, float]:
    """answers [R, G]: the entropy in nats of all answers together, which falls to 0 when one is given to
    every question, and how many different ones a group has."""
    given = answers[answers != NO_ANSWER]
    shares = given.unique(return_counts=True)[1] / max(1, given.numel())
    of_group = [len(set(group) - {NO_ANSWER}) for group in answers.tolist()]
    return {
        "completions/answer_entropy": float(-(shares * shares.log()).sum()) + 0.0,
        "completions/answers_a_group": sum(of_group) / len(of_group),
    }


def truth_correlation(rewards: Tensor, correct: Tensor) -> dict[str, float]:
    """The correlation of reward and right answer, both [R, G], within the groups that teach something;
    nothing where one of the two is always the same. Of a reward without labels it says whether the policy
    still learns to count."""
    teaches = ~equal_rewards(rewards)
    rewards, correct = rewards[teaches], correct[teaches].float()
    judged = rewards.isfinite()
    pair = (values.where(judged, torch.nan) for values in (rewards, correct))
    a, b = ((values - values.nanmean(1, keepdim=True))[judged] for values in pair)
    scale = float((a.square().sum() * b.square().sum()).sqrt())
    return {"reward_truth_correlation": float((a * b).sum()) / scale} if scale > 0 else {}


def means(logs: Sequence[dict[str, float]]) -> dict[str, float]:
    """Each number's mean over the logs that have it."""
    names = dict.fromkeys(name for log in logs for name in log)
    found = {name: [log[name] for log in logs if name in log] for name in names}
    return {name: sum(values) / len(values) for name, values in found.items()}


def rollout_metrics(
    numbers: Tensor, rewards: Tensor, per_function: Tensor, names: Sequence[str]
) -> dict[str, float]:
    """Means over a rollout: numbers [R * G, 8], rewards [R, G], per_function [R, G, F], all of all ranks.

    A group has zero variance when all its rewards are equal; of these, those that answer right throughout
    are told from those that never do.
    """
    of_names = dict(zip(COMPLETION_NUMBERS, numbers.mean(0).tolist(), strict=True))
    metrics = {f"completions/{name}": value for name, value in of_names.items() if name != "answer"}
    metrics["completions/max_length"] = float(numbers[:, 0].max())
    metrics |= {f"rewards/{name}": float(per_function[..., i].nanmean()) for i, name in enumerate(names)}
    spread = torch.stack([_std(group[~group.isnan()]) for group in rewards])  # [R]
    correct = numbers[:, 3].view(rewards.shape).bool()
    same = equal_rewards(rewards)
    metrics |= answer_numbers(numbers[:, -1].view(rewards.shape)) | truth_correlation(rewards, correct)
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
