"""Losses for labels that are present (1), absent (0) or unknown (-1 or NaN).

- `PartialBCELoss`: binary cross-entropy on the known labels. Durand et al., "Learning a Deep ConvNet for Multi-label
  Classification with Partial Labels", CVPR 2019, https://arxiv.org/abs/1902.09720
- `PartialFocalLoss`: Lin et al., "Focal Loss for Dense Object Detection", ICCV 2017, https://arxiv.org/abs/1708.02002
- `PartialAsymmetricLoss`: Ridnik et al., "Asymmetric Loss For Multi-Label Classification", ICCV 2021,
  https://arxiv.org/abs/2009.14119; on partial labels: Ben-Baruch et al., "Multi-label Classification with Partial
  Annotations using Class-aware Selective Loss", CVPR 2022, https://arxiv.org/abs/2110.10955
- `DecoupledAsymmetricLoss`: one asymmetric policy for original samples, another for mixed ones (the LogicMix authors'
  2WayAug-PL).

All are one formula. With p = sigmoid(logit), q = min(1 - p + clip, 1) and a target y in [0, 1]:

    loss = y * alpha_pos * (1 - p)^gamma_pos * -log(p)  +  (1 - y) * alpha_neg * (1 - q)^gamma_neg * -log(q)

log(p) and log(1 - p) come from log-sigmoid, so that no logit is too large. With float16 or bfloat16 logits the loss is
computed and returned in float32. Nothing here waits for the device, no shape depends on how many labels are known.

Values and gradients are those of mlcpl's losses, with two differences: a batch without any known label gives 0 where
mlcpl gives NaN, and a NaN logit under a known label gives NaN where mlcpl silently drops it.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from gpu_logicmix.losses import closed_form
from gpu_logicmix.losses.base import LOSSES, PartialLoss, check_at_least_zero, check_probability


def focal_term(logits: Tensor, gamma: float = 0, clip: float = 0, discard_focal_grad: bool = True) -> Tensor:
    """(1 - q)^gamma * -log(q) with q = min(sigmoid(logit) + clip, 1): what a label costs whose truth has this logit.

    discard_focal_grad: take (1 - q)^gamma as a constant in the backward pass.
    """
    # With a clip, q is at least that: its logarithm is safe, and not to be had from log-sigmoid.
    log_q = (torch.sigmoid(logits) + clip).clamp(max=1).log() if clip > 0 else F.logsigmoid(logits)
    if gamma == 0:
        return -log_q
    with torch.set_grad_enabled(torch.is_grad_enabled() and not discard_focal_grad):
        focus = _focus(logits, gamma, clip)
    return -log_q * focus


def _focus(logits: Tensor, gamma: float, clip: float) -> Tensor:
    """(1 - q)^gamma."""
    # The slope of x^gamma at x = 0 is infinite for gamma < 1. So: an exponential, or a floor under x.
    if clip > 0:
        x, tiny = torch.sigmoid(-logits), torch.finfo(logits.dtype).tiny
        if torch.is_grad_enabled():
            return (x - clip).clamp(min=tiny) ** gamma
        return x.sub_(clip).clamp_(min=tiny).pow_(gamma)  # the same in place
    return (gamma * F.logsigmoid(-logits)).exp()


def asymmetric_terms(
    logits: Tensor, gamma_pos: float = 0, gamma_neg: float = 0, clip: float = 0, discard_focal_grad: bool = True
) -> tuple[Tensor, Tensor]:
    """What each logit costs if its label is 1, and what if it is 0; at least float32."""
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return (
        focal_term(logits, gamma_pos, 0, discard_focal_grad),
        focal_term(-logits, gamma_neg, clip, discard_focal_grad),
    )


def _times(alpha: float, term: Tensor) -> Tensor:
    return term if alpha == 1 else alpha * term


def check_mixed(mixed: Tensor | None, logits: Tensor) -> None:
    if mixed is not None and (mixed.shape != logits.shape[:1] or mixed.dtype is not torch.bool):
        raise ValueError(
            f"mixed must be [{logits.shape[0]}] of bool, one a sample, not {list(mixed.shape)} of {mixed.dtype}"
        )


@LOSSES.register("bce")
class PartialBCELoss(PartialLoss):
    """Binary cross-entropy on the known labels. `normalize="known"` is the loss of Durand et al.; see `PartialLoss` for
    the keywords."""

    def __init__(self, reduction: str = "mean", *, alpha_pos: float = 1, alpha_neg: float = 1, **shared: Any):
        super().__init__(reduction, **shared)
        self.alpha_pos, self.alpha_neg = alpha_pos, alpha_neg

    def terms(self, logits: Tensor, mixed: Tensor | None) -> tuple[Tensor, Tensor]:
        positive, negative = asymmetric_terms(logits)
        return _times(self.alpha_pos, positive), _times(self.alpha_neg, negative)


@LOSSES.register("focal")
class PartialFocalLoss(PartialLoss):
    """Focal loss on the known labels: easy ones, present or absent, weigh (1 - probability of the truth)^gamma.

    gamma: 2 in the paper of the focal loss; mlcpl's default is 1.
    discard_focal_grad: take that weight as a constant in the backward pass, as mlcpl and the asymmetric loss do.
    """

    def __init__(
        self,
        gamma: float = 2,
        reduction: str = "mean",
        *,
        alpha_pos: float = 1,
        alpha_neg: float = 1,
        discard_focal_grad: bool = True,
        **shared: Any,
    ):
        super().__init__(reduction, **shared)
        check_at_least_zero(gamma=gamma)
        self.gamma = gamma
        self.alpha_pos, self.alpha_neg = alpha_pos, alpha_neg
        self.discard_focal_grad = discard_focal_grad

    def terms(self, logits: Tensor, mixed: Tensor | None) -> tuple[Tensor, Tensor]:
        positive, negative = asymmetric_terms(logits, self.gamma, self.gamma, 0, self.discard_focal_grad)
        return _times(self.alpha_pos, positive), _times(self.alpha_neg, negative)


@LOSSES.register("asl")
class PartialAsymmetricLoss(PartialLoss):
    """Asymmetric loss on the known labels (P-ASL).

    gamma_neg, gamma_pos: how much less easy absent and easy present labels weigh.
    clip: absent labels with a probability below it cost nothing.

    >>> loss = PartialAsymmetricLoss(gamma_neg=0, clip=0)  # that is binary cross-entropy
    >>> value = loss(torch.tensor([[0.0, 9.0]]), torch.tensor([[1, -1]]))  # the unknown label is ignored
    >>> round(value.item(), 4)
    0.6931
    """

    def __init__(
        self,
        gamma_neg: float = 4,
        gamma_pos: float = 0,
        clip: float = 0.05,
        reduction: str = "mean",
        *,
        alpha_pos: float = 1,
        alpha_neg: float = 1,
        discard_focal_grad: bool = True,
        **shared: Any,
    ):
        super().__init__(reduction, **shared)
        check_at_least_zero(gamma_neg=gamma_neg, gamma_pos=gamma_pos)
        check_probability(clip=clip)
        self.gamma_neg, self.gamma_pos, self.clip = gamma_neg, gamma_pos, clip
        self.alpha_pos, self.alpha_neg = alpha_pos, alpha_neg
        self.discard_focal_grad = discard_focal_grad

    def costs(self, logits: Tensor, present: Tensor, absent: Tensor, mixed: Tensor | None) -> Tensor:
        plain = self.discard_focal_grad and self.alpha_pos == self.alpha_neg == 1 and not present.requires_grad
        if plain and closed_form.applies(self.gamma_pos, self.gamma_neg, self.clip):
            terms = partial(self.terms, mixed=None)
            return closed_form.clipped_cells(logits, present, absent, self.gamma_neg, self.clip, terms)
        return super().costs(logits, present, absent, mixed)

    def terms(self, logits: Tensor, mixed: Tensor | None) -> tuple[Tensor, Tensor]:
        positive, negative = asymmetric_terms(
            logits, self.gamma_pos, self.gamma_neg, self.clip, self.discard_focal_grad
        )
        return _times(self.alpha_pos, positive), _times(self.alpha_neg, negative)


@LOSSES.register("dp-asl")
class DecoupledAsymmetricLoss(PartialLoss):
    """Asymmetric loss with one policy for original samples and another for mixed ones (DP-ASL): the first looks past
    easy negatives, of which original samples have plenty, the second past easy positives, of which mixed ones do.

    Called with `(logits, targets, mixed)`, `mixed` [B] bool as in `MixPlan.mixed`; None if nothing was mixed. "mean" is
    over the known labels of both kinds of samples together.
    """

    def __init__(
        self,
        gamma_neg: float = 4,
        gamma_pos: float = 0,
        clip: float = 0.05,
        mixed_gamma_neg: float = 0,
        mixed_gamma_pos: float = 4,
        mixed_clip: float = 0,
        reduction: str = "mean",
        *,
        discard_focal_grad: bool = True,
        **shared: Any,
    ):
        super().__init__(reduction, **shared)
        check_at_least_zero(
            gamma_neg=gamma_neg, gamma_pos=gamma_pos, mixed_gamma_neg=mixed_gamma_neg, mixed_gamma_pos=mixed_gamma_pos
        )
        check_probability(clip=clip, mixed_clip=mixed_clip)
        self.gamma_neg, self.gamma_pos, self.clip = gamma_neg, gamma_pos, clip
        self.mixed_gamma_neg, self.mixed_gamma_pos, self.mixed_clip = mixed_gamma_neg, mixed_gamma_pos, mixed_clip
        self.discard_focal_grad = discard_focal_grad

    def terms(self, logits: Tensor, mixed: Tensor | None) -> tuple[Tensor, Tensor]:
        terms = asymmetric_terms(logits, self.gamma_pos, self.gamma_neg, self.clip, self.discard_focal_grad)
        if mixed is not None:
            check_mixed(mixed, logits)
            other = asymmetric_terms(
                logits, self.mixed_gamma_pos, self.mixed_gamma_neg, self.mixed_clip, self.discard_focal_grad
            )
            terms = [torch.where(mixed[:, None], b, a) for a, b in zip(terms, other, strict=True)]
        return tuple(terms)
