"""HST: SST with thresholds that are learnt, and prototypes in place of stored features.

Chen et al., "Heterogeneous Semantic Transfer for Multi-Label Recognition with Partial Labels", IJCV 2024,
https://arxiv.org/abs/2205.11131; code https://github.com/HCPLab-SYSU/HCP-MLR-PL. Written from the formulas.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gpu_logicmix.losses.base import Batch, LossSum, Output
from gpu_logicmix.methods.base import HEADS
from gpu_logicmix.methods.prototypes import PrototypeHead
from gpu_logicmix.methods.sst import PairHead, add_positives, pair_loss, within_image
from gpu_logicmix.methods.transfer import Step, Terms, partial_bce


def soft_score(score: Tensor, threshold: Tensor, labels: Tensor | None = None) -> Tensor:
    """How far a score is above the threshold, in [0, 1]. With labels, those known to be present have a gradient below
    the threshold too."""
    above = score - threshold
    soft = above.clamp(0, 1)
    return soft if labels is None else torch.where(labels == 1, soft.detach() + above - above.detach(), soft)


@HEADS.register("hst")
class HSTHead(PrototypeHead):
    """HST: from epoch `start` on, the known labels count again, together with positives found within the image and
    with those found across images, by likeness to prototypes.

    Where this differs from the released code:
    - The prototype loss is 1 - cos for a category that is present, 1 + cos for one that is absent, as in the paper; the
      released code has the sign the other way round (`sign=released`).
    - A score below the threshold has no gradient in the released code, and the threshold starts at 1, where cosines
      never are: it moves by weight decay alone. Here known positives below a threshold lower it
      (`gradient=released`: as in the code).

    pair: weight of the loss of the pairs.
    scores: weight of the losses by which the thresholds are learnt.
    nearness: weight of the prototype loss.
    sign: of the prototype loss.
    gradient: of scores below the threshold.
    threshold: where the thresholds start.
    """

    def __init__(
        self,
        features: int,
        categories: int,
        pair: float = 10.0,
        scores: float = 0.1,
        nearness: float = 0.05,
        sign: Literal["paper", "released"] = "paper",
        gradient: Literal["positives", "released"] = "positives",
        threshold: float = 1.0,
        **options: Any,
    ) -> None:
        super().__init__(features, categories, **options)
        self.pair, self.scores, self.nearness = pair, scores, nearness
        self.sign, self.gradient = sign, gradient
        joint, out = self.decouple.image.out_features, self.mix.out_features
        self.pairs = PairHead(categories, self.width, joint, out) if categories > 1 else None
        self.intra_threshold = nn.Parameter(torch.tensor(float(threshold)))
        self.inter_threshold = nn.Parameter(torch.tensor(float(threshold)))

    def across_images(self, features: Tensor) -> Tensor:
        """Score of each category [B, C]: its mean cosine with the prototypes."""
        mean = F.normalize(self.prototypes, dim=2, eps=1e-9).mean(1)
        return (F.normalize(features.float(), dim=2, eps=1e-9) * mean).sum(2)

    def prototype_loss(self, cos: Tensor, labels: Tensor) -> LossSum:
        cells = 1 - labels * cos if self.sign == "paper" else 1 + labels * cos
        return LossSum(cells.sum(), torch.full((), cells.numel(), device=cells.device))

    def own_losses(self, output: Output, batch: Batch, step: Step) -> Terms:
        labels, features = step.labels, output.extra["features"]
        terms: Terms = []
        scores: list[tuple[Tensor, Tensor]] = []
        if self.pairs is not None:
            logits = self.pairs(features)
            terms.append((self.pair * step.ramp, pair_loss(logits, labels, self.pairs.pairs)))
            scores.append((within_image(logits, labels, self.pairs.pairs), self.intra_threshold))
        if batch.epoch < self.start:
            # Every parameter has a gradient in every step: distributed runs wait for it.
            idle = self.intra_threshold + self.inter_threshold
            return [*terms, (0.0, LossSum(idle, torch.ones_like(idle)))]
        cos = self.across_images(features)
        for score, threshold in (*scores, (cos, self.inter_threshold)):
            soft = soft_score(score, threshold, labels if self.gradient == "positives" else None)
            found = add_positives(labels, (soft.detach() > 0).float(), 1.0)
            terms += [(1.0, partial_bce(output.logits, found)), (self.scores, partial_bce(soft, labels))]
        if self.pairs is None:
            terms.append((0.0, LossSum(self.intra_threshold, torch.ones_like(self.intra_threshold))))
        return [*terms, (self.nearness, self.prototype_loss(cos, labels))]
