"""Calling reward functions: names, arguments by name, and what happens when one fails or hangs.

The functions themselves stand in grpo.py. The signature is R1-V's and TRL's:
    fn(completions, **columns) -> list[float | None]
completions are conversations, [[{"role": "assistant", "content": str}], …]; every column of the data set
comes as a list with one value per completion. A function may further name any of EXTRAS, and gets it;
nothing is computed that no function asks for. None means "cannot judge".
"""

import copy
import inspect
import math
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .data import Prompt
from .protocol import MAX_NEW_TOKENS
from .scoring import TOKEN_STATISTICS
from .time_limit import TimeIsUp, time_limit
from .user_functions import find_function, option_value

EXTRAS = {
    "prompts": "the question as the user asked it, str",
    "group": "number of the prompt that the completion belongs to, int",
    "completion_ids": "token ids, list[int], with the end-of-sequence token when it was reached",
    "truncated": "True when no end-of-sequence token was reached, bool",
    "max_completion_length": "the flag's value, at which completions are cut, int",
    "images": "the prompt's images, list[PIL.Image]",
    "votes": "texts of all --vote_generations completions of the prompt, tuple[str, ...]",
    "entropy": "entropy of the policy at each token in nats, Tensor [T]",
    "self_certainty": "KL(uniform || policy) at each token, Tensor [T]",
}


class RewardError(RuntimeError):
    """A reward function that does not do what its signature promises."""


@dataclass(frozen=True)
class Reward:
    """A reward function with its name and weight; weight 0 is logged only. A call may take `timeout` s, and
    gets `options` by name."""

    name: str
    function: Callable
    weight: float
    timeout: float = 60.0
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def parameters(self) -> dict[str, inspect.Parameter]:
        return dict(inspect.signature(self.function).parameters)

    def wants(self, extra: str) -> bool:
        return extra in self.parameters

    def arguments(self, available: dict[str, list]) -> dict[str, list]:
        """What the function asks for, of the columns and extras there are; it may change its own lists."""
        takes_all = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in self.parameters.values())
        names = [k for k in available if k in self.parameters or (takes_all and k not in EXTRAS)]
        own = {name: list(available[name]) for name in names}
        return own | {"completions": copy.deepcopy(available["completions"])} if "completions" in own else own

    def __call__(self, available: dict[str, list]) -> list[float]:
        """One float per completion, NaN for None. RewardError for anything else, exceptions included."""
        expected = len(available["completions"])
        try:
            with time_limit(self.timeout):
                values = self.function(**self.arguments(available), **self.options)
                values = values.tolist() if hasattr(values, "tolist") else values  # numpy and torch
        except TimeIsUp as alarm:
            limit = f"--reward_timeout {self.timeout:g} s"
            raise RewardError(f"reward {self.name} took more than {limit} {_where(alarm, 2)}") from None
        except BaseException as error:  # SystemExit too: a reward that exits must not end the run in silence
            raise RewardError(
                f"reward {self.name} raised {type(error).__name__}: {error} {_where(error)}"
            ) from error
        if not isinstance(values, Sequence) or isinstance(values, str) or len(values) != expected:
            raise RewardError(
                f"reward {self.name} must return a list of {expected} numbers or None, not {values!r:.200}"
            )
        return [self._number(value) for value in values]

    def _number(self, value: Any) -> float:
        try:
            number = value.item() if hasattr(value, "item") else value  # numpy and torch
            if number is None:
                return math.nan
            if isinstance(number, int | float) and abs(float(number)) <= LARGEST:  # no NaN is
                return float(number)
        except (ValueError, RuntimeError, OverflowError):  # several elements; more digits than a float has
            pass
        shown = f"{type(value).__name__} {value!r:.100}"
        raise RewardError(f"reward {self.name} returned {shown}: every value is a finite number or None")


LARGEST = torch.finfo(torch.float32).max


def _where(error: BaseException, depth: int = 1) -> str:
    """The line that raised; with depth 2 the one that was interrupted by what raised."""
    frame = traceback.extract_tb(error.__traceback__)[-depth]
    return f"({frame.filename}, line {frame.lineno})"


def resolve_rewards(
    names: Sequence[str],
    weights: Sequence[float] | None,
    registry: dict[str, Callable],
    timeout: float = Reward.timeout,
    options: Sequence[str] = (),
) -> list[Reward]:
    """Names of the registry or dotted paths (package.module.function) -> rewards, with `options` of the form
    NAME.PARAMETER=VALUE. ValueError names what is wrong."""
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
    rewards = [Reward(n, find_function(n, registry), w, timeout) for n, w in zip(names, weights, strict=True)]
    for option in options:
        _set_option({reward.name: reward for reward in rewards}, option)
    return rewards


def _set_option(rewards: dict[str, Reward], option: str) -> None:
    """Sets a parameter of one of the rewards."""
    place, equals, value = option.partition("=")
    name, _, parameter = place.rpartition(".")
    if not equals or name not in rewards:
        raise ValueError(
            f"--reward_options {option}: give NAME.PARAMETER=VALUE, where NAME is of --reward_funcs "
            f"({' '.join(rewards)})"
        )
    rewards[name].options[parameter] = option_value(
        rewards[name].function, parameter, value, EXTRAS, f"--reward_options {option}: {name}"
    )


def check_signature(reward: Reward, columns: Sequence[str]) -> None:
    """Refuses a function that needs an argument which neither the data set nor the trainer has, or both."""
    available = {"completions", *columns, *EXTRAS}
    for name, parameter in reward.parameters.items():
        if name in reward.options and name in columns:
            raise ValueError(f"--reward_options {reward.name}.{name}: {name} is a column too; rename that")
        if name in EXTRAS and name in columns:
            raise ValueError(
                f"reward {reward.name} asks for {name}, which is a column of the data set and also what the "
                "trainer gives: rename the column"
            )
        named = parameter.kind in (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
        if named and parameter.default is inspect.Parameter.empty and name not in available:
            raise ValueError(
                f"reward {reward.name} asks for {name}, which is neither a column "
                f"({', '.join(sorted(columns))}) "
                f"nor one of {', '.join(EXTRAS)}"
            )


FAILED = math.inf  # stands for every value of a function that failed; its own values are finite


class RewardCaller:
    """Calls all rewards on a rollout. Failures are counted over all ranks, and stop all of them together: a
    rank that raised alone would leave the others waiting for it."""

    def __init__(self, rewards: Sequence[Reward], max_failures: int):
        self.rewards, self.max_failures = list(rewards), max_failures
        self.failures = {reward.name: 0 for reward in rewards}  # calls that failed, on all ranks
        self.messages: dict[str, str] = {}  # the newest failure of each on this rank
        self.shares: dict[str, float] = {}  # of the newest rollout's completions, by what is to be logged

    def __call__(self, available: dict[str, list]) -> Tensor:
        """Values [B, F] of this rank: NaN where a function could not judge, FAILED where it failed.

        All ranks' values go to `settle`. A failure is printed at once.
        """
        columns = []
        for reward in self.rewards:
            try:
                values = reward(available)
            except RewardError as error:
                self.messages[reward.name] = str(error)
                print(f"\nrank {_rank()}: {error}", flush=True)
                values = [FAILED] * len(available["completions"])
            columns.append(torch.tensor(values, dtype=torch.float32))
        return torch.stack(columns, dim=1)

    def settle(self, values: Tensor, ranks: int = 1) -> Tensor:
        """Counts the failures in `values` [R, G, F] of all ranks, one behind the other; NaN replaces them.

        Where a function with a weight failed the others' values go too: what is left of the sum would train
        on something else than was asked for. Raises RewardError, on every rank, when a function has failed
        more than max_failures times.
        """
        failed, names = values.isinf(), [reward.name for reward in self.rewards]
        for which, what in ((failed, "failed"), (values.isnan(), "unjudged")):
            shares = which.float().mean((0, 1)).tolist()
            self.shares |= {f"rewards/{n}/{what}": share for n, share in zip(names, shares, strict=True)}
        calls = failed.view(ranks, -1, len(names)).any(1)  # [ranks, F]
        for name, count in zip(names, calls.sum(0).tolist(), strict=True):
            self.failures[name] += count
            total = f"reward {name} has failed {self.failures[name]} times, of {self.max_failures} allowed"
            if count and self.failures[name] > self.max_failures:
                raise RewardError(f"{total} (--max_reward_failures); the last time: {self._last(name)}")
            if count and _rank() == 0:
                print(total, flush=True)
        weighted = torch.tensor([reward.weight != 0 for reward in self.rewards])
        lost = (failed & weighted).any(-1, keepdim=True)
        return values.masked_fill(failed | lost, torch.nan)

    def _last(self, name: str) -> str:
        """What a rank's newest failure says. A collective."""
        messages = [self.messages.get(name)]
        if dist.is_initialized():
            messages = [None] * dist.get_world_size()
            dist.all_gather_object(messages, self.messages.get(name))
        return next(message for message in messages if message)

    def restore(self, failures: dict[str, int]) -> None:
        """The counts of a checkpoint, of the functions that this run has too."""
        self.failures |= {name: count for name, count in failures.items() if name in self.failures}

    def numbers(self) -> dict[str, float]:
        """For the log: failed calls so far, and shares of the newest rollout's completions."""
        counts = {f"reward_failures/{name}": float(count) for name, count in self.failures.items()}
        return counts | self.shares


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def as_conversations(texts: Sequence[str]) -> list[list[dict]]:
    return [[{"role": "assistant", "content": text}] for text in texts]


def reward_arguments(
    prompts: Sequence[Prompt], groups: Sequence[Sequence], numbers: Sequence[int],
    voters: Sequence[Sequence], max_completion_length: int,
) -> dict[str, list]:  # fmt: skip
    """What functions may name, a value per completion: the rows' columns and the EXTRAS that need no
    forward pass.

    groups are the completions of each prompt, and voters those with the ones that only vote; `numbers` are
    the places of the prompts among those of all ranks.
    """
    votes = [tuple(completion.text for completion in group) for group in voters]
    flat = [(i, completion) for i, group in enumerate(groups) for completion in group]
    arguments = {name: [prompts[i].columns[name] for i, _ in flat] for name in prompts[0].columns}
    return arguments | {
        "completions": as_conversations([c.text for _, c in flat]),
        "prompts": [prompts[i].columns["question"] for i, _ in flat],
        "group": [numbers[i] for i, _ in flat],
        "completion_ids": [c.token_ids.tolist() for _, c in flat],
        "truncated": [c.truncated for _, c in flat],
        "max_completion_length": [max_completion_length] * len(flat),
        "images": [prompts[i].images for i, _ in flat],
        "votes": [votes[i] for i, _ in flat],
    }


def try_rewards(
    rewards: Sequence[Reward], rows: Sequence[dict], images: Sequence[list], tokenizer,
    max_completion_length: int = MAX_NEW_TOKENS,
) -> tuple[list[str], list[str]]:  # fmt: skip
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
                shown.append(_tried(reward, rows, images, texts, tokenizer, max_completion_length))
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
    reward: Reward, rows: Sequence[dict], images: Sequence[list], texts: Sequence[str], tokenizer,
    max_completion_length: int,
) -> str:  # fmt: skip
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
        "max_completion_length": [max_completion_length] * len(rows),
        "images": list(images),
        "votes": [(text,) for text in texts],
        **{name: [torch.rand(len(row), generator=generator) for row in ids] for name in TOKEN_STATISTICS},
    }
    known = [value for value in reward(available) if not math.isnan(value)]
    return f"{sum(known) / len(known):.2f}" if known else "cannot judge"
