"""P-GCN: graph convolutions over features of categories, which predict their scores.

Chen et al., "Learning Graph Convolutional Networks for Multi-Label Recognition and Applications", TPAMI 2021.
There is no public code: written from the description of the method.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gpu_logicmix.losses.base import Batch, Output, check_at_least_one
from gpu_logicmix.methods.base import HEADS, Head
from gpu_logicmix.methods.gcn_ml import GraphLayer, correlation
from gpu_logicmix.methods.semantic import CategoryClassifier, pair_counts


@HEADS.register("p-gcn")
class PGCNHead(Head):
    """The map is split into a feature per category, by the activation map of the category; two graph convolutions on
    the graph of ML-GCN exchange them; a linear score for each category.

    The graph is counted from known positives; the paper has all labels. How features are split and the residual around
    the graph convolutions are our reading of the paper.

    width: of a category's feature.
    threshold, weight: of the graph, as in gcn-ml.
    """

    takes = "map"

    def __init__(
        self, features: int, categories: int, width: int = 512, threshold: float = 0.4, weight: float = 0.25
    ) -> None:
        super().__init__()
        check_at_least_one(width=width)
        self.threshold, self.weight = threshold, weight
        self.activation = nn.Linear(features, categories)
        self.reduce = nn.Linear(features, width)
        self.first, self.second = GraphLayer(width, width), GraphLayer(width, width)
        self.classify = CategoryClassifier(categories, width)
        self.register_buffer("graph", torch.eye(categories))

    def prepare(self, labels: Any, categories: list[str], word_vectors: Tensor | None = None) -> None:
        self.graph.copy_(correlation(pair_counts(labels), self.threshold, self.weight))

    def forward(self, features: Tensor, batch: Batch | None = None) -> Output:
        positions = features.flatten(2).transpose(1, 2)
        attention = self.activation(positions).transpose(1, 2).sigmoid()  # [B, C, P]
        own = attention @ self.reduce(positions) / positions.shape[1]
        exchanged = self.second(F.leaky_relu(self.first(own, self.graph), 0.2), self.graph)
        return Output(self.classify(F.leaky_relu(own + exchanged, 0.2)))
