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
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from gpu_logicmix.augment.pixel_ops import (
    ADJUST,
    affine_warp,
    autocontrast,
    check_images,
    check_range,
    equalize,
    like,
    posterize,
    solarize,
    translate,
)
from gpu_logicmix.augment.plan import random_source
from gpu_logicmix.machine import sent, triton_works

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


@cache
def _triton() -> Any:
    """The module that launches the kernels; None where Triton is not installed."""
    try:
        from gpu_logicmix.augment import augment_launch
    except ImportError:
        return None
    return augment_launch if triton_works() else None


def _by_kernel(images: Tensor) -> bool:
    on_gpu = images.is_cuda and not torch.compiler.is_compiling()
    return on_gpu and _triton() is not None and _triton().takes(images)


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
        uint8, 0 to 1 for float). None, torchvision's default, is 0.
    ops: names out of `OPERATIONS` to draw from, all 14 by default.
    generator: where the draws come from; torch's global one by default.

    Identity in `eval()`. Keeps dtype and memory format, never writes into its input, is not differentiable.
    Float images are cut to 0 and 1. Far outside (0 to 255, or normalised) they are refused on a CPU; on other devices,
    where the check would have to wait, they are not looked at.

    >>> augment = RandAugment(n=2, m=9)
    >>> augment(torch.zeros(4, 3, 8, 8, dtype=torch.uint8)).shape
    torch.Size([4, 3, 8, 8])
    """

    def __init__(
        self,
        n: int = 2,
        m: int = 9,
        *,
        bins: int = 31,
        interpolation: str = "bilinear",
        fill: float | Sequence[float] | None = 0,
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
        self.interpolation, self.fill, self.ops = interpolation, 0 if fill is None else fill, tuple(ops)
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

        uint8 images on CUDA go through three Triton kernels a round, whose plan is on the device; one on the CPU is
        copied there. Elsewhere, a plan on the CPU (the default) can be read without waiting for the device, so
        `forward` computes each operation for the samples that drew it. A plan on the images' own device is never read:
        every operation is computed for every sample and the right one is kept. The pixels are the same.
        """
        source = self.generator.device if self.generator is not None else torch.device(device or "cpu")
        draw = partial(torch.randint, size=(batch_size, self.n), device=source, **random_source(self.generator))
        operations, signs = draw(len(self.ops)), draw(2) * 2 - 1
        return AugmentPlan(sent(operations, device or source), sent(signs, device or source))

    @torch.no_grad()
    def forward(self, images: Tensor, plan: AugmentPlan | None = None, mirror: Tensor | None = None) -> Tensor:
        """mirror: [B] bool, which samples to mirror first, left to right; in the same pass, where kernels do it."""
        check_images(images)
        if not self.training or images.numel() == 0:
            return images
        if mirror is not None:
            _check_mirror(images, mirror, "mirror")
        by_kernel = _by_kernel(images)
        if mirror is not None and not (by_kernel and self.n):
            images = mirrored(images, mirror)
        if self.n == 0:
            return images
        check_range(images)
        compiling = torch.compiler.is_compiling()
        if plan is None:
            plan = self.plan(images.shape[0], images.device if compiling or by_kernel else None)
        shapes = [list(tensor.shape) for tensor in plan]
        if shapes[0] != shapes[1] or len(shapes[0]) != 2 or shapes[0][0] != images.shape[0]:
            expected = f"for {images.shape[0]} images both are [{images.shape[0]}, N]"
            raise ValueError(f"plan: operations {shapes[0]} and signs {shapes[1]}; {expected}")
        if by_kernel:
            operations, signs = (sent(tensor, images.device) for tensor in plan)
            mirror = None if mirror is None else sent(mirror, images.device)
            return _triton().augmented(images, operations, signs, mirror, self._magnitudes(images))
        if plan.operations.device.type == "cpu" and not compiling:
            return self._grouped(images, plan)
        return self._dense(images, plan)

    def _grouped(self, images: Tensor, plan: AugmentPlan) -> Tensor:
        """Each operation for the samples that drew it."""
        kernels = self._kernels(images)
        which = {(code, s): k for k, (codes, signs, _) in enumerate(kernels) for code in codes for s in signs}
        on_cpu = images.device.type == "cpu"
        piece = _piece(images[0].numel()) if on_cpu else images.shape[0]
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
            table = sent(table, images.device)
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
            operations, signs = sent(operations, images.device), sent(signs, images.device)
            before = result
            for codes, directions, apply in kernels:
                mine = sum(operations == code for code in codes) > 0
                if len(directions) == 1:
                    mine = mine & (signs == directions[0])
                result = torch.where(mine.view(-1, 1, 1, 1), apply(before, operations, signs), result)
        return like(result, images)

    def _kernels(self, images: Tensor) -> list[Kernel]:
        """What there is to compute: (indices into `ops`, signs, function of images [b, ...], operations and signs [b]).

        Identity is not among them. A translation is by whole pixels: a copy, one for each direction."""
        channels, height, width = images.shape[1:]
        fill = self._fill(channels, images.dtype)
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

    def _magnitudes(self, images: Tensor) -> Any:
        """What the kernels on a GPU need to know."""
        channels, height, width = images.shape[1:]
        names = ["Identity" if name == "Color" and channels == 1 else name for name in self.ops]
        return _triton().Magnitudes(
            codes=sum(OPERATIONS.index(name) << 4 * place for place, name in enumerate(names)),
            keep=256 - 2 ** (8 - self.bits),
            level=math.ceil(self.threshold),
            dx=self._shift(width),
            dy=self._shift(height),
            nearest=int(self.interpolation == "nearest"),
            strength=self.strength,
            sin=math.sin(self.angle),
            versine=1 - math.cos(self.angle),
            shear_x=self.shear * height / width,
            shear_y=self.shear * width / height,
            aspect=height / width,
            fill=tuple(self._fill(channels, images.dtype)),
        )

    def _shift(self, size: int) -> int:
        return int(150 / 331 * size * self.m / (self.bins - 1))

    def _fill(self, channels: int, dtype: torch.dtype) -> list[float]:
        fill = [float(f) for f in self.fill] if isinstance(self.fill, Sequence) else [float(self.fill)]
        if len(fill) not in (1, channels):
            raise ValueError(f"fill={self.fill}: give one number, or one for each of the {channels} channels")
        white = 255 if dtype is torch.uint8 else 1
        if not all(0 <= level <= white for level in fill):
            kind = "uint8" if dtype is torch.uint8 else "float"
            raise ValueError(f"fill={self.fill}: must be in the range of the images, 0 to {white} for {kind} images")
        return fill if any(fill) else []


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
        return sent(torch.rand(batch_size, device=source, **random_source(self.generator)) < self.p, device or source)

    def forward(self, images: Tensor, plan: Tensor | None = None) -> Tensor:
        if not self.training or images.numel() == 0:
            return images
        if plan is None:
            plan = self.plan(images.shape[0], images.device)
        return mirrored(images, plan, "plan")


def mirrored(images: Tensor, mirror: Tensor, name: str = "mirror") -> Tensor:
    """Those of `mirror` [B] left to right, as a new tensor. `name` is the caller's for it."""
    _check_mirror(images, mirror, name)
    if images.device.type == "cpu" and not torch.compiler.is_compiling():
        flipped = [x.flip(-1) if flip else x for x, flip in zip(images, mirror.tolist(), strict=True)]
        return like(torch.stack(flipped), images)
    mirror = sent(mirror, images.device)
    if images.ndim == 4 and images.shape[1] in (1, 3) and _by_kernel(images):
        return _triton().mirrored(images, mirror)
    return torch.where(mirror.view(-1, *[1] * (images.ndim - 1)), images.flip(-1), images)


def _check_mirror(images: Tensor, mirror: Tensor, name: str) -> None:
    """A kernel would read past the end of a short one."""
    if mirror.ndim != 1 or mirror.shape[0] != images.shape[0]:
        count = images.shape[0]
        raise ValueError(f"{name} has shape {tuple(mirror.shape)}: for {count} images it must be [{count}]")


def _piece(values: int) -> int:
    """How many samples of so many values to work on at a time on a CPU: few enough for what lies between two lines of
    an operation to stay in the cache, and the same number for each thread."""
    threads = torch.get_num_threads()
    return threads * max(1, round(CPU_PIECE / (values * threads)))
