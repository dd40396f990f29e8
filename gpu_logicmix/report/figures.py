"""Pictures of a page: a batch after each step of its augmentation, and the best and worst predictions."""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from torch import Tensor

from gpu_logicmix.data import ImageDataset
from gpu_logicmix.report.preview import Step, to_picture
from gpu_logicmix.report.run_folder import Predictions, Run
from gpu_logicmix.report.words import first_of, probability

EXAMPLES = 6  # pictures of each kind
THUMBNAIL = 192  # pixels


class Figure(NamedTuple):
    """A picture and the lines under it: (class of the style sheet, text)."""

    data: str  # JPEG in base64; empty without an image
    alt: str
    lines: list[tuple[str, str]]


def make_figure(image: Tensor | None, alt: str, lines: list[tuple[str, str]]) -> Figure:
    if image is None:
        return Figure("", alt, lines)
    file = io.BytesIO()
    to_picture(image, min(THUMBNAIL, image.shape[-1])).save(file, "JPEG", quality=88)
    return Figure(base64.b64encode(file.getvalue()).decode(), alt, lines)


def batch_figures(steps: Sequence[Step], categories: Sequence[str]) -> list[tuple[str, list[Figure]]]:
    """The title of each step, and its images with their labels."""
    return [
        (
            step.title,
            [
                make_figure(image, caption, [("", caption), *_labels(target, categories)])
                for image, target, caption in zip(step.images, step.targets, step.captions, strict=True)
            ],
        )
        for step in steps
    ]


def _labels(targets: Tensor, categories: Sequence[str]) -> list[tuple[str, str]]:
    if len(categories) != len(targets):
        return []  # names are not at hand
    targets = targets.detach().cpu().float()
    unknown = [categories[c] for c in (targets.isnan() | (targets < 0)).nonzero().flatten()]
    # Soft labels, as Mixup makes them, with their share.
    present = [
        categories[c] + ("" if targets[c] == 1 else f" {targets[c]:.2f}") for c in (targets > 0).nonzero().flatten()
    ]
    lines = [("present", first_of(present, 8))] if present else [("", "none known")]
    if unknown:
        lines.append(("unknown", f"{len(unknown)} unknown: {first_of(unknown, 3)}"))
    return [*lines, ("absent", f"{int((targets == 0).sum())} absent")]


class Examples(NamedTuple):
    """(row, category) of predictions to look at."""

    right: list[tuple[int, int]]  # known to be present, highest probability
    false: list[tuple[int, int]]  # known to be absent, highest probability
    missed: list[tuple[int, int]]  # known to be present, lowest probability


def pick_examples(logits: np.ndarray, targets: np.ndarray, count: int = EXAMPLES) -> Examples:
    """The best and the worst predictions, [N, C]. In each list no image and no category comes twice."""
    # Infinite ones at the ends, so that -inf is free to mean "not eligible"; NaN is never shown.
    scores = np.clip(np.asarray(logits, np.float64), -1e300, 1e300)

    def pick(value: int, sign: int) -> list[tuple[int, int]]:
        left = np.where((targets == value) & ~np.isnan(scores), sign * scores, -np.inf)
        chosen = []
        while left.size and len(chosen) < count:
            row, category = np.unravel_index(left.argmax(), left.shape)
            if left[row, category] == -np.inf:
                break
            chosen.append((int(row), int(category)))
            left[row], left[:, category] = -np.inf, -np.inf
        return chosen

    return Examples(right=pick(1, 1), false=pick(0, 1), missed=pick(1, -1))


TITLES = (
    "Best: present, highest probability",
    "Worst: absent, highest probability",
    "Worst: present, lowest probability",
)


def example_figures(run: Run, val: ImageDataset | None) -> tuple[list[tuple[str, list[Figure]]], str]:
    """Lists of pictures with their titles; and why there are no pictures, if so."""
    found = run.predictions
    if found is None:
        return [], ""
    examples = pick_examples(found.logits, found.targets)
    images, problem = row_images(found, val, sorted({row for part in examples for row, _ in part}))
    out = []
    for title, pairs in zip(TITLES, examples, strict=True):
        figures = [make_figure(images.get(row), found.ids[row], _guess(found, row, c)) for row, c in pairs]
        if figures:
            out.append((title, figures))
    return out, problem


def row_images(found: Predictions, val: ImageDataset | None, rows: list[int]) -> tuple[dict[int, Tensor], str]:
    """Images of some rows of the predictions; and why there are none, if so."""
    if val is None:
        return {}, "The validation images were not at hand when this page was written."
    try:
        if any(str(val.ids[found.index[row]]) != found.ids[row] for row in rows):
            return {}, "The validation images at hand are not those of the predictions."
        images, _, index = val[[int(found.index[row]) for row in rows]]
    except (OSError, ValueError, IndexError) as error:
        return {}, f"The validation images cannot be read: {error}"
    place = {int(found.index[row]): row for row in rows}
    return {place[at]: image for at, image in zip(index.tolist(), images, strict=True)}, ""


def _guess(found: Predictions, row: int, category: int) -> list[tuple[str, str]]:
    """What the model says about an image."""
    logits, targets = found.logits[row], found.targets[row]

    def words(c: int) -> str:
        return f"{found.categories[c]} {probability(logits[c]) if np.isfinite(logits[c]) else '–'}"

    order = [int(c) for c in np.argsort(-np.nan_to_num(logits, nan=-np.inf), kind="stable") if c != category]
    present = [words(c) for c in order if targets[c] == 1]
    kinds = {1: "present", 0: "absent", -1: "unknown"}
    others = [(kinds[int(targets[c])], words(c)) for c in [c for c in order if targets[c] != 1][:3]]
    lines = [("strong", f"{words(category)}, {kinds[int(targets[category])]}"), ("present", first_of(present, 8))]
    lines += [(kind, f"{text}, {kind}") for kind, text in others]
    return [(kind, text) for kind, text in lines if text]
