"""The mean of bytes on a CPU, without a float copy of the batch."""

from __future__ import annotations

import torch
from torch import Tensor

# Bytes worked on at a time: few calls for small images, and what lies between two lines stays in the cache.
_AT_ONCE = 2**18


def bytes_on_host(rows: Tensor, index: Tensor, size: Tensor) -> Tensor:
    """[N, L] bytes -> [B, L]: the mean of rows[index[i, :size[i]]], rounded to nearest, halves to even.

    Samples with groups of the same size are taken together: pairs eight bytes at a time in whole numbers, others
    through sums of 16 bits.
    """
    length = rows.shape[1]
    out = rows.new_empty(len(index), length)
    sizes, members = size.tolist(), index.tolist()
    by_size: dict[int, list[int]] = {}
    for sample, k in enumerate(sizes):
        by_size.setdefault(k, []).append(sample)
    at_once = max(1, _AT_ONCE // length)
    words = length % 8 == 0 and rows.stride(0) % 8 == 0 and rows.storage_offset() % 8 == 0 and rows.stride(1) == 1
    for k, samples in by_size.items():
        for first in range(0, len(samples), at_once):
            part = samples[first : first + at_once]
            if len(part) == 1:
                places = [rows[members[part[0]][j]] for j in range(k)]
            else:
                chosen = index[part]
                places = [rows.index_select(0, chosen[:, j]) for j in range(k)]
            target = out[part[0]] if len(part) == 1 else torch.empty_like(places[0])
            if k == 1:
                target.copy_(places[0])
            elif k == 2 and words:
                _mean_of_two(*(place.view(torch.int64) for place in places), target.view(torch.int64))
            else:
                _mean_of_many(places, target)
            if len(part) > 1:
                out[part] = target
    return out


def _mean_of_two(a: Tensor, b: Tensor, out: Tensor) -> None:
    """Eight bytes in each whole number: a + b = 2 (a & b) + (a ^ b), so the half of it needs no ninth bit."""
    differ = a ^ b
    mean = (differ >> 1).bitwise_and_(0x7F7F7F7F7F7F7F7F).add_(a & b)  # rounded down
    # Where the sum is odd, up to the next even number if this one is odd.
    torch.add(mean, differ.bitwise_and_(mean).bitwise_and_(0x0101010101010101), out=out)


def _mean_of_many(places: list[Tensor], out: Tensor) -> None:
    total = places[0].to(torch.int16 if len(places) <= 128 else torch.int32)
    for place in places[1:]:
        total += place.to(total.dtype)
    # Divided, not multiplied by 1 / k: a half must come out as one. Through int16, as torch has no fast way from floats
    # to bytes.
    out.copy_(total.float().div_(len(places)).round_().to(torch.int16))
