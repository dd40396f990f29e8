"""Category-wise fine-tuning, some categories at a time: its working memory is ten bytes a label, known or not, and ten
thousand categories need not be there at once, since each is tuned for itself."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gpu_logicmix.cft import category_wise_fine_tune
from gpu_logicmix.cft.api import CFTRecord
from gpu_logicmix.data import ImageDataset
from gpu_logicmix.data.sparse import SparseLabels

CELLS = 1 << 28  # labels, known or not, that are tuned at a time


def tuned(
    features: Tensor,
    labels: Callable[[int, int], np.ndarray],
    weight: Tensor,
    bias: Tensor,
    evaluation: tuple[Tensor, Callable[[int, int], np.ndarray]],
    **options: Any,
) -> tuple[Tensor, Tensor, CFTRecord]:
    """`category_wise_fine_tune`; `labels(start, stop)` and `evaluation[1](start, stop)` give those of some categories.
    The record of several blocks has no `held_out`."""
    count = len(weight)
    step = block_size(count, max(len(features), len(evaluation[0])))
    parts = []
    for start in range(0, count, step):
        stop = min(start + step, count)
        judged = (evaluation[0], evaluation[1](start, stop))
        head = weight[start:stop], bias[start:stop]
        parts.append(category_wise_fine_tune(features, labels(start, stop), *head, evaluation=judged, **options))
    if len(parts) == 1:
        return parts[0]
    weights, biases, records = zip(*parts, strict=True)
    return torch.cat(weights), torch.cat(biases), _joined(records, step)


def block_size(categories: int, samples: int) -> int:
    """How many categories are tuned at a time."""
    return max(1, min(categories, CELLS // max(samples, 1)))


def _joined(records: tuple[CFTRecord, ...], step: int) -> CFTRecord:
    longest = max(len(record.history) for record in records)
    fill = lambda h: torch.cat((h, h.new_full((longest - len(h), h.shape[1]), math.nan)))  # noqa: E731
    cat = lambda name: torch.cat([getattr(record, name) for record in records])  # noqa: E731
    joined = CFTRecord(
        ap_before=cat("ap_before"),
        ap_after=cat("ap_after"),
        best_epoch=cat("best_epoch"),
        epochs=cat("epochs"),
        history=torch.cat([fill(record.history) for record in records], 1),
        held_out=torch.zeros(0, 0, dtype=torch.bool),
        skipped={at * step + c: why for at, record in enumerate(records) for c, why in record.skipped.items()},
        evaluation_before=cat("evaluation_before"),
        evaluation_after=cat("evaluation_after"),
        rows_left_out=records[0].rows_left_out,
        evaluation_rows_left_out=records[0].evaluation_rows_left_out,
    )
    # Means over categories. Of the intervals too, as if all blocks erred alike: wider than the truth, never narrower.
    share = [int(record.ap_before.isfinite().sum()) for record in records]
    gains = [(record.gain, *record.gain_interval) if record.changed else (0.0, 0.0, 0.0) for record in records]
    means = [(s, g) for s, g in zip(share, gains, strict=True) if s and all(map(math.isfinite, g))]
    if means and joined.changed:
        total = sum(s for s, _ in means)
        joined.gain, low, high = (sum(s * g[at] for s, g in means) / total for at in range(3))
        joined.gain_interval = low, high
    return joined


def labels_by_category(dataset: ImageDataset, rows: np.ndarray) -> Callable[[int, int], np.ndarray]:
    """int8 [rows, stop - start] of categories start to stop, however the labels are stored."""
    labels = dataset.labels
    if isinstance(labels, SparseLabels):
        mine = labels.take(rows)
        return mine.block
    return lambda start, stop: labels[rows, start:stop]
