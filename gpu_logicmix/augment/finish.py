"""What can follow the mix in the same pass: bytes to 0..1, normalisation, another dtype."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

FLOATING = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


class Ending(NamedTuple):
    """pixel * scale[channel] + shift[channel], as `dtype`."""

    dtype: torch.dtype
    scale: Tensor | None = None  # [channels] float32; None: as they are
    shift: Tensor | None = None


def _mean_and_std(normalize: tuple) -> tuple[tuple[float, ...], tuple[float, ...]]:
    if isinstance(normalize, Sequence) and len(normalize) == 2:
        with contextlib.suppress(TypeError, ValueError):  # numbers in place of lists, words in place of numbers
            mean, std = (tuple(float(x) for x in part) for part in normalize)
            return mean, std
    raise ValueError(f"normalize={normalize!r}: must be (mean, std), one number each per channel, as ([0.5], [0.25])")


class Finish:
    """normalize: (mean, std) per channel, of images in 0..1; out_dtype: the dtype that comes out.

    uint8 images that come out as floats are divided by 255; without `out_dtype`, normalised ones come out as float32.
    """

    def __init__(self, normalize: tuple | None = None, out_dtype: torch.dtype | None = None) -> None:
        if out_dtype is not None and out_dtype not in (*FLOATING, torch.uint8):
            raise TypeError(f"out_dtype={out_dtype}: must be a floating type, or uint8 for uint8 images")
        if normalize is not None and out_dtype is torch.uint8:
            raise ValueError("out_dtype=torch.uint8: normalised images do not fit into bytes; use a floating type")
        self.normalize, self.out_dtype = None, out_dtype
        if normalize is not None:
            mean, std = _mean_and_std(normalize)
            if len(mean) != len(std) or not mean or not all(s > 0 and math.isfinite(s) for s in std):
                raise ValueError(f"normalize={normalize!r}: mean and std must be as many, every std above 0")
            self.normalize = mean, std
        self._made: dict[tuple, tuple[Tensor, Tensor]] = {}

    @property
    def idle(self) -> bool:
        """Whether no batch would change, whatever it is."""
        return self.normalize is None and self.out_dtype is None

    def of(self, images: Tensor) -> Ending | None:
        """For a batch [B, channels, ...]; None: nothing to do."""
        bytes_in = images.dtype is torch.uint8
        dtype = self.out_dtype or (torch.float32 if bytes_in and self.normalize else images.dtype)
        if dtype is torch.uint8 and not bytes_in:
            raise TypeError(f"out_dtype=torch.uint8: images are {images.dtype}; only uint8 images can stay uint8")
        if self.normalize is None and (dtype is images.dtype or not bytes_in):
            return None if dtype is images.dtype else Ending(dtype)
        mean, std = self.normalize or ((0.0,), (1.0,))
        if len(mean) not in (1, images.shape[1]):
            raise ValueError(f"normalize: {len(mean)} numbers, but images have {images.shape[1]} channels")
        return Ending(dtype, *self._constants(mean, std, 255.0 if bytes_in else 1.0, images.device))

    def _constants(self, mean: tuple, std: tuple, white: float, device: torch.device) -> tuple[Tensor, Tensor]:
        """Made once per device: a copy to a GPU in every step would be one too many."""
        made = self._made.get((white, device))
        if made is None or torch.compiler.is_compiling():
            scale = torch.tensor([1 / (white * s) for s in std], dtype=torch.float32, device=device)
            shift = torch.tensor([-m / s for m, s in zip(mean, std, strict=True)], dtype=torch.float32, device=device)
            made = scale, shift
            if not torch.compiler.is_compiling() and type(scale) is Tensor:
                self._made[white, device] = made
        return made
