"""The best validated model stands in the submission folder, from the first minute on."""

from collections.abc import Callable
from pathlib import Path

import torch
from accelerate import PartialState
from accelerate.utils import broadcast_object_list
from torch import nn

from .checkpoint import load_policy
from .submission import ensure_submission, write_submission
from .validation import format_table, score
from .weights import master_weights


class KeepBest:
    """Writes a policy into the folder `submission` (in the files of the folder `base`) when it scores
    higher than what stands there. All ranks call the methods: gathering weights is collective; rank 0
    writes."""

    def __init__(self, base: Path, submission: Path):
        self.base, self.submission, self.best_score = base, submission, -1.0

    def start(self, rollout_copy: nn.Module, validate: Callable[[], dict[str, dict]]) -> None:
        """Puts a valid model there (the base, unless one stands there already) and measures the score to
        beat, on this run's own validation rows. The rollout copy holds the base before and after."""
        kept = [ensure_submission(self.base, self.submission) if PartialState().is_main_process else None]
        broadcast_object_list(kept)
        self.best_score = self._measure("base", validate)
        if kept[0]:
            _load_into(rollout_copy, self.submission)
            self.best_score = self._measure("submission", validate)
            _load_into(rollout_copy, self.base)

    def offer(self, policy: nn.Module, found: float, summaries: dict[str, dict], step: int) -> bool:
        """Makes the policy the submission if `found` beats the best score; says whether it did."""
        if found <= self.best_score:
            return False
        self.best_score = found
        record = {"recipe": "grpo", "step": step, "score": found}
        record["sets"] = {name: numbers_of(summary) for name, summary in summaries.items()}
        state = PartialState()
        if state.is_main_process:
            write_submission(self.base, self.submission, master_weights(policy), record)
            print(
                f"update {step}: validation score {found:.2f}, the best so far: it is the submission",
                flush=True,
            )
        else:
            for _ in master_weights(policy):
                pass
        state.wait_for_everyone()
        return True

    def _measure(self, name: str, validate: Callable[[], dict[str, dict]]) -> float:
        summaries = validate()
        if PartialState().is_main_process:
            print(f"{name}:\n{format_table(summaries)}", flush=True)
        return score(summaries.values())


def numbers_of(summary: dict) -> dict[str, float]:
    """The plain numbers of a validation summary, for logs and records."""
    return {k: v for k, v in summary.items() if isinstance(v, int | float)}


@torch.no_grad()
def _load_into(model: nn.Module, folder: Path) -> None:
    into = dict(model.named_parameters())
    for name, parameter in load_policy(folder, model.dtype).named_parameters():
        into[name].copy_(parameter)
