"""The long tail of a large set of labels: known positives and negatives per category, in the order of the positives.
Legible with ten categories and with ten thousand: lines over the rank, both axes logarithmic."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np

from gpu_logicmix.errors import printable
from gpu_logicmix.labels import LabelCounts
from gpu_logicmix.report.preview import ABSENT_TEXT, PRESENT_TEXT


def tail_figure(counts: LabelCounts, title: str) -> Any:
    """A matplotlib figure of `label_counts(labels, 0)`."""
    from matplotlib.figure import Figure  # without pyplot there is no window and no global state

    order = np.argsort(-np.asarray(counts.positive), kind="stable")
    positive, negative = np.asarray(counts.positive)[order], np.asarray(counts.negative)[order]
    rank = np.arange(1, len(order) + 1)
    figure = Figure(figsize=(9, 5), layout="constrained")
    axes = figure.add_subplot()
    # Negatives scatter from category to category: the median of what lies close in rank can be read.
    edges = np.unique(np.geomspace(1, len(rank) + 1, 60).astype(int))
    middle = [np.median(negative[a - 1 : b - 1]) for a, b in pairwise(edges)]
    axes.plot(rank, np.maximum(positive, 0.5), color=PRESENT_TEXT, lw=2, label="known present")
    axes.plot(edges[:-1], np.maximum(middle, 0.5), color=ABSENT_TEXT, lw=2, label="known absent (median by rank)")
    axes.set(xscale="log", yscale="log", xlabel="category, from common to rare", ylabel="images (0 drawn at 0.5)")
    nothing = int((positive == 0).sum())
    axes.set_title(printable(title).replace("$", r"\$"), fontsize=11, loc="left")
    if nothing:
        axes.text(0.02, 0.03, f"{nothing:,} categories without a known positive", transform=axes.transAxes, fontsize=9)
    axes.legend(frameon=False)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    return figure
