"""What SST, HST, SARB and DSRB share: losses on features of categories that carry known labels over to unknown ones.

Chen et al., "Structured Semantic Transfer for Multi-Label Recognition with Partial Labels" (SST), AAAI 2022,
https://arxiv.org/abs/2112.10941, and its successors; code https://github.com/HCPLab-SYSU/HCP-MLR-PL. Written from the
formulas.

Inside these methods a label is a sign: +1 present, -1 absent, 0 unknown (and whatever Mixup makes between them). A
positive target may be soft, in (0, 1].

Where this differs from the released code: means, pairs and partners are those of the batch of all processes (see
everyone.py); random choices are a function of a counter in the state, so that processes agree on them and a resumed
run repeats them.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from gpu_logicmix.losses.base import Batch, LossSum, Output, check_at_least_zero
from gpu_logicmix.losses.everyone import Everyone, random_integers, total
from gpu_logicmix.methods.semantic import SemanticHead

Terms = list[tuple[float | Tensor, LossSum]]  # losses and their weights


def signs(targets: Tensor) -> Tensor:
    """Labels 1 / 0 / unknown as +1 / -1 / 0, float32."""
    return (targets == 1).float() - (targets == 0).float()


def partial_bce(logits: Tensor, labels: Tensor) -> LossSum:
    """Binary cross-entropy with the labels that are known. labels: signs; a positive one may be soft."""
    logits = logits.float()
    cells = F.softplus(logits) - logits * labels.clamp(min=0)
    known = labels != 0
    return LossSum(cells.masked_fill(~known, 0).sum(), known.sum())


def contrastive(features: Tensor, labels: Tensor, place: Tensor, seed: Tensor) -> LossSum:
    """Features of a category are alike where it is present in both images, unlike where it is absent from one or both.

    features [G, C, D]; labels [G, C]: signs, rows of zeros are left out; place [G]: the number of a sample, for chance.
    Cost of a pair of samples: 1 - cos if both are present, 1 + cos else. With n pairs of two present ones, of each of
    the other two kinds 2n pairs count that are drawn at random and the n with the largest cost (some may count twice);
    all of them if n is 0.
    """
    pairs = torch.triu_indices(len(labels), len(labels), 1, device=labels.device)
    unit = F.normalize(features.float(), dim=2, eps=1e-9).transpose(0, 1)
    cos = (unit @ unit.transpose(1, 2))[:, pairs[0], pairs[1]].flatten()
    first, second = labels.T[:, pairs[0]].flatten(), labels.T[:, pairs[1]].flatten()
    both = (first == 1) & (second == 1)
    n = both.sum()
    sums, counts = ((1 - cos) * both).sum(), n
    pair = (place[pairs[0]] << 20) + place[pairs[1]]
    category = torch.arange(labels.shape[1], device=labels.device)
    keys = random_integers((pair + (category[:, None] << 40)).flatten(), seed)
    for kind in (first * second == -1, (first == -1) & (second == -1)):
        cost = 1 + cos
        at_random = _rank(keys.masked_fill(~kind, torch.iinfo(keys.dtype).max)) < 2 * n
        largest = _rank(-cost.detach().masked_fill(~kind, -torch.inf)) < n
        times = torch.where(n > 0, at_random.long() + largest.long(), 1) * kind
        sums, counts = sums + (cost * times).sum(), counts + times.sum()
    return LossSum(sums, counts)


def _rank(values: Tensor) -> Tensor:
    """Place of each value in ascending order."""
    order = values.argsort(stable=True)
    return torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))


# ---------------------------------------------------------------------------------------------------------------- head
class Step(NamedTuple):
    """What losses of a step look at."""

    labels: Tensor  # [B, C] signs
    everyone: Everyone
    all_features: Tensor  # [G, C, D], of the samples of all processes
    all_labels: Tensor  # [G, C]
    ramp: float | Tensor  # weight of losses that fade in during the first epoch: what share of it is over


class TransferHead(SemanticHead):
    """The semantic head with losses of its own.

    start: first epoch, counted from 0, in which known labels are carried over to unknown ones.
    contrast: weight of the contrastive loss.
    """

    def __init__(self, features: int, categories: int, start: int = 5, contrast: float = 0.05, **options: Any) -> None:
        super().__init__(features, categories, **options)
        check_at_least_zero(start=start)
        self.start, self.contrast = start, contrast
        # What random choices are made from, and where they stand: the same on every process.
        self.register_buffer("draws", torch.randint(1 << 30, ()))
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))  # samples, since the run began
        self.register_buffer("samples", torch.zeros((), dtype=torch.int64))  # in the training set
        self._capacity: int | None = None

    def prepare(self, labels: Any, categories: list[str], word_vectors: Tensor | None = None) -> None:
        super().prepare(labels, categories, word_vectors)
        self.samples.fill_(len(labels))
        self.seen.zero_()  # of this run: the weights it starts from may bring those of another

    def own_losses(self, output: Output, batch: Batch, step: Step) -> Terms:
        """Losses over the samples of this process, which become means over those of all."""
        raise NotImplementedError

    def auxiliary(self, output: Output, batch: Batch) -> LossSum:
        one = torch.ones((), device=output.logits.device)
        return LossSum(self.with_auxiliary(LossSum(torch.zeros_like(one), one), output, batch).total, one)

    def with_auxiliary(self, main: LossSum, output: Output, batch: Batch) -> LossSum:
        """A run divides the sum of all processes' `total` by the sum of their `count`, here `everywhere`."""
        rows = len(batch.targets)  # there may be more in the output, of images that only fill it
        output = Output(output.logits[:rows], {name: value[:rows] for name, value in output.extra.items()})
        step = self.step(output, batch)
        terms = self.own_losses(output, batch, step)
        counts = total(torch.stack([main.count.float(), *(term.count.float() for _, term in terms)]))
        everywhere, value = counts[0], main.total
        for (weight, term), count in zip(terms, counts[1:], strict=True):
            value = value + weight * term.total / count.clamp(min=1) * everywhere
        # This one every process computes for all samples.
        pairs = contrastive(step.all_features, step.all_labels, step.everyone.place, self.draws)
        value = value + self.contrast * step.ramp * pairs.total / pairs.count.clamp(min=1) * main.count
        return LossSum(value, main.count)

    def step(self, output: Output, batch: Batch) -> Step:
        rows, device = len(batch.targets), batch.targets.device
        if self._capacity is None:
            self._capacity = Everyone.agree(rows, device)
        everyone, labels = Everyone(rows, self._capacity, device), signs(batch.targets)
        ramp = (self.seen / self.samples.clamp(min=1)).clamp(max=1) if batch.epoch == 0 else 1.0
        self.draws += 1
        self.seen += everyone.valid.sum()
        return Step(labels, everyone, everyone.all(output.extra["features"]), everyone.all(labels), ramp)
