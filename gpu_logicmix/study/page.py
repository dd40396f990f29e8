"""The page of a study: its tables, their plots, and links to the reports of its runs. It needs no other file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from urllib.parse import quote

from gpu_logicmix.report.charts import tag
from gpu_logicmix.report.listing import Cell, Listing, number
from gpu_logicmix.report.pages import render
from gpu_logicmix.study.pays import gain_figure, gain_line, gain_points
from gpu_logicmix.study.plots import plot_figures
from gpu_logicmix.study.results import Row
from gpu_logicmix.study.tables import by, tables


def page(rows: Sequence[Row], title: str, folder: Path) -> str:
    """folder: where the page goes; runs are linked whose reports are in its `runs`."""
    parts = []
    for table, part in zip(tables(rows), by(rows, "table").values(), strict=True):
        charts, legend = plot_figures(part)
        parts.append({"table": table, "charts": charts, "legend": legend})
    points = gain_points([(title, rows)])
    gains = None if gain_line(points) is None else gain_figure(points)
    runs = {row.run: row.minutes for row in rows}
    summary = f"{len(runs)} runs, {sum(minutes or 0 for minutes in runs.values()) / 60:.1f} hours."
    return render(
        "study.html", title=title, parts_of_study=parts, summary=summary, gains=gains, runs=_runs(rows, folder)
    )


def _runs(rows: Sequence[Row], folder: Path) -> Listing:
    """Every run once."""
    lines = []
    for row in {row.run: row for row in rows}.values():
        link = f"runs/{row.run}/report.html"
        name = tag('<a href="{}">{}</a>', quote(link), row.run) if (folder / link).exists() else row.run
        measured = row.known if row.known_measured is None else row.known_measured
        lines.append(
            [
                Cell(row.method),
                number(measured, f"{100 * measured:.3g} %"),
                number(row.seed, f"{row.seed}"),
                number(float("nan") if row.mAP is None else row.mAP, "–" if row.mAP is None else f"{row.mAP:.1f}"),
                number(row.minutes or 0, f"{row.minutes or 0:.1f}"),
                Cell(name),
            ]
        )
    return Listing(("method", "known", "seed", "mAP %", "minutes", "run"), lines, "runs")
