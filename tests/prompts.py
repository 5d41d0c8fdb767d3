"""Prompts for the tests of packing and rollout: different lengths, image sizes, two images, and none."""

import torch

from open_r1.data import Prompt, PromptEncoder
from open_r1.protocol import EVAL_TEMPLATE
from tests.tiny import noise_image, tiny_config, tiny_processor

QUESTIONS = [
    ("How many?", [(100, 80)]),
    ("How many red things are there in this image?", [(300, 60)]),
    ("x", [(64, 220), (56, 56)]),
    ("No image here", []),
]


def make_prompts(questions=QUESTIONS) -> list[Prompt]:
    """The prompts as PromptEncoder makes them, from pictures of noise."""
    processor = tiny_processor()
    encoder = PromptEncoder(processor, tiny_config(), prompt_mix=0.0, keep_images=False, seed=0)
    prompts = []
    for row, (question, sizes) in enumerate(questions):
        images = [noise_image(10 * row + i, *size) for i, size in enumerate(sizes)]
        prompts.append(encoder.encode(_OneRow(question, images), row, EVAL_TEMPLATE))
    return prompts


class _OneRow:
    """Quacks like CountingData for one row."""

    source = "made in the test"

    def __init__(self, question, images):
        self._columns, self._images = {"question": question, "solution": "3", "answer": 3}, images

    def columns(self, row):
        return self._columns

    def images(self, row):
        return self._images


def separate_logps(model, prompt: Prompt, completion: torch.Tensor) -> torch.Tensor:
    """Log-probs [T] of one completion from the library's own forward on one unpadded row: the yardstick."""
    ids = torch.cat([prompt.input_ids, completion])[None]
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    if prompt.pixel_values is not None:
        inputs["pixel_values"], inputs["image_grid_thw"] = prompt.pixel_values, prompt.image_grid_thw
        inputs["mm_token_type_ids"] = (ids == model.config.image_token_id).int()
    model.model.rope_deltas = None
    logits = model(**inputs).logits[0, prompt.input_ids.numel() - 1 : -1]
    return logits.log_softmax(-1).gather(1, completion[:, None])[:, 0]
