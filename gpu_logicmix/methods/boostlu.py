"""BoostLU: the positive part of class activation maps, made larger.

Kim et al., "Bridging the Gap between Model Explanations in Partially Annotated Multi-label Classification", CVPR 2023,
https://arxiv.org/abs/2304.01804; code: youngwk/BridgeGapExplanationPAMC.

A model that takes unknown labels as absent has class activation maps of the right shape, whose positive part is too
small. So it is multiplied by `alpha` before the mean over positions, which is the logit. The authors use it in training
and prediction together with LL-R, LL-Ct or LL-Cp (`--loss ll-r`); in the paper's first variant it acts in prediction
alone. It has no state and no effect on labels, so it goes with any mix.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from gpu_logicmix.losses.base import Batch, Output
from gpu_logicmix.methods.base import HEADS, Head


def boosted_logits(maps: Tensor, alpha: float) -> Tensor:
    """[B, C, H, W] -> [B, C]."""
    return torch.where(maps > 0, alpha * maps, maps).mean((2, 3))


@HEADS.register("boostlu")
class BoostLU(Head):
    """A linear layer at every position of the feature map; its positive values times `alpha`, then the mean.

    alpha: 5 in the paper; 1 is a plain linear head.
    prediction_only: train as a plain linear head, boost in prediction.
    """

    takes = "map"

    def __init__(self, features: int, categories: int, alpha: float = 5.0, prediction_only: bool = False) -> None:
        super().__init__()
        if not alpha >= 1:
            raise ValueError(f"alpha={alpha!r}: must be 1 or more")
        self.alpha, self.prediction_only = alpha, prediction_only
        self.layer = nn.Conv2d(features, categories, 1)

    def forward(self, features: Tensor, batch: Batch | None = None) -> Output:
        plain = self.prediction_only and self.training
        return Output(boosted_logits(self.layer(features), 1.0 if plain else self.alpha))
