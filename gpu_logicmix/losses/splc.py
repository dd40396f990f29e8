"""SPLC and Hill: losses for missing positives.

Zhang et al., "Simple and Robust Loss Design for Multi-Label Learning with Missing Labels", 2021,
https://arxiv.org/abs/2112.07368; code: xinyu1205/robust-loss-mlml.

Both take an unknown label as absent. SPLC (self-paced loss correction) takes it as present where the model already says
so; Hill makes confident negatives, which are probably missing positives, cost less again.

The authors' data have no known negatives, and their code turns any label that is not 1. Here only unknown labels turn:
known ones stay what they are. Their losses are sums; "mean" is over all labels, "sum" is theirs.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gpu_logicmix.labels import is_unknown
from gpu_logicmix.losses.asymmetric import check_mixed, focal_term
from gpu_logicmix.losses.base import LOSSES, Batch, Loss, Output, check_at_least_zero, check_probability


def _labels(logits: Tensor, targets: Tensor, unknown: float) -> tuple[Tensor, Tensor, Tensor]:
    """Logits in at least float32, labels with unknown ones as absent, where they are unknown."""
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    missing = is_unknown(targets, unknown)
    return logits, targets.masked_fill(missing, 0).to(logits.dtype), missing


def _all_labels(values: Tensor) -> Tensor:
    return torch.full((), values.numel(), dtype=values.dtype, device=values.device)


@LOSSES.register("splc")
class SPLCLoss(Loss):
    """SPLC: unknown labels are taken as absent, or as present where the model gives them a probability above `tau`.

    tau: that probability; the authors take 0.6, and 0.65 with three quarters of COCO's positives.
    tau_mixed: the same for mixed samples; that of the others if none.
    change_epoch: the first epoch, counted from 0, in which labels turn. With LogicMix a later one may be better: mixed
        images have lower probabilities.
    margin: known positives are judged by a logit this much lower.
    gamma: how much less easy labels weigh, present and absent alike; this weight has a gradient of its own.
    """

    def __init__(
        self,
        tau: float = 0.6,
        change_epoch: int = 1,
        margin: float = 1.0,
        gamma: float = 2.0,
        reduction: str = "mean",
        *,
        tau_mixed: float | None = None,
        unknown: float = -1,
    ) -> None:
        super().__init__(reduction, unknown=unknown)
        check_probability(tau=tau, tau_mixed=tau if tau_mixed is None else tau_mixed)
        check_at_least_zero(change_epoch=change_epoch, margin=margin, gamma=gamma)
        self.tau, self.tau_mixed, self.change_epoch = tau, tau_mixed, change_epoch
        self.margin, self.gamma = margin, gamma
        self.epoch = 0

    @property
    def epoch(self) -> int:
        return self._epoch

    @epoch.setter
    def epoch(self, epoch: int) -> None:
        self._epoch = epoch
        # One of two values, and not the epoch itself, of which torch.compile would make a new graph every time.
        self._turning = epoch >= getattr(self, "change_epoch", 1)

    def cells(self, output: Output, batch: Batch) -> tuple[Tensor, Tensor]:
        check_mixed(batch.mixed, output.logits)
        logits, y, missing = _labels(output.logits, batch.targets, self.unknown)
        present = focal_term(logits - self.margin, self.gamma, discard_focal_grad=False)
        absent = focal_term(-logits, self.gamma, discard_focal_grad=False)
        loss = y * present + (1 - y) * absent
        if self._turning:
            turned = focal_term(logits, self.gamma, discard_focal_grad=False)  # without the margin, as in their code
            loss = torch.where(missing & (logits.detach().sigmoid() > self._tau(logits, batch.mixed)), turned, loss)
        return loss, _all_labels(loss)

    def _tau(self, logits: Tensor, mixed: Tensor | None) -> float | Tensor:
        if mixed is None or self.tau_mixed is None:
            return self.tau
        # Filled, not `where` of two numbers: those would be float32 and round the threshold of float64 logits.
        tau = torch.full((len(mixed), 1), self.tau, dtype=logits.dtype, device=logits.device)
        return tau.masked_fill(mixed[:, None], self.tau_mixed)


@LOSSES.register("hill")
class HillLoss(Loss):
    """Hill: unknown labels are taken as absent, and an absent label with a probability p costs (lamb - p) p^2, which
    falls again as p goes to 1. Known absent labels cost the same.

    lamb: 1.5 in the paper; the larger, the closer to a squared error.
    margin: known positives are judged by a logit this much lower.
    gamma: how much less easy positives weigh; this weight has a gradient of its own.
    """

    def __init__(
        self,
        lamb: float = 1.5,
        margin: float = 1.0,
        gamma: float = 2.0,
        reduction: str = "mean",
        *,
        unknown: float = -1,
    ) -> None:
        super().__init__(reduction, unknown=unknown)
        check_at_least_zero(lamb=lamb, margin=margin, gamma=gamma)
        self.lamb, self.margin, self.gamma = lamb, margin, gamma

    def cells(self, output: Output, batch: Batch) -> tuple[Tensor, Tensor]:
        logits, y, _ = _labels(output.logits, batch.targets, self.unknown)
        present = focal_term(logits - self.margin, self.gamma, discard_focal_grad=False)
        p = logits.sigmoid()
        loss = y * present + (1 - y) * (self.lamb - p) * p * p
        return loss, _all_labels(loss)
