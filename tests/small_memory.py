"""A GPU that has little memory, played by the reward function's module: named by dotted path, it is imported
by the very process that trains. From the second update on a row finds room only with one prompt and gradient
checkpointing; with one prompt alone it is not PyTorch that finds none."""

import sys

import torch

from open_r1 import trainer
from tests.rewards import letters  # noqa: F401 (the reward)

original = trainer.grpo_loss


def loss(logps, old_logps, ref_logps, advantages, weights, owners, settings):
    owner = sys._getframe(1).f_locals["self"]
    one_prompt = owners.max() < owner.args.num_generations
    if owner.state.global_step and not (one_prompt and owner.args.gradient_checkpointing):
        if one_prompt:
            raise RuntimeError("Triton Error [CUDA]: out of memory")
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nand so on")
    return original(logps, old_logps, ref_logps, advantages, weights, owners, settings)


trainer.grpo_loss = loss
