"""Images a second of the self-check: the product's validation against `model.generate` in padded batches."""

import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.settings import Settings
from open_r1 import validation
from open_r1.arguments import GRPOArguments
from open_r1.checkpoint import load_policy
from open_r1.data import Prompt, PromptEncoder, load_rows
from open_r1.processor import load_processor
from open_r1.rollout import Completion, Engine, FastEngine
from open_r1.sampling import Sampling

GENERATE_BATCH = 16
GENERATE_SHARE = 8  # `generate` answers one image of so many: it is the slow one


class GenerateEngine(Engine):
    """What people write who batch the grader's loop: prompts padded on the left, one `model.generate`."""

    @torch.no_grad()
    def generate(self, prompts: list[Prompt], num: int, sampling: Sampling, *rest) -> list[list[Completion]]:
        tokenizer, device = self.processor.tokenizer, self.model.device
        padded = tokenizer.pad({"input_ids": [p.input_ids for p in prompts]}, return_tensors="pt").to(device)
        ids: Tensor = padded["input_ids"]  # [B, P], padded on the left
        output = self.model.generate(
            input_ids=ids,
            attention_mask=padded["attention_mask"],
            mm_token_type_ids=(ids == self.model.config.image_token_id).int(),
            pixel_values=torch.cat([p.pixel_values for p in prompts]).to(device),
            image_grid_thw=torch.cat([p.image_grid_thw for p in prompts]).to(device),
            do_sample=False,
            suppress_tokens=self.placeholders,  # as the product does; one of them stands as the end
            max_new_tokens=sampling.max_new_tokens,
        )
        token_ids = output[:, ids.shape[1] :].cpu()
        return [[self.completion(row, torch.zeros(len(row)))] for row in token_ids]


def measure_selfcheck(settings: Settings, out: Path) -> dict[str, Any]:
    """Both engines on the same model, images and length; the first batch of each, which compiles, apart."""
    processor = load_processor(settings.base)
    data = load_rows(settings.rows)
    shipped = GRPOArguments.__dataclass_fields__["per_device_eval_batch_size"].default
    validation.GREEDY = Sampling(greedy=True, max_new_tokens=settings.new_tokens)
    found = {}
    for name, kind, batch, images in (
        ("product", FastEngine, shipped, settings.images),
        ("generate", GenerateEngine, GENERATE_BATCH, settings.images // GENERATE_SHARE),
    ):
        # Without a dtype in its config.json a checkpoint loads as float32.
        dtype = torch.bfloat16 if settings.cuda else torch.float32
        engine = kind(load_policy(settings.base, dtype, settings.device), processor)
        encoder = PromptEncoder(processor, engine.model.config, prompt_mix=0.0, keep_images=False, seed=0)

        def answer(count: int, engine=engine, encoder=encoder, batch=batch) -> float:
            started = time.perf_counter()
            rows = [i % len(data) for i in range(count)]
            workers = 2 if settings.cuda else 0
            examples = validation.evaluate(
                engine, encoder, data, rows=rows, batch_size=batch, num_workers=workers, progress=False
            )
            lengths = {example.num_tokens for example in examples}
            if lengths != {settings.new_tokens}:
                raise RuntimeError(f"answers of {lengths} tokens instead of {settings.new_tokens}")
            return time.perf_counter() - started

        first = answer(min(batch, images))
        seconds = answer(images)
        speed = {"images_per_s": images / seconds, "first_batch_s": first}
        found[name] = {"images": images, "batch": batch, **speed}
        del engine
    return found | {"ratio": found["product"]["images_per_s"] / found["generate"]["images_per_s"]}
