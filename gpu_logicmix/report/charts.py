"""Charts as SVG, in the colours of style.css. All text in them is escaped (markupsafe).

A panel is 360 units wide, so that its letters are legible on a phone, where it is as wide as the screen.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from markupsafe import Markup

from gpu_logicmix.report.words import finite

Points = list[tuple[float, float | None]]
WIDTH, HEIGHT = 360, 200
LEFT, RIGHT, TOP, BOTTOM = 50, 350, 12, 176  # of the plotting area
POINTS = 200  # of a curve: about as many as there are pixels


class Series(NamedTuple):
    name: str
    colour: str  # a class of the style sheet: one, two, present, unknown, absent, c0 ... c7
    points: Points  # None interrupts the line


def chart_series(name: str, colour: str, lines: list[dict], key: str, x: str = "epoch", factor: float = 1) -> Series:
    """Lines without the key, as an epoch without validation, leave no gap; a value that is not finite does."""
    values = [(finite(line.get(x)), finite(line[key])) for line in lines if key in line]
    return Series(name, colour, [(a, None if b is None else b * factor) for a, b in values if a is not None])


def has_data(series: Series) -> bool:
    """Whether there is a value other than 0 to see."""
    return any(y for _, y in series.points)


class Axes(NamedTuple):
    """From values to places on a panel."""

    x: tuple[float, float]
    y: tuple[float, float]
    scale: Callable[[float], float] = float

    def place(self, x: float, y: float) -> tuple[float, float]:
        across = (x - self.x[0]) / ((self.x[1] - self.x[0]) or 1)
        low, high = self.scale(self.y[0]), self.scale(self.y[1])
        up = (self.scale(y) - low) / ((high - low) or 1)
        return round(LEFT + across * (RIGHT - LEFT), 1), round(BOTTOM - up * (BOTTOM - TOP), 1)


def tag(text: str, *values: object, **named: object) -> Markup:
    """HTML with its values escaped."""
    return Markup(text).format(*values, **named)


def joined(parts: Iterable[str]) -> Markup:
    return Markup("").join(parts)


def line_chart(
    title: str,
    *series: Series,
    zero: bool = False,
    unit: str = "",
    mark: float | None = None,
    x_name: str = "epoch",
    square: bool = False,
) -> Markup:
    """A line chart; empty if there is nothing to draw.

    zero: the y axis begins at 0. mark: an x to point out on the first series, with its value.
    square: both axes from 0 to 100, and single values are not marked by circles.
    """
    shown = [s._replace(points=thin(s.points)) for s in series if any(y is not None for _, y in s.points)]
    if not shown:
        return Markup("")
    axes, ticks, x_ticks, log = _unit_axes() if square else _fitted_axes(shown, zero, bool(unit))
    out = [_grid(axes, ticks, unit), _x_labels(axes, x_ticks, x_name)]
    for one in shown:
        out.append(tag('<path class="{}" d="{}"/>', one.colour, path(one.points, axes)))
        if len(one.points) <= 30 and not square:
            spots = [axes.place(x, y) for x, y in one.points if y is not None]
            out += [tag('<circle class="{}" cx="{}" cy="{}" r="3"/>', one.colour, *spot) for spot in spots]
    out += [_marked(axes, x, y, unit) for x, y in shown[0].points if x == mark and y is not None]
    said = "; ".join(f"{s.name}: {_last(s.points):.4g}{unit} at the end" for s in shown)
    caption = tag("<b>{}</b>{}", title, " (logarithmic)" if log else "")
    keys = joined(key(s.name, s.colour) for s in shown) if len(shown) > 1 else ""
    return panel(caption, keys, f"{title} by {x_name}. {said}", joined(out))


def panel(caption: Markup, keys: Markup | str, label: str, content: Markup, height: int = HEIGHT) -> Markup:
    """A chart with its caption. label: the same in words, for those who cannot see it."""
    below = tag("<div>{}</div>", keys) if keys else ""
    return tag(
        '<figure class="chart"><figcaption>{}{}</figcaption>'
        '<svg viewBox="0 0 {} {}" role="img" aria-label="{}">{}</svg></figure>\n',
        caption, below, WIDTH, height, label, content,
    )  # fmt: skip


def key(name: str, colour: str, symbol: str = "●") -> Markup:
    return tag('<span class="key {}">{} {}</span>', colour, symbol, name)


def _fitted_axes(series: Sequence[Series], zero: bool, linear: bool) -> tuple[Axes, list[float], list[float], bool]:
    """Axes, ticks of y, ticks of x, and whether y is logarithmic. Percents are always linear."""
    xs = [x for s in series for x, _ in s.points]
    ys = [y for s in series for _, y in s.points if y is not None]
    # From 1 up to 20 times as much a linear axis shows all there is to see.
    log = not zero and not linear and min(ys) > 0 and max(ys) > 20 * min(ys)
    marks = log_ticks(min(ys), max(ys)) if log else ticks(0 if zero else min(ys), max(ys))
    first, last = (0.0, max(1.0, math.ceil(max(xs)))) if max(xs) > 0 else (min(xs), min(xs) + 1)
    span = min(marks[0], min(ys)), max(marks[-1], max(ys))
    axes = Axes((first, last), span, math.log10 if log else float)
    return axes, marks, [tick for tick in ticks(first, last, whole=True) if first <= tick <= last], log


def _unit_axes() -> tuple[Axes, list[float], list[float], bool]:
    return Axes((0, 100), (0, 100)), [0.0, 25.0, 50.0, 75.0, 100.0], [0.0, 25.0, 50.0, 75.0, 100.0], False


def _grid(axes: Axes, marks: Sequence[float], unit: str = "") -> Markup:
    out = []
    for tick in marks:
        _, y = axes.place(axes.x[0], tick)
        out.append(tag('<line class="grid" x1="{}" x2="{}" y1="{}" y2="{}"/>', LEFT, RIGHT, y, y))
        out.append(tag('<text x="{}" y="{}" text-anchor="end">{}{}</text>', LEFT - 6, y + 4, short(tick), unit))
    return joined(out)


def _x_labels(axes: Axes, marks: Sequence[float], name: str) -> Markup:
    out = []
    for tick in marks:
        x, _ = axes.place(tick, axes.y[0])
        out.append(tag('<text x="{}" y="{}" text-anchor="middle">{}</text>', x, BOTTOM + 18, f"{tick:g}"))
    return joined([*out, tag('<text x="{}" y="{}" text-anchor="end">{}</text>', LEFT - 10, BOTTOM + 18, name)])


def _marked(axes: Axes, x: float, value: float, unit: str) -> Markup:
    x, y = axes.place(x, value)
    anchor = "end" if x > (LEFT + RIGHT) / 2 else "start"
    text = tag(
        '<text class="strong" x="{}" y="{}" text-anchor="{}">{}{}</text>',
        x, y + 20 if y < TOP + 20 else y - 10, anchor, f"{value:.1f}", unit,
    )  # fmt: skip
    return tag('<circle class="mark" cx="{}" cy="{}" r="6"/>', x, y) + text


def spark_line(points: Points) -> Markup:
    """A curve without axes, both from 0 to 1; for a cell of a table."""
    places = "L".join(f"{48 * x:.1f} {22 - 22 * (y or 0):.1f}" for x, y in thin(points, 24))
    return tag('<svg viewBox="0 0 48 22" class="one" aria-hidden="true"><path d="M{}"/></svg>', places)


# ------------------------------------------------------------------------------------------------------ numbers on axes
def short(value: float) -> str:
    """For an axis: 0.05, 250, 20k, 1.5M."""
    for size, letter in ((1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:g}{letter}"
    return f"{value:g}"


def _last(points: Points) -> float:
    return next(y for _, y in reversed(points) if y is not None)


def path(points: Points, axes: Axes) -> str:
    parts, pen = [], "M"
    for x, y in points:
        if y is None:
            pen = "M"
            continue
        parts.append("{}{} {}".format(pen, *axes.place(x, y)))
        pen = "L"
    return "".join(parts)


def thin(points: Points, most: int = POINTS) -> Points:
    """Means of neighbours, where there are more points than pixels to draw them."""
    size = -(-len(points) // most)
    if size <= 1:
        return points
    out: Points = []
    for at in range(0, len(points), size):
        part = points[at : at + size]
        known = [y for _, y in part if y is not None]
        out.append((sum(x for x, _ in part) / len(part), sum(known) / len(known) if known else None))
    return out


def ticks(low: float, high: float, whole: bool = False) -> list[float]:
    """From three to six round numbers that enclose low and high."""
    span = (high - low) or abs(high) or 1.0
    unit = 10.0 ** math.floor(math.log10(span / 4))
    step = next(unit * factor for factor in (1, 2, 2.5, 5, 10) if unit * factor * 4.5 >= span)
    if whole:
        step = max(1, math.ceil(step))
    first = math.floor(low / step)
    return [float(f"{step * at:.9g}") for at in range(first, math.ceil(high / step - 1e-9) + 1)] or [low, high]


def log_ticks(low: float, high: float) -> list[float]:
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    marks = [float(f"{factor}e{power}") for power in powers for factor in (1, 2, 5)]
    inside = [
        t for at, t in enumerate(marks) if marks[min(at + 1, len(marks) - 1)] > low and marks[max(at - 1, 0)] < high
    ]
    return inside[:: -(-len(inside) // 6)]
