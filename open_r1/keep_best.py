"""The best validated model stands in the submission folder, from the first minute on."""

from collections.abc import Callable
from pathlib import Path

import torch
from accelerate import PartialState
from torch import nn

from .checkpoint import load_policy
from .ranks import first_of_ranks, on_rank_zero
from .submission import ensure_submission, note_score, read_record, write_submission
from .validation import format_table, score
from .weights import master_weights


class KeepBest:
    """Writes a policy into the folder `submission` (in the files of the folder `base`) when it scores
    higher than what stands there. All ranks call the methods: gathering weights is collective; rank 0
    writes.

    `measured_in` names the run and the rows that it validates on: a score that the record of the submission
    has from there is not measured again.
    """

    def __init__(self, base: Path, submission: Path, measured_in: str | None = None):
        self.base, self.submission, self.measured_in = base, submission, measured_in
        self.best_score = self.baseline = -1.0  # now, and before the first update
        self.failures = 0  # better models that could not be written

    def start(self, rollout_copy: nn.Module, validate: Callable[[], dict[str, dict]]) -> None:
        """Puts a valid model there (the base, unless one stands there already) and measures the score to
        beat, on this run's own validation rows; a run that goes on has measured it. The rollout copy holds
        the base before and after."""
        kept = on_rank_zero(lambda: ensure_submission(self.base, self.submission))
        if known := self._known():
            self.best_score, self.baseline = known["score"], known["baseline"]
            self._say(f"submission: score {self.best_score:.2f}, as this run measured before it was stopped")
            return
        self.best_score = self._measure("base", validate)
        if kept:
            _load_into(rollout_copy, self.submission)
            self.best_score = self._measure("submission", validate)
            _load_into(rollout_copy, self.base)
        self.baseline = self.best_score
        on_rank_zero(lambda: note_score(self.submission, score=self.best_score, **self._of_this_run()))

    def offer(self, policy: nn.Module, found: float, summaries: dict[str, dict], step: int) -> bool:
        """Makes the policy the submission if `found` beats the best score; says whether it did. Where it
        cannot be written (a full disk), the old one stays and the run goes on."""
        if found <= self.best_score:
            return False
        record = {"recipe": "grpo", "step": step, "score": found, **self._of_this_run()}
        record["sets"] = {name: numbers_of(summary) for name, summary in summaries.items()}
        weights, error = master_weights(policy), None
        if PartialState().is_main_process:
            try:
                write_submission(self.base, self.submission, weights, record)
            except Exception as raised:
                error = raised
        for _ in weights:  # the other ranks gather along
            pass
        error = first_of_ranks(error)
        if error is None:
            self.best_score = found
            self._say(f"update {step}: validation score {found:.2f}, the best so far: it is the submission")
        elif isinstance(error, OSError):
            self.failures += 1
            self.best_score = (self._known() or {"score": self.best_score})["score"]  # it may stand even so
            self._say(
                f"update {step}: validation score {found:.2f}, the best so far, but it could not be written "
                f"({error}): {self.submission} holds the one before. Make room there for the next."
            )
        else:
            raise error
        return error is None

    def _of_this_run(self) -> dict:
        return {"baseline": self.baseline, "measured_in": self.measured_in}

    def _known(self) -> dict | None:
        """The record of what stands there, if this run measured it on the rows that it validates on now."""
        record = on_rank_zero(lambda: read_record(self.submission)) or {}
        same = self.measured_in is not None and record.get("measured_in") == self.measured_in
        return record if same else None

    def _say(self, sentence: str) -> None:
        if PartialState().is_main_process:
            print(sentence, flush=True)

    def _measure(self, name: str, validate: Callable[[], dict[str, dict]]) -> float:
        summaries = validate()
        self._say(f"{name}:\n{format_table(summaries)}")
        return score(summaries.values())


def numbers_of(summary: dict) -> dict[str, float]:
    """The plain numbers of a validation summary, for logs and records."""
    return {k: v for k, v in summary.items() if isinstance(v, int | float)}


@torch.no_grad()
def _load_into(model: nn.Module, folder: Path) -> None:
    into = dict(model.named_parameters())
    for name, parameter in load_policy(folder, model.dtype).named_parameters():
        into[name].copy_(parameter)
