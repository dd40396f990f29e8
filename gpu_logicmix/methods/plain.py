"""A linear head, and one with a hidden layer: what the LogicMix paper trains."""

from __future__ import annotations

from torch import Tensor, nn

from gpu_logicmix.losses.base import Batch, Output, check_at_least_one, check_probability
from gpu_logicmix.methods.base import HEADS, Head


class _Layers(Head, nn.Sequential):
    """Layers one after the other, of which the last is linear."""

    def __init__(self, *layers: nn.Module) -> None:
        nn.Sequential.__init__(self, *layers)

    def forward(self, features: Tensor, batch: Batch | None = None) -> Output:
        return Output(self.classifier(self.embed(features)))

    def embed(self, features: Tensor) -> Tensor:
        for layer in list(self)[:-1]:
            features = layer(features)
        return features

    @property
    def classifier(self) -> nn.Linear:
        return list(self)[-1]


def _dropout(share: float) -> list[nn.Module]:
    check_probability(dropout=share)
    return [nn.Dropout(share)] if share > 0 else []


@HEADS.register("linear")
class LinearHead(_Layers):
    """One linear layer.

    dropout: before it.
    """

    def __init__(self, features: int, categories: int, dropout: float = 0.0) -> None:
        super().__init__(*_dropout(dropout), nn.Linear(features, categories))


@HEADS.register("mlp")
class MLPHead(_Layers):
    """Linear, ReLU, linear: the head of the LogicMix paper.

    hidden: width of the hidden layer; that of the features if none.
    dropout: before the last layer.
    """

    def __init__(self, features: int, categories: int, hidden: int | None = None, dropout: float = 0.0) -> None:
        check_at_least_one(hidden=hidden)
        hidden = features if hidden is None else hidden
        super().__init__(nn.Linear(features, hidden), nn.ReLU(), *_dropout(dropout), nn.Linear(hidden, categories))
