"""What a run's predictions are worth, category by category: average precision, precision-recall curves, reliability.

Only known labels of the validation images count; predictions that are not finite are left out, and counted.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from markupsafe import Markup

from gpu_logicmix.data import ImageDataset
from gpu_logicmix.labels import label_counts
from gpu_logicmix.metrics import average_precision
from gpu_logicmix.report.charts import POINTS, Points, Series, line_chart, spark_line
from gpu_logicmix.report.listing import Cell, Listing, number, share_bar
from gpu_logicmix.report.run_folder import Predictions, Run
from gpu_logicmix.report.words import percent

BINS = 10  # of a reliability diagram


def clean_targets(found: Predictions) -> tuple[np.ndarray, np.ndarray, int]:
    """Logits and targets in which what is not finite is unknown; and how many those are."""
    broken = ~np.isfinite(found.logits)
    return np.where(broken, 0, found.logits), np.where(broken, -1, found.targets), int(broken.sum())


def precision_recall(scores: np.ndarray, targets: np.ndarray, most: int | None = None) -> Points:
    """(recall, precision) at every threshold that tells scores apart, from the highest on; [] without a positive.

    most: points, by means of neighbours as `charts.thin` has them. Of millions, a list would take gigabytes.
    """
    known = targets != -1
    scores, present = scores[known], targets[known] == 1
    if not present.any():
        return []
    order = np.argsort(-scores, kind="stable")
    scores, present = scores[order], present[order]
    last = np.append(scores[1:] != scores[:-1], True)  # equal scores are one threshold
    hits = np.cumsum(present)[last]
    taken = np.flatnonzero(last) + 1
    starts = np.arange(0, len(hits), -(-len(hits) // (most or len(hits))))
    size = np.diff(starts, append=len(hits))
    recall, precision = (np.add.reduceat(values, starts) / size for values in (hits / hits[-1], hits / taken))
    return list(zip(recall.tolist(), precision.tolist(), strict=True))


class Reliability(NamedTuple):
    predicted: list[float]  # mean probability of each bin that has labels
    present: list[float]  # share of its labels that are present
    count: list[int]
    error: float  # expected calibration error: the mean distance, weighted by labels


def reliability(logits: np.ndarray, targets: np.ndarray) -> Reliability:
    """Predicted probability against the share that is present, in bins of equal width, over all known labels."""
    known = targets != -1
    guess, present = 1 / (1 + np.exp(-np.clip(logits[known], -60, 60))), targets[known] == 1
    bins = np.minimum((guess * BINS).astype(int), BINS - 1)
    count = np.bincount(bins, minlength=BINS)
    full = count > 0
    mean = np.bincount(bins, guess, BINS)[full] / count[full]
    share = np.bincount(bins, present, BINS)[full] / count[full]
    error = float((np.abs(mean - share) * count[full]).sum() / max(count.sum(), 1))
    return Reliability(mean.tolist(), share.tolist(), count[full].tolist(), error)


class Judged(NamedTuple):
    """The section of the categories."""

    words: str
    notes: list[str]
    listing: Listing
    charts: list[Markup]
    remark: str


def judge(run: Run, train: ImageDataset | None) -> Judged | None:
    found = run.predictions
    if found is None or not found.logits.size:
        return None
    logits, targets, broken = clean_targets(found)
    ap = average_precision(torch.from_numpy(logits), torch.from_numpy(targets)).numpy()
    order = [int(c) for c in np.argsort(-ap, kind="stable") if not np.isnan(ap[c])]
    positives = None
    if train is not None and list(train.categories) == found.categories:
        positives = label_counts(train.labels, 0).positive
    mean = percent(float(np.nanmean(ap)) if order else None)
    words = f"The mean over {len(order)} categories is {mean} (step AP, over known labels)."
    missing = [found.categories[c] for c in np.flatnonzero(np.isnan(ap))]
    notes = (
        [f"Left out, without a known positive among the validation labels: {', '.join(missing)}."] if missing else []
    )
    if broken:
        notes.append(f"{broken:,} predictions are not finite and are left out.")
    curves = {c: precision_recall(logits[:, c], targets[:, c], POINTS) for c in order}
    charts, remark = _charts(run, logits, targets, ap, order, curves)
    return Judged(words, notes, _listing(found, ap, order, curves, positives, targets), charts, remark)


def _listing(
    found: Predictions, ap: Any, order: list[int], curves: Any, positives: Any, targets: np.ndarray
) -> Listing:
    head = ["category", "", "AP %", "curve"]
    head += ["train positives"] * (positives is not None) + ["val positives"]
    rows = []
    for c in order:
        row = [Cell(found.categories[c]), share_bar(float(ap[c])), number(float(ap[c]), f"{100 * ap[c]:.1f}")]
        row.append(Cell(spark_line(curves[c]), round(float(ap[c]), 6)))
        if positives is not None:
            row.append(number(int(positives[c]), f"{positives[c]:,}"))
        count = int((targets[:, c] == 1).sum())
        rows.append([*row, number(count, f"{count:,}")])
    return Listing(head, rows)


def _charts(
    run: Run, logits: np.ndarray, targets: np.ndarray, ap: Any, order: list[int], curves: Any
) -> tuple[list[Markup], str]:
    if not order:
        return [], ""
    names = run.predictions.categories if run.predictions else []
    chosen = dict.fromkeys([order[0], order[len(order) // 2], order[-1]])
    series = [_percent_series("all labels at once", "c0", precision_recall(logits.ravel(), targets.ravel(), POINTS))]
    for at, c in enumerate(chosen, 1):
        series.append(_percent_series(f"{names[c]}, AP {100 * ap[c]:.1f}", f"c{at}", curves[c]))
    charts = [line_chart("Precision over recall", *series, unit=" %", x_name="recall", square=True)]
    plain = reliability(logits, targets)
    lines = [
        Series("ideal", "ink", [(0.0, 0.0), (100.0, 100.0)]),
        _percent_series(f"as predicted, error {100 * plain.error:.1f} points", "c1", _pairs(plain)),
    ]
    found = run.decisions
    if found is not None and found.weights == "model" and not found.outdated:  # as the predictions are
        after = reliability(found.calibrated(logits), targets)
        text = f"calibrated, error {100 * after.error:.1f} points"
        lines.append(_percent_series(text, "c2", _pairs(after)))
    charts.append(line_chart("Present, over the probability", *lines, unit=" %", x_name="prob.", square=True))
    remark = (
        "Left: of all known labels, and of the categories with the highest, the median and the lowest AP. Right: the "
        "share of labels that are present among those with about that probability; on the diagonal, probabilities can "
        "be taken at their word."
    )
    return charts, remark


def _pairs(found: Reliability) -> Points:
    return list(zip(found.predicted, found.present, strict=True))


def _percent_series(name: str, colour: str, points: Points) -> Series:
    return Series(name, colour, [(100 * x, None if y is None else 100 * y) for x, y in points])
