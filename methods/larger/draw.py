"""Draw the sets of the larger model: the demo's scenes and questions, ray-cast.

    python -m methods.larger.draw --out methods/larger/runs/data                      # what the arms need
    python -m methods.larger.draw --out methods/larger/runs/cold_start --only base    # what the base needs

Scenes, conditions A and B, questions and written-out counting are those of methods/demo/draw.py. Here they
stand on a floor in perspective, with a lamp, true shadows, matt and shiny surfaces: 168 x 168 pixels, of
which Qwen2-VL's processor makes 6 x 6 image tokens. Objects lie across tokens and can hide each other in
part; a place (a1 to d4) is one on the floor. `ood` has another camera, lamp and floor, and more objects.
"""

import math
import random
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
from PIL import Image

from methods.demo import draw as demo
from methods.demo.draw import CELL, COLORS, GRID, Thing, shade

PIXELS = 168
SETS = {
    name: replace(spec, renderer={"studio": "floor", "paper": "tiles"}[spec.renderer])
    for name, spec in demo.SETS.items()
}
SETS["base"] = replace(SETS["base"], rows=24000)


@dataclass(frozen=True)
class Style:
    """Ranges that a picture's camera, lamp and floor are drawn from; degrees, and cells of the grid."""

    pitch: tuple[float, float]  # of the camera, down from the horizon
    turn: tuple[float, float]  # of the camera around the scene
    lamp: tuple[float, float]  # direction of the light, around the scene
    floor: tuple[int, int]  # brightness
    tint: tuple[float, float, float] = (1.0, 1.0, 1.0)
    tiles: bool = False
    shiny: float = 0.3  # share of objects


STYLES = {
    "floor": Style(pitch=(55, 61), turn=(-4, 4), lamp=(110, 150), floor=(150, 190)),
    "tiles": Style(
        pitch=(47, 53), turn=(-12, 12), lamp=(20, 60), floor=(185, 215), tint=(1.0, 0.97, 0.88), tiles=True,
        shiny=0.7,
    ),
}  # fmt: skip
DISTANCE, ZOOM = 9.0, 1.72  # of the camera from the middle of the floor; pixels = PIXELS * ZOOM * tangent
AMBIENT = 0.42
FAR = np.float32(1e6)  # a distance that nothing is at


# --- rays: origins and directions [N, 3], or [3] where all share one


def turned(vectors: np.ndarray, angle: float) -> np.ndarray:
    """About the vertical axis."""
    c, s = math.cos(angle), math.sin(angle)
    return vectors @ np.array([[c, s, 0], [-s, c, 0], [0, 0, 1]], np.float32)


def enter(shape: str, origin: np.ndarray, ray: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Where rays enter a solid of unit radius that stands on the floor at 0: distance [N] (FAR where they
    miss) and normal [N, 3]. A solid is what several pairs of surfaces have in common."""
    if shape == "sphere":
        near, far = round_walls(origin - np.float32([0, 0, 1]), ray, axes=3, radius=1.0)
        normal = origin + near[:, None] * ray - np.float32([0, 0, 1])
    elif shape == "cylinder":
        near, far = round_walls(origin, ray, axes=2, radius=0.78)
        low, high = flat_walls(origin[..., 2:], ray[:, 2:], np.float32([0]), np.float32([1.9]))
        cap = low[:, 0] > near
        normal = (origin + near[:, None] * ray) * np.float32([1, 1, 0]) / 0.78
        normal[cap] = np.float32([0, 0, 1])
        near, far = np.maximum(near, low[:, 0]), np.minimum(far, high[:, 0])
    else:
        low, high = flat_walls(origin, ray, np.float32([-0.76, -0.76, 0]), np.float32([0.76, 0.76, 1.52]))
        wall = low.argmax(1)
        normal = np.zeros_like(ray)
        rows = np.arange(len(ray))
        normal[rows, wall] = -np.sign(ray[rows, wall])
        near, far = low.max(1), high.min(1)
    return np.where((near < far) & (near > 1e-3), near, FAR), normal


def round_walls(origin, ray, axes: int, radius: float) -> tuple[np.ndarray, np.ndarray]:
    """Distances at which rays cross a sphere (axes 3) or an upright cylinder without end (2)."""
    o, d = origin[..., :axes], ray[:, :axes]
    a, b, c = np.maximum((d * d).sum(1), 1e-9), (d * o).sum(1), (o * o).sum(-1) - radius**2
    root = np.sqrt(np.maximum(b * b - a * c, 0))
    missed = b * b < a * c
    return np.where(missed, FAR, (-b - root) / a), np.where(missed, -FAR, (-b + root) / a)


def flat_walls(origin, ray, low, high) -> tuple[np.ndarray, np.ndarray]:
    """Distances at which rays cross pairs of planes, axis by axis."""
    safe = np.where(np.abs(ray) < 1e-6, 1e-6, ray)
    first, second = (low - origin) / safe, (high - origin) / safe
    return np.minimum(first, second), np.maximum(first, second)


# --- a picture


@dataclass
class Body:
    """A thing on the floor: x to the right, y away from the camera, in cells."""

    thing: Thing
    angle: float
    shiny: bool
    color: np.ndarray  # [3]

    def enter(self, origin: np.ndarray, ray: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The rays that enter it: numbers, distances and normals. `ray` is [3] where all go one way."""
        thing, radius = self.thing, self.thing.radius / CELL
        place = np.float32([thing.x / CELL - GRID / 2, GRID / 2 - thing.y / CELL, 0])
        to = place + np.float32([0, 0, radius]) - origin
        along = ray @ to if to.ndim == 1 else to @ ray
        off = np.einsum("...i,...i", to, to) - along**2  # squared, of the ray from the middle
        close = np.flatnonzero((off < (1.5 * radius) ** 2) & (along > 0))
        origin = origin[close] if origin.ndim > 1 else origin
        ray = ray[close] if ray.ndim > 1 else np.broadcast_to(ray, origin.shape)
        own = turned((origin - place) / radius, -self.angle), turned(ray, -self.angle)
        distance, normal = enter(thing.shape, *own)
        hit = distance < FAR
        return close[hit], distance[hit] * radius, turned(normal[hit], self.angle)


def camera(rng: random.Random, style: Style) -> tuple[np.ndarray, np.ndarray]:
    """Its place [3], and a ray of length 1 for each pixel [N, 3]."""
    pitch, turn = (math.radians(rng.uniform(*span)) for span in (style.pitch, style.turn))
    at = turned(np.float32([0, -DISTANCE * math.cos(pitch), DISTANCE * math.sin(pitch)]), turn)
    ahead = np.float32([0, math.cos(pitch), -math.sin(pitch)])
    up = np.float32([0, math.sin(pitch), math.cos(pitch)])
    steps = (np.arange(PIXELS, dtype=np.float32) + 0.5) / PIXELS - 0.5
    x, y = (part.reshape(-1, 1) / ZOOM for part in np.meshgrid(steps, -steps))
    rays = ahead + x * np.float32([1, 0, 0]) + y * up
    return at, turned(rays / np.linalg.norm(rays, axis=1, keepdims=True), turn).astype(np.float32)


def render(rng: random.Random, things: list[Thing], renderer: str) -> Image.Image:
    """The scene as a picture of this style."""
    style = STYLES[renderer]
    at, rays = camera(rng, style)
    around, height = math.radians(rng.uniform(*style.lamp)), math.radians(rng.uniform(50, 62))
    lamp = np.float32(
        [math.cos(around) * math.cos(height), math.sin(around) * math.cos(height), math.sin(height)]
    )
    bodies = [
        Body(
            thing, math.radians(rng.uniform(0, 90)), rng.random() < style.shiny,
            np.float32(shade(COLORS[thing.color], rng.uniform(0.9, 1.1))),
        )
        for thing in things
    ]  # fmt: skip
    distance = -at[2] / rays[:, 2]  # the floor: every ray falls
    points = at + distance[:, None] * rays
    normal = np.broadcast_to(np.float32([0, 0, 1]), rays.shape).copy()
    color = floor_color(points, rng.randint(*style.floor), style)
    shine = np.zeros(len(rays), np.float32)
    for body in bodies:
        pixels, there, facing = body.enter(at, rays)
        first = there < distance[pixels]
        pixels = pixels[first]
        distance[pixels], normal[pixels] = there[first], facing[first]
        color[pixels], shine[pixels] = body.color, body.shiny
    points = at + (distance[:, None] - 1e-3) * rays
    lit = np.ones(len(rays), bool)
    for body in bodies:
        lit[body.enter(points, lamp)[0]] = False
    light = AMBIENT + (1.12 - AMBIENT) * np.maximum(normal @ lamp, 0) * lit
    mirrored = lamp - 2 * (normal @ lamp)[:, None] * normal
    glint = np.maximum((mirrored * rays).sum(1), 0) ** 20 * lit * (0.12 + 0.6 * shine) * (normal @ lamp > 0)
    picture = (color * light[:, None] + 255 * glint[:, None]) * np.float32(style.tint)
    return Image.fromarray(picture.clip(0, 255).astype(np.uint8).reshape(PIXELS, PIXELS, 3))


def floor_color(points: np.ndarray, brightness: int, style: Style) -> np.ndarray:
    color = np.full(points.shape, brightness, np.float32)
    if style.tiles:
        odd = (np.floor(points[:, 0] * 0.8) + np.floor(points[:, 1] * 0.8)) % 2
        color *= (1 - 0.13 * odd)[:, None]
    return color


draw_row = partial(demo.draw_row, sets=SETS, render=render)

if __name__ == "__main__":
    demo.main(__doc__, SETS, draw_row)
