"""Prototypes of categories, which HST, SARB and DSRB share: features of known positives, clustered on the device.

They are made from unmixed, un-augmented images; the released code has random crops. A category with fewer known
positives than prototypes, with which the released code stops, has each of them as a prototype, some more than once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from gpu_logicmix.errors import printable
from gpu_logicmix.losses.base import check_at_least_one
from gpu_logicmix.methods.semantic import pair_counts
from gpu_logicmix.methods.transfer import TransferHead


@torch.no_grad()
def positive_features(
    samples: Iterable[tuple[Tensor, Tensor, Tensor]],
    category_features: Callable[[Tensor], Tensor],
    categories: int,
    most: int,
) -> tuple[Tensor, Tensor]:
    """Of each category, the features of the first known positives: [C, most, D], and how many there are [C].

    samples: (features, targets, index) batch by batch; category_features: features of a batch -> [B, C, D].
    """
    store = count = None
    for features, targets, _ in samples:
        own = category_features(features)
        present = targets == 1
        if store is None or count is None:
            store = own.new_zeros(categories, most, own.shape[2])
            count = torch.zeros(categories, dtype=torch.int64, device=own.device)
        place = count + present.cumsum(0) - 1
        row, category = (present & (place < most)).nonzero(as_tuple=True)
        store[category, place[row, category]] = own[row, category]
        count = (count + present.sum(0)).clamp(max=most)
    if store is None or count is None:
        raise ValueError("no samples to make prototypes of")
    return store, count


@torch.no_grad()
def k_means(points: Tensor, count: Tensor, clusters: int, rounds: int = 30) -> Tensor:
    """Lloyd's algorithm in all categories at once: points [C, N, D], of which `count` [C] are there -> [C, K, D].

    Starts from points spread evenly over the list, so that it is a function of its input. Of fewer points than
    clusters, each is a cluster, some of them more than once; of none, the centres are zero.
    """
    there = torch.arange(points.shape[1], device=points.device) < count[:, None]
    steps = torch.arange(clusters, device=points.device)
    few = count[:, None].clamp(min=1)
    start = torch.where(few < clusters, steps % few, steps * few // clusters)
    centres = points.gather(1, start[..., None].expand(-1, -1, points.shape[2]))
    for _ in range(rounds):
        nearest = torch.cdist(points, centres).argmin(2)
        member = torch.nn.functional.one_hot(nearest, clusters).to(points.dtype) * there[..., None]
        size = member.sum(1)[..., None]
        means = member.transpose(1, 2) @ points / size.clamp(min=1)
        centres = torch.where(size > 0, means, centres)
    return centres


class PrototypeHead(TransferHead):
    """A head with prototypes, made at the start of epoch `start` and every few epochs after it.

    prototypes: per category.
    every: epochs from one time they are made to the next.
    positives: maximum number of known positives per category to make them from, the first in the training set.
    """

    def __init__(
        self,
        features: int,
        categories: int,
        prototypes: int = 10,
        every: int = 5,
        positives: int = 500,
        **options: Any,
    ) -> None:
        super().__init__(features, categories, **options)
        check_at_least_one(prototypes=prototypes, every=every, positives=positives)
        self.every, self.positives = every, positives
        self.register_buffer("prototypes", torch.zeros(categories, prototypes, self.width))
        self.register_buffer("found", torch.zeros(categories, dtype=torch.bool))  # categories that have prototypes

    def prepare(self, labels: Any, categories: list[str], word_vectors: Tensor | None = None) -> None:
        super().prepare(labels, categories, word_vectors)
        wanted, counts = self.prototypes.shape[1], pair_counts(labels).diagonal().long().tolist()
        few = [f"{printable(name)} ({n})" for name, n in zip(categories, counts, strict=True) if n < wanted]
        if few:
            self.messages.append(
                f"{len(few)} categories have fewer known positives than prototypes ({wanted}): {', '.join(few)}"
            )

    def begin_epoch(
        self, epoch: int, epochs: int, samples: Callable[[], Iterator[tuple[Tensor, Tensor, Tensor]]]
    ) -> None:
        if epoch < self.start or (epoch - self.start) % self.every:
            return
        training = self.training
        self.eval()
        try:
            with torch.no_grad():
                prototypes, found = self.make_prototypes(samples())
        finally:
            self.train(training)
        self.prototypes.copy_(prototypes)
        self.found.copy_(found)

    def make_prototypes(self, samples: Iterable[tuple[Tensor, Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
        """[C, K, D], and which categories have some."""

        def own(features: Tensor) -> Tensor:
            return self.category_features(features)[1].float()

        points, count = positive_features(samples, own, len(self.found), self.positives)
        return k_means(points, count, self.prototypes.shape[1]), count > 0
