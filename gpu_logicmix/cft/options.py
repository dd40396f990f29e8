"""What category-wise fine-tuning can be told."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

METHODS = ("adam", "ga")
SCHEDULES = ("constant", "cosine")


@dataclass(frozen=True)
class CFTOptions:
    """How the heads are fitted.

    method: "adam" fits the asymmetric loss; "ga" breeds heads for AP itself (all labels at once, `batch_size` is None).
    epochs: the maximum; the authors take 5,000.
    patience: a head stops after this many epochs without a better AP (None: never); the authors take 300.
    batch_size: known labels of its category that a head sees in a step; None: all of them.
    lr, schedule: Adam learning rate, one for all heads or [C]; "constant", or "cosine" to 0 at each head's last step.
    betas, eps: Adam's other constants.
    gamma_neg, gamma_pos, clip: constants of the asymmetric loss.
    holdout: share of the known positives, and of the known negatives, of each category that choose its best state.
    min_known: a category with fewer known positives or negatives than this keeps its head, bit for bit.
    seed: fixes the held-out labels, the batches, the bootstrap and, for "ga", all else that is random.
    population, mutation: for "ga": heads bred at a time for each category; the maximum by which a mutation moves a
        weight.
    resamples: bootstrap draws for the interval of the gain.
    on_epoch: is called after every epoch, for a progress bar.
    """

    method: str = "adam"
    epochs: int = 1000
    patience: int | None = 100
    batch_size: int | None = None
    lr: float | Tensor = 1e-4
    schedule: str = "constant"
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    gamma_neg: float = 4.0
    gamma_pos: float = 0.0
    clip: float = 0.05
    holdout: float = 0.2
    min_known: int = 5
    seed: int = 0
    population: int = 50
    mutation: float = 1e-3
    resamples: int = 500
    on_epoch: Callable[[], object] | None = None

    def __post_init__(self) -> None:
        for name, value, choices in (("method", self.method, METHODS), ("schedule", self.schedule, SCHEDULES)):
            if value not in choices:
                raise ValueError(f"{name}={value!r}: must be one of {', '.join(choices)}")
        least = {"epochs": 0, "min_known": 2, "population": 2, "patience": 1, "batch_size": 1, "resamples": 1}
        for name, lowest in least.items():
            value = getattr(self, name)
            if value is None and name in ("patience", "batch_size"):
                continue
            if not isinstance(value, int) or isinstance(value, bool) or value < lowest:
                raise ValueError(f"{name}={value!r}: must be a whole number from {lowest} on")
        for name, right, rule in (
            ("gamma_neg", self.gamma_neg >= 0, "at least 0"),
            ("gamma_pos", self.gamma_pos >= 0, "at least 0"),
            ("clip", 0 <= self.clip < 1, "from 0 to below 1"),
            ("holdout", 0 < self.holdout < 1, "above 0 and below 1"),
            ("mutation", self.mutation > 0, "above 0"),
        ):
            if not right:
                raise ValueError(f"{name}={getattr(self, name)}: must be {rule}")
        if self.method == "ga" and self.batch_size is not None:
            raise ValueError(
                f"batch_size={self.batch_size}: must be None with method='ga', which ranks all labels at once"
            )

    def check_lr(self, categories: int) -> None:
        lr = torch.as_tensor(self.lr)
        if lr.shape not in ((), (categories,)) or not (lr > 0).all():
            raise ValueError(
                f"lr={lr.tolist()}: must be above 0, one number or one for each of {categories} categories"
            )
