"""A plan applied: the mean of each group's images, the logical OR of its labels.

Each has several ways to the same result. On CUDA one Triton kernel; under `torch.compile` plain indexing, which becomes
one kernel as well; on a CPU, where the sizes of groups can be read, only their members; elsewhere `embedding_bag`.
"""

from __future__ import annotations

import math
from functools import cache
from types import ModuleType
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from gpu_logicmix.augment.finish import Ending
from gpu_logicmix.augment.host import bytes_on_host
from gpu_logicmix.augment.plan import MixPlan, filled, inside
from gpu_logicmix.labels import from_bits, is_unknown, to_bits
from gpu_logicmix.machine import triton_works

# Samples are cut into rows of at most this many numbers, so that a sum stays in the first-level cache while it grows.
_ROW = 4096


@cache
def _triton() -> ModuleType | None:
    """The module with the kernels; None where Triton is not installed."""
    try:
        from gpu_logicmix.augment import kernels
    except ImportError:
        return None
    return kernels if triton_works() else None


def _by_kernel(table: Tensor, dtype: torch.dtype) -> bool:
    if not table.is_cuda or torch.compiler.is_compiling() or _triton() is None:
        return False
    differentiable = table.requires_grad and torch.is_grad_enabled()
    return {table.dtype, dtype} <= set(_triton().DTYPES) and not differentiable


def mix_images(images: Tensor, plan: MixPlan, table: Tensor | None = None, ending: Ending | None = None) -> Tensor:
    """The weighted mean of each group, in the dtype and memory format of `images`; groups of one are copied.

    `table` holds the samples that `plan.index` speaks of, where these are not the images themselves. `ending` is what
    becomes of the mean; its dtype is the result's.
    """
    table = images if table is None else table
    order = memory_order(images)
    rows = table.permute(order)
    shape = (images.shape[0], *rows.shape[1:])
    dtype = images.dtype if ending is None else ending.dtype
    if math.prod(shape[1:]) == 0:
        return images.to(dtype, copy=True)
    inner = math.prod(shape[order.index(1) + 1 :])  # numbers that lie together in one channel
    rows = rows.reshape(rows.shape[0], -1)  # a view, unless `images` has holes in it
    if _by_kernel(rows, dtype):
        _, scale, shift = ending or Ending(dtype)
        mixed = _triton().mix_rows(rows, plan.index, plan.size, plan.weight, scale, shift, inner, dtype)
    else:
        mixed = _mean(rows, filled(plan), _Columns(dtype, ending, inner, rows.shape[1]))
    return mixed.view(shape).permute(inverse(order))


class _Columns:
    """`Ending` for rows of pixels: the numbers of each column."""

    def __init__(self, dtype: torch.dtype, ending: Ending | None, inner: int, length: int) -> None:
        self.dtype, self.scale, self.shift = dtype, None, None
        self.whole = dtype is torch.uint8  # bytes are rounded
        if ending is not None and ending.scale is not None:
            times = length // (inner * ending.scale.shape[0])
            self.scale, self.shift = (t.repeat_interleave(inner).repeat(times) for t in (ending.scale, ending.shift))

    def __call__(self, mean: Tensor, first: int = 0) -> Tensor:
        """The end of the columns from `first` on; `mean` may be overwritten if it has no history."""
        if self.scale is not None:
            part = slice(first, first + mean.shape[1])
            kind = torch.float64 if mean.dtype is torch.float64 else torch.float32
            mean = mean.to(kind) * self.scale[part] + self.shift[part]
        if self.whole:
            # torch has no fast way from floats to bytes on a CPU; its compiler has none from 16 bits.
            mean = mean.round()
            mean = mean.to(torch.int16) if mean.is_cpu and not torch.compiler.is_compiling() else mean
        return mean.to(self.dtype)


def _mean(rows: Tensor, plan: MixPlan, end: _Columns) -> Tensor:
    if torch.compiler.is_compiling():
        return end(_gathered(rows, plan))
    if rows.dtype is torch.uint8:
        if _sizes_are_at_hand(rows) and end.whole and plan.weight is None:
            return bytes_on_host(rows, plan.index, plan.size)
        return _mean_in_float32(rows, plan, end)
    # Half precision is rounded once, at the end, as by the kernel: normalising would enlarge the rounding of the mean.
    if rows.dtype in (torch.float16, torch.bfloat16) and (end.scale is not None or end.dtype is not rows.dtype):
        return _mean_in_float32(rows, plan, end)
    return end(_mean_of_floats(rows, plan))


def _gathered(rows: Tensor, plan: MixPlan) -> Tensor:
    """Plain indexing, which the compiler turns into one kernel together with what comes before and after it."""
    equal_bytes = rows.dtype == torch.uint8 and plan.weight is None
    kind = torch.float64 if rows.dtype == torch.float64 else torch.float32
    weight = inside(plan).to(kind) if equal_bytes else _all_places(plan, kind)
    total = rows[plan.index[:, 0]].to(kind) * weight[:, :1]
    for k in range(1, plan.index.shape[1]):
        total = total + rows[plan.index[:, k]].to(kind) * weight[:, k, None]
    return total / plan.size[:, None] if equal_bytes else total


def _mean_of_floats(rows: Tensor, plan: MixPlan) -> Tensor:
    if plan.weight is None and _sizes_are_at_hand(rows):
        members = inside(plan)
        weight = (1 / plan.size.to(rows.dtype))[:, None].expand_as(members)
        return _sum_rows(rows, _bags(rows, plan.index, weight, members))
    return _sum_rows(rows, _bags(rows, plan.index, _all_places(plan, rows.dtype), None))


def _all_places(plan: MixPlan, dtype: torch.dtype) -> Tensor:
    """[B, k_max] weights for reading every place, members or not.

    Places past the size of a group repeat the sample itself, so its share is split over them: no weight is 0, which
    would turn an infinite pixel into NaN. Halves, smallest first, add up without rounding, so a group of one comes out
    bit for bit."""
    if plan.weight is not None:
        return plan.weight.to(dtype)
    k_max = plan.index.shape[1]
    halves = torch.exp2(torch.arange(-k_max, 0, device=plan.size.device).to(dtype))
    first = torch.exp2((plan.size - k_max).to(dtype))[:, None]
    weight = torch.cat([first, torch.where(inside(plan), 1.0, halves)[:, 1:]], dim=1)
    return weight / plan.size[:, None]


def _mean_in_float32(rows: Tensor, plan: MixPlan, end: _Columns) -> Tensor:
    """Of bytes and half precision; in columns, to keep the float copy small."""
    members = inside(plan)
    at_hand = _sizes_are_at_hand(rows)
    # Where all shares are equal, the sum of bytes is exact and only the division rounds. It reads floats at places
    # without weight only where these are left out: they may be infinite.
    summed = plan.weight is None and (at_hand or rows.dtype is torch.uint8)
    weight = members.float() if summed else _all_places(plan, torch.float32)
    out = rows.new_empty(plan.index.shape[0], rows.shape[1], dtype=end.dtype)
    pieces = 8 if rows.is_cuda else max(8, rows.numel() >> 19)  # few kernels on a GPU, 2 MB for the cache of a CPU
    width = -(-rows.shape[1] // pieces // _ROW) * _ROW if rows.shape[1] > 8 * _ROW else -(-rows.shape[1] // 8)
    bags = None
    for first in range(0, rows.shape[1], width):
        piece = rows[:, first : first + width]
        if bags is None or piece.shape[1] != width:
            bags = _bags(piece, plan.index, weight, members if at_hand else None)
        total = _sum_rows(piece.float(), bags)
        if summed:
            total /= plan.size[:, None]
        out[:, first : first + width] = end(total, first)
    return out


def _sizes_are_at_hand(rows: Tensor) -> bool:
    """True on the CPU, run as written: there, reading only the members of each group waits for nothing."""
    return rows.is_cpu and type(rows) is Tensor and not rows.requires_grad and not torch.compiler.is_compiling()


class _Bags(NamedTuple):
    """The arguments of `embedding_bag` that sum rows."""

    index: Tensor
    weight: Tensor
    start: Tensor | None
    cuts: int  # how many rows of the table make one sample


def _bags(rows: Tensor, index: Tensor, weight: Tensor, members: Tensor | None) -> _Bags:
    """For each sample i the sum of weight[i, k] * rows[index[i, k]] over k.

    Samples are cut into short rows, so that a sum stays in the first-level cache while it grows. `members` leaves out
    places, for which their number must be known on the host. Without it all are read, which costs little: what is read
    again is in that cache.
    """
    cuts = _cuts(rows.shape[1])
    index = (index[:, None] * cuts + torch.arange(cuts, device=index.device)[:, None]).flatten(0, 1)
    weight = weight.repeat_interleave(cuts, dim=0)
    if members is None:
        return _Bags(index, weight, None, cuts)
    members = members.repeat_interleave(cuts, dim=0)
    size = members.sum(1)
    return _Bags(index[members], weight[members], size.cumsum(0) - size, cuts)


def _sum_rows(rows: Tensor, bags: _Bags) -> Tensor:
    """One pass and no temporary: every device has `embedding_bag`; half precision it adds up in float32."""
    table = rows.reshape(-1, rows.shape[1] // bags.cuts)
    weight = bags.weight.to(rows.dtype)
    return F.embedding_bag(bags.index, table, bags.start, mode="sum", per_sample_weights=weight).view(-1, rows.shape[1])


def _cuts(length: int) -> int:
    """Into how many equal rows to cut a sample: as few as give rows of at most _ROW; 1 where none come out even."""
    for cuts in range(-(-length // _ROW), length // 256 + 1):
        if length % cuts == 0:
            return cuts
    return 1


def or_targets(targets: Tensor, plan: MixPlan, unknown: float = -1, assume: str = "unknown") -> Tensor:
    """`logic_or` over each group, as [B, C] in the dtype of `targets`.

    assume: how unknown labels count: "unknown", "absent-if-mixed" or "absent". Labels that are neither 0, 1 nor unknown
    are never taken as absent.
    """
    categories = targets.shape[1]
    if categories == 0:
        return targets.new_empty(plan.index.shape[0], 0)
    if targets.is_cuda and not torch.compiler.is_compiling() and _exact(unknown) and _triton() is not None:
        mode = ("unknown", "absent-if-mixed", "absent").index(assume)
        return _triton().or_rows(targets, plan.index, plan.size, float(unknown), mode)
    plan = filled(plan)
    if assume == "absent":
        targets = targets.masked_fill(is_unknown(targets, unknown), 0)
    labels = _or_groups(targets, plan.index, unknown)
    if assume != "absent-if-mixed":
        return labels
    assumed = _or_groups(targets.masked_fill(is_unknown(targets, unknown), 0), plan.index, unknown)
    return torch.where(plan.mixed[:, None], assumed, labels)


def _exact(unknown: float) -> bool:
    """Whether float32, in which the kernel is told it, holds it: all whole numbers up to 2^24, and NaN."""
    return unknown != unknown or (unknown % 1 == 0 and abs(unknown) <= 2**24)


def _or_groups(targets: Tensor, index: Tensor, unknown: float) -> Tensor:
    """Places past the size of a group repeat the sample itself, which leaves an OR as it is."""
    if torch.compiler.is_compiling():  # it fuses plain indexing, and would stop at the views of words
        return from_bits(_or_rows(to_bits(targets), index), targets.dtype, unknown)
    categories = targets.shape[1]
    spare = -categories % 8  # words hold eight labels each
    if not _sizes_are_at_hand(targets):
        words = F.pad(to_bits(targets).contiguous(), (0, spare)).view(torch.int64)
        return from_bits(_or_rows(words, index).view(torch.int8)[:, :categories], targets.dtype, unknown)
    padded = torch.empty(len(targets), categories + spare, dtype=torch.int8)
    to_bits(targets, out=padded[:, :categories])
    words, labels = padded.view(torch.int64), targets.new_empty(len(index), categories)
    # In blocks of samples whose labels fit into the cache: it matters with thousands of categories.
    rows = max(1, 2**17 // words.shape[1])
    for part, out in zip(index.split(rows), labels.split(rows), strict=True):
        joined = _or_rows(words, part).view(torch.int8)[:, :categories]
        out.copy_(joined.neg() if unknown == -1 else from_bits(joined, targets.dtype, unknown))
    return labels


def _or_rows(words: Tensor, index: Tensor) -> Tensor:
    joined = words.index_select(0, index[:, 0])
    for partner in index.unbind(1)[1:]:
        joined |= words.index_select(0, partner)
    return joined


def memory_order(tensor: Tensor) -> list[int]:
    """The dimensions after the first as they lie in memory, so that one permute undoes channels_last."""
    return [0, *sorted(range(1, tensor.ndim), key=tensor.stride, reverse=True)]


def inverse(order: list[int]) -> list[int]:
    return sorted(range(len(order)), key=order.__getitem__)
