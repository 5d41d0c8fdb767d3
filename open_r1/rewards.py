"""Calling reward functions: names, arguments by name, and what happens when one fails.

The functions themselves stand in grpo.py. The signature is R1-V's and TRL's:
    fn(completions, **columns) -> list[float | None]
completions are conversations, [[{"role": "assistant", "content": str}], …]; every column of the data set
comes as a list with one value per completion. A function may further name any of EXTRAS, and gets it;
nothing is computed that no function asks for. None means "cannot judge".
"""

import importlib
import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .data import Prompt
from .packing import TOKEN_STATISTICS

EXTRAS = {
    "prompts": "the question as the user asked it, str",
    "group": "number of the prompt that the completion belongs to, int",
    "completion_ids": "token ids, list[int], with the end-of-sequence token when it was reached",
    "truncated": "True when no end-of-sequence token was reached, bool",
    "images": "the prompt's images, list[PIL.Image]",
    "entropy": "entropy of the policy at each token in nats, Tensor [T]",
    "self_certainty": "KL(uniform || policy) at each token, Tensor [T]",
}


class RewardError(RuntimeError):
    """A reward function that does not do what its signature promises."""


@dataclass(frozen=True)
class Reward:
    """A reward function with its name and weight; weight 0 is logged only."""

    name: str
    function: Callable
    weight: float

    @property
    def parameters(self) -> dict[str, inspect.Parameter]:
        return dict(inspect.signature(self.function).parameters)

    def wants(self, extra: str) -> bool:
        return extra in self.parameters

    def arguments(self, available: dict[str, list]) -> dict[str, list]:
        """What the function asks for, of the columns and extras there are."""
        takes_all = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in self.parameters.values())
        return {k: v for k, v in available.items() if k in self.parameters or (takes_all and k not in EXTRAS)}

    def __call__(self, available: dict[str, list]) -> list[float]:
        """One float per completion, NaN for None. RewardError for anything else, exceptions included."""
        expected = len(available["completions"])
        try:
            values = self.function(**self.arguments(available))
        except Exception as error:
            raise RewardError(f"reward {self.name} raised {type(error).__name__}: {error}") from error
        if hasattr(values, "tolist"):  # numpy and torch
            values = values.tolist()
        if not isinstance(values, Sequence) or isinstance(values, str) or len(values) != expected:
            raise RewardError(
                f"reward {self.name} must return a list of {expected} numbers or None, not {values!r:.200}"
            )
        values = [value.item() if hasattr(value, "item") else value for value in values]
        for value in values:
            if value is not None and not (isinstance(value, int | float) and math.isfinite(value)):
                raise RewardError(
                    f"reward {self.name} returned {value!r}: every value must be a finite number or None"
                )
        return [math.nan if value is None else float(value) for value in values]


def resolve_rewards(
    names: Sequence[str], weights: Sequence[float] | None, registry: dict[str, Callable]
) -> list[Reward]:
    """Names of the registry or dotted paths (package.module.function) -> rewards. ValueError names what is
    wrong."""
    weights = [1.0] * len(names) if weights is None else list(weights)
    if len(weights) != len(names):
        raise ValueError(
            f"--reward_weights has {len(weights)} values for {len(names)} --reward_funcs "
            f"({' '.join(names)}): give one each"
        )
    if len(set(names)) != len(names):
        raise ValueError(f"--reward_funcs {' '.join(names)} names a function twice: add its weights instead")
    if not any(weights):
        raise ValueError("--reward_weights are all 0: such functions are only logged; give one a weight")
    return [Reward(n, _find(n, registry), w) for n, w in zip(names, weights, strict=True)]


def _find(name: str, registry: dict[str, Callable]) -> Callable:
    if name in registry:
        return registry[name]
    known = f"known names are {', '.join(sorted(registry))}; others are dotted paths (my_rewards.length)"
    module, _, attribute = name.rpartition(".")
    if not module:
        raise ValueError(f"--reward_funcs {name} is no known reward: {known}")
    try:
        return getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"--reward_funcs {name} could not be imported ({error}): {known}") from error


def check_signature(reward: Reward, columns: Sequence[str]) -> None:
    """Refuses a function that needs an argument which neither the data set nor the trainer has."""
    available = {"completions", *columns, *EXTRAS}
    for name, parameter in reward.parameters.items():
        named = parameter.kind in (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
        if named and parameter.default is inspect.Parameter.empty and name not in available:
            raise ValueError(
                f"reward {reward.name} asks for {name}, which is neither a column "
                f"({', '.join(sorted(columns))}) "
                f"nor one of {', '.join(EXTRAS)}"
            )


class RewardCaller:
    """Calls all rewards on a rollout; counts failures and stops the run when one function keeps failing."""

    def __init__(self, rewards: Sequence[Reward], max_failures: int):
        self.rewards, self.max_failures = list(rewards), max_failures
        self.failures = {reward.name: 0 for reward in rewards}

    def __call__(self, available: dict[str, list]) -> Tensor:
        """Values [B, F], NaN where a function could not judge or failed.

        Raises RewardError when a function has failed more than max_failures times. A failure is printed and
        counted: it never becomes a silent 0.
        """
        columns = []
        for reward in self.rewards:
            try:
                values = reward(available)
            except RewardError as error:
                self.failures[reward.name] += 1
                print(
                    f"\n{error} (failure {self.failures[reward.name]}, {self.max_failures} are allowed)",
                    flush=True,
                )
                if self.failures[reward.name] > self.max_failures:
                    raise
                values = [math.nan] * len(available["completions"])
            columns.append(torch.tensor(values, dtype=torch.float32))
        return torch.stack(columns, dim=1)


def as_conversations(texts: Sequence[str]) -> list[list[dict]]:
    return [[{"role": "assistant", "content": text}] for text in texts]


def reward_arguments(
    prompts: Sequence[Prompt], groups: Sequence[Sequence], numbers: Sequence[int]
) -> dict[str, list]:
    """What functions may name, a value per completion: the rows' columns and the EXTRAS that need no
    forward pass.

    groups are the completions of each prompt; `numbers` are
    the places of the prompts among those of all ranks.
    """
    flat = [(i, completion) for i, group in enumerate(groups) for completion in group]
    arguments = {name: [prompts[i].columns[name] for i, _ in flat] for name in prompts[0].columns}
    return arguments | {
        "completions": as_conversations([c.text for _, c in flat]),
        "prompts": [prompts[i].columns["question"] for i, _ in flat],
        "group": [numbers[i] for i, _ in flat],
        "completion_ids": [c.token_ids.tolist() for _, c in flat],
        "truncated": [c.truncated for _, c in flat],
        "images": [prompts[i].images for i, _ in flat],
    }


def try_rewards(
    rewards: Sequence[Reward], rows: Sequence[dict], images: Sequence[list], tokenizer
) -> tuple[list[str], list[str]]:
    """Calls each reward on gold answers and on empty text. Returns the lines of a table, and the faults.

    rows are column dictionaries with "answer" and "question", images those of each row. A reward that fails
    is a fault, and so is one named accuracy that does not give 1.0 for gold and 0.0 for nothing: it disagrees
    with the grader. Entropy and self-certainty are drawn at random.
    """
    lines, faults = [f"{'reward':<24}{'weight':>8}{'gold answer':>14}{'empty text':>14}"], []
    gold = [f"<answer> {row['answer']} </answer>" for row in rows]
    for reward in rewards:
        shown = []
        for what, texts in (("gold answers", gold), ("empty text", [""] * len(rows))):
            try:
                shown.append(_tried(reward, rows, images, texts, tokenizer))
            except RewardError as error:
                shown.append("failed")
                faults.append(f"{error} (when it was tried on {what})")
        lines.append(f"{reward.name:<24}{reward.weight:>8g}{shown[0]:>14}{shown[1]:>14}")
        if reward.name == "accuracy" and shown != ["1.00", "0.00"]:
            faults.append(
                f"the accuracy reward gives {shown[0]} on gold answers and {shown[1]} on empty text, not "
                "1.00 and 0.00: it disagrees with the grader, see accuracy_reward in open_r1/grpo.py"
            )
    return lines, faults


def _tried(
    reward: Reward, rows: Sequence[dict], images: Sequence[list], texts: Sequence[str], tokenizer
) -> str:
    """The mean reward of these texts, as the table shows it. Raises RewardError."""
    ids = [tokenizer(text)["input_ids"] + [tokenizer.eos_token_id] for text in texts]
    generator = torch.Generator().manual_seed(0)
    available = {
        **{name: [row[name] for row in rows] for name in rows[0]},
        "completions": as_conversations(texts),
        "prompts": [row["question"] for row in rows],
        "group": list(range(len(rows))),
        "completion_ids": ids,
        "truncated": [False] * len(rows),
        "images": list(images),
        **{name: [torch.rand(len(row), generator=generator) for row in ids] for name in TOKEN_STATISTICS},
    }
    known = [value for value in reward(available) if not math.isnan(value)]
    return f"{sum(known) / len(known):.2f}" if known else "cannot judge"
