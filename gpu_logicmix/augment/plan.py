"""Who is mixed with whom: the plan, drawn apart from the arithmetic, so that it can be kept, replayed and tested."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class MixPlan(NamedTuple):
    """Who is mixed with whom: sample i with `index[i, :size[i]]`, of which the first is sample i itself.

    Indices past the end of the batch stand for the bank (see `GPULogicMix`): `batch_size` is the sample seen last
    before this batch, `batch_size + 1` the one before it, and so on.
    """

    index: Tensor  # [B, k_max] int64; places past `size` repeat the sample itself
    size: Tensor  # [B] int64: 1 where a sample stays as it is
    mixed: Tensor  # [B] bool: size > 1
    weight: Tensor | None = None  # [B, k_max] float32: the share of each image, 1 in all; None: 1 / size each


def draw_groups(batch_size: int, k: int, pool: int | Tensor, device=None, generator=None) -> Tensor:
    """[B, k]: i itself, then k - 1 others out of `pool` samples: distinct, all orders equally likely, O(B * k) memory.

    Each place draws its rank among the samples not yet taken (a Lehmer code); decoding the code from the right turns
    ranks into samples. Where the pool is too small for k, the last places hold nothing of use.
    """
    index = torch.arange(batch_size, device=device)[:, None]
    if k == 1:
        return index
    left = (pool - 1 - torch.arange(k - 1, device=device)).clamp(min=1)
    # 63 random bits, so that the remainder is uniform for every pool that fits into memory.
    rank = torch.randint(2**63 - 1, (batch_size, k - 1), device=device, generator=generator) % left
    index = torch.cat([index, rank], dim=1)
    for j in range(k - 2, -1, -1):
        later = index[:, j + 1 :]
        later += later >= index[:, j, None]
    return index


def inside(plan: MixPlan) -> Tensor:
    """[B, k_max] bool: the places that are members of their group."""
    return torch.arange(plan.index.shape[1], device=plan.size.device) < plan.size[:, None]


def filled(plan: MixPlan) -> MixPlan:
    """The plan with the sample itself in the places past the size of its group."""
    return plan._replace(index=torch.where(inside(plan), plan.index, plan.index[:, :1]))
