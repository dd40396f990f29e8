"""mAP by epoch: curves.csv, which outlives the folders of runs as results.csv does, and its plots."""

from __future__ import annotations

import csv
import io
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from markupsafe import Markup

from gpu_logicmix.files import csv_rows, read_text, write_whole
from gpu_logicmix.report.charts import BOTTOM, HEIGHT, LEFT, RIGHT, WIDTH, Axes, joined, path, tag, ticks
from gpu_logicmix.report.pages import chart_style
from gpu_logicmix.report.words import finite
from gpu_logicmix.study.plots import COLOURS, legend_lines, symbol
from gpu_logicmix.study.results import Row, finite_number
from gpu_logicmix.study.tables import by, known_words
from gpu_logicmix.train.runlog import read_log

if TYPE_CHECKING:
    from gpu_logicmix.study.plan import Planned

Curve = dict[int, float]  # epoch -> mAP in percent


def read_curves(folder: Path) -> dict[str, Curve]:
    """By run; empty if there is no curves.csv."""
    curves: dict[str, Curve] = {}
    file = folder / "curves.csv"
    if file.exists():
        lines = csv_rows(file, io.StringIO(read_text(file), newline=""))
        next(lines, None)  # run, epoch, mAP
        for number, cells in lines:
            try:
                run, epoch, mAP = cells
                curves.setdefault(run, {})[int(epoch)] = finite_number(mAP)
            except ValueError as error:
                raise ValueError(f"{file}, line {number}: {error}; remove the line") from None
    return curves


def write_curves(planned: Sequence[Planned], out: Path, ended: set[str]) -> None:
    """curves.csv anew, from the logs of runs that have ended; lines of runs whose folders are gone stay."""
    curves = read_curves(out)
    for plan in planned:
        lines = read_log(out / "runs" / plan.folder) if plan.folder in ended else []
        found = {int(e["epoch"]): finite(e.get("mAP")) for e in lines if e.get("kind") == "epoch"}
        if curve := {epoch: round(100 * mAP, 2) for epoch, mAP in found.items() if mAP is not None}:
            curves[plan.folder] = curve
    if curves:
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(("run", "epoch", "mAP"))
        writer.writerows((run, epoch, mAP) for run, curve in curves.items() for epoch, mAP in sorted(curve.items()))
        write_whole(out / "curves.csv", text.getvalue())


def mean_curve(curves: Sequence[Curve]) -> Curve:
    """Over the epochs that all of them have."""
    epochs = sorted(set.intersection(*(set(curve) for curve in curves))) if curves else []
    return {epoch: statistics.fmean(curve[epoch] for curve in curves) for epoch in epochs}


def curve_plot(rows: Sequence[Row], curves: Mapping[str, Curve], known: Sequence[float] | None = None) -> str | None:
    """Of one table, a panel for each known proportion: the mean of a method's seeds, and thin lines for single seeds.
    None if none of its runs has a curve.

    known: only these proportions.
    """
    methods = list(by(rows, "method"))
    panels = []
    for share, part in sorted(by(rows, "known").items()):
        own = {m: [curves[r.run] for r in part if r.method == m and r.run in curves] for m in methods}
        if any(own.values()) and (known is None or share in known):
            panels.append((f"mAP (%), {known_words(rows, share)}", _panel(methods, own)))
    if not panels:
        return None
    legend, top = legend_lines(methods, 8, max(WIDTH * len(panels), WIDTH))
    parts = [
        tag(
            '<g transform="translate({} {})"><text class="strong" x="0" y="14">{}</text>'
            '<g transform="translate(0 20)">{}</g></g>',
            at * (WIDTH + 24), top, title, content,
        )
        for at, (title, content) in enumerate(panels)
    ]  # fmt: skip
    width = WIDTH * len(panels) + 24 * (len(panels) - 1)
    own_style = (
        "text{font:11px system-ui,sans-serif}.ground{fill:var(--ground)}svg path.thin{stroke-width:.7;opacity:.6}"
    )
    return tag(
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {} {}" width="{}" role="img"><style>{}</style>'
        '<rect class="ground" width="100%" height="100%"/>{}{}</svg>\n',
        width, top + HEIGHT + 20, max(width, 480), Markup(chart_style() + own_style), legend, joined(parts),
    )  # fmt: skip


def _panel(methods: Sequence[str], own: Mapping[str, Sequence[Curve]]) -> Markup:
    every = [curve for curves in own.values() for curve in curves]
    values = ticks(min(min(c.values()) for c in every), max(max(c.values()) for c in every))
    last = max(max(c) for c in every)
    axes = Axes((0, last), (values[0], values[-1]))
    out = []
    for value in values:
        _, y = axes.place(0, value)
        out.append(tag('<line class="grid" x1="{}" x2="{}" y1="{}" y2="{}"/>', LEFT, RIGHT, y, y))
        out.append(tag('<text x="{}" y="{}" text-anchor="end">{:g}</text>', LEFT - 6, y + 4, value))
    for epoch in [tick for tick in ticks(0, last, whole=True) if tick <= last]:
        x, _ = axes.place(epoch, values[0])
        out.append(tag('<text x="{}" y="{}" text-anchor="middle">{:g}</text>', x, BOTTOM + 16, epoch))
    out.append(tag('<text x="{}" y="{}" text-anchor="end">epoch</text>', LEFT - 8, BOTTOM + 16))
    for number, method in enumerate(methods):
        mean, colour = mean_curve(own[method]), f"c{number % COLOURS}"
        if len(own[method]) > 1:
            thin = [path(sorted(curve.items()), axes) for curve in own[method]]
            out += [tag('<path class="thin {}" d="{}"/>', colour, line) for line in thin]
        if mean:
            out.append(tag('<path class="{}" d="{}"/>', colour, path(list(mean.items()), axes)))
            end = max(mean)
            out.append(symbol(number, *axes.place(end, mean[end])))
    return joined(out)
