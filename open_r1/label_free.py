"""Rewards that need no labels: the group's majority (TTRL), the policy's certainty (Intuitor) and its entropy
(RENT). grpo.py's registry names them; methods/{ttrl,intuitor,rent} are the recipes.

Answers are what the grader reads. A completion without one neither votes nor earns.
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from .protocol import extract_answer

TIES = ("first", "skip")


@dataclass(frozen=True)
class Vote:
    """What the completions of one prompt agree on."""

    label: int | None  # None: nobody answered, or the winner does not count
    share: float  # the winner's share of all completions, those without an answer among them
    tied: bool


def hold_vote(texts: Sequence[str], ties: str = "first", minimum_share: float = 0.0) -> Vote:
    """The most frequent answer. `ties`: of equally frequent ones the `first` given wins, or none does
    (`skip`). A winner with less than `minimum_share` does not count.

    >>> hold_vote(["<answer>3</answer>", "<answer> 03 </answer>", "<answer>4</answer>", "five"])
    Vote(label=3, share=0.5, tied=False)
    """
    if ties not in TIES:
        raise ValueError(f"ties={ties}: set one of {', '.join(TIES)}")
    if not 0 <= minimum_share <= 1:
        raise ValueError(f"minimum_share={minimum_share}: a share; set 0 up to 1")
    answers = [extract_answer(text) for text in texts]
    ballots = Counter(answer for answer in answers if answer is not None)  # in the order they were given
    if not ballots:
        return Vote(None, 0.0, False)
    winner, count = ballots.most_common(1)[0]
    share, tied = count / len(texts), list(ballots.values()).count(count) > 1
    counts = share >= minimum_share and not (tied and ties == "skip")
    return Vote(winner if counts else None, share, tied)


def majority_vote_reward(
    completions: list[list[dict]], group: list[int], votes: list[Sequence[str]], ties: str = "first",
    minimum_share: float = 0.0, **kwargs,
) -> list[float]:  # fmt: skip
    """1.0 for the answer that most of the prompt's completions give (TTRL, arXiv 2504.16084), else 0.0.

    All --vote_generations vote. In a group without a label everyone gets 0.0: it teaches nothing.
    """
    ballots = dict(zip(group, votes, strict=True))
    labels = {number: hold_vote(texts, ties, minimum_share).label for number, texts in ballots.items()}
    answers = [extract_answer(c[0]["content"]) for c in completions]
    return [
        float(answer is not None and answer == labels[number])
        for answer, number in zip(answers, group, strict=True)
    ]


def self_certainty_reward(completions: list, self_certainty: list[Tensor], **kwargs) -> list[float]:
    """KL(uniform || policy), a mean over the completion's tokens (Intuitor, arXiv 2505.19590). It has no
    upper bound."""
    return [float(values.mean()) for values in self_certainty]


def negative_entropy_reward(
    completions: list[list[dict]], entropy: list[Tensor], unparsed_entropy: float | None = None,
    format_only: bool = False, **kwargs,
) -> list[float]:  # fmt: skip
    """Minus the policy's entropy, a mean over the completion's tokens (RENT, arXiv 2505.22660); at most 0.

    A completion without an answer counts as one of `unparsed_entropy`, where that is set (the paper's
    base_format takes 7.0); `format_only` then gives all others 0, as a control.
    """
    if format_only and unparsed_entropy is None:
        raise ValueError("format_only needs unparsed_entropy: set it too, to 7.0 as in the paper's code")
    if unparsed_entropy is not None and unparsed_entropy < 0:
        raise ValueError(f"unparsed_entropy={unparsed_entropy} rewards what cannot be read: set 0 or more")
    rewards = [0.0 if format_only else -float(values.mean()) for values in entropy]
    if unparsed_entropy is not None:
        unparsed = [extract_answer(c[0]["content"]) is None for c in completions]
        rewards = [-unparsed_entropy if u else r for r, u in zip(rewards, unparsed, strict=True)]
    return rewards


def vote_numbers(votes: Sequence[str], answer: int | None, trained: int, **options) -> dict[str, float]:
    """One prompt's vote (with the options of its reward) beside the true count, named as in TTRL; NaN for
    what a row without a count leaves open. The first `trained` completions are trained on: post_."""
    vote, answers = hold_vote(votes, **options), [extract_answer(text) for text in votes]
    numbers = {"majority_ratio": vote.share, "tied": vote.tied, "no_label": vote.label is None}
    right = [given == answer for given in answers]
    earns = [given is not None and given == vote.label for given in answers]
    agree = [e == r for e, r in zip(earns, right, strict=True)]
    against_truth = {
        "label_accuracy": vote.label == answer,
        "reward_accuracy": sum(agree) / len(agree),
        "ground_truth_ratio": sum(right) / len(right),
        "pass": any(right),
        "post_reward_accuracy": sum(agree[:trained]) / trained,
        "post_ground_truth_ratio": sum(right[:trained]) / trained,
        "post_pass": any(right[:trained]),
    }
    if answer is None:
        against_truth = dict.fromkeys(against_truth, math.nan)
    return {f"votes/{name}": float(value) for name, value in (numbers | against_truth).items()}
