"""KGGR: SSGRL whose classifiers learn from each other along the graph too.

Chen et al., "Knowledge-Guided Multi-Label Few-Shot Learning for General Image Recognition", TPAMI 2020,
https://arxiv.org/abs/2009.09450. There is no public code: written from the description of the method.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gpu_logicmix.methods.base import HEADS
from gpu_logicmix.methods.semantic import GatedGraph
from gpu_logicmix.methods.ssgrl import SSGRLHead


@HEADS.register("kggr")
class KGGRHead(SSGRLHead):
    """SSGRL, and a second gated graph network over the weights of the classifiers: a category with few known labels
    takes over from those it is often seen with.

    The propagated weights are added to the category's own. The last map of the propagation starts at zero, so that
    training starts from SSGRL.

    transfer: propagate the weights of the classifiers; false: the forward pass is SSGRL's.
    """

    def __init__(self, features: int, categories: int, transfer: bool = True, **options: Any) -> None:
        super().__init__(features, categories, **options)
        self.transfer = None
        if transfer:
            out = self.classify.weight.shape[1]
            self.transfer = GatedGraph(out, self.graph_network.steps)
            self.transferred = torch.nn.Linear(out, out, bias=False)
            torch.nn.init.zeros_(self.transferred.weight)

    def predict(self, features: Tensor) -> Tensor:
        state = self.graph_network(features, self.graph)
        mixed = torch.tanh(self.mix(torch.cat((state, features), -1)))
        logits = self.classify(mixed)
        if self.transfer is not None:
            logits = logits + (mixed * self.transferred(self.transfer(self.classify.weight, self.graph))).sum(-1)
        return logits
