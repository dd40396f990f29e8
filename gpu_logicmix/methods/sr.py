"""SR, saliency regularization: logits that see the strongest positions, and a strong view that learns from a weak one.

Wang et al., "Saliency Regularization for Self-Training with Partial Annotations", ICCV 2023. No public code was found;
this is from the paper's text.

With a class activation map A of a category, its mean a and the mean s of its k largest values:

    logit = a + alpha * s

Known labels train both views. An unknown label trains the strong view where the weak one is sure of it: as present if
its probability is at least tau, as absent if one minus it is. The weak view is a constant there.

The paper's Eq. 9 divides by the known labels of each image, its ablation by those of the batch, which is what is done
here: the mean over the known labels of both views, plus the mean over the labels the weak view is sure of. Learning
rate, epochs and the two augmentations are in a supplement not seen: here the weak view is flipped, the strong one goes
through RandAugment too. LogicMix mixes both by the same plan, so the weak view judges the same mixture.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gpu_logicmix.labels import is_unknown
from gpu_logicmix.losses.base import Batch, Loss, LossSum, Output, check_at_least_zero, check_probability
from gpu_logicmix.losses.everyone import total as over_all
from gpu_logicmix.methods.base import HEADS, Head


def salient_logits(maps: Tensor, alpha: float, k: int) -> Tensor:
    """[B, C, H, W] -> [B, C]."""
    positions = maps.flatten(2)
    return positions.mean(2) + alpha * positions.topk(min(k, positions.shape[2]), dim=2).values.mean(2)


def weak_labels(logits: Tensor, targets: Tensor, tau: float) -> tuple[Tensor, Tensor]:
    """Labels [B, C] for the strong view from the weak view's logits, and where they count: at unknown labels that the
    weak view is sure of."""
    p = logits.detach().to(torch.promote_types(logits.dtype, torch.float32)).sigmoid()
    return (p >= 0.5).to(p.dtype), is_unknown(targets) & ((p >= tau) | (1 - p >= tau))


@HEADS.register("sr")
class SaliencyRegularization(Head):
    """A linear layer at every position of the feature map; the mean plus `alpha` times the mean of the `k` largest. Two
    views of each image: the strong one also learns the unknown labels that the weak one is sure of. Use with
    `--loss bce`, as the paper does, or another loss for the known labels.

    alpha, k: 0.5 and 5 in the paper.
    tau: the probability from which on the weak view is sure, 0.6 in the paper.
    weight: of the loss at labels from the weak view; 0 leaves the saliency alone.
    """

    takes = "map"
    views = 2

    def __init__(
        self, features: int, categories: int, alpha: float = 0.5, k: int = 5, tau: float = 0.6, weight: float = 1.0
    ) -> None:
        super().__init__()
        check_at_least_zero(alpha=alpha, weight=weight)
        check_probability(tau=tau)
        if k < 1 or tau <= 0.5:
            raise ValueError(f"k={k!r}, tau={tau!r}: k must be 1 or more, tau above 0.5")
        self.alpha, self.k, self.tau, self.weight = alpha, k, tau, weight
        self.layer = nn.Conv2d(features, categories, 1)

    def forward(self, features: Tensor, batch: Batch | None = None) -> Output:
        return Output(salient_logits(self.layer(features), self.alpha, self.k))

    def training_step(self, net: nn.Module, views: Sequence[Tensor], batch: Batch, loss: Loss) -> LossSum:
        # One pass of both: several processes average gradients once, and batch norms see one batch.
        logits = net(torch.cat(tuple(views)), batch).logits
        weak, strong = logits.chunk(2)
        both = [loss(Output(view), batch) for view in (weak, strong)]
        total, count = both[0].total + both[1].total, both[0].count + both[1].count
        labels, sure = weak_labels(weak, batch.targets, self.tau)
        own = F.binary_cross_entropy_with_logits(strong.to(labels.dtype), labels, reduction="none")
        # A run divides the sum of all processes' totals by the sum of their counts.
        sums = over_all(torch.stack((sure.sum(), count)).float())
        own = own.masked_fill(~sure, 0).sum() / sums[0].clamp(min=1) * sums[1]
        return LossSum(total + self.weight * own, count)
