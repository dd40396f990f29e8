"""What a run adds up on the device while it trains, so that no step makes the host wait."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from gpu_logicmix.errors import RunError
from gpu_logicmix.losses.base import LossSum


class Sums:
    """Loss and count since the epoch began, the count since the last update, and the first non-finite step."""

    def __init__(self, device: torch.device) -> None:
        self.totals = torch.zeros(2, dtype=torch.float64, device=device)
        self.counted = torch.zeros((), device=device)
        self.first_bad = torch.full((), -1, dtype=torch.int64, device=device)

    def add(self, loss: LossSum, step: int) -> None:
        """`step` counts from 1."""
        total = loss.total.detach()
        self.counted += loss.count
        self.totals += torch.stack((total.double(), loss.count.double()))
        fine = torch.isfinite(total) | (self.first_bad >= 0)
        self.first_bad = torch.where(fine, self.first_bad, step)

    def begin_epoch(self) -> None:
        self.totals.zero_()

    def begin_update(self) -> None:
        self.counted.zero_()

    def of_epoch(self, world: Any) -> Tensor:
        """Loss and count over all processes."""
        return world.sum_(self.totals.clone())


def check_finite(run: Any, *, weights: bool = False) -> None:
    """Stop a `loop.Training` if the loss became non-finite in some step, or a weight is non-finite now. Syncs."""
    bad, what = run.world.maximum(int(run.sums.first_bad)), "loss"
    if bad < 0 and weights:
        largest = torch.stack(torch._foreach_norm([p.detach() for p in run.params], math.inf)).max()
        bad, what = (-1 if math.isfinite(largest) else run.step), "largest weight"
    if bad >= 0:
        saved = (run.folder / "last.pt").exists()
        before = f"the last checkpoint in {run.folder} is from before" if saved else "there is no checkpoint yet"
        raise RunError(
            f"the {what} became non-finite at step {bad} (epoch {(bad - 1) // run.steps + 1}); {before}. "
            "A smaller --lr or --amp off may help"
        )
