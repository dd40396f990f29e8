"""Multi-scale random crop on a batch that is already on the device, each sample its own.

    crop = MultiScaleCrop()
    images = crop(images)  # [B, C, H, W], uint8 or float, any device

What SST, SARB and their family train with (https://github.com/HCPLab-SYSU/HCP-MLR-PL): a square whose side is 1, 7/8,
3/4, 5/8 or 1/2 of the image's, each equally likely, anywhere in the image, resized to the size of the image. (There
512 px are cropped and the result has 448; here the images of a run have one size.)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from gpu_logicmix.augment.plan import drawn

SIDES = (1.0, 7 / 8, 3 / 4, 5 / 8, 1 / 2)


class CropPlan(NamedTuple):
    start: Tensor  # [B, 2] int64: first row and column
    length: Tensor  # [B, 2] int64: rows and columns


class MultiScaleCrop(nn.Module):
    """Crop each sample at random and resize it to the size it had, bilinearly.

    sides: shares of the image's side to draw from.
    generator: where the draws come from; torch's global one by default.

    Identity in `eval()`. Keeps dtype and memory format, never writes into its input.
    """

    def __init__(self, sides: tuple[float, ...] = SIDES, *, generator: torch.Generator | None = None) -> None:
        super().__init__()
        if not isinstance(sides, Sequence) or not sides or not all(0 < side <= 1 for side in sides):
            raise ValueError(f"sides={sides!r}: must be shares of the side, above 0 and at most 1")
        self.sides, self.generator = tuple(sides), generator

    def plan(self, images: Tensor) -> CropPlan:
        """What to crop; draws from the device of the images. Must not make the host wait for the device."""
        samples, device = len(images), images.device
        draw = drawn(torch.rand, 3, samples, device=device, generator=self.generator)
        size = torch.stack([torch.full((), n, device=device) for n in images.shape[2:]])
        # A share for each sample without an index on the device: how many of the thresholds its draw has passed.
        share = torch.full((samples,), self.sides[0], device=device)
        for number, side in enumerate(self.sides[1:], 1):
            share = torch.where(draw[0] * len(self.sides) >= number, side, share)
        length = (share[:, None] * size).round().long().clamp(min=1)
        room = size - length
        return CropPlan(torch.minimum((draw[1:].T * (room + 1)).long(), room), length)

    def forward(self, images: Tensor, plan: CropPlan | None = None) -> Tensor:
        if not self.training:
            return images
        if images.ndim != 4:
            raise ValueError(f"images must be [B, C, H, W], not {list(images.shape)}")
        plan = self.plan(images) if plan is None else plan
        out = images if images.is_floating_point() else images.float()
        for dim in (2, 3):
            out = _resized(out, dim, plan.start[:, dim - 2], plan.length[:, dim - 2])
        if not images.is_floating_point():
            out = out.round().to(images.dtype)
        layout = torch.channels_last if images.is_contiguous(memory_format=torch.channels_last) else None
        return out.contiguous(memory_format=layout) if layout else out.contiguous()

    def extra_repr(self) -> str:
        return f"sides={self.sides}"


def _resized(images: Tensor, dim: int, start: Tensor, length: Tensor) -> Tensor:
    """Along one side: `length` pixels from `start` on, of each sample, as many as the side has."""
    size = images.shape[dim]
    centre = torch.arange(size, device=images.device) + 0.5
    at = (centre * (length[:, None] / size) - 0.5).clamp(min=0)  # as with align_corners=False
    low = at.long()
    weight = (at - low).to(images.dtype)
    high = torch.minimum(low + 1, length[:, None] - 1)
    shape = [len(images), 1, 1, 1]
    shape[dim] = size

    def pixels(index: Tensor) -> Tensor:
        return images.gather(dim, (start[:, None] + index).view(shape).expand_as(images))

    return pixels(low).lerp(pixels(high), weight.view(shape))
