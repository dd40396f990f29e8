"""The long tail of a large set of labels: known positives and negatives per category, in the order of the positives,
before and after LogicMix. Legible with ten categories and with ten thousand: lines over the rank, logarithmic axes."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np

from gpu_logicmix.errors import printable
from gpu_logicmix.labels import LabelCounts
from gpu_logicmix.report.preview import ABSENT_TEXT, PRESENT_TEXT

_BEFORE = "#56B4E9"


def tail_figure(before: LabelCounts, after: LabelCounts, mixing: str, title: str) -> Any:
    """A matplotlib figure of `label_counts(labels, 0)` before and after mixing, which is called `mixing`."""
    from matplotlib.figure import Figure  # without pyplot there is no window and no global state

    order = np.argsort(-np.asarray(before.positive), kind="stable")
    figure = Figure(figsize=(9, 8.5), layout="constrained")
    figure.suptitle(printable(title).replace("$", r"\$"), fontsize=11)
    top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
    edges = np.unique(np.geomspace(1, len(order) + 1, 60).astype(int))
    for counts, name, width, style in ((before, "before", 1.5, "--"), (after, mixing, 2.5, "-")):
        positive, negative, unknown = (np.asarray(values)[order] for values in counts)
        colour = _BEFORE if counts is before else PRESENT_TEXT
        _line(top, edges, positive, f"known present, {name}", color=colour, lw=width, ls=style)
        _line(top, edges, negative, f"known absent, {name}", color=ABSENT_TEXT, lw=width, ls=style, alpha=0.8)
        share = 100 * unknown / max(int(positive[:1].sum() + negative[:1].sum() + unknown[:1].sum()), 1)
        known = 100 - share
        _line(bottom, edges, known, f"known, {name}", color=colour, lw=width, ls=style, lowest=1e-4)
    top.set(xscale="log", yscale="log", ylabel="images (0 drawn at 0.5)")
    bottom.set(yscale="log", xlabel="category, from common to rare", ylabel="% of images in which\nit is known")
    nothing = int((np.asarray(before.positive) == 0).sum())
    if nothing:
        words = f"{nothing:,} categories without a known positive"
        top.text(0.02, 0.03, words, transform=top.transAxes, fontsize=9)
    for axes in (top, bottom):
        axes.legend(frameon=False, ncols=2, loc="lower left", bbox_to_anchor=(0, 1), borderaxespad=0.2)
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    return figure


def _line(axes: Any, edges: np.ndarray, values: np.ndarray, name: str, lowest: float = 0.5, **style: Any) -> None:
    """The median of what lies close in rank: from category to category numbers scatter, and would fill the plot."""
    middle = [np.median(values[a - 1 : b - 1]) for a, b in pairwise(edges)]
    at = [(a + b - 1) / 2 for a, b in pairwise(edges)]
    axes.plot(at, np.maximum(middle, lowest), label=name, **style)
