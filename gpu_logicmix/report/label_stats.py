"""The labels of a dataset before and after mixing, per sample and per category, as a matplotlib figure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from gpu_logicmix.augment.logicmix import GPULogicMix, MixPlan, or_targets
from gpu_logicmix.errors import printable
from gpu_logicmix.labels import label_counts
from gpu_logicmix.report.preview import ABSENT, ABSENT_TEXT, PRESENT, PRESENT_TEXT, UNKNOWN


def mixed_labels(labels: np.ndarray, mix: GPULogicMix, batch_size: int, seed: int = 0) -> np.ndarray:
    """What one epoch of shuffled batches makes of the labels: a plan for each batch, all of them applied at once."""
    torch.manual_seed(seed)
    rows, plans = [], []
    for batch in torch.randperm(len(labels)).split(batch_size):
        plans.append(mix.plan(len(batch)))
        rows.append(batch[plans[-1].index])
    size = torch.cat([plan.size for plan in plans])
    return or_targets(torch.from_numpy(labels), MixPlan(torch.cat(rows), size, size > 1)).numpy()


class Share(NamedTuple):
    """One row of `stats`: labels, and what to call them."""

    title: str
    labels: np.ndarray


def stats_figure(shares: Sequence[Share], categories: Sequence[str], title: str) -> Any:
    """A matplotlib figure: labels per sample and per category, before (first share) and after (last share) mixing."""
    from matplotlib.figure import Figure  # without pyplot there is no window and no global state

    before, after = shares[0], shares[-1]
    count = len(categories)
    figure = Figure(figsize=(max(11, min(0.19 * count + 2, 22)), 12), layout="constrained")
    figure.suptitle(_plain(title), fontsize=14)
    grid = figure.add_gridspec(3, 3, height_ratios=(1, 1.15, 1.15))
    _plot_means(figure.add_subplot(grid[0, 0]), shares, count)
    for column, (value, name) in enumerate(((1, "present"), (0, "absent"))):
        _plot_histogram(figure.add_subplot(grid[0, 1 + column]), before, after, value, name)
    order = np.argsort(-label_counts(before.labels, 0).positive, kind="stable")
    top = figure.add_subplot(grid[1, :])
    _plot_positives(top, before, after, order)
    bottom = figure.add_subplot(grid[2, :], sharex=top)
    _plot_others(bottom, before, after, order)
    names = [_plain(categories[c]) for c in order]
    bottom.set_xticks(np.arange(count), names, rotation=90, fontsize=8 if count > 40 else 10)
    top.tick_params(labelbottom=False)
    bottom.set_xlim(-0.7, count - 0.3)
    for axes in figure.axes:
        axes.spines[["top", "right"]].set_visible(False)
    return figure


def _plain(text: str) -> str:
    """Without TeX: matplotlib would take what is between two dollar signs for mathematics."""
    return printable(text).replace("$", r"\$")


def _legend_above(axes: Any, columns: int) -> None:
    """Outside the axes, where it covers no data."""
    axes.legend(
        frameon=False, ncols=columns, loc="lower left", bbox_to_anchor=(0, 1), borderaxespad=0.2, handlelength=1
    )


def _plot_positives(axes: Any, before: Share, after: Share, order: np.ndarray) -> None:
    x = np.arange(len(order))
    for share, colour, offset in ((before, "#56B4E9", -0.2), (after, PRESENT, 0.2)):
        axes.bar(x + offset, label_counts(share.labels, 0).positive[order], 0.4, color=colour, label=share.title)
    axes.set_yscale("symlog", linthresh=1)  # log, but with a place for 0
    axes.set_ylim(bottom=0)
    axes.set_ylabel("samples in which it is\nknown to be present")
    _legend_above(axes, 2)


def _plot_others(axes: Any, before: Share, after: Share, order: np.ndarray) -> None:
    x = np.arange(len(order))
    for share, marker in ((before, "o"), (after, "s")):
        counts = label_counts(share.labels, 0)
        for values, colour, name in ((counts.unknown, UNKNOWN, "unknown"), (counts.negative, ABSENT, "absent")):
            height = 100 * values[order] / max(len(share.labels), 1)
            face = colour if share is after else "white"
            axes.plot(x, height, marker, ms=5, mec=colour, mfc=face, label=f"{name}, {share.title}")
    axes.set_ylabel("% of samples")
    axes.set_ylim(0, 100)
    _legend_above(axes, 4)


def _plot_means(axes: Any, shares: Sequence[Share], count: int) -> None:
    """What the labels of an average sample are."""
    left = np.zeros(len(shares))
    y = np.arange(len(shares))[::-1]
    counts = [label_counts(share.labels) for share in shares]
    for field, colour in (("positive", PRESENT), ("unknown", UNKNOWN), ("negative", ABSENT)):
        values = np.array([getattr(c, field) / max(len(s.labels), 1) for c, s in zip(counts, shares, strict=True)])
        name = {"positive": "present", "negative": "absent"}.get(field, field)
        axes.barh(y, values, left=left, color=colour, label=name)
        ink = "white" if field == "positive" else "black"
        for at, value, start in zip(y, values, left, strict=True):
            if value > count * 0.09:
                axes.text(start + value / 2, at, f"{value:.1f}", ha="center", va="center", fontsize=9, color=ink)
            elif field == "positive":
                axes.text(start + count * 0.01, at + 0.43, f"{value:.2f}", fontsize=9, color=PRESENT_TEXT)
            elif field == "negative":
                axes.text(start + value + count * 0.01, at, f"{value:.1f}", va="center", fontsize=9, color=ABSENT_TEXT)
        left = left + values
    axes.set_yticks(y, [share.title for share in shares])
    axes.set_xlabel("labels of an average sample")
    axes.set_ylim(-0.6, len(shares) - 0.1)
    axes.legend(frameon=False, ncols=3, loc="lower center", bbox_to_anchor=(0.4, 1), handlelength=1, columnspacing=1)


def _plot_histogram(axes: Any, before: Share, after: Share, value: int, name: str) -> None:
    counts = [(share.labels == value).sum(1) for share in (before, after)]
    top = max(int(c.max(initial=0)) for c in counts)
    bins = np.arange(top + 2) - 0.5 if top <= 40 else np.linspace(-0.5, top + 0.5, 41)
    light, dark = ("#56B4E9", PRESENT) if value == 1 else ("#C8C8C8", "#6B6B6B")
    for c, share, colour in zip(counts, (before, after), (light, dark), strict=True):
        weights = np.full(len(c), 100 / max(len(c), 1))
        axes.hist(c, bins, weights=weights, histtype="step", lw=2, color=colour, label=share.title)
    axes.set_xlabel(f"labels of a sample known as {name}")
    axes.set_ylabel("% of samples")
    _legend_above(axes, 1)
