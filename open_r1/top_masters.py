"""OUT/masters: float32 weights of the best validated models of a run, for finalize.py to average and mix."""

import math
from dataclasses import dataclass
from pathlib import Path

from accelerate import PartialState
from torch import nn

from . import disk
from .checkpoint import temporary, tensor_slots
from .mixing import Weights, write_masters
from .ranks import on_rank_zero, write_along
from .weights import master_weights

FOLDER = "masters"


@dataclass(frozen=True)
class Master:
    """One of them: the file, the update and the score of its validation."""

    path: Path
    step: int
    score: float


def masters_of(out: Path, run: str | None, base: Path | None = None) -> list[Master]:
    """What this run wrote, the best first; files of others are left out, and those that are damaged, or have
    not the tensors of `base`."""
    found = []
    for path in _files(out):
        if base and _fault(path, base):
            continue
        try:
            about = Weights(path).metadata
            if about["run"] == run:
                found.append(Master(path, int(about["step"]), float(about["score"])))
        except (ValueError, KeyError):
            continue
    return sorted(found, key=lambda one: (-one.score, one.step))


def damaged(out: Path, base: Path) -> list[str]:
    """A sentence for each file that is not whole, or has not the tensors of the model `base`."""
    return [fault for path in _files(out) if (fault := _fault(path, base))]


def _files(out: Path) -> list[Path]:
    return sorted((out / FOLDER).glob("update-*.safetensors"))


def _fault(path: Path, base: Path) -> str | None:
    try:
        same = Weights(path).shapes() == Weights(base).shapes()
    except ValueError as error:
        return str(error)
    return None if same else f"{path} has not the tensors of {base}"


class TopMasters:
    """Keeps the `keep` best. `reserve` are bytes that stay free for checkpoints and the submission: where the
    disk has no room beside them, nothing is kept, and the run goes on. Deletes only what this run wrote."""

    def __init__(self, out: Path, base: Path, run: str, keep: int, reserve: int):
        self.out, self.run, self.keep, self.reserve = out, run, keep, reserve
        self.shapes = {name: places[0].shape for name, places in tensor_slots(base).items()}
        self.size = 4 * sum(map(math.prod, self.shapes.values()))  # bytes in float32
        self.said = False

    def offer(self, policy: nn.Module, score: float, step: int) -> bool:
        """Whether it was kept. All ranks call it: gathering weights is collective; rank 0 writes."""
        if not on_rank_zero(lambda: self._wants(score, step)):
            return False
        about = {"run": self.run, "step": str(step), "score": repr(score)}
        path = self.out / FOLDER / f"update-{step}.safetensors"
        error = write_along(
            master_weights(policy), lambda weights: write_masters(path, self.shapes, weights, about)
        )
        if error is None:
            on_rank_zero(self._prune)
        elif isinstance(error, OSError):
            self._say(f"update {step}: its float32 weights could not be kept ({error}).")
        else:
            raise error
        return error is None

    def _wants(self, score: float, step: int) -> bool:
        for part in (self.out / FOLDER).glob(temporary(Path("update-*.safetensors")).name):
            part.unlink()  # of a killed run
        own = [one for one in masters_of(self.out, self.run) if one.step != step]
        if len(own) >= self.keep and score <= own[self.keep - 1].score:
            return False
        fault = disk.shortage([(self.out, self.size + self.reserve, "float32 weights beside the rest")])
        if fault and not self.said:
            self._say(f"update {step}: {fault}: none are kept (--keep_top) until there is room.")
            self.said = True
        return not fault

    def _prune(self) -> None:
        for one in masters_of(self.out, self.run)[self.keep :]:
            one.path.unlink()

    def _say(self, sentence: str) -> None:
        if PartialState().is_main_process:
            print(sentence, flush=True)
