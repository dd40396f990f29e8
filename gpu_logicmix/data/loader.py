"""Batches of a dataset, in an order that depends on seed and epoch alone.

loader = make_loader(dataset, batch_size=32, shuffle=True, workers=2)
for images, targets, index in loader:       # uint8 [B, 3, S, S], int8 [B, C], int64 [B]
    images = images.to(device, non_blocking=True).float().div_(255)
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import torch
from torch.utils.data import DataLoader, Sampler

from gpu_logicmix.data.dataset import ImageDataset


class Batches(Sampler[list[int]]):
    """The indices of each batch. Every pass is an epoch with an order of its own.

    The order is a function of `seed` and epoch, so a run can go on in the middle: `set_epoch(7, start=120)`. Of several
    processes, each takes its share of the same global batch: `world` processes with `batch_size` see what one process
    with `world * batch_size` sees. Where the last batch is short, shares differ in size and may be empty; `drop_last`
    avoids that.
    """

    def __init__(
        self,
        length: int,
        batch_size: int,
        *,
        shuffle: bool = False,
        seed: int = 0,
        drop_last: bool = False,
        rank: int = 0,
        world: int = 1,
    ) -> None:
        if batch_size < 1:
            raise ValueError(f"batch_size={batch_size}: must be at least 1")
        if not 0 <= rank < world:
            raise ValueError(f"rank={rank}: must be from 0 to world - 1 = {world - 1}")
        self.length, self.batch_size, self.drop_last = length, batch_size, drop_last
        self.shuffle, self.seed = shuffle, seed
        self.rank, self.world = rank, world
        self.epoch = self.start = 0

    def set_epoch(self, epoch: int, start: int = 0) -> None:
        """The next pass is this epoch, from batch `start` on."""
        self.epoch, self.start = epoch, start

    def __len__(self) -> int:
        together = self.batch_size * self.world
        return self.length // together if self.drop_last else -(-self.length // together)

    def __iter__(self) -> Iterator[list[int]]:
        epoch, start = self.epoch, self.start
        self.set_epoch(epoch + 1)
        order = torch.arange(self.length)
        if self.shuffle:
            # Mixed by multiplication, so that seed 0 in epoch 1 is not seed 1 in epoch 0.
            generator = torch.Generator().manual_seed((self.seed * 1_000_003 + epoch) % 2**63)
            order = torch.randperm(self.length, generator=generator)
        together = self.batch_size * self.world
        for batch in range(start, len(self)):
            yield order[batch * together : (batch + 1) * together][self.rank :: self.world].tolist()


class ReadAhead(DataLoader):
    """Fetches the next batches in a thread.

    For caches: to hand a batch from process to process costs several times what it costs to copy it out of the mapped
    file, and while numpy copies, or waits for the disk, Python goes on.
    """

    def __iter__(self) -> Iterator:
        batches = super().__iter__()
        with ThreadPoolExecutor(1) as pool:
            coming = deque(pool.submit(next, batches, None) for _ in range(4))
            while (batch := coming.popleft().result()) is not None:
                coming.append(pool.submit(next, batches, None))
                yield batch


def make_loader(
    dataset: ImageDataset,
    batch_size: int,
    *,
    shuffle: bool = False,
    seed: int = 0,
    drop_last: bool = False,
    workers: int = 0,
    rank: int = 0,
    world: int = 1,
) -> DataLoader:
    """A DataLoader that fetches whole batches; `loader.sampler` is its `Batches`.

    workers: processes that decode. A cache has nothing to decode and is read ahead by a thread instead.
    """
    batches = Batches(len(dataset), batch_size, shuffle=shuffle, seed=seed, drop_last=drop_last, rank=rank, world=world)
    cached = hasattr(dataset.source, "gather")
    workers = 0 if cached else workers
    return (ReadAhead if cached else DataLoader)(
        dataset,
        batch_size=None,  # the sampler gives lists of indices, the dataset gives batches
        sampler=batches,
        num_workers=workers,
        pin_memory=torch.cuda.is_available(),
        persistent_workers=workers > 0,
        prefetch_factor=4 if workers else None,
        worker_init_fn=_apart,
    )


def _apart(worker: int) -> None:
    """Ctrl-C, and torchrun's SIGTERM, go to a group of processes. Workers leave it: the main process decides when to
    stop, and needs them until then."""
    if hasattr(os, "setpgrp"):
        os.setpgrp()
