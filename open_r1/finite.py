"""Updates with a loss, a gradient or a reward that is not finite: the run stops before they change a weight,
or drops them (--on_nonfinite skip)."""

import torch
from torch import Tensor

from .arguments import GRPOArguments
from .control import RunControl, StopRun
from .status import NOT_FINITE
from .training_rows import TrainingRow


class FiniteWatch:
    """Looks once an update, since looking waits for the GPU. All ranks call the methods together."""

    def __init__(self, args: GRPOArguments, control: RunControl):
        self.args, self.control = args, control
        self.rows: list[tuple[TrainingRow, Tensor]] = []  # of this update, with whether the loss is finite
        self.found: str | None = None  # what was found in this update before its last backward
        self.in_a_row, self.dropped = 0, 0

    def add(self, row: TrainingRow, loss: Tensor) -> None:
        self.rows.append((row, torch.isfinite(loss.detach())))

    def look(self, update: int) -> bool:
        """Whether all losses of the update are finite, on all ranks. Called before the last row's backward:
        there DeepSpeed steps. Raises StopRun unless such updates are skipped."""
        finite = torch.stack([flag for _, flag in self.rows]).tolist()
        bad = [row for (row, _), fine in zip(self.rows, finite, strict=True) if not fine]
        if not any(self.control.highest([len(bad)])):
            return True
        rewards = any(self.control.highest([sum(int(row.rewards.isinf().sum()) for row in bad)]))
        self.found = self._sentence("rewards" if rewards else "loss", update, bad)
        self._stop_if_asked(self.found)
        return False

    def settle(self, update: int, fine: bool) -> bool:
        """Called once the gradient is known, `fine` or not; whether the update is to be dropped. Raises
        StopRun for one too many."""
        rows, found = [row for row, _ in self.rows], self.found
        self.rows, self.found = [], None
        if fine:
            self.in_a_row = 0
            return False
        found = found or self._sentence("gradient", update, rows)
        self._stop_if_asked(found)
        if self.in_a_row == self.args.max_nonfinite:  # not counted: who goes on makes this update again
            raise StopRun("not finite", f"{found} {self.in_a_row + 1} updates in a row were not.", NOT_FINITE)
        self.in_a_row += 1
        self.dropped += 1
        if self.args.process_index == 0:
            print(f"{found} This update is dropped.", flush=True)
        return True

    def state(self) -> dict[str, int]:
        """For a checkpoint's marker."""
        return {"in_a_row": self.in_a_row, "dropped": self.dropped}

    def restore(self, state: dict[str, int]) -> None:
        self.in_a_row, self.dropped = state["in_a_row"], state["dropped"]

    def _stop_if_asked(self, found: str) -> None:
        if self.args.on_nonfinite == "stop":
            advice = "Lower --learning_rate, or set --on_nonfinite skip."
            raise StopRun("not finite", f"{found} No weight was changed by it. {advice}", NOT_FINITE)

    def _sentence(self, what: str, update: int, rows: list[TrainingRow]) -> str:
        """With the data set rows of all ranks."""
        named = [
            f"{number} ({' '.join(f'{reward:g}' for reward in rewards)})"
            for row in rows
            for number, rewards in zip(row.numbers, row.rewards.tolist(), strict=True)
        ]
        named = [f"rank {self.args.process_index}: {', '.join(named)}"] if named else []
        places = "; ".join(self.control.collect(named))
        verb = "are" if what == "rewards" else "is"
        return f"The {what} of update {update} {verb} not finite; data set rows (rewards) of {places}."
