"""SARB: the feature of an unknown category is blended with one of an image, or a prototype, that shows the category.

Pu et al., "Semantic-Aware Representation Blending for Multi-Label Image Recognition with Partial Labels", AAAI 2022,
https://arxiv.org/abs/2203.02172; code https://github.com/HCPLab-SYSU/HCP-MLR-PL. Written from the formulas.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from gpu_logicmix.losses.base import Batch, LossSum, Output
from gpu_logicmix.losses.everyone import random_integers
from gpu_logicmix.methods.base import HEADS
from gpu_logicmix.methods.prototypes import PrototypeHead
from gpu_logicmix.methods.transfer import Step, Terms, partial_bce


def blend(features: Tensor, labels: Tensor, where: Tensor, others: Tensor, share: Tensor) -> tuple[Tensor, Tensor]:
    """Features [B, C, D] of which `share` stays where `where` [B, C] says so, and the rest comes from `others`; labels
    [B, C] that are 1 - share there."""
    blended = share * features + (1 - share) * others
    return torch.where(where[..., None], blended, features), torch.where(where, 1 - share, labels)


@HEADS.register("sarb")
class SARBHead(PrototypeHead):
    """SARB: from epoch `start` on, two more losses, on blended features through the same graph and classifiers.

    Instance: with the batch in reverse order; a category that is unknown here and known to be present there keeps
    `alpha` of its feature and gets the label 1 - alpha. Prototype: one unknown category of each image, drawn at random,
    keeps `beta` of its feature and takes the rest from a prototype, one of the ten drawn for the whole batch. alpha and
    beta are learnt; their gradient runs through features and labels, as in the released code.

    Where this differs from the released code: an image without unknown labels is not blended with a prototype (the
    released code overwrites the known label of its first category), nor is a category without prototypes.

    instance, prototype: weights of the two losses.
    alpha, beta: where they start.
    """

    def __init__(
        self,
        features: int,
        categories: int,
        instance: float = 1.0,
        prototype: float = 1.0,
        alpha: float = 0.5,
        beta: float = 0.5,
        **options: Any,
    ) -> None:
        super().__init__(features, categories, **options)
        for name, value in (("alpha", alpha), ("beta", beta)):
            if not 0 <= value <= 1:
                raise ValueError(f"{name}={value!r}: must be from 0 to 1")
        self.instance, self.prototype = instance, prototype
        self.alpha, self.beta = nn.Parameter(torch.tensor(float(alpha))), nn.Parameter(torch.tensor(float(beta)))

    def own_losses(self, output: Output, batch: Batch, step: Step) -> Terms:
        if batch.epoch < self.start:
            # Every parameter has a gradient in every step: distributed runs wait for it.
            idle = self.alpha + self.beta
            return [(0.0, LossSum(idle, torch.ones_like(idle)))]
        with torch.no_grad():
            self.alpha.clamp_(0, 1)
            self.beta.clamp_(0, 1)
        features, labels, own = output.extra["features"], step.labels, step.everyone.own
        features, labels = features[: len(own)], labels[: len(own)]
        partner = step.everyone.reversed()
        where = (labels == 0) & (step.all_labels[partner] == 1)
        instance, instance_labels = blend(features, labels, where, step.all_features[partner], self.alpha)

        # Numbers below those of the contrastive loss, so that the two are independent.
        category = torch.arange(labels.shape[1], device=labels.device)
        keys = random_integers(-1 - (step.everyone.place[own][:, None] << 20) - category, self.draws)
        where = chosen(keys, (labels == 0) & self.found)
        one = random_integers(torch.full_like(self.draws, -(1 << 60)), self.draws)
        others = self.prototype_features(output, keys, one)
        prototype, prototype_labels = blend(features, labels, where, others, self.beta)

        first, second = self.predict(torch.cat((instance, prototype))).chunk(2)
        return [
            (self.instance, partial_bce(first, instance_labels)),
            (self.prototype, partial_bce(second, prototype_labels)),
        ]

    def prototype_features(self, output: Output, keys: Tensor, key: Tensor) -> Tensor:
        """A prototype of each category: [C, D], or [B, C, D]. keys [B, C] and key: random integers."""
        # Not `[:, key]`, which would wait for the key.
        return self.prototypes.index_select(1, key.remainder(self.prototypes.shape[1])[None])[:, 0]


def chosen(keys: Tensor, eligible: Tensor) -> Tensor:
    """[B, C]: of each row the eligible one with the largest key; none where none is eligible."""
    keys = keys.masked_fill(~eligible, torch.iinfo(keys.dtype).min)
    return eligible & (torch.arange(keys.shape[1], device=keys.device) == keys.argmax(1, keepdim=True))
