"""How good the scores are, by the known labels alone: AP by category, mAP, precision, recall, F1, ranking, calibration.

- AP, of which there are two kinds that papers print side by side without naming them. "step": the area under the
  precision-recall curve without interpolation, equal scores taken together: that of scikit-learn and torchmetrics, of
  LogicMix and mlcpl, and of all figures of this package unless they say otherwise. "envelope": precision is first made
  to fall with recall, as in VOC 2012; that of the SST, SARB and HST papers. It is never the smaller one.
- CP, CR, CF1 (per category, then averaged) and OP, OR, OF1 (overall) as in Chen et al., "Multi-Label Image Recognition
  with Graph Convolutional Networks", CVPR 2019, https://arxiv.org/abs/1904.03582: CF1 is the F1 of CP and CR.
- AUROC and expected calibration error by category, Hamming loss; by sample, ranking loss, label-ranking average
  precision and coverage as scikit-learn has them.

An unknown label is left out, where it stands, and nothing else with it. A category without a known positive label has
neither AP nor recall: it is left out of mAP, CP, CR and CF1, and named. A sample without known labels is left out of
what is counted by sample.

Not on torchmetrics, its place in the tests is that of an oracle: its `multilabel_average_precision` puts logits through
a sigmoid first, after which all of those above 17 are equal in float32, and walks through the categories one by one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from gpu_logicmix.labels import check_labels, is_unknown

# Labels at a time: bounds the memory when there are thousands of categories, and is fastest on a CPU.
CHUNK = 1 << 20
KINDS = ("step", "envelope")


# ------------------------------------------------------------------------------------------------ by category, of ranks
def average_precision(scores: Tensor, targets: Tensor, unknown: float = -1, *, kind: str = "step") -> Tensor:
    """Average precision of each category, [C] in float64; NaN for a category without a known positive label.

    scores: [N, C] of any type, logits or probabilities: only their order counts.
    targets: [N, C] of 1, 0 and `unknown`; NaN is unknown too.
    kind: "step" or "envelope", see above.
    """
    if kind not in KINDS:
        raise ValueError(f"kind={kind!r}: must be one of {', '.join(KINDS)}")
    scores, targets = _check(scores, targets, unknown)
    return _by_category(lambda *ranked: area_under_sorted(*ranked, kind=kind), scores, targets, unknown)


def mean_average_precision(scores: Tensor, targets: Tensor, unknown: float = -1, *, kind: str = "step") -> float:
    """Mean of `average_precision` over the categories with a known positive label, in [0, 1]; NaN if none has one.

    >>> scores = torch.tensor([[0.9, 0.1], [0.6, 0.8], [0.7, 0.2]])
    >>> targets = torch.tensor([[1, 0], [1, 1], [0, -1]])  # the unknown label is ignored
    >>> round(mean_average_precision(scores, targets), 4)
    0.9167
    """
    return average_precision(scores, targets, unknown, kind=kind).nanmean().item()


def auroc(scores: Tensor, targets: Tensor, unknown: float = -1) -> Tensor:
    """Area under the ROC curve of each category, [C] in float64: how often a present label has the larger score than an
    absent one, equal scores counting half. NaN for a category without a known label of either kind."""
    scores, targets = _check(scores, targets, unknown)
    return _by_category(_auroc_sorted, scores, targets, unknown)


def area_under_sorted(scores: Tensor, positive: Tensor, known: Tensor, kind: str = "step") -> Tensor:
    """AP [C] of scores [C, N] that fall along each row, with bool masks of the known positive and the known labels."""
    true, seen = positive.cumsum(1), known.cumsum(1)
    # A threshold lies below the last of equal scores. There, all samples so far are the predicted ones.
    last = torch.ones_like(known)
    last[:, :-1] = scores[:, :-1] != scores[:, 1:]
    # `true` never falls, so its running maximum over thresholds is its value at the latest of them.
    before = true.new_zeros(true.shape)
    before[:, 1:] = torch.where(last, true, 0).cummax(1).values[:, :-1]
    precision = true.double() / seen.clamp(min=1)
    if kind == "envelope":  # the best precision at this threshold or a lower one
        precision = torch.where(last, precision, 0).flip(1).cummax(1).values.flip(1)
    area = ((true - before) * precision * last).sum(1)
    return area / positive.sum(1)  # 0 / 0 = NaN


def _auroc_sorted(scores: Tensor, positive: Tensor, known: Tensor) -> Tensor:
    negative = known & ~positive
    first, end = _ties(scores)
    above = negative.cumsum(1)
    with_ties = above.gather(1, end)
    ties = with_ties - (above - negative.long()).gather(1, first)
    wrong = ((with_ties - 0.5 * ties.double()) * positive).sum(1)
    pairs = positive.sum(1).double() * negative.sum(1)
    return 1 - wrong / pairs  # 0 / 0 = NaN


def _of_ranks(*ranked: Tensor) -> Tensor:
    """[C, 3]: both kinds of AP, AUROC."""
    step, envelope = (area_under_sorted(*ranked, kind=kind) for kind in KINDS)
    return torch.stack((step, envelope, _auroc_sorted(*ranked)), 1)


def _by_category(measure: Callable, scores: Tensor, targets: Tensor, unknown: float) -> Tensor:
    """`measure` of some categories at a time: scores [c, N] that fall, which are known positives, which are known."""
    parts = []
    for columns in _blocks(scores.shape[1], scores.shape[0]):
        ranked, order = scores[:, columns].T.contiguous().sort(dim=1, descending=True)
        truth = targets[:, columns].T
        parts.append(measure(ranked, (truth == 1).gather(1, order), (~is_unknown(truth, unknown)).gather(1, order)))
    return torch.cat(parts) if parts else scores.new_empty(0, dtype=torch.float64)


def _ties(scores: Tensor) -> tuple[Tensor, Tensor]:
    """Where the first and the last score equal to each one are, in rows that fall."""
    place = torch.arange(scores.shape[1], device=scores.device).expand(scores.shape)
    new = torch.ones_like(scores, dtype=torch.bool)
    new[:, 1:] = scores[:, 1:] != scores[:, :-1]
    first = torch.where(new, place, 0).cummax(1).values
    last = torch.ones_like(new)
    last[:, :-1] = new[:, 1:]
    end = torch.where(last, place, scores.shape[1]).flip(1).cummin(1).values.flip(1)
    return first, end


def _blocks(count: int, other: int) -> Iterator[slice]:
    """Slices of `count` rows or columns with about CHUNK labels each, where the other side is `other` long."""
    step = max(1, CHUNK // max(1, other))
    return (slice(start, start + step) for start in range(0, count, step))


# ------------------------------------------------------------------------------------------------ calibration, Hamming
def calibration_error(
    scores: Tensor, targets: Tensor, bins: int = 15, *, logits: bool = True, unknown: float = -1
) -> Tensor:
    """Expected calibration error of each category, [C] in float64: predictions in `bins` of equal width, the distance
    between mean probability and share of present labels in each, weighted by how many it has. NaN without known labels.

    That of torchmetrics' `binary_calibration_error`, except that a probability of exactly 1 is in the last bin, not in
    one of its own.
    """
    scores, targets = _check(scores, targets, unknown)
    if bins < 1:
        raise ValueError(f"bins={bins!r}: must be 1 or more")
    _check_probabilities(scores, logits)
    parts = []
    for columns in _blocks(scores.shape[1], scores.shape[0]):
        some, truth = scores[:, columns].T.double(), targets[:, columns].T
        p = some.sigmoid() if logits else some
        known = (~is_unknown(truth, unknown)).double()
        place = (p * bins).long().clamp(0, bins - 1)
        gap = torch.zeros(len(p), bins, dtype=torch.float64, device=p.device)
        gap.scatter_add_(1, place, (p - (truth == 1).double()) * known)
        parts.append(gap.abs().sum(1) / known.sum(1))  # 0 / 0 = NaN
    return torch.cat(parts) if parts else scores.new_empty(0, dtype=torch.float64)


def hamming_loss(
    scores: Tensor, targets: Tensor, threshold: float = 0.5, *, logits: bool = True, unknown: float = -1
) -> float:
    """The share of known labels that are predicted wrongly when every label above `threshold`, a probability, is
    predicted; NaN if none is known."""
    scores, targets = _check(scores, targets, unknown)
    _check_threshold(threshold)
    _check_probabilities(scores, logits)
    wrong = known = 0
    for rows in _blocks(*scores.shape):
        some = ~is_unknown(targets[rows], unknown)
        predicted = _above(scores[rows], threshold, logits)
        wrong, known = wrong + int(((predicted != (targets[rows] == 1)) & some).sum()), known + int(some.sum())
    return wrong / known if known else math.nan


# ------------------------------------------------------------------------------------------------ by sample
class Ranking(NamedTuple):
    """Means over the samples that have known labels, of how their labels are ranked; scikit-learn's definitions."""

    loss: float  # the share of (present, absent) pairs in the wrong order, equal scores too; 0 where there are no pairs
    ap: float  # label-ranking average precision; 1 where there are no pairs
    coverage: float  # how far down the ranking the last present label is; 0 where there is none


def ranking(scores: Tensor, targets: Tensor, unknown: float = -1) -> Ranking:
    """Ranking loss, label-ranking average precision and coverage of the known labels of each sample."""
    scores, targets = _check(scores, targets, unknown)
    sums, samples = torch.zeros(3, dtype=torch.float64, device=scores.device), 0
    for rows in _blocks(*scores.shape) if scores.numel() else ():
        ranked, order = scores[rows].sort(dim=1, descending=True)
        truth = targets[rows].gather(1, order)
        positive, known = truth == 1, ~is_unknown(truth, unknown)
        end = _ties(ranked)[1]
        above = known.cumsum(1).gather(1, end).double()  # known labels with a score at least as large
        hits = positive.cumsum(1).gather(1, end).double()
        positives, count = positive.sum(1), known.sum(1)
        pairs = positives.double() * (count - positives)
        wrong = ((above - hits) * positive).sum(1) / pairs.clamp(min=1)
        precision = (hits / above.clamp(min=1) * positive).sum(1) / positives.clamp(min=1)
        counted = count > 0
        values = (wrong, torch.where(pairs > 0, precision, 1), (above * positive).amax(1))
        sums += torch.stack([(value * counted).sum() for value in values])
        samples += int(counted.sum())
    return Ranking(*(sums / samples).tolist()) if samples else Ranking(math.nan, math.nan, math.nan)


# ------------------------------------------------------------------------------------------------ precision and recall
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
    _check_threshold(threshold)
    _check_probabilities(scores, logits)
    if top_k is not None and top_k < 1:
        raise ValueError(f"top_k={top_k!r}: must be 1 or more")
    sums = torch.zeros(3, scores.shape[1], dtype=torch.float64, device=scores.device)
    for rows in _blocks(*scores.shape):
        some, truth = scores[rows], targets[rows]
        predicted = _above(some, threshold, logits)
        if top_k is not None:
            # Sorted, not `topk`, which may choose either of two equal scores.
            best = some.sort(dim=1, descending=True, stable=True).indices[:, :top_k]
            predicted &= torch.zeros_like(predicted).scatter_(1, best, True)
        positive = truth == 1
        sums += torch.stack(
            [m.sum(0) for m in (predicted & positive, predicted & ~is_unknown(truth, unknown), positive)]
        )

    hits, guesses, positives = sums
    counted = positives > 0
    cp = (hits / guesses.clamp(min=1))[counted].mean().item()
    cr = (hits / positives)[counted].mean().item()
    op = (hits.sum() / guesses.sum().clamp(min=1)).item() if counted.any() else math.nan
    or_ = (hits.sum() / positives.sum()).item()
    return PrecisionRecall(cp, cr, _f1(cp, cr), op, or_, _f1(op, or_))


def _above(scores: Tensor, threshold: float, logits: bool) -> Tensor:
    """Which probabilities are above the threshold; with a threshold of 0 all are."""
    if not logits:
        return scores > threshold if threshold > 0 else torch.ones_like(scores, dtype=torch.bool)
    if 0 < threshold < 1:
        return scores > math.log(threshold / (1 - threshold))
    return torch.full_like(scores, threshold == 0, dtype=torch.bool)


def _f1(precision: float, recall: float) -> float:
    return 2 * precision * recall / (precision + recall) if precision + recall != 0 else 0.0


# ------------------------------------------------------------------------------------------------ all at once
class Metrics(NamedTuple):
    mAP: float  # step
    AP: list[float]  # one a category, NaN for those left out
    left_out: list[int]  # categories without a known positive label
    threshold: PrecisionRecall  # every label with a probability above 0.5
    top3: PrecisionRecall  # the same, no more than three a sample
    mAP_envelope: float
    AUROC: float  # the mean over categories, as the next but one
    hamming: float
    ECE: float
    ranking: Ranking

    def as_dict(self) -> dict[str, float]:
        """The numbers flat, for a log or a table: mAP, CP ... OF1, CP_top3 ... OF1_top3, and the others."""
        top3 = {f"{name}_top3": value for name, value in self.top3._asdict().items()}
        others = {name: getattr(self, name) for name in ("mAP_envelope", "AUROC", "hamming", "ECE")}
        ranked = {f"ranking_{name}" if name != "coverage" else name: x for name, x in self.ranking._asdict().items()}
        return {"mAP": self.mAP, **self.threshold._asdict(), **top3, **others, **ranked}


def evaluate(scores: Tensor, targets: Tensor, *, logits: bool = True, unknown: float = -1) -> Metrics:
    """All metrics of [N, C] scores against [N, C] targets at once."""
    scores, targets = _check(scores, targets, unknown)
    ap, envelope, roc = _by_category(_of_ranks, scores, targets, unknown).view(-1, 3).T
    options = {"logits": logits, "unknown": unknown}
    return Metrics(
        mAP=ap.nanmean().item(),
        AP=ap.tolist(),
        left_out=ap.isnan().nonzero().flatten().tolist(),
        threshold=precision_recall(scores, targets, **options),
        top3=precision_recall(scores, targets, top_k=3, **options),
        mAP_envelope=envelope.nanmean().item(),
        AUROC=roc.nanmean().item(),
        hamming=hamming_loss(scores, targets, **options),
        ECE=calibration_error(scores, targets, **options).nanmean().item(),
        ranking=ranking(scores, targets, unknown),
    )


def _check_threshold(threshold: float) -> None:
    if not 0 <= threshold <= 1:
        raise ValueError(f"threshold={threshold!r}: must be a probability, from 0 to 1")


def _check_probabilities(scores: Tensor, logits: bool) -> None:
    if not logits and scores.numel() and not (scores.min() >= 0 and scores.max() <= 1):
        raise ValueError(
            f"scores go from {scores.min().item():g} to {scores.max().item():g}: with logits=False they must be "
            "probabilities, from 0 to 1"
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
