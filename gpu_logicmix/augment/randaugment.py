"""RandAugment on a batch that is already on the device: drawn per sample, computed per batch.

    augment = RandAugment(n=2, m=9)
    images = augment(images)  # [B, 3, H, W], uint8 or float in [0, 1], any device; each sample has its own operations

- Cubuk et al., RandAugment: Practical automated data augmentation with a reduced search space, 2020, arXiv:1909.13719.
- Chong et al., LogicMix: the 14 operations, N=2 and M=9 (the section on data augmentation).
- torchvision's `transforms.RandAugment` on uint8 tensors is the reference for the magnitudes and the pixels.

Kornia and torchvision v2 draw one sequence of operations for the whole batch; here every sample draws its own. Kornia
has all of them batch-wise, and its functions were measured for each: they take float images alone, which is four times
the memory of uint8, and at 448 pixels longer than the few tensor lines below (docs/randaugment.md), so this stands on
torch alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# In the paper's order.
OPERATIONS = (
    "Identity",
    "AutoContrast",
    "Equalize",
    "Rotate",
    "Solarize",
    "Color",
    "Posterize",
    "Contrast",
    "Brightness",
    "Sharpness",
    "ShearX",
    "ShearY",
    "TranslateX",
    "TranslateY",
)
WARPS = ("Rotate", "ShearX", "ShearY")
INTERPOLATIONS = ("bilinear", "nearest")
# Values worked on at a time on a CPU.
CPU_PIECE = 2**20

Kernel = tuple[list[int], tuple[int, ...], Callable[[Tensor, Tensor, Tensor], Tensor]]


class AugmentPlan(NamedTuple):
    operations: Tensor  # [B, N] int64, index into `RandAugment.ops`
    signs: Tensor  # [B, N] int64, +1 or -1; read by the operations that have two directions


class RandAugment(nn.Module):
    """Apply to each sample N operations of its own, drawn uniformly with replacement.

    n: operations per sample.
    m: magnitude of all of them, one of `bins` equal steps from 0 to `bins - 1`.
    bins: number of magnitudes.
    interpolation: "bilinear" or "nearest", of rotations and shears.
    fill: what comes in from outside the image: a number, or one per channel, in the range of the images (0 to 255 for
        uint8, 0 to 1 for float).
    ops: names out of `OPERATIONS` to draw from, all 14 by default.
    generator: where the draws come from; torch's global one by default.

    Identity in `eval()`. Keeps dtype and memory format, never writes into its input, is not differentiable.
    """

    def __init__(
        self,
        n: int = 2,
        m: int = 9,
        *,
        bins: int = 31,
        interpolation: str = "bilinear",
        fill: float | Sequence[float] = 0,
        ops: Sequence[str] = OPERATIONS,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__()
        if n < 0:
            raise ValueError(f"n={n}: the number of operations per sample cannot be negative")
        if bins < 2:
            raise ValueError(f"bins={bins}: at least two magnitudes are needed")
        if not 0 <= m < bins:
            raise ValueError(f"m={m}: with bins={bins} the magnitude goes from 0 to {bins - 1}")
        if interpolation not in INTERPOLATIONS:
            raise ValueError(f"interpolation={interpolation!r}: it is one of {', '.join(INTERPOLATIONS)}")
        if isinstance(ops, str) or not ops or len(set(ops)) < len(ops) or not set(ops) <= set(OPERATIONS):
            raise ValueError(f"ops={ops!r}: give a list of different names out of {', '.join(OPERATIONS)}")
        self.n, self.m, self.bins = n, m, bins
        self.interpolation, self.fill, self.ops = interpolation, fill, tuple(ops)
        self.generator = generator
        # In float32, as torchvision has them, so that a threshold falls on the same side of a grey level.
        step = partial(torch.linspace, steps=bins, device="cpu")
        self.angle = math.radians(step(0, 30)[m].item())
        self.shear = step(0, 0.3)[m].item()
        self.strength = step(0, 0.9)[m].item()
        self.threshold = step(255, 0)[m].item()
        self.bits = 8 - round(m / ((bins - 1) / 4))

    def extra_repr(self) -> str:
        text = f"n={self.n}, m={self.m}, bins={self.bins}, interpolation={self.interpolation!r}, fill={self.fill}"
        return text if self.ops == OPERATIONS else f"{text}, ops={list(self.ops)}"

    def plan(self, batch_size: int, device: torch.device | str | None = None) -> AugmentPlan:
        """Draw the operations and signs of `batch_size` samples.

        A plan on the CPU (the default, whatever the device of the images) can be read without waiting for the device,
        so `forward` computes each operation for the samples that drew it. A plan on the images' own device is never
        read: every operation is computed for every sample and the right one is kept. The pixels are the same.
        """
        source = self.generator.device if self.generator is not None else torch.device(device or "cpu")
        draw = partial(torch.randint, size=(batch_size, self.n), generator=self.generator, device=source)
        operations, signs = draw(len(self.ops)), draw(2) * 2 - 1
        return AugmentPlan(_send(operations, device or source), _send(signs, device or source))

    @torch.no_grad()
    def forward(self, images: Tensor, plan: AugmentPlan | None = None) -> Tensor:
        _check_images(images)
        if not self.training or self.n == 0 or len(images) == 0:
            return images
        compiling = torch.compiler.is_compiling()
        if plan is None:
            plan = self.plan(len(images), images.device if compiling else None)
        shapes = [list(tensor.shape) for tensor in plan]
        if shapes[0] != shapes[1] or len(shapes[0]) != 2 or shapes[0][0] != len(images):
            expected = f"for {len(images)} images both are [{len(images)}, N]"
            raise ValueError(f"plan: operations {shapes[0]} and signs {shapes[1]}; {expected}")
        if plan.operations.device.type == "cpu" and not compiling:
            return self._grouped(images, plan)
        return self._dense(images, plan)

    def _grouped(self, images: Tensor, plan: AugmentPlan) -> Tensor:
        """Each operation for the samples that drew it."""
        kernels = self._kernels(images)
        which = {(code, s): k for k, (codes, signs, _) in enumerate(kernels) for code in codes for s in signs}
        on_cpu = images.device.type == "cpu"
        piece = _piece(images[0].numel()) if on_cpu else len(images)
        result = torch.empty_like(images) if on_cpu else images.clone()
        # On a CPU samples are taken out and put back one after the other: torch is far slower at it by index there.
        source, samples, results = images, images.unbind(), result.unbind()
        rounds = (zip(*tensor.tolist(), strict=True) for tensor in plan)
        for operations, signs in zip(*rounds, strict=True):
            groups: dict[int, list[int]] = {k: [] for k in range(-1, len(kernels))}
            for sample, drawn in enumerate(zip(operations, signs, strict=True)):
                if not (0 <= drawn[0] < len(self.ops) and drawn[1] in (1, -1)):
                    raise ValueError(f"plan: operation {drawn[0]} with sign {drawn[1]} for sample {sample}")
                groups[which.get(drawn, -1)].append(sample)
            if on_cpu and source is images:
                for sample in groups[-1]:  # nothing to do but be there
                    results[sample].copy_(samples[sample])
            order = [sample for members in groups.values() for sample in members]
            # The one transfer of a round, three whole numbers a sample; the host does not wait for it.
            table = torch.tensor([(i, operations[i], signs[i]) for i in order], device="cpu")
            table = _send(table, images.device)
            start = len(groups[-1])
            for k, (_, _, apply) in enumerate(kernels):
                members = groups[k]
                for first in range(0, len(members), piece):
                    part = members[first : first + piece]
                    index, *drawn = table[start + first : start + first + len(part)].unbind(1)
                    if not on_cpu:
                        result.index_copy_(0, index, apply(source.index_select(0, index), *drawn))
                        continue
                    batch = samples[part[0]][None] if len(part) == 1 else torch.stack([samples[i] for i in part])
                    for i, done in zip(part, apply(batch, *drawn).unbind(), strict=True):
                        results[i].copy_(done)
                start += len(members)
            source, samples = result, results
        return result

    def _dense(self, images: Tensor, plan: AugmentPlan) -> Tensor:
        """Every operation for every sample: no shape and no branch depends on the draw."""
        kernels = self._kernels(images)
        result = images
        for operations, signs in zip(plan.operations.unbind(1), plan.signs.unbind(1), strict=True):
            operations, signs = _send(operations, images.device), _send(signs, images.device)
            before = result
            for codes, directions, apply in kernels:
                mine = sum(operations == code for code in codes) > 0
                if len(directions) == 1:
                    mine = mine & (signs == directions[0])
                result = torch.where(mine.view(-1, 1, 1, 1), apply(before, operations, signs), result)
        return _like(result, images)

    def _kernels(self, images: Tensor) -> list[Kernel]:
        """What there is to compute: (indices into `ops`, signs, function of images [b, ...], operations and signs [b]).

        Identity is not among them. A translation is by whole pixels: a copy, one for each direction."""
        channels, height, width = images.shape[1:]
        fill = self._fill(channels)
        dx, dy = self._shift(width), self._shift(height)
        both = (1, -1)
        kernels: list = [(WARPS, both, partial(self._warp, fill=fill))]
        for sign in both:
            kernels.append((("TranslateX",), (sign,), lambda x, op, s, t=sign * dx: translate(x, t, 0, fill)))
            kernels.append((("TranslateY",), (sign,), lambda x, op, s, t=sign * dy: translate(x, 0, t, fill)))
        for name, adjust in ADJUST.items():
            kernels.append(((name,), both, lambda x, op, s, adjust=adjust: adjust(x, 1 + self.strength * s)))
        kernels += [
            (("AutoContrast",), both, lambda x, op, s: autocontrast(x)),
            (("Equalize",), both, lambda x, op, s: equalize(x)),
            (("Posterize",), both, lambda x, op, s: posterize(x, self.bits)),
            (("Solarize",), both, lambda x, op, s: solarize(x, self.threshold)),
        ]
        coded = [([self.ops.index(name) for name in names if name in self.ops], s, f) for names, s, f in kernels]
        return [kernel for kernel in coded if kernel[0]]

    def _warp(self, images: Tensor, operations: Tensor, signs: Tensor, fill: list[float]) -> Tensor:
        """Rotate, ShearX and ShearY: one warp with a matrix per sample."""
        height, width = images.shape[2:]
        code = {name: i for i, name in enumerate(self.ops)}
        rotate, shear_x, shear_y = ((operations == code.get(name, -1)) * signs for name in WARPS)
        sin, cos = rotate * math.sin(self.angle), 1 - rotate.abs() * (1 - math.cos(self.angle))
        # As fractions of the other side, because the grid's coordinates go from -1 to 1 on both.
        shear_x, shear_y = shear_x * (self.shear * height / width), shear_y * (self.shear * width / height)
        # The shears keep the upper and the left edge in place.
        x = cos, shear_x - sin * (height / width), shear_x
        y = shear_y + sin * (width / height), cos, shear_y
        return affine_warp(images, torch.stack([*x, *y], dim=1).view(-1, 2, 3), self.interpolation, fill)

    def _shift(self, size: int) -> int:
        return int(150 / 331 * size * self.m / (self.bins - 1))

    def _fill(self, channels: int) -> list[float]:
        fill = [float(f) for f in self.fill] if isinstance(self.fill, Sequence) else [float(self.fill)]
        if len(fill) not in (1, channels):
            raise ValueError(f"fill={self.fill}: give one number, or one for each of the {channels} channels")
        return fill if any(fill) else []


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


class RandomHorizontalFlip(nn.Module):
    """Mirror each sample with probability `p`, left to right. Identity in `eval()`."""

    def __init__(self, p: float = 0.5, *, generator: torch.Generator | None = None) -> None:
        super().__init__()
        if not 0 <= p <= 1:
            raise ValueError(f"p={p}: a probability is from 0 to 1")
        self.p = p
        self.generator = generator

    def extra_repr(self) -> str:
        return f"p={self.p}"

    def plan(self, batch_size: int, device: torch.device | str | None = None) -> Tensor:
        """[B] bool: which samples to mirror. On `device`, or on the generator's."""
        source = self.generator.device if self.generator is not None else torch.device(device or "cpu")
        return _send(torch.rand(batch_size, generator=self.generator, device=source) < self.p, device or source)

    def forward(self, images: Tensor, plan: Tensor | None = None) -> Tensor:
        if not self.training or len(images) == 0:
            return images
        if plan is None:
            plan = self.plan(len(images), images.device)
        if images.device.type == "cpu" and not torch.compiler.is_compiling():
            flipped = [x.flip(-1) if mirror else x for x, mirror in zip(images, plan.tolist(), strict=True)]
            return _like(torch.stack(flipped), images)
        return torch.where(_send(plan, images.device).view(-1, 1, 1, 1), images.flip(-1), images)


def resize(images: Tensor, size: int | tuple[int, int], *, antialias: bool = True) -> Tensor:
    """Resize a batch to (height, width), or to a square, bilinearly; dtype kept.

    antialias: average over all source pixels an output pixel covers when shrinking, as PIL does.
    uint8 is computed in float32 and rounded to nearest; with `antialias` on a CPU by torch's kernel in whole numbers,
    which may differ by one grey level.
    """
    _check_images(images)
    size = (size, size) if isinstance(size, int) else tuple(size)
    direct = images.dtype is not torch.uint8 or (images.device.type == "cpu" and antialias)
    result = F.interpolate(
        images if direct else images.float(), size, mode="bilinear", antialias=antialias, align_corners=False
    )
    return result if direct else _to_dtype(result.round_(), images.dtype)


def _check_images(images: Tensor) -> None:
    if images.ndim != 4 or images.shape[1] not in (1, 3):
        raise ValueError(f"images must be [B, 3, H, W] or [B, 1, H, W], not {list(images.shape)}")
    if images.dtype is not torch.uint8 and not images.is_floating_point():
        raise TypeError(f"images must be uint8 (0 to 255) or float (0 to 1), not {images.dtype}")


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


def _send(tensor: Tensor, device: torch.device | str) -> Tensor:
    """Without waiting, where the other side can do without: what arrives on the host is read at once."""
    return tensor.to(device, non_blocking=torch.device(device).type != "cpu")


def _piece(values: int) -> int:
    """How many samples of so many values to work on at a time on a CPU: few enough for what lies between two lines of
    an operation to stay in the cache, and the same number for each thread."""
    threads = torch.get_num_threads()
    return threads * max(1, round(CPU_PIECE / (values * threads)))


def _like(result: Tensor, images: Tensor) -> Tensor:
    """In the memory format of `images`."""
    channels_last = images.is_contiguous(memory_format=torch.channels_last) and not images.is_contiguous()
    return result.contiguous(memory_format=torch.channels_last if channels_last else torch.contiguous_format)
