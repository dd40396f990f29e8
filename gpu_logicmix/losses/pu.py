"""PU-MLC's loss: variational learning from positive and unlabeled labels. Known negatives are not used.

Yuan et al., "Positive Label Is All You Need for Multi-Label Classification", ICME 2024,
https://arxiv.org/abs/2306.16016; code: TAKELAMAG/PU-MLC. The loss: Chen et al., "A Variational Approach for Learning
from Positive and Unlabeled Data", NeurIPS 2020, https://arxiv.org/abs/1906.00642.

For each category, with the logits z of a batch:

    s = min(1, alpha * std(z))                 the temperature, a constant in the backward pass; 1 if that is about 0
    f = sigmoid(z / s)
    w = mean(f)^gamma                          re-balances categories, a constant as well
    loss = w * log(mean(f)) - mean over known positives of log(f)

The loss of a batch is the sum over categories; it can be negative. "mean" divides it by their number. It is no sum over
labels: means are over the samples of all processes, and of one of several accumulated batches.

mean(f) stands for how often the category is present. So it, and the standard deviation, are taken over original samples
alone where others are mixed; known positives are taken from both. One sample has no deviation: where fewer than two are
original it is that of all samples.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from gpu_logicmix.losses.asymmetric import check_mixed
from gpu_logicmix.losses.base import LOSSES, Batch, Loss, Output, check_at_least_zero
from gpu_logicmix.losses.everyone import summed, total

TINY = 1e-10  # below this, mean(f) has no logarithm
COLDEST = 1e-3  # a temperature below it is none: the logits are all alike, or there is one alone


@LOSSES.register("pu-mlc")
class VariationalPULoss(Loss):
    """PU-MLC: known positives against all other labels, whose mean probability is pushed down.

    alpha: of the temperature; the authors take 1 on COCO and 2 on VOC 2007.
    gamma: of the re-balance; the authors take 0.55 on COCO and 0.85 on VOC 2007.
    """

    def __init__(
        self, alpha: float = 1.0, gamma: float = 0.55, reduction: str = "mean", *, unknown: float = -1
    ) -> None:
        super().__init__(reduction, unknown=unknown)
        check_at_least_zero(alpha=alpha, gamma=gamma)
        self.alpha, self.gamma = alpha, gamma

    def cells(self, output: Output, batch: Batch) -> tuple[Tensor, Tensor]:
        """The loss of each category, [C]."""
        check_mixed(batch.mixed, output.logits)
        logits = output.logits.to(torch.promote_types(output.logits.dtype, torch.float32))
        original = self._original(batch.mixed, logits)
        scaled = logits / self.temperature(logits.detach(), self._original(batch.mixed, logits, least=2))
        mean = self._mean(scaled.sigmoid(), original).clamp(min=TINY)
        positive = (batch.targets == 1).to(logits.dtype)
        from_positives = self._mean(F.logsigmoid(scaled), positive)
        loss = mean.detach() ** self.gamma * mean.log() - from_positives
        return loss, torch.full((), logits.shape[1], dtype=loss.dtype, device=loss.device)

    def temperature(self, logits: Tensor, weight: Tensor) -> Tensor:
        """[C], by the samples that have a weight [B, 1] of 1."""
        variance = self._mean((logits - self._mean(logits, weight)) ** 2, weight)
        found = self.alpha * variance.sqrt()
        # Not as cold as it can be: that would multiply the logits, and with them the loss, by a thousand.
        return found.masked_fill(found < COLDEST, 1).clamp(max=1)

    def _original(self, mixed: Tensor | None, logits: Tensor, least: int = 1) -> Tensor:
        """[B, 1] of 1 for original samples and 0 for mixed ones; all 1 where fewer than `least` are original."""
        if mixed is None and not self.together:
            return logits.new_ones(len(logits), 1)
        original = logits.new_ones(len(logits), dtype=torch.bool) if mixed is None else ~mixed
        few = (total(original.sum()) if self.together else original.sum()) < least
        return (original | few)[:, None].to(logits.dtype)

    def _mean(self, values: Tensor, weight: Tensor) -> Tensor:
        """[C], over samples, by weights [B, 1] or [B, C]."""
        top, count = (values * weight).sum(0), weight.sum(0)
        if self.together:
            top, count = summed(top), total(count)
        return top / count.clamp(min=1)


def consistency_cells(logits: Tensor, soft: Tensor) -> Tensor:
    """PU-MLC's mixup consistency, [B, C]: (log of the mixed label - log of the probability of the mixed image)^2."""
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return (soft.clamp(min=TINY).log() - F.logsigmoid(logits).clamp(min=math.log(TINY))).square()
