"""What LogicMix makes of labels that are too many for a matrix: counts, some thousand samples at a time."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch

from gpu_logicmix.augment.logicmix import GPULogicMix
from gpu_logicmix.data.sparse import SparseLabels
from gpu_logicmix.labels import LabelCounts


class MixedCounts(NamedTuple):
    """Of one epoch."""

    after: LabelCounts  # per category, over all samples
    mixed: int  # samples that are mixtures
    of_mixed: LabelCounts  # labels of these alone, in all


def mixed_counts(
    labels: SparseLabels, mix: GPULogicMix, batch_size: int, seed: int = 0, advance: Callable[[int], object] = int
) -> MixedCounts:
    """The counts of `mixed_labels` of the matrix, with the same draws. `advance` is told the samples done."""
    torch.manual_seed(seed)
    n, width = labels.shape
    positive, negative = np.zeros(width, dtype=np.int64), np.zeros(width, dtype=np.int64)
    mixed, mixed_positive, mixed_negative = 0, 0, 0
    for batch in torch.randperm(n).split(batch_size):
        plan = mix.plan(len(batch))
        size, rows = plan.size.numpy(), batch[plan.index].numpy()
        group, columns, present = _ored(labels, rows, size)
        positive += np.bincount(columns[present], minlength=width)
        negative += np.bincount(columns[~present], minlength=width)
        of_mixed = size[group] > 1
        mixed += int((size > 1).sum())
        mixed_positive += int((present & of_mixed).sum())
        mixed_negative += int((~present & of_mixed).sum())
        advance(len(batch))
    known = mixed_positive + mixed_negative
    of_mixed_counts = LabelCounts(*map(np.int64, (mixed_positive, mixed_negative, mixed * width - known)))
    return MixedCounts(LabelCounts(positive, negative, n - positive - negative), mixed, of_mixed_counts)


def _ored(labels: SparseLabels, rows: np.ndarray, size: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The known labels of the mixtures of rows[i, :size[i]]: mixture, column, and whether present."""
    inside = np.arange(rows.shape[1]) < size[:, None]
    lengths, flat = labels.places(rows[inside])
    keys = np.repeat(np.repeat(np.arange(len(rows)), size), lengths) * (2 * labels.shape[1])
    keys += 2 * labels.columns[flat].astype(np.int64)
    keys += labels.values[flat]
    keys.sort()  # the labels of one category of a mixture side by side, present ones last
    cells = keys >> 1
    last = np.flatnonzero(np.append(cells[1:] != cells[:-1], True)) if len(cells) else np.zeros(0, dtype=np.int64)
    count = np.diff(last, prepend=-1)
    group, columns = np.divmod(cells[last], labels.shape[1])
    present = (keys[last] & 1) == 1
    known = present | (count == size[group])  # absent: said of every member
    return group[known], columns[known], present[known]
