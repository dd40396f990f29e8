"""The kernels of RandAugment as operators of torch, so that they run on fake tensors too; the rounds of a plan.

Only eager code calls them: under `torch.compile` RandAugment is the dense form in plain torch.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from gpu_logicmix.augment.augment_kernels import apply_kernel, statistics_kernel, tables_kernel
from gpu_logicmix.augment.kernels import on_device

# Fixed, because trying out others is not allowed while a CUDA graph is captured. Four bytes a thread in `apply`: a warp
# then reads 128 in a row, and needs half of the registers that it would with eight (bench/aot.py).
BLOCK, WARPS = 512, 4
CHUNK = 8192  # pixels whose statistics one program gathers before it adds them to those of the sample
PIXELS_AT_MOST = 2**23  # the sum of their grey levels fits 32 bits


class Magnitudes(NamedTuple):
    """The numbers that the operations take; the first six are whole."""

    codes: int  # for each index that a plan can hold its operation, 4 bits each
    keep: int  # Posterize: the bits that stay
    level: int  # Solarize: the first that is inverted
    dx: int  # Translate
    dy: int
    nearest: int  # interpolation of warps; 0: bilinear
    strength: float
    sin: float
    versine: float  # 1 - cos
    shear_x: float  # in the coordinates of the grid, which go from -1 to 1 on both sides
    shear_y: float
    aspect: float  # height / width
    fill: tuple[float, ...] = ()  # of each channel; () is 0


def _layout(images: Tensor) -> tuple[int, int, int, bool]:
    """Channels, height, width, and whether the channels of a pixel lie together."""
    channels, height, width = images.shape[1:]
    return channels, height, width, channels > 1 and not images.is_contiguous()


def launch_statistics(images: Tensor, operations: Tensor, codes: int, stats: Tensor) -> None:
    channels, height, width, last = _layout(images)
    pixels = height * width
    grid = (triton.cdiv(pixels, CHUNK) * len(images),)
    step = operations.stride(0)
    with on_device(images.device):
        statistics_kernel[grid](
            images, operations, stats, pixels, pixels * channels, step, codes,
            CHANNELS=channels, LAST=last, CHUNK=CHUNK, BLOCK=2 * BLOCK, num_warps=WARPS, enable_fp_fusion=False,
        )  # fmt: skip


def launch_tables(
    stats: Tensor, operations: Tensor, signs: Tensor, height: int, width: int, whole: list[int], strength: float
) -> Tensor:
    samples, channels = len(stats), stats.shape[1] - 1
    tables = torch.empty(samples, channels, 256, dtype=torch.uint8, device=stats.device)
    with on_device(stats.device):
        tables_kernel[samples, channels](
            stats, operations, signs, tables, height, width, operations.stride(0), *whole[:3], strength,
            CHANNELS=channels, num_warps=WARPS, enable_fp_fusion=False,
        )  # fmt: skip
    return tables


def launch_apply(
    images: Tensor,
    operations: Tensor,
    signs: Tensor,
    mirror: Tensor | None,
    tables: Tensor,
    whole: list[int],
    numbers: list[float],
) -> Tensor:
    channels, height, width, last = _layout(images)
    row = height * width * channels
    out = torch.empty_like(images)
    codes, _, _, dx, dy, nearest = whole
    *rest, fill_0, fill_1, fill_2 = numbers
    with on_device(images.device):
        apply_kernel[(triton.cdiv(row, BLOCK) * len(images),)](
            images, operations, signs, images if mirror is None else mirror, tables, out,
            height, width, row, operations.stride(0), codes, dx, dy, *rest, fill_0, fill_1, fill_2,
            MIRROR=mirror is not None, NEAREST=bool(nearest), CHANNELS=channels, LAST=last, EVEN=row % BLOCK == 0,
            BLOCK=BLOCK, num_warps=WARPS, enable_fp_fusion=False,
        )  # fmt: skip
    return out


statistics = torch.library.custom_op("gpu_logicmix::augment_statistics", launch_statistics, mutates_args=("stats",))
tables = torch.library.custom_op("gpu_logicmix::augment_tables", launch_tables, mutates_args=())
apply = torch.library.custom_op("gpu_logicmix::augment_apply", launch_apply, mutates_args=())


@statistics.register_fake
def _(images: Tensor, *_: Any) -> None:
    return None


@tables.register_fake
def _(stats: Tensor, *_: Any) -> Tensor:
    return stats.new_empty(stats.shape[0], stats.shape[1] - 1, 256, dtype=torch.uint8)


@apply.register_fake
def _(images: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(images)


def takes(images: Tensor) -> bool:
    """Whether these kernels can work on a batch [B, 1 or 3, H, W]."""
    return images.dtype is torch.uint8 and 0 < images.shape[2] * images.shape[3] <= PIXELS_AT_MOST


def augmented(
    images: Tensor, operations: Tensor, signs: Tensor, mirror: Tensor | None, magnitudes: Magnitudes
) -> Tensor:
    """uint8 images [B, 1 or 3, H, W] through the rounds of a plan [B, N]; before the first one, those of `mirror` [B]
    are mirrored. Memory format kept. All on one device."""
    if mirror is not None and not operations.shape[1]:
        return mirrored(images, mirror)
    images = _dense(images)
    channels, height, width = images.shape[1:]
    whole, fill = list(magnitudes[:6]), magnitudes.fill or (0.0,)
    numbers = [*magnitudes[6:12], *(fill * 3 if len(fill) == 1 else fill)]
    operations, signs, rounds = operations.contiguous(), signs.contiguous(), operations.shape[1]
    mirror = None if mirror is None else _flags(mirror)
    stats = torch.zeros(rounds, len(images), channels + 1, 256, dtype=torch.int32, device=images.device)
    for n in range(rounds):
        operation, sign = operations[:, n], signs[:, n]
        statistics(images, operation, magnitudes.codes, stats[n])
        levels = tables(stats[n], operation, sign, height, width, whole, magnitudes.strength)
        images = apply(images, operation, sign, None if n else mirror, levels, whole, numbers)
    return images


def mirrored(images: Tensor, mirror: Tensor) -> Tensor:
    """One pass, with the codes that make every operation Identity: nothing but `mirror` is read of a plan."""
    flags = _flags(mirror)
    return apply(_dense(images), flags, flags, flags, flags, [0] * 6, [0.0] * 9)


def _flags(mirror: Tensor) -> Tensor:
    """A byte for each sample."""
    return mirror.bool().contiguous().view(torch.uint8)


def _dense(images: Tensor) -> Tensor:
    return images if images.is_contiguous(memory_format=torch.channels_last) else images.contiguous()
