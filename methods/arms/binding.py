"""Which number labels which element: a probe of binding on drawn figures, for any Qwen2-VL.

    python methods/arms/binding.py --model DIR                  the shares of right answers
    python methods/arms/binding.py --model DIR --out FOLDER     and the figures, questions and answers

A figure holds four to six elements, no two of them alike, each with a printed number. Asked is which number
labels one of them, under the grader's protocol. Every figure comes twice, the second time with the numbers
passed on by one element, so that a liking for a number or an element cannot get both right. Chance is one
over the number of elements.
"""

import argparse
import json
import random
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[0] = str(ROOT)

from PIL import Image, ImageDraw, ImageFont

from methods.demo.draw import COLORS, GRID, PIXELS, SCALE, SHAPES, Thing, draw_thing
from open_r1.data import PromptEncoder
from open_r1.protocol import EVAL_TEMPLATE, extract_answer
from open_r1.sampling import Sampling

SIDE = PIXELS * SCALE  # pixels of a figure
CELL = SIDE // GRID
DIGIT = 34  # font size: at 112 pixels a digit is still 8 high


@dataclass(frozen=True)
class Figure:
    """A picture, the element that is asked for in words, its number, and all numbers in the picture."""

    image: Image.Image
    element: str
    number: int
    numbers: tuple[int, ...]

    @property
    def question(self) -> str:
        return f"Which number labels the {self.element}?"


def pair(seed: int, number: int) -> tuple[Figure, Figure]:
    """Two figures of one scene, whose numbers differ at every element."""
    rng = random.Random(f"{seed} binding {number}")
    kinds = rng.sample([(color, shape) for color in COLORS for shape in SHAPES], rng.randint(4, 6))
    cells = rng.sample(range(GRID * GRID), len(kinds))
    labels = rng.sample(range(1, 10), len(kinds))
    asked = rng.randrange(len(kinds))
    passed_on = labels[1:] + labels[:1]
    element = " ".join(kinds[asked])
    return tuple(
        Figure(draw_figure(kinds, cells, given), element, given[asked], tuple(given))
        for given in (labels, passed_on)
    )


def draw_figure(kinds: list[tuple[str, str]], cells: list[int], labels: list[int]) -> Image.Image:
    """SIDE x SIDE pixels; each element in the left of its cell, its number to the right of it."""
    image = Image.new("RGB", (SIDE, SIDE), (245, 245, 240))
    draw, font = ImageDraw.Draw(image), ImageFont.load_default(DIGIT)
    for (color, shape), cell, label in zip(kinds, cells, labels, strict=True):
        x, y = (cell % GRID + 0.34) * CELL, (cell // GRID + 0.5) * CELL
        thing = Thing("large", color, shape, cell, x / SCALE, y / SCALE, 8.0)
        draw_thing(draw, thing, COLORS[color], solid=False, edge=(25, 25, 25))
        draw.text((x + 0.45 * CELL, y), str(label), fill=(0, 0, 0), font=font, anchor="mm")
    return image


class Figures:
    """Figures as the rows of a data set, `side` pixels wide."""

    source = "drawn figures"

    def __init__(self, figures: list[Figure], side: int):
        self.figures, self.side = figures, side

    def columns(self, row: int) -> dict:
        return {"question": self.figures[row].question, "answer": self.figures[row].number}

    def images(self, row: int) -> list[Image.Image]:
        return [self.figures[row].image.resize((self.side, self.side), Image.Resampling.BOX)]


def probe(
    engine, processor, config, *, figures: int, seed: int, new_tokens: int, side: int = PIXELS,
    out: Path | None = None, batch: int = 50,
) -> dict[str, float]:  # fmt: skip
    """Greedy answers to `figures` pairs. In percent: `right`, `both` of the pairs, `chance` of right,
    `a_label` (a number that the figure shows), `parsed`."""
    drawn = [figure for number in range(figures) for figure in pair(seed, number)]
    data, greedy = Figures(drawn, side), Sampling(greedy=True, max_new_tokens=new_tokens)
    encoder = PromptEncoder(processor, config, prompt_mix=0, keep_images=False, seed=0)
    texts = []
    for start in range(0, len(drawn), batch):
        prompts = [
            encoder.encode(data, row, EVAL_TEMPLATE) for row in range(len(drawn))[start : start + batch]
        ]
        texts += [group[0].text for group in engine.generate(prompts, 1, greedy)]
    answers = [extract_answer(text) for text in texts]
    right = [answer == figure.number for answer, figure in zip(answers, drawn, strict=True)]
    if out:
        write(out, data, texts, right)
    shares = {
        "right": right,
        "both": [a and b for a, b in zip(right[::2], right[1::2], strict=True)],
        "chance": [1 / len(figure.numbers) for figure in drawn],
        "a_label": [answer in figure.numbers for answer, figure in zip(answers, drawn, strict=True)],
        "parsed": [answer is not None for answer in answers],
    }
    return {name: 100 * sum(values) / len(values) for name, values in shares.items()}


def write(out: Path, data: Figures, texts: list[str], right: list[bool]) -> None:
    out.mkdir(parents=True, exist_ok=True)
    with (out / "figures.jsonl").open("w") as lines:
        for row, (text, hit) in enumerate(zip(texts, right, strict=True)):
            data.images(row)[0].save(out / f"{row:04}.png")
            lines.write(
                json.dumps(data.columns(row) | {"image": f"{row:04}.png", "right": hit, "text": text}) + "\n"
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True, help="folder of the model")
    parser.add_argument("--figures", type=int, default=200, help="pairs of figures")
    parser.add_argument("--side", type=int, default=SIDE, help="pixels; 112 for the demo's model")
    parser.add_argument("--new_tokens", type=int, default=256)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="folder for the figures, questions and answers")
    args = parser.parse_args()

    import torch

    from open_r1.checkpoint import load_policy
    from open_r1.processor import load_processor
    from open_r1.rollout import FastEngine

    device = "cuda" if torch.cuda.is_available() else "cpu"
    if args.figures < 1 or args.new_tokens < 1:
        sys.exit(f"binding.py: --figures {args.figures}, --new_tokens {args.new_tokens}: set 1 or more")
    try:
        processor, model = load_processor(args.model), load_policy(args.model, "auto", device)
    except ValueError as error:
        sys.exit(f"binding.py: --model: {error}")
    found = probe(
        FastEngine(model, processor), processor, model.config, figures=args.figures, seed=args.seed,
        new_tokens=args.new_tokens, side=args.side, out=args.out,
    )  # fmt: skip
    print(
        json.dumps({"figures": 2 * args.figures} | {name: round(value, 1) for name, value in found.items()})
    )


if __name__ == "__main__":
    main()
