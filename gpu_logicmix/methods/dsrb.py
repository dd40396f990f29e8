"""DSRB (also PSRB): SARB with prototypes by the place in the image.

Pu et al., "Dual-Perspective Semantic-Aware Representation Blending for Multi-Label Image Recognition with Partial
Labels", ESWA 2024, https://arxiv.org/abs/2205.13092; code https://github.com/HCPLab-SYSU/HCP-MLR-PL. Written from the
formulas.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from gpu_logicmix.losses.base import Batch, Output
from gpu_logicmix.methods.base import HEADS
from gpu_logicmix.methods.sarb import SARBHead


def quadrant(features: Tensor, attention: Tensor) -> Tensor:
    """In which quarter of the map [B, D, H, W] a category is strongest, 0 to 3 row by row: [B, C].

    Strength: attention [B, C, H * W] times the sum of the channels.
    """
    height, width = features.shape[2:]
    place = (attention * features.sum(1).flatten(1)[:, None]).argmax(2)
    return 2 * (place // width >= height // 2).long() + (place % width >= width // 2).long()


@HEADS.register("dsrb")
class DSRBHead(SARBHead):
    """DSRB: SARB where a category has four prototypes, by the quarter of the image in which it is strongest, and an
    image's own is blended with one of another quarter.

    The paper blends maps of attention times features, whose sum over the positions is what the rest of the network
    sees. Blending is linear, and so is the sum: blending the sums gives the same, without a map per category.

    Where this differs from the released code, which does not run: a prototype is the mean of its features (there a map
    of zeros is counted among them). As there, a quarter without known positives has the mean of the category.

    positives: maximum number of known positives per category and quarter to make prototypes from, the first in the
        training set.
    prototypes: 4, one for each quarter.
    """

    def __init__(
        self, features: int, categories: int, positives: int = 100, prototypes: int = 4, **options: Any
    ) -> None:
        if prototypes != 4:
            raise ValueError(f"prototypes={prototypes!r}: must be 4, one for each quarter of the image")
        super().__init__(features, categories, prototypes=prototypes, positives=positives, **options)

    def forward(self, features: Tensor, batch: Batch | None = None) -> Output:
        features, own, attention = self.category_features(features)
        extra = {"features": own}
        if batch is not None:
            extra["quadrant"] = quadrant(features, attention)
        return Output(self.predict(own), extra)

    def make_prototypes(self, samples: Iterable[tuple[Tensor, Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
        sums = torch.zeros_like(self.prototypes)
        count = sums.new_zeros(sums.shape[:2])
        for features, targets, _ in samples:
            features, own, attention = self.category_features(features)
            present = F.one_hot(quadrant(features, attention), 4) * (targets == 1)[..., None]
            present = (present * (count + present.cumsum(0) <= self.positives)).float()
            sums += torch.einsum("bcq,bcd->cqd", present, own.float())
            count += present.sum(0)
        mean = sums.sum(1, keepdim=True) / count.sum(1).clamp(min=1)[:, None, None]
        return torch.where(count[..., None] > 0, sums / count.clamp(min=1)[..., None], mean), count.sum(1) > 0

    def prototype_features(self, output: Output, keys: Tensor, key: Tensor) -> Tensor:
        other = (output.extra["quadrant"][: len(keys)] - 1 - keys.remainder(3)) % 4
        return self.prototypes[torch.arange(len(self.found), device=keys.device), other]
