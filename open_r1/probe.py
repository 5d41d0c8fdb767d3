"""Whether the policy looks at the picture: greedy accuracy on a few validation rows, with and without it."""

import time
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from . import validation

if TYPE_CHECKING:
    from .trainer import Qwen2VLGRPOTrainer


class BlankImages:
    """Encodes as `encoder` does, with every picture in the processor's mean colour: size and positions are
    the picture's own."""

    def __init__(self, encoder):
        self.encoder = encoder

    def encode(self, data, row: int, template: str):
        prompt = self.encoder.encode(data, row, template)
        if prompt.pixel_values is None:
            return prompt
        return replace(prompt, pixel_values=torch.zeros_like(prompt.pixel_values))


def image_probe(trainer: "Qwen2VLGRPOTrainer") -> dict[str, float]:
    """Accuracy in percent, the mean over the validation sets, of what the rollout copy holds on --probe_rows
    of the rows of each that are validated on: with the pictures, with blank ones, and the difference. Every
    rank calls it.

    It costs the greedy decoding of twice these rows.
    """
    started, args, encoder = time.perf_counter(), trainer.args, trainer.eval_encoder
    accuracy = {}
    for measure, shown in (("accuracy", encoder), ("blank_accuracy", BlankImages(encoder))):
        summaries = []
        for name, data in trainer.validation_sets.items():
            validated = trainer.validation_rows[name]
            examples = validation.evaluate(
                trainer.engine, shown, data,
                rows=[validated[i] for i in validation.pick_rows(len(validated), args.probe_rows)],
                batch_size=args.per_device_eval_batch_size, rank=args.process_index,
                world_size=args.world_size, num_workers=0, progress=False,
            )  # fmt: skip
            summaries.append(validation.summarize(validation.gather_examples(examples)))
        accuracy[measure] = validation.score(summaries)
    accuracy["image_gap"] = accuracy["accuracy"] - accuracy["blank_accuracy"]
    logs = {f"probe/{name}": value for name, value in accuracy.items()}
    return logs | {"time/probe_s": time.perf_counter() - started}
