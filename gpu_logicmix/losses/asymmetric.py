"""Losses for labels that are present (1), absent (0) or unknown (-1, or NaN if told so).

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
mlcpl gives NaN, and a NaN logit under a known label gives NaN where mlcpl drops it without a word.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gpu_logicmix.labels import is_unknown

REDUCTIONS = ("mean", "sum", "none")


def focal_term(logits: Tensor, gamma: float = 0, clip: float = 0, discard_focal_grad: bool = True) -> Tensor:
    """(1 - q)^gamma * -log(q) with q = min(sigmoid(logit) + clip, 1): what a label costs whose truth has this logit.

    discard_focal_grad: take (1 - q)^gamma as a constant in the backward pass.
    """
    # With a clip, q is at least that: its logarithm is safe, and not to be had from log-sigmoid.
    log_q = (torch.sigmoid(logits) + clip).clamp(max=1).log() if clip > 0 else F.logsigmoid(logits)
    if gamma == 0:
        return -log_q
    if discard_focal_grad:
        logits = logits.detach()
    # The slope of x^gamma at x = 0 is infinite for gamma < 1. So: an exponential, or a floor under x.
    if clip > 0:
        focus = (torch.sigmoid(-logits) - clip).clamp(min=torch.finfo(logits.dtype).tiny) ** gamma
    else:
        focus = (gamma * F.logsigmoid(-logits)).exp()
    return -log_q * focus


def asymmetric_terms(
    logits: Tensor, gamma_pos: float = 0, gamma_neg: float = 0, clip: float = 0, discard_focal_grad: bool = True
) -> tuple[Tensor, Tensor]:
    """What each logit costs if its label is 1, and what if it is 0; at least float32."""
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return (
        focal_term(logits, gamma_pos, 0, discard_focal_grad),
        focal_term(-logits, gamma_neg, clip, discard_focal_grad),
    )


class PartialLoss(nn.Module):
    """What the losses below share: unknown labels, normalisation and reduction. Not for use by itself.

    reduction:
        "mean"  the sum divided by the number of known labels in the batch (of all labels with `assume_negative`; of
                samples that have a known label with Durand's normalisation). 0 where there are none.
        "sum"   the sum over the known labels.
        "none"  [B, C], 0 at unknown labels.
    unknown: the value of an unknown label; may be NaN.
    assume_negative: take unknown labels as absent instead of leaving them out.
    normalize: how much a sample counts by its share `s` of known labels.
        None         not at all.
        "known"      the loss of a sample is its mean over its known labels: g(s) = 1/s of Durand et al.
        (a, b, c)    the loss of a sample is g(s)/C times its sum over its known labels, g(s) = a * s^c + b; Durand et
                     al. train with (-4.45, 5.45, 1).
        "mlcpl"      each label weighs 1 + 1/(1 + known labels of the sample), as with mlcpl's `normalize=True`.
    """

    def __init__(
        self,
        reduction: str = "mean",
        *,
        unknown: float = -1,
        assume_negative: bool = False,
        normalize: str | tuple[float, float, float] | None = None,
    ):
        super().__init__()
        if reduction not in REDUCTIONS:
            raise ValueError(f"reduction={reduction!r}: must be one of {', '.join(REDUCTIONS)}")
        if normalize == "known":
            normalize = (1.0, 0.0, -1.0)
        elif normalize not in (None, "mlcpl") and not (isinstance(normalize, tuple) and len(normalize) == 3):
            raise ValueError(
                f"normalize={normalize!r}: must be None, 'known', 'mlcpl' or (a, b, c) for a weight of a * share^c + b"
            )
        self.reduction = reduction
        self.unknown = unknown
        self.assume_negative = assume_negative
        self.normalize = normalize

    def count(self, targets: Tensor) -> Tensor:
        """What "mean" divides the sum by (a tensor on the device). With reduction="sum" and this, a mean over several
        batches or processes weighs every known label alike."""
        known = self._known(targets)
        return known.any(1).sum() if isinstance(self.normalize, tuple) else known.sum()

    def _known(self, targets: Tensor) -> Tensor:
        if self.assume_negative:
            return torch.ones_like(targets, dtype=torch.bool)
        return ~is_unknown(targets, self.unknown)

    def _reduce(self, positive: Tensor, negative: Tensor, targets: Tensor) -> Tensor:
        known = self._known(targets)
        y = targets.masked_fill(is_unknown(targets, self.unknown), 0).to(positive.dtype)
        loss = (y * positive + (1 - y) * negative).masked_fill(~known, 0)
        if self.normalize is not None:
            loss = loss * self._weight(known.sum(1, keepdim=True).to(loss.dtype), known.shape[1])
        if self.reduction == "none":
            return loss
        if self.reduction == "sum":
            return loss.sum()
        return loss.sum() / self.count(targets).clamp(min=1)

    def _weight(self, known: Tensor, categories: int) -> Tensor:
        if self.normalize == "mlcpl":
            return 1 + 1 / (1 + known)
        a, b, c = self.normalize
        # A sample without known labels has no loss to weigh; 1 keeps its share off 0^-1.
        return (a * (known.clamp(min=1) / categories) ** c + b) / categories

    def extra_repr(self) -> str:
        shown = {k: v for k, v in vars(self).items() if not k.startswith("_") and k != "training"}
        return ", ".join(f"{k}={v!r}" for k, v in shown.items())


class PartialBCELoss(PartialLoss):
    """Binary cross-entropy on the known labels. `normalize="known"` is the loss of Durand et al.; see `PartialLoss` for
    the keywords."""

    def __init__(self, reduction: str = "mean", *, alpha_pos: float = 1, alpha_neg: float = 1, **shared):
        super().__init__(reduction, **shared)
        self.alpha_pos, self.alpha_neg = alpha_pos, alpha_neg

    def forward(self, logits: Tensor, targets: Tensor) -> Tensor:
        _check(logits, targets)
        positive, negative = asymmetric_terms(logits)
        return self._reduce(self.alpha_pos * positive, self.alpha_neg * negative, targets)


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
        **shared,
    ):
        super().__init__(reduction, **shared)
        _at_least_zero(gamma=gamma)
        self.gamma = gamma
        self.alpha_pos, self.alpha_neg = alpha_pos, alpha_neg
        self.discard_focal_grad = discard_focal_grad

    def forward(self, logits: Tensor, targets: Tensor) -> Tensor:
        _check(logits, targets)
        positive, negative = asymmetric_terms(logits, self.gamma, self.gamma, 0, self.discard_focal_grad)
        return self._reduce(self.alpha_pos * positive, self.alpha_neg * negative, targets)


class PartialAsymmetricLoss(PartialLoss):
    """Asymmetric loss on the known labels (P-ASL).

    gamma_neg, gamma_pos: how much less easy absent and easy present labels weigh.
    clip: absent labels with a probability below it cost nothing.
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
        **shared,
    ):
        super().__init__(reduction, **shared)
        _at_least_zero(gamma_neg=gamma_neg, gamma_pos=gamma_pos)
        _probability(clip=clip)
        self.gamma_neg, self.gamma_pos, self.clip = gamma_neg, gamma_pos, clip
        self.alpha_pos, self.alpha_neg = alpha_pos, alpha_neg
        self.discard_focal_grad = discard_focal_grad

    def forward(self, logits: Tensor, targets: Tensor) -> Tensor:
        _check(logits, targets)
        positive, negative = asymmetric_terms(
            logits, self.gamma_pos, self.gamma_neg, self.clip, self.discard_focal_grad
        )
        return self._reduce(self.alpha_pos * positive, self.alpha_neg * negative, targets)


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
        **shared,
    ):
        super().__init__(reduction, **shared)
        _at_least_zero(
            gamma_neg=gamma_neg, gamma_pos=gamma_pos, mixed_gamma_neg=mixed_gamma_neg, mixed_gamma_pos=mixed_gamma_pos
        )
        _probability(clip=clip, mixed_clip=mixed_clip)
        self.gamma_neg, self.gamma_pos, self.clip = gamma_neg, gamma_pos, clip
        self.mixed_gamma_neg, self.mixed_gamma_pos, self.mixed_clip = mixed_gamma_neg, mixed_gamma_pos, mixed_clip
        self.discard_focal_grad = discard_focal_grad

    def forward(self, logits: Tensor, targets: Tensor, mixed: Tensor | None = None) -> Tensor:
        _check(logits, targets)
        terms = asymmetric_terms(logits, self.gamma_pos, self.gamma_neg, self.clip, self.discard_focal_grad)
        if mixed is not None:
            if mixed.shape != logits.shape[:1] or mixed.dtype is not torch.bool:
                raise ValueError(
                    f"mixed must be [{logits.shape[0]}] of bool, one a sample, not {list(mixed.shape)} of {mixed.dtype}"
                )
            other = asymmetric_terms(
                logits, self.mixed_gamma_pos, self.mixed_gamma_neg, self.mixed_clip, self.discard_focal_grad
            )
            terms = [torch.where(mixed[:, None], b, a) for a, b in zip(terms, other, strict=True)]
        return self._reduce(*terms, targets)


def _check(logits: Tensor, targets: Tensor) -> None:
    if logits.ndim != 2 or logits.shape != targets.shape:
        raise ValueError(
            f"logits {list(logits.shape)} and targets {list(targets.shape)} must both be [samples, categories]"
        )
    if not logits.is_floating_point():
        raise ValueError(f"logits must be of a floating-point type, not {logits.dtype}")


def _at_least_zero(**values: float) -> None:
    for name, value in values.items():
        if not value >= 0:
            raise ValueError(f"{name}={value!r}: must be 0 or more")


def _probability(**values: float) -> None:
    for name, value in values.items():
        if not 0 <= value < 1:
            raise ValueError(f"{name}={value!r}: must be at least 0 and below 1")
