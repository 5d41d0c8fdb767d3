"""OUT/validation.jsonl: a line for every model that was validated, with the rows that it got right."""

import json
import os
from pathlib import Path

from .callbacks import append_lines, keep_until, set_aside
from .selection import Outcome


class Curve:
    """`measured_in` names the run and the rows (run_identity.measured_in): lines under another name are not
    comparable. Rank 0 alone calls the methods; a full disk costs a line, not the run."""

    def __init__(self, out: Path, measured_in: str):
        self.path, self.measured_in = out / "validation.jsonl", measured_in

    def begin(self, step: int) -> None:
        """The run goes on after `step`: what it measured later is measured again, and the lines of another
        run go to a file with a number."""
        run = self.measured_in.partition(" ")[0]
        try:
            if any(line["measured_in"].partition(" ")[0] != run for line in self._lines()):
                set_aside(self.path)
            keep_until(self.path, step)
        except OSError as error:
            print(f"{self.path} cannot be written ({error.strerror})", flush=True)

    def add(self, name: str, step: int, score: float, outcome: Outcome, confidence: float | None) -> None:
        """`confidence` is the share of paired bootstrap samples in which it beats the base."""
        line = {
            "name": name, "step": step, "score": score, "accuracy_pct": outcome.accuracies,
            "confidence": confidence, "measured_in": self.measured_in, "rows": outcome.to_json(),
        }  # fmt: skip
        try:
            append_lines(self.path, [json.dumps(line) + "\n"])
        except OSError as error:
            print(f"{self.path} cannot be written ({os.strerror(error.errno)}): a line is lost.", flush=True)

    def find(self, name: str) -> Outcome | None:
        """What was measured last under this name, on the same rows."""
        found = None
        for line in self._lines():
            if line["name"] == name and line["measured_in"] == self.measured_in:
                found = Outcome.from_json(line["rows"])
        return found

    def _lines(self) -> list[dict]:
        lines = []
        for text in self.path.read_text().splitlines(keepends=True) if self.path.exists() else []:
            if not text.endswith("\n"):
                break  # the line that a kill cut short is the last one
            try:
                line = json.loads(text)
                ours = {"name", "step", "measured_in"} <= line.keys()
            except (ValueError, AttributeError):
                ours = False
            lines.append(line if ours else {"name": "", "step": 0, "measured_in": "somebody's"})
        return lines
