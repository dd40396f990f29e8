"""A batch after each step of its augmentation, as a PNG picture with the labels under each image.

Present is blue, unknown is orange and absent is grey, in every picture (colours of Okabe and Ito, which colour-blind
people tell apart), and each is also written out.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor, nn

from gpu_logicmix.data import ImageDataset
from gpu_logicmix.errors import printable

PRESENT, UNKNOWN, ABSENT = "#0072B2", "#E69F00", "#999999"
# Darker for letters on white: contrast at least 4.5 to 1.
PRESENT_TEXT, UNKNOWN_TEXT, ABSENT_TEXT = "#005A8E", "#9A5B00", "#6B6B6B"


class Step(NamedTuple):
    """One row of a preview."""

    title: str
    images: Tensor  # uint8 or float in [0, 1], [B, 3, H, W]
    targets: Tensor  # [B, C]
    captions: list[str]  # what was done to each image


def drawn_batch(dataset: ImageDataset, seed: int, count: int = 8) -> tuple[Tensor, Tensor, list[str]]:
    """Images drawn at random, their labels, and a numbered name for each. What follows is drawn from `seed` too."""
    torch.manual_seed(seed)
    images, targets, index = dataset[torch.randperm(len(dataset))[:count].tolist()]
    return images, targets, [f"{number}: {dataset.ids[row]}" for number, row in enumerate(index.tolist(), 1)]


def batch_steps(
    images: Tensor,
    targets: Tensor,
    names: list[str],
    flip: nn.Module | None = None,
    augment: nn.Module | None = None,
    mix: nn.Module | None = None,
) -> list[Step]:
    """The batch after each step of the training run, in its order; a step that is None is left out."""
    steps = [Step("original", images, targets, names)]
    if flip is not None:
        flipped = flip.plan(len(images))
        images = flip(images, flipped)
        steps.append(Step("flip", images, targets, ["flipped" if f else "as it is" for f in flipped]))
    if augment is not None:
        drawn = augment.plan(len(images))
        images = augment(images, drawn)
        captions = [", ".join(augment.ops[i] for i in row) for row in drawn.operations.tolist()]
        steps.append(Step("RandAugment", images, targets, captions))
    if mix is not None:
        plan = mix.plan(len(images), images.device)
        images, targets = mix(images, targets, plan)
        members = [(row[:size] + 1).tolist() for row, size in zip(plan.index, plan.size, strict=True)]
        captions = ["images " + " + ".join(map(str, m)) if len(m) > 1 else "as it is" for m in members]
        steps.append(Step(type(mix).__name__.removeprefix("GPU"), images, targets, captions))
    return steps


def preview_picture(steps: Sequence[Step], categories: Sequence[str], cell: int = 192) -> Image.Image:
    """A row for each step and a column for each image, with its labels underneath."""
    gap, margin, title_height = 14, 20, 34
    title_font, line = _font(19), 18
    texts = [
        [_label_lines(t, categories, caption, cell) for t, caption in zip(s.targets, s.captions, strict=True)]
        for s in steps
    ]
    heights = [title_height + cell + 6 + line * max(len(lines) for lines in row) + gap for row in texts]
    columns = max(len(step.images) for step in steps)
    width = 2 * margin + columns * cell + (columns - 1) * gap
    legend_height = 30
    page = Image.new("RGB", (width, 2 * margin + sum(heights) + legend_height), "white")
    draw = ImageDraw.Draw(page)

    x = margin
    for text, colour in (("present", PRESENT_TEXT), ("unknown", UNKNOWN_TEXT), ("absent: only counted", ABSENT_TEXT)):
        draw.rectangle((x, margin, x + 12, margin + 12), fill=colour)
        draw.text((x + 18, margin - 3), text, font=_font(14), fill=colour)
        x += 18 + _font(14).getlength(text) + 28
    top = margin + legend_height
    for step, row, height in zip(steps, texts, heights, strict=True):
        draw.text((margin, top), step.title, font=title_font, fill="black")
        for column, (image, lines) in enumerate(zip(step.images, row, strict=True)):
            left, y = margin + column * (cell + gap), top + title_height
            page.paste(to_picture(image, cell), (left, y))
            y += cell + 6
            for text, colour in lines:
                draw.text((left, y), text, font=_font(14, bold=colour == PRESENT_TEXT), fill=colour)
                y += line
        top += height
    return page


def _label_lines(targets: Tensor, categories: Sequence[str], caption: str, width: int) -> list[tuple[str, str]]:
    """The lines under an image, with their colours."""
    font, bold = _font(14), _font(14, bold=True)
    present = [categories[c] for c in (targets == 1).nonzero().flatten()]
    unknown = [categories[c] for c in (targets == -1).nonzero().flatten()]
    # At its commas, so that names of operations stay whole.
    lines = [(text, "black") for text in _wrap(caption.split(", "), "", font, width, 4)]
    if not categories:
        return lines
    lines += [(text, PRESENT_TEXT) for text in _wrap(present or ["none known"], "", bold, width, 5)]
    if unknown:
        lines += [(text, UNKNOWN_TEXT) for text in _wrap(unknown, f"{len(unknown)} unknown: ", font, width, 3)]
    absent = int((targets == 0).sum())
    return [*lines, (f"{absent} absent", ABSENT_TEXT)]


def _wrap(words: Sequence[str], head: str, font: Any, width: int, most: int) -> list[str]:
    """`words` with commas in lines no wider than `width`; what does not fit into `most` lines is counted."""
    lines, line = [], head
    for at, word in enumerate(words):
        more = f" +{len(words) - at}"
        text = _shorten(printable(word), font, width - 40) + ("," if at < len(words) - 1 else "")
        joined = f"{line} {text}" if line and line != head else line + text
        last = len(lines) == most - 1
        room = width - (font.getlength(more) if last and at < len(words) - 1 else 0)
        if not line or font.getlength(joined) <= room:
            line = joined
        elif last:
            return [*lines, line.rstrip(",") + more]
        else:
            lines, line = [*lines, line], text
    return [*lines, line] if line else lines


def _shorten(word: str, font: Any, width: int) -> str:
    """Without its middle, where it is too wide: of a path, the file name says most."""
    if font.getlength(word) <= width:
        return word
    ends = next(n for n in range(len(word) // 2, 0, -1) if font.getlength(f"{word[:4]}…{word[-n:]}") <= width or n == 1)
    return f"{word[:4]}…{word[-ends:]}"


def to_picture(image: Tensor, cell: int) -> Image.Image:
    """An image of the dataset or of a batch, `cell` pixels wide and high."""
    image = image.detach().cpu()
    if image.is_floating_point():
        image = image.clamp(0, 1).mul(255).round().to(torch.uint8)
    picture = Image.fromarray(image.permute(1, 2, 0).contiguous().numpy())
    return picture.resize((cell, cell), Image.Resampling.LANCZOS)


@functools.cache
def _font(size: int, bold: bool = False) -> ImageFont.FreeTypeFont:
    """DejaVu Sans, which comes with matplotlib and knows most alphabets."""
    import matplotlib

    name = "DejaVuSans-Bold.ttf" if bold else "DejaVuSans.ttf"
    return ImageFont.truetype(str(Path(matplotlib.get_data_path()) / "fonts" / "ttf" / name), size)
