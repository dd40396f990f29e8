"""The pixels of RandAugment's operations, as functions of a batch [b, 1 or 3, H, W], uint8 or float in [0, 1].

torchvision's functions on uint8 tensors are the reference.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor


def affine_warp(images: Tensor, theta: Tensor, interpolation: str = "bilinear", fill: Sequence[float] = ()) -> Tensor:
    """Warp by `theta` [b, 2, 3], with the meaning it has for `F.affine_grid`: from output to input coordinates.

    Outside lies `fill` (one number, one per channel, or none for 0), and a pixel on the edge is mixed with it by the
    weight of what lies outside. torchvision does the same for `fill=None`; when given a `fill`, 0 included, it
    multiplies the image's part by its weight twice, which darkens the edge.
    """
    height, width = images.shape[2:]
    u, v = (torch.linspace(1 / size - 1, 1 - 1 / size, size, device=images.device) for size in (width, height))
    # Each coordinate is a row plus a column: one pass for the grid, as planes [b, 2, H, W]. `F.affine_grid` multiplies
    # matrices there and takes as long as the sampling.
    row, column = theta[:, :, :1] * u, theta[:, :, 1:2] * v + theta[:, :, 2:]
    grid = (row[:, :, None, :] + column[:, :, :, None]).permute(0, 2, 3, 1)
    source = _own_float(images) if fill else images.float()
    # Sampling the difference to `fill`, with zeros outside, mixes it in without sampling a mask as well.
    if fill:
        outside = torch.stack([torch.full((1, 1), level, device=images.device) for level in fill])
        source -= outside
    result = F.grid_sample(source, grid, mode=interpolation, align_corners=False)
    if fill:
        result += outside
    return _to_dtype(result.round_() if images.dtype is torch.uint8 else result, images.dtype)


def translate(images: Tensor, dx: int, dy: int, fill: Sequence[float] = ()) -> Tensor:
    """Move by whole pixels, to the right and down."""
    height, width = images.shape[2:]
    result = torch.full_like(images, fill[0] if fill else 0, memory_format=torch.contiguous_format)
    for channel, value in enumerate(fill[1:], start=1):
        result[:, channel] = value
    into, out_of = (
        (..., slice(max(y, 0), height + min(y, 0)), slice(max(x, 0), width + min(x, 0)))
        for x, y in ((dx, dy), (-dx, -dy))
    )
    result[into] = images[out_of]
    return result


def adjust_brightness(images: Tensor, factor: Tensor) -> Tensor:
    return blend(images, None, factor)


def adjust_color(images: Tensor, factor: Tensor) -> Tensor:
    return images if images.shape[1] == 1 else blend(images, grayscale(images), factor)


def adjust_contrast(images: Tensor, factor: Tensor) -> Tensor:
    # Rows first: for uint8 their sums are exact in float32.
    mean = grayscale(images).sum(-1).mean(-1) / images.shape[3]
    return blend(images, mean[..., None, None], factor)


def adjust_sharpness(images: Tensor, factor: Tensor) -> Tensor:
    height, width = images.shape[2:]
    if height <= 2 or width <= 2:
        return images
    # The 3x3 smoothing [[1, 1, 1], [1, 5, 1], [1, 1, 1]] / 13 as sums of shifted images: a convolution with so few
    # channels is many times slower on a CPU. Sums of uint8 fit int16, where twice as many go through at a time.
    x = images.to(torch.int16) if images.dtype is torch.uint8 else images.float()
    inner = x[:, :, 1:-1, 1:-1]
    rows = (x[:, :, :-2] + x[:, :, 1:-1]).add_(x[:, :, 2:])
    total = (rows[..., :-2] + rows[..., 1:-1]).add_(rows[..., 2:]).add_(inner, alpha=4)
    smooth = total.float().mul_(1 / 13)
    if images.dtype is torch.uint8:
        smooth.round_()
    result = images.clone(memory_format=torch.contiguous_format)  # the border stays
    result[:, :, 1:-1, 1:-1] = blend(images[:, :, 1:-1, 1:-1], smooth, factor)
    return result


ADJUST = {
    "Color": adjust_color,
    "Contrast": adjust_contrast,
    "Brightness": adjust_brightness,
    "Sharpness": adjust_sharpness,
}


def grayscale(images: Tensor) -> Tensor:
    """[b, 1, H, W] float32, newly made; for uint8 cut to whole grey levels, as torchvision does."""
    if images.shape[1] == 1:
        return _own_float(images)
    red, green, blue = images.float().split(1, dim=1)
    gray = (0.2989 * red).add_(green, alpha=0.587).add_(blue, alpha=0.114)
    return gray.trunc_() if images.dtype is torch.uint8 else gray


def blend(images: Tensor, degenerate: Tensor | None, factor: Tensor) -> Tensor:
    """factor * images + (1 - factor) * degenerate, None being black; a factor above 1 leads away from it.

    `degenerate` is overwritten."""
    factor = factor.view(-1, 1, 1, 1)
    result = _own_float(images).mul_(factor)
    if degenerate is not None:
        result += degenerate.mul_(1 - factor)
    return _clip(result, images.dtype)


def autocontrast(images: Tensor) -> Tensor:
    """Stretch each channel to the whole range. A channel of one grey level stays as it is."""
    white = 255 if images.dtype is torch.uint8 else 1
    low, high = (f(images, dim=(2, 3), keepdim=True).float() for f in (torch.amin, torch.amax))
    # Half a grey level, so that the rounding errors of a flat float image are not stretched to black and white.
    flat = high - low < white / 510
    low = low.masked_fill(flat, 0)
    scale = (white / (high - low)).masked_fill(flat, 1)
    return _clip(_own_float(images).sub_(low).mul_(scale), images.dtype)


def equalize(images: Tensor) -> Tensor:
    """Spread each channel's grey levels evenly, by its histogram of 256 levels. Float images take those levels too."""
    batch, channels, height, width = images.shape
    levels = _levels(images).reshape(batch * channels, height * width)
    index = levels.long()
    if images.device.type == "cpu" and not torch.compiler.is_compiling():
        histogram = torch.stack([torch.bincount(row, minlength=256) for row in levels])
    else:  # bincount would wait for the device
        histogram = index.new_zeros(batch * channels, 256).scatter_add_(1, index, index.new_ones(1, 1).expand_as(index))
    total = histogram.cumsum(1)
    # All pixels but those of the brightest level present, in 255 steps.
    step = total.masked_fill(total == height * width, 0).amax(1, keepdim=True) // 255
    table = ((total - histogram + step // 2) // step.clamp(min=1)).clamp_(max=255)
    table = torch.where(step == 0, torch.arange(256, device=images.device), table)
    if images.dtype is torch.uint8:
        return table.to(torch.uint8).gather(1, index).view(images.shape)
    # A channel with too few pixels for a step stays as it is, levels between the 256 included.
    result = (table / 255).gather(1, index)
    return torch.where(step == 0, images.float().reshape(result.shape), result).view(images.shape).to(images.dtype)


def posterize(images: Tensor, bits: int) -> Tensor:
    """Keep the highest bits of each grey level."""
    mask = 256 - 2 ** (8 - bits)
    if images.dtype is torch.uint8:
        return images & mask
    return images if bits == 8 else ((_levels(images) & mask) / 255).to(images.dtype)


def solarize(images: Tensor, threshold: float) -> Tensor:
    """Invert the pixels at or above `threshold`, a number from 0 to 255; float pixels count as the nearest level."""
    level = math.ceil(threshold)
    if images.dtype is not torch.uint8:
        return torch.where(images >= (level - 0.5) / 255, 1 - images, images)
    # 255 below the threshold and 0 from there on, by wrapping around: bytes stay bytes, while a comparison and `where`
    # are an order of magnitude slower on a CPU.
    below = images.clamp(max(level - 1, 0), level) - level
    return below.bitwise_xor_(images).bitwise_not_()


def resize(images: Tensor, size: int | tuple[int, int], *, antialias: bool = True) -> Tensor:
    """Resize a batch to (height, width), or to a square, bilinearly; dtype kept.

    antialias: average over all source pixels an output pixel covers when shrinking, as PIL does.
    uint8 is computed in float32 and rounded to nearest; with `antialias` on a CPU by torch's kernel in whole numbers,
    which may differ by one grey level.
    """
    check_images(images)
    size = (size, size) if isinstance(size, int) else tuple(size)
    direct = images.dtype is not torch.uint8 or (images.device.type == "cpu" and antialias)
    result = F.interpolate(
        images if direct else images.float(), size, mode="bilinear", antialias=antialias, align_corners=False
    )
    return result if direct else _to_dtype(result.round_(), images.dtype)


def check_images(images: Tensor) -> None:
    if images.ndim != 4 or images.shape[1] not in (1, 3):
        raise ValueError(f"images must be [B, 3, H, W] or [B, 1, H, W], not {list(images.shape)}")
    if images.dtype is not torch.uint8 and not images.is_floating_point():
        raise TypeError(f"images must be uint8 (0 to 255) or float (0 to 1), not {images.dtype}")


def check_range(images: Tensor) -> None:
    """Refuse float images that are clearly not in 0 to 1, where looking at them does not wait for the device. A little
    outside, as resizing leaves them, is fine: they are cut."""
    if images.dtype is torch.uint8 or type(images) is not Tensor or not images.is_cpu or torch.compiler.is_compiling():
        return
    low, high = (bound.item() for bound in images.aminmax())
    if low < -1 or high > 2:
        raise ValueError(
            f"images go from {low:g} to {high:g}: float images must be in 0 to 1, before any normalisation; "
            "give uint8, or divide by 255"
        )


def _levels(images: Tensor) -> Tensor:
    """Grey levels as uint8."""
    return images if images.dtype is torch.uint8 else _clip(_own_float(images).mul_(255).round_(), torch.uint8)


def _own_float(images: Tensor) -> Tensor:
    """A float32 copy, to be overwritten: every tensor of that size not made is worth more than a pass less."""
    return images.to(torch.float32, copy=True)


def _clip(values: Tensor, dtype: torch.dtype) -> Tensor:
    """To the range of `dtype`, overwriting `values`; uint8 cuts off fractions."""
    if dtype is not torch.uint8:
        return values.clamp_(0, 1).to(dtype)
    if values.device.type == "cpu":
        return values.to(torch.int16).clamp_(0, 255).to(dtype)
    return values.clamp_(0, 255).to(dtype)


def _to_dtype(values: Tensor, dtype: torch.dtype) -> Tensor:
    if dtype is torch.uint8 and values.device.type == "cpu":
        values = values.to(torch.int16)  # both steps are vectorised; the direct one is not, and takes twice as long
    return values.to(dtype)


def like(result: Tensor, images: Tensor) -> Tensor:
    """In the memory format of `images`."""
    channels_last = images.is_contiguous(memory_format=torch.channels_last) and not images.is_contiguous()
    return result.contiguous(memory_format=torch.channels_last if channels_last else torch.contiguous_format)
