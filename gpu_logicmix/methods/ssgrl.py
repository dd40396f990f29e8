"""SSGRL: a feature per category by semantic attention, and a gated graph network over categories.

Chen et al., "Learning Semantic-Specific Graph Representation for Multi-Label Image Recognition", ICCV 2019,
https://arxiv.org/abs/1908.07325; code https://github.com/HCPLab-SYSU/SSGRL. Written from the formulas.
"""

from __future__ import annotations

from gpu_logicmix.methods.base import HEADS
from gpu_logicmix.methods.semantic import SemanticHead


@HEADS.register("ssgrl")
class SSGRLHead(SemanticHead):
    """SSGRL at the width of the backbone, as its paper has it.

    The graph is counted from known positives; the paper has all labels. The released code uses one matrix for the
    update and the reset gate of the graph network where the paper has two: here there are two.

    width: channels that the map is reduced to; none: as they are.
    joint: width of the space where image and word meet.
    out: width of the input of the classifiers.
    words: length of the word vectors. Without a file of word vectors they are learnt.
    steps: of the graph.
    pool: side of the average pooling of the map.
    """

    def __init__(
        self,
        features: int,
        categories: int,
        width: int | None = None,
        joint: int = 1024,
        out: int = 2048,
        words: int = 300,
        steps: int = 3,
        pool: int = 1,
    ) -> None:
        super().__init__(features, categories, width, joint, out, words, steps, pool)
