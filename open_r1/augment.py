"""Changes of a training image that leave the answer to a counting question true (--augment).

Nothing leaves the image, comes in twice or is mirrored (left stays left), all things shrink alike and by a
tenth at most (small and large stay apart), and no hue is turned: brightness and contrast act on all channels
alike, and JPEG keeps the full resolution of its colour channels. Width and height stay, and so do the tokens.
"""

import io
import random

import numpy as np
from PIL import Image, ImageEnhance, ImageFilter

SHARE = 0.5  # of the images that a change is made to
SMALLEST = 0.9  # of the width and height
LIGHT = (0.85, 1.15)  # factors of brightness and contrast: beyond, bright colours would be cut off
BLUR = 0.004  # radius at most, of the shorter side: 1.3 pixels of 320
QUALITY = (50, 95)  # of JPEG


def augmented(image: Image.Image, rng: random.Random) -> Image.Image:
    """An RGB image of the same size, which is a function of both arguments."""
    for change in (moved, lit, blurred, compressed):
        if rng.random() < SHARE:
            image = change(image, rng)
    return image


def moved(image: Image.Image, rng: random.Random) -> Image.Image:
    """Shrunk and put anywhere on a ground of the border's median colour."""
    factor = rng.uniform(SMALLEST, 1.0)
    width, height = (max(1, round(side * factor)) for side in image.size)
    canvas = Image.new("RGB", image.size, border_colour(image))
    place = (rng.randint(0, image.width - width), rng.randint(0, image.height - height))
    canvas.paste(image.resize((width, height), Image.Resampling.BICUBIC), place)
    return canvas


def border_colour(image: Image.Image) -> tuple[int, ...]:
    pixels = np.asarray(image)  # [height, width, 3]
    border = np.concatenate([pixels[0], pixels[-1], pixels[:, 0], pixels[:, -1]])
    return tuple(int(value) for value in np.median(border, axis=0))


def lit(image: Image.Image, rng: random.Random) -> Image.Image:
    for kind in (ImageEnhance.Brightness, ImageEnhance.Contrast):
        image = kind(image).enhance(rng.uniform(*LIGHT))
    return image


def blurred(image: Image.Image, rng: random.Random) -> Image.Image:
    return image.filter(ImageFilter.GaussianBlur(rng.uniform(0, BLUR) * min(image.size)))


def compressed(image: Image.Image, rng: random.Random) -> Image.Image:
    file = io.BytesIO()
    image.save(file, "JPEG", quality=rng.randint(*QUALITY), subsampling=0)
    return Image.open(file).convert("RGB")
