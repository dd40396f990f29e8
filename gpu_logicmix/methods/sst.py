"""SST: unknown labels from known ones, within an image by what occurs together, across images by likeness.

Chen et al., "Structured Semantic Transfer for Multi-Label Recognition with Partial Labels", AAAI 2022,
https://arxiv.org/abs/2112.10941; code https://github.com/HCPLab-SYSU/HCP-MLR-PL. Written from the formulas.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from gpu_logicmix.losses.base import Batch, LossSum, Output, check_at_least_one
from gpu_logicmix.methods.base import HEADS
from gpu_logicmix.methods.semantic import CHUNK
from gpu_logicmix.methods.transfer import Step, Terms, TransferHead, partial_bce


class PairHead(nn.Module):
    """Whether two categories are both in the image, a logit for each pair i < j: [B, C, D] -> [B, C (C - 1) / 2].

    [e_i ; e_j] -> linear -> ReLU -> linear -> a weight vector for each pair. What is linear is taken apart, so that
    nothing as large as a pair's features goes through a matrix: before the ReLU into what i and what j contribute,
    after it into one vector for each pair. Pairs are processed in pieces that the backward pass computes again.
    """

    def __init__(self, categories: int, width: int, joint: int, out: int) -> None:
        super().__init__()
        self.embed = nn.Linear(width, joint)
        self.first, self.second = nn.Linear(joint, out), nn.Linear(joint, out, bias=False)
        self.inner = nn.Linear(out, out)
        pairs = torch.triu_indices(categories, categories, 1)
        bound = out**-0.5
        self.weight = nn.Parameter(torch.empty(pairs.shape[1], out).uniform_(-bound, bound))
        self.bias = nn.Parameter(torch.empty(pairs.shape[1]).uniform_(-bound, bound))
        with torch.no_grad():  # the two are one layer of twice the width
            for layer in (self.first, self.second):
                layer.weight.div_(2**0.5)
            self.first.bias.div_(2**0.5)
        self.register_buffer("pairs", pairs, persistent=False)

    def forward(self, features: Tensor) -> Tensor:
        embedded = self.embed(features)
        first, second = self.first(embedded), self.second(embedded)
        bias = self.bias + self.weight @ self.inner.bias
        step = max(1, CHUNK // max(len(features) * first.shape[2], 1))
        parts = []
        for start in range(0, len(bias), step):
            piece = slice(start, start + step)
            i, j = self.pairs[:, piece]
            inputs = (first, second, self.weight[piece], self.inner.weight, i, j)
            parts.append(checkpoint(_pair_logits, *inputs, use_reentrant=False, preserve_rng_state=False))
        return torch.cat(parts, 1) + bias


def _pair_logits(first: Tensor, second: Tensor, weight: Tensor, inner: Tensor, i: Tensor, j: Tensor) -> Tensor:
    hidden = F.relu(first.index_select(1, i) + second.index_select(1, j))
    return torch.einsum("bpd,pd->bp", hidden, weight @ inner)


def pair_loss(logits: Tensor, labels: Tensor, pairs: Tensor) -> LossSum:
    """Asymmetric loss (gamma 2 for absent, 1 for present, clip 0.05): a pair is present where both labels are known to
    be, absent in all other cases."""
    both = (labels[:, pairs[0]] == 1) & (labels[:, pairs[1]] == 1)
    present = logits.float().sigmoid()
    absent = (1 - present + 0.05).clamp(max=1)
    positive = -(1 - present) * F.logsigmoid(logits.float())
    negative = -((1 - absent) ** 2) * absent.log()
    count = torch.full((), logits.numel(), device=logits.device)
    return LossSum(torch.where(both, positive, negative).sum(), count)


def within_image(logits: Tensor, labels: Tensor, pairs: Tensor) -> Tensor:
    """Score of each category [B, C]: how likely it occurs with the known positives of the image, on average."""
    batch, categories = labels.shape
    likely = torch.eye(categories, device=logits.device).expand(batch, -1, -1).clone()
    probability = logits.float().sigmoid()
    likely[:, pairs[0], pairs[1]] = probability
    likely[:, pairs[1], pairs[0]] = probability
    present = (labels == 1).float()
    return (likely @ present[..., None])[..., 0] / present.sum(1, keepdim=True).clamp(min=1)


def add_positives(labels: Tensor, score: Tensor, threshold: float | Tensor) -> Tensor:
    """Unknown labels become +1 where the score reaches the threshold."""
    return torch.where((labels == 0) & (score >= threshold), 1.0, labels)


@HEADS.register("sst")
class SSTHead(TransferHead):
    """SST: from epoch `start` on, the known labels count again, together with positives found within the image and
    with those found across images.

    Within: the mean probability that the category occurs with the known positives. Across: the mean cosine of its
    feature with those of the last known positives. An unknown label becomes positive where this reaches a threshold,
    0.95 at first and 0.025 lower with each epoch, down to 0.75.

    Where this differs from the released code: the stored features are part of the state, so that a resumed run goes
    on; mixed samples are not stored.

    intra, inter: weights of the loss with labels found within and across images.
    pair: weight of the loss of the pairs.
    threshold, lowest, fall: of the score; how far it falls in an epoch.
    stored: features of a category that are kept.
    """

    def __init__(
        self,
        features: int,
        categories: int,
        intra: float = 1.0,
        inter: float = 1.0,
        pair: float = 10.0,
        threshold: float = 0.95,
        lowest: float = 0.75,
        fall: float = 0.025,
        stored: int = 100,
        **options: Any,
    ) -> None:
        super().__init__(features, categories, **options)
        check_at_least_one(stored=stored)
        self.intra, self.inter, self.pair = intra, inter, pair
        self.threshold, self.lowest, self.fall = threshold, lowest, fall
        joint, out = self.decouple.image.out_features, self.mix.out_features
        self.pairs = PairHead(categories, self.width, joint, out) if categories > 1 else None
        # Unit vectors, so that the mean of cosines is a product with their mean; where the next one goes.
        self.register_buffer("queue", torch.zeros(categories, stored, self.width))
        self.register_buffer("next", torch.zeros(categories, dtype=torch.int64))

    def prepare(self, labels: Any, categories: list[str], word_vectors: Tensor | None = None) -> None:
        super().prepare(labels, categories, word_vectors)
        self.queue.zero_()  # features of another run's images, from the weights that this one starts from
        self.next.zero_()

    def threshold_at(self, epoch: int) -> float:
        return max(self.lowest, self.threshold - self.fall * max(0, epoch - self.start))

    @torch.no_grad()
    def store(self, features: Tensor, present: Tensor) -> None:
        """Features [G, C, D] of known positives [G, C] into the queue; they push out the oldest. Of more than there is
        room for, the first."""
        room = self.queue.shape[1]
        unit = F.normalize(features.float(), dim=2, eps=1e-9).transpose(0, 1)
        order = (~present).T.to(torch.uint8).argsort(dim=1, stable=True)[:, :room]  # known positives first
        count = present.sum(0).clamp(max=room)
        place = torch.arange(order.shape[1], device=order.device)
        # The last of a batch is the first to be pushed out, as in a list that grows at its front.
        slot = (self.next[:, None] + count[:, None] - 1 - place).remainder(room)
        slot, order = (x[..., None].expand(-1, -1, unit.shape[2]) for x in (slot, order))
        new = place[:, None] < count[:, None, None]
        self.queue.scatter_(1, slot, torch.where(new, unit.gather(1, order), self.queue.gather(1, slot)))
        self.next.copy_((self.next + count).remainder(room))

    def across_images(self, features: Tensor) -> Tensor:
        """Score of each category [B, C]: its mean cosine with the stored features."""
        return (F.normalize(features.float(), dim=2, eps=1e-9) * self.queue.mean(1)).sum(2)

    def own_losses(self, output: Output, batch: Batch, step: Step) -> Terms:
        labels, features = step.labels, output.extra["features"].detach()
        known = labels if batch.mixed is None else labels.masked_fill(batch.mixed[:, None], 0)
        self.store(step.all_features.detach(), step.everyone.all(known) == 1)
        scores: list[tuple[float, Tensor]] = []
        terms: Terms = []
        if self.pairs is not None:
            logits = self.pairs(output.extra["features"])
            terms.append((self.pair * step.ramp, pair_loss(logits, labels, self.pairs.pairs)))
            scores.append((self.intra, within_image(logits.detach(), labels, self.pairs.pairs)))
        if batch.epoch >= self.start:
            threshold = self.threshold_at(batch.epoch)
            for weight, score in (*scores, (self.inter, self.across_images(features))):
                terms.append((weight, partial_bce(output.logits, add_positives(labels, score, threshold))))
        return terms
