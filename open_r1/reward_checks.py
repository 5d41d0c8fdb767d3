"""The checks of preflight.py that are about rewards: which there are, and that they work on gold answers."""

import contextlib

from .arguments import GRPOArguments
from .data import DataError
from .machine_checks import Found
from .rewards import Reward, check_signature, resolve_rewards, try_rewards
from .scoring import TOKEN_STATISTICS

GOLD_ROWS = 8  # rows that the rewards are tried on


def check_rewards(run) -> Found:
    recipe, weights = run.recipe, run.args.reward_weights
    options = recipe.reward_options
    run.rewards = resolve_rewards(recipe.reward_funcs, weights, run.registry, recipe.reward_timeout, options)
    return [], unused_flags(run.args, run.rewards)


def unused_flags(args: GRPOArguments, rewards: list[Reward]) -> list[str]:
    """Flags about what none of the rewards asks for."""
    votes, limit = args.completions_drawn, args.vocab_limit
    faults = []
    if votes > args.num_generations and not any(reward.wants("votes") for reward in rewards):
        faults.append(f"--vote_generations {votes}: no reward counts votes; add majority_vote")
    if limit and not any(reward.wants(name) for reward in rewards for name in TOKEN_STATISTICS):
        names = " or ".join(TOKEN_STATISTICS)
        faults.append(f"--vocab_limit {limit}: no reward asks for {names}; leave it out")
    if (args.difficulty_sampling or args.count_balance) and not any(
        reward.wants("answer") or reward.wants("solution") for reward in rewards
    ):
        faults.append(
            "--difficulty_sampling and --count_balance look at the true counts, which no reward asks for: "
            "leave them out"
        )
    return faults


def check_gold(run) -> Found:
    """The rewards, proved on gold answers of the first rows that have one."""
    if not run.is_main:
        return [], []
    columns, images = [], []
    for row in run.rows or range(len(run.data)):
        with contextlib.suppress(DataError):  # bad rows are listed by their own check
            columns, images = [*columns, run.data.columns(row)], [*images, run.data.images(row)]
        if len(images) == GOLD_ROWS:
            break
    if not images:
        return [], [f"{run.data.source} has no row to try the rewards on"]
    for reward in run.rewards:
        check_signature(reward, columns[0].keys())
    cap = run.args.max_completion_length
    return try_rewards(run.rewards, columns[: len(images)], images, run.processor.tokenizer, cap)
