"""Pictures of shapes and textures, drawn on the fly: a dataset without a download.

Twelve categories on cluttered ground. Some are common and some are rare (from 4 in 10 pictures down to 4 in 100), and
they keep company: each picture belongs to one of four scenes, which favours some categories over others. Things are
turned, partly covered and sometimes pale, and the clutter holds things that are nearly of a category.

Picture i depends on (seed, split, i) alone, not on what else is drawn or in which order.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from gpu_logicmix.data.dataset import ImageDataset
from gpu_logicmix.data.files import DataError, check_choice

# From common to rare.
CATEGORIES = ["circle", "square", "triangle", "stripes", "ring", "star"]
CATEGORIES += ["dots", "cross", "hexagon", "checks", "crescent", "zigzag"]
FREQUENCY = np.array([0.42, 0.36, 0.29, 0.23, 0.20, 0.16, 0.13, 0.11, 0.09, 0.07, 0.055, 0.04])
# How much more or less often each scene shows a category than the average; columns have mean 1.
SCENES = np.array(
    [
        [1.8, 0.4, 1.6, 0.4, 1.8, 0.4, 1.8, 0.4, 0.2, 0.4, 2.2, 0.4],
        [0.6, 1.8, 0.6, 1.6, 0.4, 0.6, 0.6, 1.8, 0.2, 2.4, 0.4, 0.4],
        [0.6, 0.6, 1.4, 0.4, 0.6, 2.4, 1.2, 1.4, 1.4, 0.4, 1.2, 0.4],
        [1.0, 1.2, 0.4, 1.6, 1.2, 0.6, 0.4, 0.4, 2.2, 0.8, 0.2, 2.8],
    ]
)
SPLITS = {"train": 0, "val": 1, "test": 2}
COUNTS = {"train": 4000, "val": 1000, "test": 1000}
MOST = 10_000_000  # pictures; more would take gigabytes for the labels alone
TEXTURES = {"stripes", "dots", "checks", "zigzag"}


def open_shapes(split: str, size: int = 64, *, count: int | None = None, seed: int = 0) -> ImageDataset:
    """count: of pictures; 4,000 for "train" and 1,000 for "val" and "test" unless given."""
    check_choice("split", split, tuple(SPLITS))
    count = _whole("count", COUNTS[split] if count is None else count, 1, MOST)
    seed = _whole("seed", seed, 0, 2**63 - 1)
    if size < 16:
        raise DataError(f"size={size}: shapes cannot be told apart below 16")
    source = ShapesSource(split, count, size, seed)
    ids = [f"{split}-{i}" for i in range(count)]
    return ImageDataset("shapes", split, source, source.labels, CATEGORIES, ids)


def _whole(name: str, value: int | str, least: int, most: int) -> int:
    """Options from the command line are text."""
    text = str(value)
    if not (text.isascii() and text.isdecimal()) or len(text) > 20 or not least <= int(text) <= most:
        raise DataError(f"{name}={text[:40]!r}: must be a whole number from {least} to {most:,}")
    return int(text)


class ShapesSource:
    def __init__(self, split: str, count: int, size: int, seed: int) -> None:
        self.split, self.count, self.size, self.seed = split, count, size, seed
        # Row by row from one stream: more pictures leave the first ones as they were.
        draw = np.random.default_rng((seed, SPLITS[split])).random((count, 1 + len(CATEGORIES)))
        scene = (draw[:, 0] * len(SCENES)).astype(int)
        self.labels = (draw[:, 1:] < FREQUENCY * SCENES[scene]).astype(np.int8)

    def read(self, index: int) -> Tensor:
        rng = np.random.default_rng((self.seed, SPLITS[self.split], index, 1))
        return torch.from_numpy(draw_picture(rng, np.flatnonzero(self.labels[index]), self.size))

    def parts(self, rows: Sequence[int] | np.ndarray | None = None) -> dict[str, str]:
        """Checksum of which pictures these are."""
        rows = np.arange(self.count) if rows is None else np.asarray(rows, dtype=np.int64)
        text = f"shapes 1 {self.split} seed {self.seed} {hashlib.sha256(rows.tobytes()).hexdigest()}"
        return {"files": hashlib.sha256(text.encode()).hexdigest()}


def draw_picture(rng: np.random.Generator, present: np.ndarray, size: int) -> np.ndarray:
    """uint8 [S, S, 3] with at least one thing of each category in `present` (numbers), and no other."""
    picture = _ground(rng, size)
    for _ in range(rng.integers(3, 8)):
        _paint(picture, rng, _CLUTTER[rng.integers(len(_CLUTTER))], rng.random(2), rng.uniform(0.05, 0.2), (0.2, 0.6))
    things = [CATEGORIES[c] for c in present for _ in range(1 + (rng.random() < 0.25))]
    placed: list[tuple[np.ndarray, float]] = []
    for name in (things[i] for i in rng.permutation(len(things))):
        radius = rng.uniform(0.14, 0.26) * (1.15 if name in TEXTURES else 1)
        # The roomiest of a few places: things may touch, but none should disappear behind another.
        places = rng.uniform(radius * 0.8, 1 - radius * 0.8, (6, 2))
        room = [min((np.hypot(*(p - q)) - radius - r for q, r in placed), default=1.0) for p in places]
        place = places[int(np.argmax(room))]
        placed.append((place, radius))
        _paint(picture, rng, name, place, radius, (0.75, 1.0))
    for _ in range(rng.integers(0, 3)):
        _paint(picture, rng, "line", rng.random(2), rng.uniform(0.1, 0.3), (0.5, 0.9))
    picture += rng.random(picture.shape, dtype=np.float32) * 20 - 10
    return np.clip(picture, 0, 255).astype(np.uint8)


def _ground(rng: np.random.Generator, size: int) -> np.ndarray:
    """float32 [S, S, 3]: soft blotches of colour, coarse and finer."""
    out = np.full((size, size, 3), rng.uniform(60, 190, 3), dtype=np.float32)
    for cells, strength in ((3, 40), (8, 22)):
        blotches = rng.uniform(-strength, strength, (cells, cells, 3)).astype(np.float32)
        # Bilinear enlargement as two products with [S, cells].
        at = np.linspace(0, cells - 1, size, dtype=np.float32)[:, None]
        weight = np.clip(1 - np.abs(at - np.arange(cells, dtype=np.float32)), 0, 1)
        rows = (weight @ blotches.reshape(cells, -1)).reshape(size, cells, 3)
        out += weight @ rows
    return out


def _paint(
    picture: np.ndarray,
    rng: np.random.Generator,
    name: str,
    place: np.ndarray,
    radius: float,
    opacity: tuple[float, float],
) -> None:
    """Blend one thing into the picture, touching only the pixels around it."""
    size = len(picture)
    angle, colour = rng.uniform(0, 2 * np.pi), rng.uniform(0, 255, (3, 3)).astype(np.float32)
    # Of two colours the one that stands out more from what is there.
    ground = picture[int(min(place[0], 0.999) * size), int(min(place[1], 0.999) * size)]
    if np.abs(colour[2] - ground).sum() > np.abs(colour[0] - ground).sum():
        colour[0] = colour[2]
    alpha, detail = rng.uniform(*opacity), rng.random(6).astype(np.float32)
    reach = radius * (1.35 if name == "line" else 1.1)
    top, left = (max(int((at - reach) * size), 0) for at in place)
    bottom, right = (min(int((at + reach) * size) + 1, size) for at in place)
    y = (np.arange(top, bottom, dtype=np.float32)[:, None] + 0.5) / size - np.float32(place[0])
    x = (np.arange(left, right, dtype=np.float32)[None, :] + 0.5) / size - np.float32(place[1])
    cos, sin = np.float32(np.cos(angle) / radius), np.float32(np.sin(angle) / radius)
    u, v = x * cos + y * sin, y * cos - x * sin  # the thing reaches from -1 to 1
    mask = np.clip(0.5 - _distance(name, u, v, detail) * np.float32(radius * size), 0, 1)[..., None] * alpha
    if name in TEXTURES:
        # Two colours that differ enough for the pattern to be seen.
        other = colour[0] + np.where(colour[0] > 127, -1, 1) * (60 + 0.4 * colour[1])
        tone = _pattern(name, u, v, detail)[..., None]
        paint = colour[0] * tone + other * (1 - tone)
    else:
        paint = colour[0]
    patch = picture[top:bottom, left:right]
    patch += (paint - patch) * mask


def _distance(name: str, u: np.ndarray, v: np.ndarray, detail: np.ndarray) -> np.ndarray:
    """How far outside the outline a point is, in units of the radius; negative inside."""
    au, av, r = np.abs(u), np.abs(v), np.hypot(u, v)
    if name == "circle":
        return r - 0.9
    if name == "ring":
        return np.abs(r - 0.75) - 0.2
    if name == "square":
        return np.maximum(au, av) - 0.78
    if name == "triangle":
        return np.maximum(v, au * 0.866 - v * 0.5) - 0.5
    if name == "hexagon":
        return np.maximum(au * 0.866 + av * 0.5, av) - 0.84
    if name == "cross":
        return np.minimum(np.maximum(au - 1, av - 0.3), np.maximum(av - 1, au - 0.3))
    if name == "crescent":
        return np.maximum(r - 0.95, 0.8 - np.hypot(u - 0.45, v))
    if name == "star":
        corner = np.abs((np.arctan2(v, u) * (5 / (2 * np.pi))) % 1 * 2 - 1)  # 1 at a tip, 0 between two
        return (r - (0.42 + 0.62 * corner**1.3)) * 0.7
    if name in TEXTURES or name == "blob":
        angle = np.arctan2(v, u)
        wobble = 0.12 * np.sin(2 * angle + 6 * detail[0]) + 0.1 * np.sin(3 * angle + 6 * detail[1])
        return r - 0.82 - wobble
    if name == "ellipse":
        return np.hypot(u, v * (2.2 + detail[0])) - 0.9
    if name == "bar":
        return np.maximum(au - 0.95, av - 0.12 - 0.25 * detail[0])
    if name == "arc":
        return np.maximum(np.abs(r - 0.85) - 0.08, u + 0.2)
    if name == "line":
        return np.maximum(au - 1.3, np.abs(v - 0.15 * np.sin(3 * u)) - 0.05)
    if name == "corner":
        return np.maximum(np.minimum(np.abs(u + 0.6), np.abs(v + 0.6)) - 0.12, np.maximum(au, av) - 0.75)
    raise ValueError(f"no shape {name!r}")


_CLUTTER = ("blob", "ellipse", "bar", "arc", "line", "line", "corner")


def _pattern(name: str, u: np.ndarray, v: np.ndarray, detail: np.ndarray) -> np.ndarray:
    """0 or 1 at each point, with soft edges."""
    pitch = 7 + 4 * detail[2]
    if name == "stripes":
        wave = np.sin(pitch * u)
    elif name == "zigzag":
        wave = np.sin(pitch * (u + 0.35 * np.abs((v * 2.2) % 2 - 1)))
    elif name == "checks":
        wave = np.sin(pitch * 0.8 * u) * np.sin(pitch * 0.8 * v) * 1.5
    else:
        wave = np.sin(pitch * u) * np.sin(pitch * v) - 0.35 + np.zeros_like(u)
        wave = np.where((np.sin(pitch * u) > 0) & (np.sin(pitch * v) > 0), wave, -1)
    return np.clip(0.5 + 2 * wave, 0, 1)
