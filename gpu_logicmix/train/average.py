"""Exponential moving average of a model's weights, the model that is evaluated.

Polyak and Juditsky, "Acceleration of Stochastic Approximation by Averaging", 1992. The warm-up of the decay is that of
timm's `ModelEmaV3`, 1 - (1 + update)^(-2/3), and so are the values, bit for bit. What differs: the average is kept in
float32 or better whatever the model is in (at a decay of 0.999 a bfloat16 average would round every update away), so it
needs no random numbers and has no state beside its weights.
"""

from __future__ import annotations

from collections.abc import Iterator
from copy import deepcopy

import torch
from torch import Tensor, nn


class WeightAverage:
    """`module` is the average of the models given to `update`; buffers are averaged too, integers copied."""

    def __init__(self, model: nn.Module, decay: float = 0.999, *, warmup: bool = False) -> None:
        self.decay, self.warmup = decay, warmup
        self.module = deepcopy(model).eval().requires_grad_(False)
        for tensor in (*self.module.parameters(), *self.module.buffers()):
            if tensor.is_floating_point():
                tensor.data = tensor.data.to(torch.promote_types(tensor.dtype, torch.float32))

    def decay_at(self, update: int) -> float:
        """Of the update with this number, counted from 1; the first one copies the model."""
        before = max(0, update - 1)
        if before == 0:
            return 0.0
        return min(1 - (1 + before) ** (-2 / 3), self.decay) if self.warmup else self.decay

    @torch.no_grad()
    def update(self, model: nn.Module, update: int) -> None:
        """Move towards `model`. `update` counts from 1."""
        pairs = list(zip(_tensors(self.module), _tensors(model), strict=True))
        averages = [a for a, _ in pairs if a.is_floating_point()]
        values = [v.detach().to(a.dtype) for a, v in pairs if a.is_floating_point()]
        torch._foreach_lerp_(averages, values, weight=1.0 - self.decay_at(update))
        for average, value in pairs:
            if not average.is_floating_point():
                average.copy_(value)


def _tensors(model: nn.Module) -> Iterator[Tensor]:
    """What a state dict has, each time anew: a module may give a buffer a new tensor."""
    yield from model.parameters()
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                yield buffer
