"""What SSGRL, SST, SARB and their successors share: one feature per category, and a graph between categories.

Chen et al., "Learning Semantic-Specific Graph Representation for Multi-Label Image Recognition" (SSGRL), ICCV 2019,
https://arxiv.org/abs/1908.07325; code https://github.com/HCPLab-SYSU/SSGRL and, for partial labels,
https://github.com/HCPLab-SYSU/HCP-MLR-PL. Written from the formulas.

Where this differs from the released code:
- A category without known positives has an identity row in the graph, not NaN.
- Two linear layers in a row are multiplied with each other before they meet the data, which gives the same function
  for a fraction of the work; biases that a softmax over positions cancels are not there.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from gpu_logicmix.losses.base import Batch, Output, check_at_least_one, check_at_least_zero
from gpu_logicmix.methods.base import Head

CHUNK = 1 << 24  # elements of the largest tensor that is kept for the backward pass: 64 MB in float32


# --------------------------------------------------------------------------------------------------------------- graph
def pair_counts(labels: Any) -> Tensor:
    """[C, C] float64: in how many rows two categories are both known to be present; of one category, on the diagonal.

    labels: [N, C] of anything that slices to arrays; 1 is present.
    """
    counts = torch.zeros(labels.shape[1], labels.shape[1], dtype=torch.float64)
    for start in range(0, len(labels), 1 << 14):
        present = (torch.as_tensor(labels[start : start + (1 << 14)]) == 1).float().cpu()
        counts += (present.T @ present).double()
    return counts


def label_graph(labels: Any) -> Tensor:
    """[C, C]: how often category j is present where i is, both known; 1 on the diagonal."""
    counts = pair_counts(labels)
    graph = counts / counts.diagonal()[:, None].clamp(min=1)
    return graph.fill_diagonal_(1).float()


# -------------------------------------------------------------------------------------------------------------- layers
class SemanticDecoupling(nn.Module):
    """One feature per category: the mean of the map, weighed by an attention that the category's word vector asks for.

    Attention of category c at a position with feature f: softmax over positions of v . tanh((A f) * (B x_c)).
    """

    def __init__(self, width: int, words: int, joint: int) -> None:
        super().__init__()
        self.image = nn.Linear(width, joint, bias=False)
        self.word = nn.Linear(words, joint, bias=False)
        self.inner = nn.Linear(joint, joint, bias=False)
        self.outer = nn.Linear(joint, 1, bias=False)

    def attention(self, features: Tensor, words: Tensor) -> Tensor:
        """features [B, P, D], words [C, E] -> [B, C, P], of sum 1 over positions."""
        image, word = self.image(features), self.word(words)
        weight = (self.outer.weight @ self.inner.weight)[0]
        step = max(1, CHUNK // max(image.numel(), 1))
        if step >= len(word):
            return _scores(image, word, weight).softmax(2)
        parts = [checkpoint(_scores, image, w, weight, use_reentrant=False, preserve_rng_state=False)
                 for w in word.split(step)]  # fmt: skip
        return torch.cat(parts, 1).softmax(2)

    def forward(self, features: Tensor, words: Tensor) -> tuple[Tensor, Tensor]:
        """map [B, D, H, W] -> a feature per category [B, C, D], and the attention [B, C, H * W]."""
        positions = features.flatten(2).transpose(1, 2)
        attention = self.attention(positions, words)
        return attention @ positions, attention


def _scores(image: Tensor, word: Tensor, weight: Tensor) -> Tensor:
    return torch.tanh(image[:, None] * word[:, None]) @ weight


class GatedGraph(nn.Module):
    """Categories exchange what they know along the graph: a gated recurrent unit whose input are the neighbours.

    Li et al., "Gated Graph Sequence Neural Networks", ICLR 2016, https://arxiv.org/abs/1511.05493
    """

    def __init__(self, width: int, steps: int) -> None:
        super().__init__()
        self.steps = steps
        self.neighbours = nn.Linear(2 * width, 3 * width)  # update, reset, new
        self.own = nn.Linear(width, 2 * width)  # update, reset
        self.new = nn.Linear(width, width)

    def forward(self, state: Tensor, graph: Tensor) -> Tensor:
        """state [B, C, D], graph [C, C] -> [B, C, D]"""
        for _ in range(self.steps):
            given = self.neighbours(torch.cat((graph @ state, graph.T @ state), -1))
            update, reset, new = given.chunk(3, -1)
            own_update, own_reset = self.own(state).chunk(2, -1)
            update, reset = (update + own_update).sigmoid(), (reset + own_reset).sigmoid()
            new = torch.tanh(new + self.new(reset * state))
            state = state.lerp(new.to(state.dtype), update.to(state.dtype))  # mixed precision gives others
        return state


class CategoryClassifier(nn.Module):
    """A weight vector and a bias for each category: [B, C, D] -> [B, C]."""

    def __init__(self, categories: int, width: int) -> None:
        super().__init__()
        bound = width**-0.5
        self.weight = nn.Parameter(torch.empty(categories, width).uniform_(-bound, bound))
        self.bias = nn.Parameter(torch.empty(categories).uniform_(-bound, bound))

    def forward(self, features: Tensor) -> Tensor:
        return (features * self.weight).sum(-1) + self.bias


# ---------------------------------------------------------------------------------------------------------------- head
class SemanticHead(Head):
    """Semantic decoupling, the gated graph and a classifier per category.

    width: channels that the map is reduced to (1x1 convolution and batch norm); none: as they are.
    joint: width of the space where image and word meet.
    out: width of the input of the classifiers.
    words: length of the word vectors. Without a file of word vectors they are learnt.
    steps: of the graph.
    pool: side of the average pooling of the map; the papers' 448 px images give 14 x 14, pooled by 2.
    """

    takes = "map"
    uses_word_vectors = True

    def __init__(
        self,
        features: int,
        categories: int,
        width: int | None = 1024,
        joint: int = 512,
        out: int = 1024,
        words: int = 300,
        steps: int = 3,
        pool: int = 1,
    ) -> None:
        super().__init__()
        check_at_least_one(width=width, joint=joint, out=out, words=words, pool=pool)
        check_at_least_zero(steps=steps)
        self.categories, self.pool, self.width = categories, pool, width or features
        self.messages: list[str] = []
        self.reduce: nn.Module = nn.Identity()
        if width is not None:
            self.reduce = nn.Sequential(nn.Conv2d(features, width, 1, bias=False), nn.BatchNorm2d(width))
        self.words = nn.Parameter(torch.randn(categories, words) * 0.4)  # as GloVe's are spread
        self.decouple = SemanticDecoupling(self.width, words, joint)
        self.graph_network = GatedGraph(self.width, steps)
        self.mix = nn.Linear(2 * self.width, out)
        self.classify = CategoryClassifier(categories, out)
        self.register_buffer("graph", torch.eye(categories))

    def prepare(self, labels: Any, categories: list[str], word_vectors: Tensor | None = None) -> None:
        self.graph.copy_(label_graph(labels))
        take_word_vectors(self, word_vectors)

    def category_features(self, features: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The map [B, D, H, W] as the head sees it, and of each category its feature [B, C, D'] and its attention."""
        if self.pool > 1:
            features = F.avg_pool2d(features, self.pool, ceil_mode=True)
        features = self.reduce(features)
        return features, *self.decouple(features, self.words)

    def predict(self, features: Tensor) -> Tensor:
        """[B, C, D'] -> logits"""
        state = self.graph_network(features, self.graph)
        return self.classify(torch.tanh(self.mix(torch.cat((state, features), -1))))

    def forward(self, features: Tensor, batch: Batch | None = None) -> Output:
        _, own, _ = self.category_features(features)
        return Output(self.predict(own), {"features": own})


def take_word_vectors(head: nn.Module, vectors: Tensor | None) -> None:
    """Into `head.words`, which are then fixed; without vectors they stay as they are and are learnt."""
    if vectors is None:
        head.messages.append("no word vectors are given: those of the categories are learnt")
        return
    if vectors.shape != head.words.shape:
        raise ValueError(
            f"word vectors {list(vectors.shape)} for a head with {list(head.words.shape)}: "
            f"set its option words={vectors.shape[1]}"
        )
    with torch.no_grad():
        head.words.copy_(vectors)
    head.words.requires_grad_(False)
