"""Who is mixed with whom: the plan, drawn apart from the arithmetic, so that it can be kept, replayed and tested."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import get_worker_info

from gpu_logicmix.machine import sent

Device = torch.device | str | None


class MixPlan(NamedTuple):
    """Who is mixed with whom: sample i with `index[i, :size[i]]`, of which the first is sample i itself.

    Indices past the end of the batch stand for the bank (see `GPULogicMix`): `batch_size` is the sample seen last
    before the plan was drawn, `batch_size + 1` the one before it, and so on.
    """

    index: Tensor  # [B, k_max] int64; places past `size` repeat the sample itself
    size: Tensor  # [B] int64: 1 where a sample stays as it is
    mixed: Tensor  # [B] bool: size > 1
    weight: Tensor | None = None  # [B, k_max] float32: the share of each image, 1 in all; None: 1 / size each
    seen: Tensor | None = None  # [] int64: how many samples the bank had seen when the plan was drawn


def still_plan(batch_size: int, k: int, device: torch.device | str | None = None) -> MixPlan:
    """Every sample stays as it is."""
    index = torch.arange(batch_size, device=device)[:, None].repeat(1, k)
    size = torch.ones(batch_size, dtype=torch.int64, device=device)
    return MixPlan(index, size, size > 1)


def draw_groups(
    batch_size: int, k: int, pool: int | Tensor, device: Device = None, generator: torch.Generator | None = None
) -> Tensor:
    """[B, k]: i itself, then k - 1 others out of `pool` samples: distinct, all orders equally likely, O(B * k) memory.

    Each place draws its rank among the samples not yet taken (a Lehmer code); decoding the code from the right turns
    ranks into samples. Where the pool is too small for k, the last places hold nothing of use.
    """
    index = torch.arange(batch_size, device=device)[:, None]
    if k == 1:
        return index
    left = (pool - 1 - torch.arange(k - 1, device=device)).clamp(min=1)
    index = torch.cat([index, _random_bits(batch_size, k - 1, device, generator) % left], dim=1)
    for j in range(k - 2, -1, -1):
        later = index[:, j + 1 :]
        later += later >= index[:, j, None]
    return index


def draw_with_replacement(
    batch_size: int, k: int, pool: int | Tensor, device: Device = None, generator: torch.Generator | None = None
) -> Tensor:
    """[B, k]: i itself, then k - 1 of the `pool` samples, each drawn from all of them, i itself included."""
    index = torch.arange(batch_size, device=device)[:, None]
    return torch.cat([index, _random_bits(batch_size, k - 1, device, generator) % pool], dim=1)


def draw_sizes(
    batch_size: int, k_min: int, k_max: int, device: Device = None, generator: torch.Generator | None = None
) -> Tensor:
    """[B] int64: from k_min to k_max, equally likely."""
    if not torch.compiler.is_compiling():
        return drawn(torch.randint, k_min, k_max + 1, (batch_size,), device=device, generator=generator)
    # The compiler keeps what `rand` draws, but draws `randint` anew wherever it is used: for every 16 pixels on a CPU,
    # which takes as long as mixing them. A product of 24 random bits and a whole number never rounds up to that number.
    return k_min + (drawn(torch.rand, batch_size, device=device, generator=generator) * (k_max - k_min + 1)).long()


def _random_bits(rows: int, columns: int, device: Device, generator: torch.Generator | None) -> Tensor:
    """63 random bits each, so that the remainder is uniform for every pool that fits into memory."""
    return drawn(torch.randint, 2**63 - 1, (rows, columns), device=device, generator=generator)


def drawn(function: Callable[..., Tensor], *args: Any, device: Device, generator: torch.Generator | None) -> Tensor:
    """What a random function of torch gives, on `device`. A generator draws where it is itself, for it can draw nowhere
    else; the numbers are sent to `device`."""
    if generator is None:
        return function(*args, device=device)
    found = function(*args, device=generator.device, **random_source(generator))
    return found if device is None else sent(found, device)


def inside(plan: MixPlan) -> Tensor:
    """[B, k_max] bool: the places that are members of their group."""
    return torch.arange(plan.index.shape[1], device=plan.size.device) < plan.size[:, None]


def filled(plan: MixPlan) -> MixPlan:
    """The plan with the sample itself, and no weight, in the places past the size of its group."""
    members = inside(plan)
    weight = None if plan.weight is None else torch.where(members, plan.weight, 0)
    return plan._replace(index=torch.where(members, plan.index, plan.index[:, :1]), weight=weight)


def shares(plan: MixPlan, dtype: torch.dtype) -> Tensor:
    """[B, k_max]: the weight of each place, 0 past the size of its group."""
    if plan.weight is not None:
        return plan.weight.to(dtype)
    return inside(plan).to(dtype) / plan.size[:, None]


# Generators that were seeded anew in this worker of a DataLoader, by id. Held here, so that no id is used twice.
_IN_WORKER: dict[int, tuple[torch.Generator, int]] = {}


def random_source(generator: torch.Generator | None) -> dict[str, torch.Generator]:
    """The keyword arguments that make a random function draw from `generator`; none for torch's own, because
    torch.compile takes no `generator=None` beside a batch size that changes.

    Every worker of a DataLoader holds a copy of the generator in the same state, in every epoch: the first draw in a
    worker seeds the copy from the generator's seed and the worker's.
    """
    if generator is None:
        return {}
    if torch.compiler.is_compiling():
        raise RuntimeError(
            "generator= cannot be drawn from inside torch.compile or torch.export: draw the plan outside and pass it "
            "(plan = mix.plan(len(images), images.device)), or leave generator=None and call torch.manual_seed"
        )
    worker = get_worker_info()
    if worker is not None and _IN_WORKER.get(id(generator), (None, None))[1] != worker.seed:
        digest = hashlib.blake2b(f"{generator.initial_seed()} {worker.seed}".encode(), digest_size=8).digest()
        generator.manual_seed(int.from_bytes(digest, "little") >> 1)
        _IN_WORKER[id(generator)] = (generator, worker.seed)
    return {"generator": generator}
