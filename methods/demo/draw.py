"""Draw the demo's counting sets: questions like CLEVR's, on pictures of cubes, cylinders and spheres.

    PYTHONPATH=. python methods/demo/draw.py --out methods/demo/runs/data      # what train.sh draws
    PYTHONPATH=. python methods/demo/draw.py --out work/data --only base       # what make_base.py trains on

After CLEVR-CoGenT there are two conditions. In A a cube is gray, blue, brown or yellow and a cylinder red,
green, purple or cyan; in B it is the other way round; a sphere has any colour in both. Training is always in
condition A. `ood` is condition A by another renderer with more objects. Every row has its own random stream,
keyed by (seed, set, row): what is drawn depends neither on the number of processes nor on the sets asked for.

An image has 112 x 112 pixels: Qwen2-VL's processor makes 4 x 4 image tokens of it, one a 28-pixel cell. A
cell holds at most one object, off its middle by a few pixels.
"""

import argparse
import io
import multiprocessing
import os
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from datasets import Dataset, Features, Image, Value
from PIL import Image as PILImage
from PIL import ImageDraw
from tqdm import tqdm

from open_r1.protocol import EVAL_TEMPLATE, TRAIN_TEMPLATE

COLORS = {
    "gray": (115, 115, 115), "blue": (45, 80, 210), "brown": (135, 78, 32), "yellow": (245, 225, 60),
    "red": (190, 40, 40), "green": (30, 125, 30), "purple": (130, 40, 190), "cyan": (50, 205, 210),
}  # fmt: skip
SHAPES = ("cube", "cylinder", "sphere")
SIZES = ("small", "large")
PIXELS, CELL, GRID = 112, 28, 4
SCALE = 3  # drawn three times as large, then reduced: smooth edges

# What a counting question may fix of (size, colour, shape); how often each is asked.
ASKED = {(0, 0, 1): 3, (0, 1, 0): 3, (1, 0, 0): 2, (0, 1, 1): 1, (1, 0, 1): 1, (1, 1, 0): 1}


@dataclass(frozen=True)
class Thing:
    """One object: attributes, the cell it stands in (row-major, 0..15), middle and radius in pixels."""

    size: str
    color: str
    shape: str
    cell: int
    x: float
    y: float
    radius: float

    @property
    def place(self) -> str:
        """The cell as on a chess board, row first: a1 is top left, d4 bottom right."""
        return "abcd"[self.cell // GRID] + str(self.cell % GRID + 1)


@dataclass(frozen=True)
class Set:
    """One data set: rows, condition, renderer, smallest and largest number of objects."""

    rows: int
    condition: str = "A"
    renderer: str = "studio"
    objects: tuple[int, int] = (3, 9)
    captions: float = 0.0  # share of rows that ask for a description instead
    tail: float = 1.0  # for counting rows: n + 1 objects are so much rarer than n
    items: float = 0.6  # share of questions that fix nothing: "How many items …", most of CLEVR-70k


SETS = {
    "train": Set(6000),
    "val": Set(300),
    "B": Set(300, condition="B"),
    "ood": Set(300, renderer="paper", objects=(6, 9)),
    # Drawn anew for the report before and after training: nothing is chosen by looking at them.
    "test_val": Set(500),
    "test_B": Set(500, condition="B"),
    "test_ood": Set(500, renderer="paper", objects=(6, 9)),
    # What make_base.py trains on: descriptions of any scene, and counting shown on mostly small ones.
    "base": Set(40000, objects=(1, 9), captions=0.5, tail=0.55, items=0.3),
}
RUN_SETS = [name for name in SETS if name != "base"]  # what a run of the demo needs


def allowed_colors(condition: str, shape: str) -> list[str]:
    """The colours a shape may have in a condition: CLEVR-CoGenT's rule."""
    names = list(COLORS)
    if shape == "sphere":
        return names
    return names[:4] if (shape == "cube") == (condition == "A") else names[4:]


def draw_scene(rng: random.Random, spec: Set, caption: bool = False) -> list[Thing]:
    """Random objects in reading order. Most scenes use few colours or shapes: larger counts are asked too."""
    palette = rng.sample(list(COLORS), rng.choice([2, 3])) if rng.random() < 0.6 else list(COLORS)
    # A shape joins when the palette leaves it a colour: two colours of one kind still fit a sphere.
    shapes = [s for s in SHAPES if set(palette) & set(allowed_colors(spec.condition, s))]
    if len(shapes) > 2 and rng.random() < 0.4:
        shapes = rng.sample(shapes, 2)
    low, high = spec.objects
    tail = 1.0 if caption else spec.tail
    number = rng.choices(range(low, high + 1), [tail**n for n in range(high - low + 1)])[0]
    things = []
    for cell in sorted(rng.sample(range(GRID * GRID), number)):
        shape = rng.choice(shapes)
        color = rng.choice([c for c in allowed_colors(spec.condition, shape) if c in palette])
        size = rng.choice(SIZES)
        low, high = (10.0, 12.0) if size == "large" else (6.0, 7.5)
        if spec.renderer == "paper":
            low, high = (10.5, 13.0) if size == "large" else (5.5, 7.0)
        radius = rng.uniform(low, high)
        slack = CELL / 2 - radius
        x = (cell % GRID + 0.5) * CELL + rng.uniform(-slack, slack)
        y = (cell // GRID + 0.5) * CELL + rng.uniform(-slack, slack)
        things.append(Thing(size, color, shape, cell, x, y, radius))
    return things


def shade(color: tuple[int, ...], factor: float) -> tuple[int, ...]:
    return tuple(max(0, min(255, round(channel * factor))) for channel in color)


def draw_thing(
    draw: ImageDraw.ImageDraw, thing: Thing, color: tuple[int, ...], solid: bool, edge=None
) -> None:
    """One object in perspective; `solid` shades it, `edge` outlines it."""
    x, y, r = thing.x * SCALE, thing.y * SCALE, thing.radius * SCALE
    light, dark = (
        (shade(color, 1.3), shade(color, 0.62)) if solid else (shade(color, 1.12), shade(color, 0.88))
    )
    line = {"outline": edge, "width": SCALE} if edge else {}
    if thing.shape == "sphere":
        draw.ellipse([x - r, y - r, x + r, y + r], fill=dark if solid else color, **line)
        for step in range(1, 7) if solid else ():  # from the dark rim to the highlight
            s = r * (1 - step / 7)
            cx, cy = x - 0.36 * (r - s), y - 0.36 * (r - s)
            draw.ellipse([cx - s, cy - s, cx + s, cy + s], fill=shade(color, 0.62 + step * 0.16))
    elif thing.shape == "cube":
        side, depth = 1.45 * r, 0.55 * r
        left, top = x - r, y - r + depth
        right, bottom = left + side, y + r
        draw.rectangle([left, top, right, bottom], fill=color, **line)
        draw.polygon(
            [(left, top), (left + depth, top - depth), (x + r, top - depth), (right, top)], fill=light, **line
        )
        draw.polygon(
            [(right, top), (x + r, top - depth), (x + r, bottom - depth), (right, bottom)], fill=dark, **line
        )
    else:
        w, h = 0.78 * r, 0.36 * r
        draw.ellipse([x - w, y + r - 2 * h, x + w, y + r], fill=dark if solid else color, **line)
        steps = 8 if solid else 1
        for i in range(steps):  # the wall, from the lit left to the dark right
            tone = shade(color, 1.15 - 0.5 * i / steps) if solid else color
            draw.rectangle(
                [x - w + 2 * w * i / steps, y - r + h, x - w + 2 * w * (i + 1) / steps, y + r - h], fill=tone
            )
        if edge:
            for wall in (x - w, x + w - 1):
                draw.line([wall, y - r + h, wall, y + r - h], fill=edge, width=SCALE)
        draw.ellipse([x - w, y - r, x + w, y - r + 2 * h], fill=light, **line)


def render(rng: random.Random, things: list[Thing], renderer: str) -> PILImage.Image:
    """The scene as a picture: `studio` is a gray ground with shadows, `paper` outlined figures on squares."""
    size = PIXELS * SCALE
    if renderer == "studio":
        base, tilt = rng.randint(150, 195), rng.randint(-25, 25)
        column = PILImage.new("L", (1, size))
        column.putdata([base + round(tilt * (2 * row / size - 1)) for row in range(size)])
        image = PILImage.merge("RGB", [column.resize((size, size))] * 3)
        draw = ImageDraw.Draw(image)
        for t in things:
            x, y, r = t.x * SCALE, t.y * SCALE, t.radius * SCALE
            draw.ellipse([x - 0.8 * r, y + 0.55 * r, x + 1.25 * r, y + 1.1 * r], fill=(base - 55,) * 3)
            draw_thing(draw, t, shade(COLORS[t.color], rng.uniform(0.88, 1.12)), solid=True)
    else:
        ground = (rng.randint(215, 250), rng.randint(215, 250), rng.randint(195, 250))
        image = PILImage.new("RGB", (size, size), ground)
        draw = ImageDraw.Draw(image)
        for at in range(0, size, rng.choice([12, 16, 22]) * SCALE):
            draw.line([at, 0, at, size], fill=shade(ground, 0.9), width=2)
            draw.line([0, at, size, at], fill=shade(ground, 0.9), width=2)
        for t in things:
            tone = shade(COLORS[t.color], rng.uniform(0.85, 1.15))
            draw_thing(draw, t, tone, solid=rng.random() < 0.5, edge=(25, 25, 25))
    return image.reduce(SCALE)


def ask(
    rng: random.Random, things: list[Thing], condition: str, items: float
) -> tuple[str, list[Thing]]:
    """A counting question, and the objects that it asks for."""
    if rng.random() < items:
        return "How many items are there in the image?", things
    if rng.random() < 0.85:  # of something that is there
        wanted = rng.choice(things)
        size, color, shape = wanted.size, wanted.color, wanted.shape
    else:  # of something that may not be
        size, shape = rng.choice(SIZES), rng.choice(SHAPES)
        color = rng.choice(allowed_colors(condition, shape))
    fixed = rng.choices(list(ASKED), list(ASKED.values()))[0]
    size, color, shape = (
        value if kept else None for value, kept in zip((size, color, shape), fixed, strict=True)
    )
    words = [word for word in (size, color) if word] + [f"{shape or 'item'}s"]
    matching = [
        t for t in things if size in (None, t.size) and color in (None, t.color) and shape in (None, t.shape)
    ]
    return f"How many {' '.join(words)} are there in the image?", matching


def describe(things: list[Thing]) -> str:
    """Every object with its place, in reading order."""
    return ", ".join(f"{t.place} {t.size} {t.color} {t.shape}" for t in things)


def demonstration(matching: list[Thing]) -> str:
    """The answer a cold start imitates: the places counted through, then the number."""
    counted = " ".join(f"{i} {t.place}" for i, t in enumerate(matching, 1)) or "none"
    return f"<think> {counted} </think> <answer> {len(matching)} </answer>"


def draw_row(
    name: str, seed: int, row: int, sets: dict[str, Set] = SETS, render: Callable = render
) -> tuple[dict, list[Thing]]:
    """Row `row` of a set as its columns, and the scene behind it."""
    spec = sets[name]
    rng = random.Random(f"{seed} {name} {row}")
    caption = rng.random() < spec.captions
    things = draw_scene(rng, spec, caption)
    png = io.BytesIO()
    render(rng, things, spec.renderer).save(png, "PNG")
    if caption:
        problem, matching, completion = "Describe the image.", things, describe(things)
    else:
        question, matching = ask(rng, things, spec.condition, spec.items)
        # The base's rows mix two kinds of prompt, so there the problem is the whole of it.
        problem = question
        if spec.captions:
            problem = rng.choice([EVAL_TEMPLATE, TRAIN_TEMPLATE]).format(question=question)
        completion = demonstration(matching)
    columns = {
        "image": {"bytes": png.getvalue(), "path": None},
        "problem": problem,
        "solution": f"<answer> {len(matching)} </answer>",
        "completion": completion,
    }
    return columns, things


def _draw_rows(job: tuple[Callable, str, int, int, int]) -> list[dict]:
    draw_row, name, seed, start, stop = job
    return [draw_row(name, seed, row)[0] for row in range(start, stop)]


def draw_sets(
    names: list[str],
    seed: int,
    out: Path,
    processes: int,
    sets: dict[str, Set] = SETS,
    draw_row: Callable = draw_row,
) -> None:
    """Draw the sets and save each as out/name (datasets' save_to_disk)."""
    block = 100
    with multiprocessing.get_context("spawn").Pool(processes) as pool:
        for name in names:
            rows = sets[name].rows
            starts = range(0, rows, block)
            jobs = [(draw_row, name, seed, start, min(start + block, rows)) for start in starts]
            with tqdm(total=rows, desc=f"drawing {name}", unit="row") as bar:
                drawn: list[dict] = []
                for part in pool.imap(_draw_rows, jobs):
                    drawn += part
                    bar.update(len(part))
            features = Features({column: Value("string") for column in drawn[0]} | {"image": Image()})
            Dataset.from_list(drawn, features=features).save_to_disk(out / name)


def main(about: str, sets: dict[str, Set], draw_row: Callable) -> None:
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder that receives one folder a set")
    parser.add_argument("--only", nargs="+", choices=list(sets), default=RUN_SETS, metavar="SET")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--processes", type=int, default=os.cpu_count())
    args = parser.parse_args()
    draw_sets(args.only, args.seed, args.out, args.processes, sets, draw_row)


if __name__ == "__main__":
    main(__doc__, SETS, draw_row)
