"""GCN-ML (ML-GCN): classifiers that a graph network makes from word vectors.

Chen et al., "Multi-Label Image Recognition with Graph Convolutional Networks", CVPR 2019,
https://arxiv.org/abs/1904.03582; code https://github.com/Megvii-Nanjing/ML-GCN. Written from the formulas.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gpu_logicmix.losses.base import Batch, Output, check_at_least_one
from gpu_logicmix.methods.base import HEADS, Head
from gpu_logicmix.methods.semantic import pair_counts, take_word_vectors


def correlation(counts: Tensor, threshold: float = 0.4, weight: float = 0.25) -> Tensor:
    """The graph of ML-GCN [C, C] from counts of pairs, with those of single categories on the diagonal.

    Categories i and j are linked where j is present in a share of at least `threshold` of the images with i. All links
    into a category weigh `weight` together (0.25 is p / (1 - p) of the paper's p = 0.2), it itself 1; then normalised
    by the degrees. A category without known positives is linked to itself alone.
    """
    single = counts.diagonal()[:, None]
    links = (counts / single.clamp(min=1) >= threshold) & (single > 0)
    links = links.to(counts.dtype).fill_diagonal_(0)
    graph = weight * links / (links.sum(0, keepdim=True) + 1e-6)
    graph = graph + torch.eye(len(graph), dtype=graph.dtype, device=graph.device)
    degree = graph.sum(1) ** -0.5
    return (graph * degree).T * degree


class GraphLayer(nn.Module):
    """Graph convolution without bias: graph @ x @ weight."""

    def __init__(self, width: int, out: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width, out).uniform_(-(out**-0.5), out**-0.5))

    def forward(self, x: Tensor, graph: Tensor) -> Tensor:
        return graph @ (x @ self.weight)


@HEADS.register("gcn-ml")
class GCNMLHead(Head):
    """The largest value of each channel over the map, times classifiers from two graph convolutions over word vectors.

    The graph is counted from known positives; the paper has all labels.

    hidden: width between the two graph convolutions.
    words: length of the word vectors. Without a file of word vectors they are learnt.
    threshold: smallest share of images with one category that show the other, for a link.
    weight: of all links into a category together, where the category itself has 1.
    """

    takes = "map"
    uses_word_vectors = True

    def __init__(
        self,
        features: int,
        categories: int,
        hidden: int = 1024,
        words: int = 300,
        threshold: float = 0.4,
        weight: float = 0.25,
    ) -> None:
        super().__init__()
        check_at_least_one(hidden=hidden, words=words)
        self.threshold, self.weight = threshold, weight
        self.messages: list[str] = []
        self.words = nn.Parameter(torch.randn(categories, words) * 0.4)  # as GloVe's are spread
        self.first, self.second = GraphLayer(words, hidden), GraphLayer(hidden, features)
        self.register_buffer("graph", torch.eye(categories))

    def prepare(self, labels: Any, categories: list[str], word_vectors: Tensor | None = None) -> None:
        self.graph.copy_(correlation(pair_counts(labels), self.threshold, self.weight))
        take_word_vectors(self, word_vectors)

    def forward(self, features: Tensor, batch: Batch | None = None) -> Output:
        classifiers = self.second(F.leaky_relu(self.first(self.words, self.graph), 0.2), self.graph)
        return Output(features.amax((2, 3)) @ classifiers.T)
