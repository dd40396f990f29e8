"""How good the scores are, by the known labels alone: mAP, per-category AP, precision, recall and F1.

- AP is the area under the precision-recall curve without interpolation, equal scores taken together: that of
  scikit-learn's `average_precision_score`, and of the papers on partial labels.
- CP, CR, CF1 (per category, then averaged) and OP, OR, OF1 (overall) as in Chen et al., "Multi-Label Image Recognition
  with Graph Convolutional Networks", CVPR 2019, https://arxiv.org/abs/1904.03582: CF1 is the F1 of CP and CR.

An unknown label is left out, where it stands, and nothing else with it. A category without a known positive label has
neither AP nor recall: it is left out of mAP, CP, CR and CF1, and named.

Not on torchmetrics, its place in the tests is that of an oracle: its `multilabel_average_precision` puts logits through
a sigmoid first, after which all of those above 17 are equal in float32, and walks through the categories one by one.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from gpu_logicmix.labels import check_labels, is_unknown

# Labels to sort at a time: bounds the memory when there are thousands of categories, and is fastest on a CPU.
CHUNK = 1 << 20


def average_precision(scores: Tensor, targets: Tensor, unknown: float = -1) -> Tensor:
    """Average precision of each category, [C] in float64; NaN for a category without a known positive label.

    scores: [N, C] of any type, logits or probabilities: their order counts alone.
    targets: [N, C] of 1, 0 and `unknown`, which may be NaN.
    """
    scores, targets = _check(scores, targets, unknown)
    samples, categories = scores.shape
    step = max(1, CHUNK // max(1, samples))
    parts = [
        _average_precision(scores[:, i : i + step].T, targets[:, i : i + step].T, unknown)
        for i in range(0, categories, step)
    ]
    return torch.cat(parts) if parts else scores.new_empty(0, dtype=torch.float64)


def _average_precision(scores: Tensor, targets: Tensor, unknown: float) -> Tensor:
    """The same for checked [C, N]."""
    scores, order = scores.contiguous().sort(dim=1, descending=True)
    return area_under_sorted(scores, (targets == 1).gather(1, order), (~is_unknown(targets, unknown)).gather(1, order))


def area_under_sorted(scores: Tensor, positive: Tensor, known: Tensor) -> Tensor:
    """AP [C] of scores [C, N] that fall along each row, with bool masks of the known positive and the known labels."""
    true, seen = positive.cumsum(1), known.cumsum(1)
    # A threshold lies below the last of equal scores. There, all samples so far are the predicted ones.
    last = torch.ones_like(known)
    last[:, :-1] = scores[:, :-1] != scores[:, 1:]
    # `true` never falls, so its running maximum over thresholds is its value at the latest of them.
    before = true.new_zeros(true.shape)
    before[:, 1:] = torch.where(last, true, 0).cummax(1).values[:, :-1]
    precision = true.double() / seen.clamp(min=1)
    area = ((true - before) * precision * last).sum(1)
    return area / positive.sum(1)  # 0 / 0 = NaN


def mean_average_precision(scores: Tensor, targets: Tensor, unknown: float = -1) -> float:
    """Mean of `average_precision` over the categories with a known positive label, in [0, 1]; NaN if none has one."""
    return average_precision(scores, targets, unknown).nanmean().item()


class PrecisionRecall(NamedTuple):
    """Per category (C) and overall (O): precision, recall and their harmonic mean."""

    CP: float
    CR: float
    CF1: float
    OP: float
    OR: float
    OF1: float


def precision_recall(
    scores: Tensor,
    targets: Tensor,
    threshold: float = 0.5,
    top_k: int | None = None,
    *,
    logits: bool = True,
    unknown: float = -1,
) -> PrecisionRecall:
    """Precision, recall and F1 when every label above `threshold` is predicted.

    threshold: a probability; 0 together with `top_k` predicts exactly that many labels a sample.
    top_k: predict no more than the best `top_k` labels of a sample, out of all categories whether known or not; the one
        of lower index where scores are equal. The published top-3 results have the threshold too.
    logits: whether scores are logits (probability 0.5 is logit 0) or probabilities.

    A category in which nothing is predicted has precision 0. OP, OR and OF1 count every known label, also those of
    categories without a positive one. NaN where nothing can be said for want of known positive labels.
    """
    scores, targets = _check(scores, targets, unknown)
    if not 0 <= threshold <= 1:
        raise ValueError(f"threshold={threshold!r}: must be a probability, from 0 to 1")
    if not logits and scores.numel() and not (scores.min() >= 0 and scores.max() <= 1):
        raise ValueError(
            f"scores go from {scores.min().item():g} to {scores.max().item():g}: with logits=False they must be "
            "probabilities, from 0 to 1"
        )
    if not logits:
        predicted = scores > threshold if threshold > 0 else torch.ones_like(scores, dtype=torch.bool)
    elif 0 < threshold < 1:
        predicted = scores > math.log(threshold / (1 - threshold))
    else:
        predicted = torch.full_like(scores, threshold == 0, dtype=torch.bool)
    if top_k is not None:
        if top_k < 1:
            raise ValueError(f"top_k={top_k!r}: must be 1 or more")
        # Sorted, not `topk`, which may choose either of two equal scores.
        best = scores.sort(dim=1, descending=True, stable=True).indices[:, :top_k]
        predicted &= torch.zeros_like(predicted).scatter_(1, best, True)

    positive = targets == 1
    hits = (predicted & positive).sum(0).double()
    guesses = (predicted & ~is_unknown(targets, unknown)).sum(0).double()
    positives = positive.sum(0).double()
    counted = positives > 0
    cp = (hits / guesses.clamp(min=1))[counted].mean().item()
    cr = (hits / positives)[counted].mean().item()
    op = (hits.sum() / guesses.sum().clamp(min=1)).item() if counted.any() else math.nan
    or_ = (hits.sum() / positives.sum()).item()
    return PrecisionRecall(cp, cr, _f1(cp, cr), op, or_, _f1(op, or_))


def _f1(precision: float, recall: float) -> float:
    return 2 * precision * recall / (precision + recall) if precision + recall != 0 else 0.0


class Metrics(NamedTuple):
    mAP: float
    AP: list[float]  # one a category, NaN for those left out
    left_out: list[int]  # categories without a known positive label
    threshold: PrecisionRecall  # every label with a probability above 0.5
    top3: PrecisionRecall  # the same, no more than three a sample

    def as_dict(self) -> dict[str, float]:
        """The numbers flat, for a log or a table: mAP, CP ... OF1, CP_top3 ... OF1_top3."""
        top3 = {f"{name}_top3": value for name, value in self.top3._asdict().items()}
        return {"mAP": self.mAP, **self.threshold._asdict(), **top3}


def evaluate(scores: Tensor, targets: Tensor, *, logits: bool = True, unknown: float = -1) -> Metrics:
    """All metrics of [N, C] scores against [N, C] targets at once."""
    ap = average_precision(scores, targets, unknown)
    options = {"logits": logits, "unknown": unknown}
    return Metrics(
        mAP=ap.nanmean().item(),
        AP=ap.tolist(),
        left_out=ap.isnan().nonzero().flatten().tolist(),
        threshold=precision_recall(scores, targets, **options),
        top3=precision_recall(scores, targets, top_k=3, **options),
    )


def _check(scores: Tensor, targets: Tensor, unknown: float) -> tuple[Tensor, Tensor]:
    scores, targets = torch.as_tensor(scores).detach(), torch.as_tensor(targets)
    if scores.ndim != 2 or scores.shape != targets.shape:
        raise ValueError(
            f"scores {list(scores.shape)} and targets {list(targets.shape)} must both be [samples, categories]"
        )
    if scores.dtype in (torch.float16, torch.bfloat16):
        scores = scores.float()  # exact, and sorts faster
    wrong = scores.isnan()
    if wrong.any():
        row, column = wrong.nonzero()[0].tolist()
        raise ValueError(
            f"scores[{row}, {column}] is NaN, as are {wrong.sum().item() - 1} more: scores must be numbers"
        )
    check_labels(targets, unknown=unknown)
    return scores, targets.to(scores.device)
