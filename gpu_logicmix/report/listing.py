"""Long tables of categories that a reader sorts and searches (tables.js): their cells."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from markupsafe import Markup

SAME = 1e-6  # changes of AP up to this are none


class Bar(NamedTuple):
    """In percent of its cell."""

    start: float
    width: float
    kind: str = ""  # "", up, down, same


class Cell(NamedTuple):
    text: str | Markup = ""
    value: float | None = None  # what it is sorted by; by its text if None
    bar: Bar | None = None


class Listing(NamedTuple):
    head: Sequence[str]
    rows: list[list[Cell]]
    what: str = "categories"


def number(value: float, text: str) -> Cell:
    return Cell(text, -math.inf if value != value else round(value, 6))


def share_bar(value: float) -> Cell:
    return Cell("", round(value, 6), Bar(0, round(100 * value, 1)))


def changes(rows: Sequence[tuple[str, float, float]], heads: tuple[str, str]) -> Listing:
    """Two values of each category and the change between them, in percent and points; in the order of `rows`."""
    out = []
    for name, before, after in rows:
        low, high = 100 * min(before, after), 100 * max(before, after)
        kind = "same" if abs(after - before) <= SAME else "up" if after > before else "down"
        bar = Bar(round(low, 1), round(max(high - low, 0.5), 1), kind)
        out.append(
            [
                Cell(name),
                Cell("", round(after, 6), bar),
                number(before, f"{100 * before:.1f}"),
                number(after, f"{100 * after:.1f}"),
                number(after - before, f"{100 * (after - before):+.1f}"),
            ]
        )
    return Listing(("category", "", *heads, "change"), out)
