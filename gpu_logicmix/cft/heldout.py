"""Known labels held out of the fit: they choose each head's state, and say what the fit gained and how sure that is.

The state that scores best on some labels scores better on them than it is. So the gain is not read off there: a state
is also chosen by either half of the held-out labels and judged by the other half, and the mean of the two gains counts.
A half without a positive or without a negative label can neither choose nor judge: such a category has no gain, which
is not one of 0. The interval is a paired bootstrap: the same images, drawn with replacement, for the heads before and
after.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from gpu_logicmix import metrics
from gpu_logicmix.cft.products import leave_out_unknown, logits_at, pieces, sparse_pattern

CHUNK = 1 << 22  # labels times draws of the bootstrap at a time


def split_known(
    labels: Tensor, holdout: float, min_known: int, generator: torch.Generator
) -> tuple[Tensor, Tensor, dict[int, str]]:
    """Labels [C, N] to fit and labels [C, N] to judge by, -1 elsewhere; and why some categories have none of either.

    Of each category `holdout` of the known positives and `holdout` of the known negatives are held out, at least one of
    each. All categories take the first ones in the same random order of the samples. For any one category that is as
    random as an order of its own, and together the held-out labels need few samples.
    """
    order = torch.randperm(labels.shape[1], generator=generator).to(labels.device)
    shuffled = labels.index_select(1, order)
    held = torch.zeros_like(shuffled, dtype=torch.bool)
    skipped: dict[int, str] = {}
    for value, name in ((1, "positive"), (0, "negative")):
        mask = shuffled == value
        count = mask.sum(1)
        wanted = (count * holdout).round().clamp(min=1).minimum(count - 1)
        held |= mask & (mask.cumsum(1, dtype=torch.int32) <= wanted[:, None])
        for category in (count < min_known).nonzero()[:, 0].tolist():
            before = f"{skipped[category]}, " if category in skipped else ""
            skipped[category] = f"{before}{int(count[category])} known {name} labels, min_known is {min_known}"
    held = torch.empty_like(held).index_copy_(1, order, held)
    usable = torch.ones(len(labels), 1, dtype=torch.bool, device=labels.device)
    usable[sorted(skipped)] = False
    return labels.masked_fill(held | ~usable, -1), labels.masked_fill(~(held & usable), -1), skipped


class Judge:
    """AP of heads on the known ones of `labels` [C, N]: [C] on all of them, or [3, C] with that on either half."""

    def __init__(self, features: Tensor, labels: Tensor, like: Tensor, halves: bool = False) -> None:
        known = labels != -1
        self.features, self.rows = features, known.any(0).nonzero()[:, 0]
        # Known labels to the front, so that what is sorted is as long as the category with most of them, not N.
        longest = int(known.sum(1).max()) if labels.numel() else 0
        labels = labels.index_select(1, self.rows)
        self.place = (labels == -1).to(torch.int8).argsort(dim=1, stable=True)[:, :longest]
        self.labels = labels.gather(1, self.place)
        self.halves = _halves(self.labels) if halves else []
        self.pattern = None
        if leave_out_unknown(features, labels, like):
            place, heads = (labels != -1).t().nonzero().t().contiguous()
            self.pattern = sparse_pattern(self.rows[place], heads, (len(features), len(labels)), like)
            # Where each of them is in `self.labels`: it goes by head, and within a head by sample as well.
            self.slots = torch.empty_like(heads)
            self.slots[heads.argsort(stable=True)] = (self.labels != -1).view(-1).nonzero()[:, 0]

    def logits(self, weight: Tensor, bias: Tensor) -> Tensor:
        """[C, longest], as `self.labels`."""
        if self.pattern is not None:
            logits = weight.new_zeros(self.labels.shape)
            logits.view(-1)[self.slots] = logits_at(self.pattern, self.features, weight, bias)
            return logits
        found = [torch.addmm(bias[:, 0], x, weight.t()) for x in pieces(self.features, self.rows, weight)]
        return (torch.cat(found) if found else weight.new_zeros(0, len(weight))).t().gather(1, self.place)

    def __call__(self, weight: Tensor, bias: Tensor) -> Tensor:
        ap = head_average_precision(self.logits(weight, bias), self.labels, *self.halves)
        return ap if self.halves else ap[0]

    def gain(
        self, original: list[Tensor], chosen: list[list[Tensor]], resamples: int, generator: torch.Generator
    ) -> tuple[float, tuple[float, float]]:
        """What the heads gained in mAP, and the 95 % interval of that; NaN if no half can tell. `chosen`: heads in the
        states that are best by the first and by the second half; each is judged by the other half."""
        draws = _draws(len(self.rows), resamples, generator).to(self.place.device)
        before = self.logits(*original)
        both = []
        for heads, half in zip(chosen, reversed(self.halves), strict=True):
            after = resampled_ap(self.logits(*heads), half, self.place, draws)
            both.append(after - resampled_ap(before, half, self.place, draws))
        # Where a half had no AP to choose by, the original head was judged against itself.
        telling = ~before.isnan().any(1)
        for half in self.halves:
            telling &= (half == 1).any(1) & (half == 0).any(1)
        gains = torch.stack(both).masked_fill(~telling, math.nan).nanmean(0).nanmean(1)
        low, high = torch.nanquantile(gains[1:], gains.new_tensor([0.025, 0.975])).tolist()
        return gains[0].item(), (low, high)


def _halves(labels: Tensor) -> list[Tensor]:
    """Labels [C, n] of which every second positive and every second negative is kept; and the others."""
    second = torch.zeros_like(labels, dtype=torch.bool)
    for value in (0, 1):
        mask = labels == value
        second |= mask & (mask.cumsum(1) % 2 == 0)
    return [labels.masked_fill(second, -1), labels.masked_fill(~second, -1)]


def _draws(rows: int, resamples: int, generator: torch.Generator) -> Tensor:
    """[1 + resamples, rows]: how often each row is drawn; in the first of them, once."""
    draws = torch.ones(1 + resamples, rows, dtype=torch.uint8)
    for draw in draws[1:]:
        draw.copy_(torch.randint(rows, (rows,), generator=generator).bincount(minlength=rows))
    return draws


def resampled_ap(logits: Tensor, labels: Tensor, place: Tensor, draws: Tensor) -> Tensor:
    """AP [R, C] of logits [C, n] by the known ones of labels [C, n], where the sample `place` [C, n] counts as often as
    it is drawn, `draws` [R, rows]."""
    found = torch.full((len(draws), len(labels)), math.nan, dtype=torch.float64, device=draws.device)
    step = max(1, CHUNK // max(1, labels.shape[1]))
    for c in range(len(labels)):
        known = (labels[c] != -1).nonzero()[:, 0]
        if not len(known) or not (labels[c] == 1).any():
            continue
        scores, order = logits[c, known].sort(descending=True)
        known = known[order]
        # A threshold lies below the last of equal scores.
        end = torch.searchsorted(-scores, -scores, right=True) - 1
        positive = labels[c, known] == 1
        for start in range(0, len(draws), step):
            weight = draws[start : start + step].index_select(1, place[c, known]).float()
            hit = weight * positive
            precision = hit.cumsum(1) / weight.cumsum(1).clamp(min=1)
            area = (hit * precision.index_select(1, end)).sum(1, dtype=torch.float64)
            found[start : start + step, c] = area / hit.sum(1)  # 0 / 0 = NaN: no positive label was drawn
    return found


def head_average_precision(logits: Tensor, *labels: Tensor) -> Tensor:
    """AP [L, G] of each row of `logits` [G, n] by the known ones of each of the `labels` [G, n]; NaN for a head that
    gives NaN."""
    step = max(1, metrics.CHUNK // max(1, logits.shape[1]))
    parts = []
    for start in range(0, len(logits), step):
        some = logits[start : start + step]
        broken = some.isnan()
        scores, order = some.masked_fill(broken, 0).sort(dim=1, descending=True)
        mine = (y[start : start + step].gather(1, order) for y in labels)
        ap = torch.stack([metrics.area_under_sorted(scores, y == 1, y != -1) for y in mine])
        parts.append(ap.masked_fill(broken.any(1), math.nan))
    return torch.cat(parts, dim=1) if parts else logits.new_empty(len(labels), 0, dtype=torch.float64)
