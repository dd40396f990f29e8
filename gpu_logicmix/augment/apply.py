"""A plan applied: the mean of each group's images, the logical OR of its labels."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from gpu_logicmix.augment.plan import MixPlan, inside
from gpu_logicmix.labels import from_bits, to_bits

# Samples are cut into rows of at most this many numbers, so that a sum stays in the first-level cache while it grows.
_ROW = 4096


def mix_images(images: Tensor, plan: MixPlan, table: Tensor | None = None) -> Tensor:
    """The weighted mean of each group, in the dtype and memory format of `images`; groups of one are copied.

    `table` holds the samples that `plan.index` speaks of, where these are not the images themselves.
    """
    table = images if table is None else table
    order = memory_order(images)
    rows = table.permute(order)
    shape = (images.shape[0], *rows.shape[1:])
    rows = rows.reshape(rows.shape[0], -1)  # a view, unless `images` has holes in it
    mean = _mean_of_bytes if rows.dtype == torch.uint8 else _mean_of_floats
    return mean(rows, plan).view(shape).permute(inverse(order))


def _mean_of_floats(rows: Tensor, plan: MixPlan) -> Tensor:
    """Places past the size of a group repeat the sample itself, so its share is split over them: no weight is 0, which
    would turn an infinite pixel into NaN. Halves, smallest first, add up without rounding, so a group of one comes out
    bit for bit."""
    members = None
    if plan.weight is not None:
        weight = plan.weight
    elif _sizes_are_at_hand(rows):
        members = inside(plan)
        weight = (1 / plan.size.to(rows.dtype))[:, None].expand_as(members)
    else:
        k_max = plan.index.shape[1]
        halves = torch.exp2(torch.arange(-k_max, 0, device=rows.device).to(rows.dtype))
        weight = torch.where(inside(plan), 1.0, halves)
        weight[:, 0] = torch.exp2((plan.size - k_max).to(rows.dtype))
        weight = weight / plan.size[:, None]
    return _sum_rows(rows, _bags(rows, plan.index, weight, members))


def _mean_of_bytes(rows: Tensor, plan: MixPlan) -> Tensor:
    """Rounded to nearest, halves to even. In columns, to keep the float copy small."""
    members = inside(plan)
    # Where all shares are equal, the sum of bytes is exact and only the division rounds.
    weight = members.float() if plan.weight is None else plan.weight
    out = rows.new_empty(plan.index.shape[0], rows.shape[1])
    pieces = 8 if rows.is_cuda else max(8, rows.numel() >> 19)  # few kernels on a GPU, 2 MB for the cache of a CPU
    width = -(-rows.shape[1] // pieces // _ROW) * _ROW if rows.shape[1] > 8 * _ROW else -(-rows.shape[1] // 8)
    bags = None
    for piece, mean in zip(rows.split(width, dim=1), out.split(width, dim=1), strict=True):
        if bags is None or piece.shape[1] != width:
            bags = _bags(piece, plan.index, weight.float(), members if _sizes_are_at_hand(rows) else None)
        total = _sum_rows(piece.float(), bags)
        if plan.weight is None:
            total /= plan.size[:, None]
        mean.copy_(total.round_().to(torch.int16))  # torch has no fast way from floats to bytes on the CPU
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


def or_targets(targets: Tensor, plan: MixPlan, unknown: float = -1) -> Tensor:
    """`logic_or` over each group. Places past its size repeat the sample itself, which OR does not mind."""
    categories = targets.shape[1]
    words = F.pad(to_bits(targets, unknown), (0, -categories % 8)).view(torch.int64)  # eight labels each
    # On the CPU so many samples at a time that their labels stay in its cache; that matters to thousands of categories.
    rows = len(plan.index) if words.is_cuda else max(1, 2**17 // max(1, words.shape[1]))
    joined = []
    for index in plan.index.split(rows):
        joined.append(words.index_select(0, index[:, 0]))
        for partner in index.unbind(1)[1:]:
            joined[-1] |= words.index_select(0, partner)
    return from_bits(torch.cat(joined).view(torch.int8)[:, :categories], targets.dtype, unknown)


def memory_order(tensor: Tensor) -> list[int]:
    """The dimensions after the first as they lie in memory, so that one permute undoes channels_last."""
    return [0, *sorted(range(1, tensor.ndim), key=tensor.stride, reverse=True)]


def inverse(order: list[int]) -> list[int]:
    return sorted(range(len(order)), key=order.__getitem__)
