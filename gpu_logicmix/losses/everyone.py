"""The batch of all processes, for losses and methods that rank labels, take means, or look at pairs of samples.

Rows are in the order that one process with the whole batch has them in: its row `i` is row `i // world` of process
`i % world`, as the loader deals them out. A method that computes on these rows, on every process alike, computes what
one process would, and its state is the same everywhere. With one process everything here is the identity.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def world() -> tuple[int, int]:
    """Rank and number of processes."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return 0, 1


def total(numbers: Tensor) -> Tensor:
    """The sum over all processes, without gradient."""
    numbers = numbers.detach().clone()
    if world()[1] > 1:
        dist.all_reduce(numbers)
    return numbers


def summed(numbers: Tensor) -> Tensor:
    """The sum over all processes, with gradients."""
    return _Sum.apply(numbers) if world()[1] > 1 else numbers


class Everyone:
    """Rows of all processes. A process with fewer rows than others, where images could not be read, pads them.

    capacity: rows of a process that take part, the same number on all; `agree` finds it.
    """

    def __init__(self, rows: int, capacity: int, device: torch.device) -> None:
        self.rank, self.world = world()
        self.rows, self.capacity = rows, capacity if self.world > 1 else rows
        here = torch.arange(self.capacity, device=device) < rows
        self.valid = self.all(here)  # [G] bool: rows that are samples
        self.place = self.valid.cumsum(0) - 1  # [G]: of a sample among the samples
        self.own = torch.arange(min(rows, self.capacity), device=device) * self.world + self.rank  # ours among all

    @staticmethod
    def agree(rows: int, device: torch.device) -> int:
        """A capacity for all processes and all steps: a power of two, so that it does not depend on a few missing
        images in the step it is found in. Waits for the device."""
        if world()[1] == 1:
            return rows
        most = torch.tensor(rows, device=device)
        dist.all_reduce(most, dist.ReduceOp.MAX)
        return 1 << max(int(most) - 1, 0).bit_length()

    def all(self, rows: Tensor, fill: float = 0) -> Tensor:
        """[rows, ...] of this process -> [G, ...] of all, with gradients; padded with `fill`."""
        if self.world == 1:
            return rows
        rows = rows[: self.capacity]
        missing = self.capacity - len(rows)
        if missing:
            rows = torch.cat((rows, rows.new_full((missing, *rows.shape[1:]), fill)))
        return _Gather.apply(rows)

    def reversed(self) -> Tensor:
        """[rows]: for each of our rows, the row among all that stands as far from the end as ours from the start."""
        order = torch.argsort((~self.valid).to(torch.uint8), stable=True)  # samples first, in their order
        return order[(self.valid.sum() - 1 - self.place[self.own]).clamp(min=0)]


class _Gather(torch.autograd.Function):
    """Rows of all processes, interleaved. A row's gradient is the sum of what all processes want of it."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor) -> Tensor:
        ctx.rank, ctx.world = world()
        given = rows.to(torch.uint8) if rows.dtype is torch.bool else rows.contiguous()
        parts = [torch.empty_like(given) for _ in range(ctx.world)]
        dist.all_gather(parts, given)
        return torch.stack(parts, 1).flatten(0, 1).to(rows.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        gradient = gradient.contiguous().clone()
        dist.all_reduce(gradient)
        return gradient.unflatten(0, (-1, ctx.world))[:, ctx.rank]


class _Sum(torch.autograd.Function):
    """A process's part has a gradient from what all processes make of the sum."""

    @staticmethod
    def forward(ctx: Any, numbers: Tensor) -> Tensor:
        return total(numbers)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return total(gradient)


def random_integers(number: Tensor, seed: Tensor) -> Tensor:
    """int64, each equally likely, a function of `number` (int64, any shape) and `seed` (0-d int64) alone: the same on
    every process and device and after a resume. The generator is SplitMix64 (Steele, Lea and Flood, 2014)."""
    return _scrambled(_scrambled(seed * _GOLDEN) + (number + 1) * _GOLDEN)


_GOLDEN = -7046029254386353131  # 0x9E3779B97F4A7C15; products wrap around


def _scrambled(x: Tensor) -> Tensor:
    for bits, factor in ((30, -4658895280553007687), (27, -7723592293110705685)):
        x = (x ^ _shifted(x, bits)) * factor
    return x ^ _shifted(x, 31)


def _shifted(x: Tensor, bits: int) -> Tensor:
    return (x >> bits) & ((1 << (64 - bits)) - 1)  # `>>` alone would repeat the sign
