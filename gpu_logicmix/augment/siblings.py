"""What LogicMix is compared with: each mixes every sample with one other. Same call as `GPULogicMix`.

- Mixup: Zhang et al., "mixup: Beyond Empirical Risk Minimization", ICLR 2018.
- OrMixup: Wang et al., "A Baseline for Multi-Label Image Classification Using an Ensemble of Deep Convolutional Neural
  Networks", ICIP 2019.
- Multi-label Mixup: Gao et al., "Dynamic Mixup for Multi-Label Long-Tailed Food Ingredient Recognition", 2022.
- Mixup-PME: Dong et al., "Revisiting Vicinal Risk Minimization for Partially Supervised Multi-Label Classification
  Under Data Scarcity", CVPR workshops 2022.
"""

from __future__ import annotations

from numbers import Real
from typing import Any

import torch
from torch import Tensor

from gpu_logicmix.augment.base import Mix, check_share
from gpu_logicmix.augment.plan import MixPlan, drawn, filled, shares
from gpu_logicmix.labels import is_unknown


class Mixup(Mix):
    """Mixup with unknown labels taken as absent: each sample with another one, shares from Beta(alpha, alpha).

    The labels come back soft: floating types are kept, others become float32. This and the other siblings mix every
    sample; the options `unknown`, `generator`, `validate`, `normalize` and `out_dtype` are as in `GPULogicMix`.
    """

    def __init__(self, alpha: float = 0.2, **options: Any) -> None:
        super().__init__(**options)
        if not isinstance(alpha, Real) or not alpha > 0:
            raise ValueError(f"alpha={alpha}: must be above 0")
        self.alpha = float(alpha)

    def _share(self, batch_size: int, device: torch.device | str | None) -> Tensor:
        # Beta as a ratio of Gammas. Gamma(alpha) = Gamma(alpha + 1) * U^(1 / alpha) in logarithms, because for small
        # alpha both would underflow to 0.
        source = {"device": device, "generator": self.generator}
        gamma = drawn(_gammas, self.alpha + 1.0, 2, batch_size, **source)
        uniform = 1 - drawn(torch.rand, 2, batch_size, **source)
        log = gamma.log() + uniform.log() / self.alpha
        return torch.sigmoid(log[0] - log[1])

    def _mix_targets(self, targets: Tensor, plan: MixPlan) -> Tensor:
        plan = filled(plan)
        present = targets == 1
        mixed = _soft(_floating(targets, present), plan)
        # What is neither 0, 1 nor unknown must not pass as absent.
        odd = ~(present | (targets == 0) | is_unknown(targets, self.unknown))
        return mixed.masked_fill_(odd[plan.index].any(1), self.unknown)


class OrMixup(Mix):
    """Wang et al.: each sample with another one, `lam` of it, labels by OR with unknown taken as absent.

    On in the first epoch, off in the next, and so on: call `set_epoch(epoch)` at the start of each.
    """

    alternate = True

    def __init__(self, lam: float = 0.5, **options: Any) -> None:
        super().__init__(**options)
        self.lam = check_share("lam", lam)

    def _share(self, batch_size: int, device: torch.device | str | None) -> Tensor:
        return torch.full((batch_size,), self.lam, device=device)


class MultiLabelMixup(Mix):
    """Gao et al.: each sample with another one, share uniform from 0 to 1, labels by OR with unknown as absent."""

    def _share(self, batch_size: int, device: torch.device | str | None) -> Tensor:
        return drawn(torch.rand, batch_size, device=device, generator=self.generator)


class MixupPME(Mix):
    """Dong et al.: each sample with another one, share uniform from `alpha` to 1; an unknown label counts 0.5 in the
    mean, and stays unknown where the sample's own is. The labels come back soft, as from `Mixup`."""

    def __init__(self, alpha: float = 0.75, **options: Any) -> None:
        super().__init__(**options)
        self.alpha = check_share("alpha", alpha)

    def _share(self, batch_size: int, device: torch.device | str | None) -> Tensor:
        return self.alpha + (1 - self.alpha) * drawn(torch.rand, batch_size, device=device, generator=self.generator)

    def _mix_targets(self, targets: Tensor, plan: MixPlan) -> Tensor:
        plan = filled(plan)
        present = targets == 1
        hidden = ~(present | (targets == 0))
        mixed = _soft(_floating(targets, present).masked_fill_(hidden, 0.5), plan)
        return mixed.masked_fill_(hidden, self.unknown)


def _gammas(shape: float, *size: int, device: torch.device | str | None, **source: Any) -> Tensor:
    return torch._standard_gamma(torch.full(size, shape, device=device), **source)


def _soft(targets: Tensor, plan: MixPlan) -> Tensor:
    """The weighted mean of each group's labels."""
    weight = shares(plan, targets.dtype)
    mixed = weight[:, :1] * targets[plan.index[:, 0]]
    for k in range(1, plan.index.shape[1]):
        mixed = mixed + weight[:, k, None] * targets[plan.index[:, k]]
    return mixed


def _floating(targets: Tensor, present: Tensor) -> Tensor:
    """1 where `present` and else 0, in the type of the targets if that is a floating one."""
    return present.to(targets.dtype if targets.is_floating_point() else torch.float32)
