"""Which training rows a rollout has: epochs of permutations, or rows drawn by weight.

The weight of a row is the product of

    (mean p(1 - p) + FLOOR)      --difficulty_sampling    p is the share of a group that answers right
    (frequency of its true count) ** -alpha               --count_balance alpha

A group that is always or never right has no advantage, so p(1 - p), the variance of a right answer, says how
much a row teaches (as variance-aware sampling does, arXiv 2509.21268). Four departures:

1. A run sees most rows of a large data set once or never, so a row leans on the groups of its question and
   true count, these on those of its true count, and these on 1/4, the most there is: what is new is tried.
2. p(1 - p) is averaged, not p: rows half of which are hopeless and half of which are mastered teach nothing.
3. Groups count by half after HALF_LIFE rollouts, since the policy changes, and are dropped after MEMORY.
4. Rollout n knows the groups of the rollouts before n - ROLLOUTS_AHEAD: prompts are encoded ahead of time,
   and what is drawn must not depend on how far ahead.

What is drawn follows from seed, rollout and the groups kept, which a checkpoint holds: it is the same on all
ranks, with any number of processes and after a resume.
"""

from collections.abc import Sequence

import numpy as np

from .arguments import GRPOArguments
from .data import CountingData, gold_answer
from .data_loader import refill_rows, rollout_rows
from .flag_rules import ROLLOUTS_AHEAD

FLOOR = 0.05  # so that a row which teaches most is drawn six times as often as one that teaches nothing
HALF_LIFE = 25  # rollouts
MEMORY = 8 * HALF_LIFE
PRIOR = 0.25  # the most that p(1 - p) can be
PRIOR_GROUPS = 8.0  # groups that weigh as much as what they lean on
MOST_FREQUENT = 10.0  # times that a row of the rarest count is drawn as often as one of the commonest


class RowSampler:
    """Rows are numbered by their place in `rows`, the rows of `data` to train on."""

    def __init__(self, args: GRPOArguments, data: CountingData, rows: Sequence[int]):
        self.args, self.place = args, {row: place for place, row in enumerate(rows)}
        self.groups: dict[int, dict[int, float]] = {}  # rollout: {place: share that answered right}
        if not self.weighted:
            return
        answers = np.array([gold_answer(one) for one in data.column(data.solution_column, rows)])
        questions = data.column(data.question_column, rows)
        _, self.count_of = np.unique(answers, return_inverse=True)  # [rows], numbers of the true counts
        pairs = np.unique(questions, return_inverse=True)[1] * (answers.max() + 1) + answers
        _, self.kind_of = np.unique(pairs, return_inverse=True)  # [rows], of question and true count together
        self.balance = count_weights(self.count_of, args.count_balance)

    @property
    def weighted(self) -> bool:
        return self.args.difficulty_sampling or self.args.count_balance > 0

    def rows(self, rollout: int) -> list[int]:
        """The rows of a rollout, by place of it."""
        if not self.weighted:
            return rollout_rows(self.args, len(self.place), rollout)
        return self._drawn(rollout, self.args.prompts_drawn)

    def refill(self, rollout: int, attempt: int) -> list[int]:
        """For each place of a rollout the row of attempt 1, 2, ... to replace its prompt."""
        if not self.weighted:
            return refill_rows(self.args, len(self.place), rollout, attempt)
        count = self.args.prompts_drawn
        return self._drawn(rollout, (attempt + 1) * count)[attempt * count :]

    def _drawn(self, rollout: int, count: int) -> list[int]:
        """Without replacement (by the largest of log weight + Gumbel noise), but for too few rows."""
        weights = np.log(self.weights(rollout))
        rng, drawn = np.random.default_rng([self.args.seed, rollout, 2]), []
        while len(drawn) < count:
            order = np.argsort(-(weights + rng.gumbel(size=len(weights))), kind="stable")
            drawn += order[: count - len(drawn)].tolist()
        return drawn

    def weights(self, rollout: int) -> np.ndarray:
        """Of each row when this rollout is drawn, [rows]; they need not sum to 1."""
        if not self.args.difficulty_sampling:
            return self.balance
        return self.balance * (self._expected(rollout) + FLOOR)

    def _expected(self, rollout: int) -> np.ndarray:
        """The p(1 - p) that a group of each row is expected to have, [rows]."""
        last = rollout - ROLLOUTS_AHEAD - 1
        known = [
            (place, 0.5 ** ((last - number) / HALF_LIFE), share * (1 - share))
            for number, groups in sorted(self.groups.items())
            if last - MEMORY < number <= last
            for place, share in sorted(groups.items())
        ]
        places, ages, spreads = np.array(known).reshape(-1, 3).T
        places = places.astype(int)

        def leaning(of: np.ndarray, on: np.ndarray | float, groups: float) -> np.ndarray:
            """Weighted means by number `of[place]`, each with `groups` groups more of what it leans on."""
            size = of.max() + 1
            seen = np.bincount(of[places], ages, size)
            total = np.bincount(of[places], ages * spreads, size)
            return (total + groups * on) / (seen + groups)

        of_count = leaning(self.count_of, PRIOR, PRIOR_GROUPS)  # [true counts]
        count_of_kind = np.zeros(self.kind_of.max() + 1, dtype=int)
        count_of_kind[self.kind_of] = self.count_of
        of_kind = leaning(self.kind_of, of_count[count_of_kind], PRIOR_GROUPS)  # [kinds]
        return leaning(np.arange(len(self.place)), of_kind[self.kind_of], 1.0)

    def observe(self, rollout: int, rows: Sequence[int], shares: Sequence[float]) -> None:
        """The share of each group of a rollout that answered right; `rows` are numbered as in the data set.
        All ranks observe the same. What was observed of a rollout before stays."""
        groups = self.groups.setdefault(rollout, {})
        groups |= {self.place[row]: share for row, share in zip(rows, shares, strict=True)}
        for old in [number for number in self.groups if number < rollout - ROLLOUTS_AHEAD - MEMORY]:
            del self.groups[old]

    def state(self) -> dict:
        """For a checkpoint's marker."""
        groups = {str(rollout): list(map(list, one.items())) for rollout, one in self.groups.items()}
        return {"pass_rates": groups} if self.args.difficulty_sampling else {}

    def restore(self, info: dict, next_rollout: int) -> None:
        """What a checkpoint holds of the rollouts before the next one, which is made (again) now, and of the
        rows that there are."""
        self.groups = {
            int(rollout): {place: share for place, share in groups if place < len(self.place)}
            for rollout, groups in info.get("pass_rates", {}).items()
            if int(rollout) < next_rollout
        }


def count_weights(count_of: np.ndarray, alpha: float) -> np.ndarray:
    """frequency ** -alpha of each row's true count, at most MOST_FREQUENT times the smallest, [rows].

    >>> count_weights(np.array([0, 0, 0, 0, 1]), 0.5).tolist()
    [1.0, 1.0, 1.0, 1.0, 2.0]
    """
    rarity = np.bincount(count_of).max() / np.bincount(count_of)
    with np.errstate(over="ignore"):
        return np.minimum(rarity**alpha, MOST_FREQUENT)[count_of]
