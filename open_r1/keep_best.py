"""The best validated model stands in the submission folder, from the first minute on."""

from collections.abc import Callable
from pathlib import Path

from accelerate import PartialState
from torch import nn

from .curve import Curve
from .mixing import Weights, mix
from .ranks import on_rank_zero, write_along
from .selection import BASE, STANDING, Outcome, confidence
from .submission import ensure_submission, note_score, read_record, write_submission
from .top_masters import TopMasters
from .validation import format_table, score
from .weights import load_weights, master_weights


class KeepBest:
    """Writes a policy into the folder `submission` (in the files of the folder `base`) when it scores
    higher than what stands there, and better than the base with `level` confidence (selection.py). All ranks
    call the methods: gathering weights is collective; rank 0 writes.

    `curve` keeps what was measured. A score that the record of the submission has from the same run and rows
    is not measured again. `top` keeps float32 weights of the best, where they are wanted. The run's own
    policy starts from the folder `start`.
    """

    def __init__(
        self, base: Path, submission: Path, curve: Curve, *, level: float = 0.0, start: Path | None = None,
        top: TopMasters | None = None,
    ):  # fmt: skip
        self.base, self.submission, self.curve = base, submission, curve
        self.level, self.start_from, self.top = level, start or base, top
        self.best_score = self.baseline = -1.0  # now, and before the first update
        self.chosen_score = -1.0  # the best that was to be written, whether that went well or not
        self.base_outcome: Outcome | None = None
        self.failures = 0  # better models that could not be written

    def start(self, rollout_copy: nn.Module, validate: Callable[[], dict[str, dict]], step: int = 0) -> None:
        """Puts a valid model there (the base, unless one stands there already) and measures the score to
        beat, on this run's own validation rows; a run that goes on after `step` has measured it. The rollout
        copy holds the weights that the run starts from before and after."""
        kept = on_rank_zero(lambda: ensure_submission(self.base, self.submission))
        on_rank_zero(lambda: self.curve.begin(step))
        self.base_outcome = on_rank_zero(lambda: self.curve.find(BASE))
        if self.base_outcome and (known := self._known()):
            self.best_score, self.baseline = known.get("score_to_beat", known["score"]), known["baseline"]
            self.chosen_score = self.baseline
            self._say(f"submission: score {self.best_score:.2f}, as this run measured before it was stopped")
            return
        if self.start_from != self.base:
            load_weights(rollout_copy, self.base)
        self.best_score, self.base_outcome = self._measure(BASE, validate)
        if kept:
            load_weights(rollout_copy, self.submission)
            found, _ = self._measure(STANDING, validate)
            if found < self.best_score:
                self._say(f"{self.submission} scores below the base, which takes its place")
                on_rank_zero(self._write_base)
            self.best_score = max(found, self.best_score)
        if kept or self.start_from != self.base:
            load_weights(rollout_copy, self.start_from)
        self.baseline = self.chosen_score = self.best_score
        measured = {"score": self.best_score, "score_to_beat": self.best_score}  # not an earlier round's
        on_rank_zero(lambda: note_score(self.submission, **measured, **self._of_this_run()))

    def offer(self, policy: nn.Module, found: float, summaries: dict[str, dict], step: int) -> bool:
        """Makes the policy the submission if `found` beats the best score, and the rows tell it from the
        base; says whether anything was written. Where it cannot be written (a full disk), the old one stays
        and the run goes on."""
        outcome = outcome_of(summaries)
        sure = confidence(outcome, self.base_outcome)
        on_rank_zero(lambda: self.curve.add(f"update {step}", step, found, outcome, sure))
        wrote = self.top is not None and self.top.offer(policy, found, step)
        if found <= self.best_score:
            return wrote
        if sure < self.level:
            self._say(
                f"update {step}: validation score {found:.2f}, but it beats the base in {sure:.1%} of the "
                f"paired bootstrap samples only (--select_level {self.level:g}): the submission stays"
            )
            return wrote
        self.chosen_score = max(found, self.chosen_score)
        record = {"recipe": "grpo", "step": step, "score": found, **self._of_this_run()}
        record["sets"] = {name: numbers_of(summary) for name, summary in summaries.items()}
        error = write_along(
            master_weights(policy), lambda it: write_submission(self.base, self.submission, it, record)
        )
        if error is None:
            self.best_score = found
            self._say(
                f"update {step}: validation score {found:.2f}, the best so far, above the base in {sure:.1%} "
                "of the paired bootstrap samples: it is the submission"
            )
        elif isinstance(error, OSError):
            self.failures += 1
            self.best_score = (self._known() or {"score": self.best_score})["score"]  # it may stand even so
            self._say(
                f"update {step}: validation score {found:.2f}, the best so far, but it could not be written "
                f"({error}): {self.submission} holds the one before. Make room there for the next."
            )
        else:
            raise error
        return wrote or error is None

    def _write_base(self) -> None:
        weights = mix([(Weights(self.base), 1.0)])
        write_submission(self.base, self.submission, weights, {"recipe": "base", "step": 0})

    def _of_this_run(self) -> dict:
        return {"baseline": self.baseline, "measured_in": self.curve.measured_in}

    def _known(self) -> dict | None:
        """The record of what stands there, if this run measured it on the rows that it validates on now."""
        record = on_rank_zero(lambda: read_record(self.submission)) or {}
        return record if record.get("measured_in") == self.curve.measured_in else None

    def _say(self, sentence: str) -> None:
        if PartialState().is_main_process:
            print(sentence, flush=True)

    def _measure(self, name: str, validate: Callable[[], dict[str, dict]]) -> tuple[float, Outcome]:
        summaries = validate()
        self._say(f"{name}:\n{format_table(summaries)}")
        found, outcome = score(summaries.values()), outcome_of(summaries)
        on_rank_zero(lambda: self.curve.add(name, 0, found, outcome, None))
        return found, outcome


def outcome_of(summaries: dict[str, dict]) -> Outcome:
    return Outcome({name: summary["rows"] for name, summary in summaries.items()})


def numbers_of(summary: dict) -> dict[str, float]:
    """The plain numbers of a validation summary, for logs and records."""
    return {k: v for k, v in summary.items() if isinstance(v, int | float)}
