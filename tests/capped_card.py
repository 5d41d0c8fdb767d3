"""A GPU that has little memory from the second update on, played by the reward function's module: named by
dotted path, it is imported by the very process that trains. In the second update the first row shows what it
needs; from then on there are three quarters of that. The file CAPPED_CARD keeps the number for the processes
that come after, whose card is small from the start."""

import os
from pathlib import Path

import torch

from open_r1.trainer import Qwen2VLGRPOTrainer
from tests.rewards import letters  # noqa: F401 (the reward)

CAP = Path(os.environ["CAPPED_CARD"])
original = Qwen2VLGRPOTrainer.training_step


def cap() -> None:
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(int(CAP.read_text()) / total)


def training_step(self, *args, **kwargs):
    if CAP.exists() or not self.state.global_step:
        return original(self, *args, **kwargs)
    torch.cuda.reset_peak_memory_stats()
    held = torch.cuda.memory_allocated()
    result = original(self, *args, **kwargs)
    CAP.write_text(str(int(held + 0.75 * (torch.cuda.max_memory_allocated() - held))))
    torch.cuda.empty_cache()
    cap()
    return result


Qwen2VLGRPOTrainer.training_step = training_step
if CAP.exists():
    cap()
