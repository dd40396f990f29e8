"""The section about decisions: thresholds and calibration, fitted on held-out known labels (decisions.json)."""

from __future__ import annotations

from typing import Any, NamedTuple

from markupsafe import Markup

from gpu_logicmix.decisions import Decisions
from gpu_logicmix.report.charts import Points, Series, line_chart
from gpu_logicmix.report.listing import Cell, Listing, number
from gpu_logicmix.report.words import finite, percent, two_digits


class Decided(NamedTuple):
    words: str
    notes: list[str]
    listing: Listing
    charts: list[Markup]
    undecided: list[str]  # with the reason


def decide(found: Decisions | None) -> Decided | None:
    if found is None:
        return None
    floor = "" if found.floor is None else f" at a precision of at least {percent(found.floor, 0)}"
    goal = "F1" if found.goal == "f1" else f"recall{floor}"
    which = "the fine-tuned weights" if found.weights == "cft" else "the weights as trained"
    words = (
        f"Fitted on {found.fitted_on or 'held-out known labels'}, for {which}: a temperature of "
        f"{found.temperature:.2f} and a shift of {found.shift:.2f} for all, and for each category the threshold with "
        f"the best {goal}. The validation images had no part in it."
    )
    notes = []
    if found.outdated:
        notes.append(
            "These weights have been written anew since. evaluate, predict and export do not use the thresholds below; "
            f"gpu-logicmix decide RUN --use {found.weights} fits them again."
        )
    if found.trained_on:
        notes.append("The backbone was trained on these images: on new ones the figures below will be lower.")
    undecided = [f"{c['name']}: {c.get('reason') or 'not decided'}" for c in found.categories if not c["decided"]]
    return Decided(words, notes, _listing(found), _charts(found), undecided)


def _listing(found: Decisions) -> Listing:
    head = ("category", "threshold", "precision %", "recall %", "F1 %", "F1 at 0.5 %", "positives", "negatives")
    rows = []
    for category in found.categories:
        row = [Cell(str(category["name"])), _number(category["threshold"], two_digits(category["threshold"]))]
        for name in ("precision", "recall", "f1", "f1_at_half"):
            value = finite(category.get(name))
            row.append(_number(value, "–" if value is None else f"{100 * value:.1f}"))
        for name in ("positives", "negatives"):
            value = finite(category.get(name))
            row.append(_number(value, "–" if value is None else f"{value:,.0f}"))
        rows.append(row)
    return Listing(head, rows)


def _number(value: Any, text: str) -> Cell:
    known = finite(value)
    return number(float("nan") if known is None else known, text)


def _charts(found: Decisions) -> list[Markup]:
    """Reliability on the held-out labels, before and after calibration."""
    series = [Series("ideal", "ink", [(0.0, 0.0), (100.0, 100.0)])]
    errors = found.ece or [None, None]
    for at, (kind, colour) in enumerate((("before", "c1"), ("after", "c2"))):
        points = _points((found.reliability or {}).get(kind))
        if points:
            error = finite(errors[at]) if len(errors) > at else None
            text = "" if error is None else f", error {100 * error:.1f} points"
            series.append(Series(f"{kind} calibration{text}", colour, points))
    if len(series) == 1:
        return []
    return [line_chart("Present, over the probability", *series, unit=" %", x_name="prob.", square=True)]


def _points(bins: Any) -> Points:
    pairs = [(finite(b.get("confidence")), finite(b.get("positive"))) for b in bins or [] if isinstance(b, dict)]
    return [(100 * x, 100 * y) for x, y in pairs if x is not None and y is not None]
