"""Makes what a measurement reads, once: the base model with random weights, and rows of images.

    python -m benchmarks.material SETTINGS.json
"""

import io
import json
import shutil
import sys
from pathlib import Path

import numpy as np
from datasets import Dataset, Features, Image, Value
from PIL import Image as PILImage

from benchmarks.random_base import make_base
from benchmarks.settings import Settings, load
from tests.tiny import save_public_form

NUM_ROWS = 64
QUESTION = "How many items are there in the image?"
MIXED_SIZES = [(480, 320), (320, 480), (448, 448), (640, 480), (224, 224)]


def picture(seed: int, width: int, height: int) -> bytes:
    """A JPEG of coloured patches, about as large as a photograph of that size."""
    coarse = np.random.default_rng(seed).integers(0, 256, (height // 8, width // 8, 3), dtype=np.uint8)
    buffer = io.BytesIO()
    PILImage.fromarray(coarse).resize((width, height), PILImage.Resampling.BICUBIC).save(buffer, "JPEG")
    return buffer.getvalue()


def make_rows(settings: Settings) -> None:
    """Rows of one question and one size of image, or (--flat) of many."""
    numbers = range(NUM_ROWS)
    if settings.flat:
        sizes = [MIXED_SIZES[i % len(MIXED_SIZES)] for i in numbers]
        questions = [f"How many{' red' * (i % 7)} items are there in the image?" for i in numbers]
    else:
        sizes, questions = [(settings.width, settings.height)] * NUM_ROWS, [QUESTION] * NUM_ROWS
    rows = {
        "image": [{"bytes": picture(i, *size), "path": None} for i, size in enumerate(sizes)],
        "problem": questions,
        "solution": [f"<answer> {3 + i % 7} </answer>" for i in numbers],
    }
    features = Features(image=Image(), problem=Value("string"), solution=Value("string"))
    Dataset.from_dict(rows, features=features).save_to_disk(settings.rows)


def set_ends(base: Path, tokens: list[int]) -> None:
    """Writes the end-of-sequence tokens into generation_config.json, where both sides read them."""
    file = base / "generation_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"eos_token_id": tokens}, indent=2))


def make(settings: Settings) -> None:
    if not settings.base.exists():
        print(f"making {settings.base}", flush=True)
        unfinished = settings.base.with_suffix(".unfinished")
        shutil.rmtree(unfinished, ignore_errors=True)
        (make_base if settings.size == "2b" else save_public_form)(unfinished)
        unfinished.rename(settings.base)
    if not (settings.rows / "state.json").exists():
        make_rows(settings)
    config = json.loads((settings.base / "config.json").read_text())
    # In a flat run every hundredth token ends a completion: lengths of all kinds, 100 on average.
    # Else a placeholder does, which no side samples: every completion has its full length.
    every_hundredth = list(range(50, config["vocab_size"], 100))
    set_ends(settings.base, every_hundredth if settings.flat else [config["video_token_id"]])


if __name__ == "__main__":
    for settings in load(sys.argv[1]):
        make(settings)
