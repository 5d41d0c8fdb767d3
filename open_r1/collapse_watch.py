"""Whether a run collapses: signs in its rollouts and validations, each against the run's own beginning.

Rewards that need no labels rise while the policy falls apart, so the reward cannot tell. What can:

  format      the share of completions that the grader can read is below PARSED of the start's
  repetition  the share of 4-grams of a completion that differ is below DISTINCT of the start's
  one answer  the entropy of all answers is below ANSWERS of the start's, while the reward is above it
  score       a validation is more than ERRORS standard errors below the best before it

The first three are means over WINDOW rollouts, the start's over the first WINDOW. A sign stands once it holds
in LOOKS windows, or SCORE_LOOKS validations, in a row. The length is logged against the start and is no sign:
a policy that learns to answer directly is a fraction as long and no worse, and one that runs on until it is
cut off cannot be read.
"""

import math
from collections.abc import Iterable

WINDOW, LOOKS, SCORE_LOOKS = 3, 3, 2
PARSED, DISTINCT, ANSWERS, ERRORS = 0.8, 0.5, 0.5, 2.0
LENGTH = "completions/mean_length"
SIGNS = {  # name in the log: (share of the start's, what it is)
    "completions/parsed": (PARSED, "share of completions with an answer"),
    "completions/distinct_4": (DISTINCT, "share of different 4-grams"),
    "completions/answer_entropy": (ANSWERS, "entropy of the answers, while the reward rises,"),
}
WATCHED = (*SIGNS, LENGTH, "reward")


class CollapseWatch:
    """What was seen, from all ranks alike. What it says is a function of that alone, and a rollout or
    validation that is made again takes its own place: a resumed run says the same."""

    def __init__(self):
        self.rollouts: list[dict[str, float]] = []  # the first WINDOW and the newest; "rollout" is the number
        self.scores: list[list[float]] = []  # [update, score, standard error of a difference], in points

    def add_rollout(self, number: int, logs: dict[str, float]) -> dict[str, float]:
        """What is to be logged of rollout `number` against the start."""
        earlier = [one for one in self.rollouts if one["rollout"] < number]
        self.rollouts = [*earlier, {"rollout": number} | {name: logs[name] for name in WATCHED}]
        newest = max(WINDOW, len(self.rollouts) - (WINDOW + LOOKS - 1))
        self.rollouts = self.rollouts[:WINDOW] + self.rollouts[newest:]
        return {"completions/length_vs_start": logs[LENGTH] / _mean(self.rollouts[:WINDOW], LENGTH)}

    def add_score(self, update: int, score: float, error: float) -> None:
        self.scores = [*(one for one in self.scores if one[0] < update), [update, score, error]]

    def sign(self) -> str | None:
        """Why the run is to end; None while there is no reason."""
        newest = self.rollouts[WINDOW:]
        windows = [newest[i : i + WINDOW] for i in range(len(newest) - WINDOW + 1)]
        if len(windows) == LOOKS:
            for name, (share, words) in SIGNS.items():
                limit = share * _mean(self.rollouts[:WINDOW], name)
                if all(self._holds(name, window, limit) for window in windows):
                    now = _mean(windows[-1], name)
                    return f"the {words} is {now:.3f}, below {share:g} of the start's {limit / share:.3f}"
        return self._fallen()

    def _holds(self, name: str, window: list[dict], limit: float) -> bool:
        risen = _mean(window, "reward") > _mean(self.rollouts[:WINDOW], "reward")
        return _mean(window, name) < limit and (risen or name != "completions/answer_entropy")

    def _fallen(self) -> str | None:
        if len(self.scores) <= SCORE_LOOKS:
            return None
        best = max(score for _, score, _ in self.scores[:-SCORE_LOOKS])
        if all(best - score > ERRORS * error for _, score, error in self.scores[-SCORE_LOOKS:]):
            return f"the validation score is {self.scores[-1][1]:.2f}, after a best of {best:.2f}"
        return None

    def state(self) -> dict:
        """For a checkpoint's marker."""
        return {"rollouts": self.rollouts, "scores": self.scores}

    def restore(self, state: dict) -> None:
        self.rollouts, self.scores = state["rollouts"], state["scores"]


def difference_error(totals: Iterable[int]) -> float:
    """The standard error, in points, of the difference of two scores over sets of so many rows: at most this
    much, as at 50 %."""
    errors = [50 / math.sqrt(total) for total in totals]
    return math.sqrt(2) * math.hypot(*errors) / len(errors)


def _mean(rollouts: list[dict], name: str) -> float:
    return sum(one[name] for one in rollouts) / len(rollouts)
