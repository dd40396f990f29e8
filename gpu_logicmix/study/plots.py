"""The plots of a study as SVG: mAP of each method, and its difference to the first with a 95 % interval.

Both panels show the same runs: a ring is one run (or one pair of runs with the same seed), a filled mark is the mean.
An axis always has room for the whole of every interval.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from markupsafe import Markup

from gpu_logicmix.report.charts import BOTTOM, HEIGHT, LEFT, RIGHT, TOP, WIDTH, Axes, joined, key, panel, tag, ticks
from gpu_logicmix.report.pages import chart_style
from gpu_logicmix.study.results import Row
from gpu_logicmix.study.tables import Difference, differences, known_words, table_cells

COLOURS = 8  # of the style sheet: c0 ... c7
SYMBOLS = "●■▲◆▼✚✖★"
ROW = 40  # height of a method's row, where there is one proportion alone


class Mark(NamedTuple):
    """A method at a known proportion, in one panel."""

    method: int
    column: int
    values: list[float]  # of single runs
    mean: float
    half: float = 0.0


class Panel(NamedTuple):
    title: str
    marks: list[Mark]
    zero: bool  # whether 0 is the first method's line
    height: int
    content: Markup
    said: str


def plot_panels(rows: Sequence[Row]) -> tuple[list[Panel], Markup]:
    """The two panels of a table and their legend: over the known proportion, or a row for each method where there is
    one proportion alone."""
    methods, proportions, cells = table_cells(rows)
    gains = differences(rows)
    levels, steps = [], []
    for m, method in enumerate(methods):
        for k, known in enumerate(proportions):
            if (own := cells[method, known]) is not None:
                values = [r.mAP for r in rows if r.method == method and r.known == known and r.mAP is not None]
                levels.append(Mark(m, k, values, own.mean))
            if (gain := gains.get((method, known))) is not None:
                steps.append(Mark(m, k, gain.values, gain.mean, gain.half or 0.0))
    over = len(proportions) > 1
    columns = [known_words(rows, k).removesuffix(" known") for k in proportions]
    draw = _over_known if over else _by_method
    where = "" if over else f", {known_words(rows, proportions[0])}"
    panels = []
    for title, marks, zero in (
        (f"mAP (%){where}", levels, False),
        (f"Difference to {_short_name(methods[0], 18)}{_interval_words(gains)}", steps, True),
    ):
        if marks:
            content, height = draw(methods, columns, marks, zero)
            panels.append(Panel(title, marks, zero, height, content, _said(methods, columns, marks, zero)))
    legend = joined(key(m, _colour(n), SYMBOLS[n % len(SYMBOLS)]) for n, m in enumerate(methods)) if over else ""
    return panels, Markup(legend)


def _interval_words(gains: dict[tuple[str, float], Difference]) -> str:
    return " in points, 95 % interval" if any(d.half is not None for d in gains.values()) else " in points"


def _colour(number: int) -> str:
    return f"c{number % COLOURS}"


def _span(marks: Sequence[Mark], zero: bool) -> list[float]:
    """Ticks that enclose every run and the whole of every interval."""
    ends = [v for mark in marks for v in (*mark.values, mark.mean - mark.half, mark.mean + mark.half)]
    return ticks(min(ends + [0.0] * zero), max(ends + [0.0] * zero))


def _said(methods: list[str], columns: list[str], marks: Sequence[Mark], zero: bool) -> str:
    """The means in words, for those who cannot see the plot."""
    form = "+.1f" if zero else ".1f"
    return "; ".join(f"{methods[m.method]}, {columns[m.column]}: {m.mean:{form}}" for m in marks)


def symbol(number: int, x: float, y: float) -> Markup:
    """A mark that is told from others without its colour too."""
    r = 4.0
    shapes = {
        1: f"M{x - r} {y - r}h{2 * r}v{2 * r}h{-2 * r}z",
        2: f"M{x - r - 1} {y + r}h{2 * r + 2}L{x} {y - r - 1}z",
        3: f"M{x} {y - r - 1}L{x + r + 1} {y}L{x} {y + r + 1}L{x - r - 1} {y}z",
        4: f"M{x - r - 1} {y - r}h{2 * r + 2}L{x} {y + r + 1}z",
        5: f"M{x - 1.5} {y - 5}h3v3.5h3.5v3h-3.5v3.5h-3v-3.5h-3.5v-3h3.5z",
        6: f"M{x} {y - 2}l3-3l2 2l-3 3l3 3l-2 2l-3-3l-3 3l-2-2l3-3l-3-3l2-2z",
        7: f"M{x} {y - 6}l1.8 4h4.2l-3.2 2.8l1.2 4.2l-4-2.4l-4 2.4l1.2-4.2l-3.2-2.8h4.2z",
    }
    kind = number % COLOURS
    if kind == 0:
        return tag('<circle class="c0" cx="{}" cy="{}" r="{}"/>', x, y, r)
    return tag('<path class="spot {}" d="{}"/>', _colour(number), shapes[kind])


def ring(number: int, x: float, y: float) -> Markup:
    return tag('<circle class="run {}" cx="{}" cy="{}" r="2.6"/>', _colour(number), x, y)


def _over_known(methods: list[str], columns: list[str], marks: Sequence[Mark], zero: bool) -> tuple[Markup, int]:
    """mAP upwards, a group of marks for each known proportion, a line through the means of each method."""
    values = _span(marks, zero)
    axes = Axes((-0.5, len(columns) - 0.5), (values[0], values[-1]))
    width = (RIGHT - LEFT) / len(columns)
    apart = min(16.0, 0.8 * width / len(methods))
    out = []
    for value in values:
        _, y = axes.place(0, value)
        kind = "zero" if zero and value == 0 else "grid"
        out.append(tag('<line class="{}" x1="{}" x2="{}" y1="{}" y2="{}"/>', kind, LEFT, RIGHT, y, y))
        text = f"{value:+g}" if zero and value else f"{value:g}"
        out.append(tag('<text x="{}" y="{}" text-anchor="end">{}</text>', LEFT - 6, y + 4, text))
    for at, name in enumerate(columns):
        x, _ = axes.place(at, values[0])
        out.append(tag('<text x="{}" y="{}" text-anchor="middle">{}</text>', x, BOTTOM + 18, name))
    out.append(tag('<text x="{}" y="{}" text-anchor="end">known</text>', LEFT - 6, BOTTOM + 18))
    for number in range(len(methods)):
        own = [mark for mark in marks if mark.method == number]
        shift = apart * (number - (len(methods) - 1) / 2)
        places = []
        for mark in own:
            x, y = axes.place(mark.column, mark.mean)
            x = round(x + shift, 1)
            places.append(f"{x} {y}")
            if mark.half:
                ends = [axes.place(0, mark.mean + s * mark.half)[1] for s in (-1, 1)]
                out.append(tag('<path class="{}" d="M{} {}V{}"/>', _colour(number), x, *ends))
            if len(mark.values) > 1:
                out += [ring(number, x, axes.place(0, v)[1]) for v in mark.values]
            out.append(symbol(number, x, y))
        if not zero and len(places) > 1:
            out.append(tag('<path class="dashed {}" d="M{}"/>', _colour(number), "L".join(places)))
    return joined(out), HEIGHT


def _by_method(methods: list[str], columns: list[str], marks: Sequence[Mark], zero: bool) -> tuple[Markup, int]:
    """A row for each method with its name above its marks; mAP or the difference to the right."""
    values = _span(marks, zero)
    left, right = 14, WIDTH - 14
    shown = sorted({mark.method for mark in marks})
    bottom = TOP + ROW * len(shown)

    def across(value: float) -> float:
        return round(left + (value - values[0]) / ((values[-1] - values[0]) or 1) * (right - left), 1)

    out = []
    for value in values:
        kind = "zero" if zero and value == 0 else "grid"
        x = across(value)
        out.append(tag('<line class="{}" x1="{}" x2="{}" y1="{}" y2="{}"/>', kind, x, x, TOP, bottom))
        text = f"{value:+g}" if zero and value else f"{value:g}"
        out.append(tag('<text x="{}" y="{}" text-anchor="middle">{}</text>', x, bottom + 16, text))
    for mark in marks:
        y = TOP + ROW * shown.index(mark.method) + 30
        bar = f" ± {mark.half:.1f}" if mark.half else ""
        words = f"{mark.mean:+.1f}{bar}" if zero else f"{mark.mean:.1f}"
        out.append(tag('<text class="strong" x="{}" y="{}">{}</text>', left, y - 13, _short_name(methods[mark.method])))
        out.append(tag('<text x="{}" y="{}" text-anchor="end">{}</text>', right, y - 13, words))
        if mark.half:
            ends = [across(mark.mean + s * mark.half) for s in (-1, 1)]
            out.append(tag('<path class="{}" d="M{} {}H{}"/>', _colour(mark.method), ends[0], y, ends[1]))
        if len(mark.values) > 1:
            out += [ring(mark.method, across(v), y) for v in mark.values]
        out.append(symbol(mark.method, across(mark.mean), y))
    return joined(out), bottom + 24


def _short_name(name: str, most: int = 42) -> str:
    return name if len(name) <= most else f"{name[: most - 1]}…"


# ------------------------------------------------------------------------------------------------- on a page, in a file
def plot_figures(rows: Sequence[Row]) -> tuple[list[Markup], Markup]:
    """The panels as figures of a page, and their legend."""
    panels, legend = plot_panels(rows)
    return [panel(tag("<b>{}</b>", p.title), "", f"{p.title}. {p.said}", p.content, p.height) for p in panels], legend


def standalone_plot(rows: Sequence[Row]) -> str:
    """Both panels and the legend in one SVG file, light or dark as the reader's screen is."""
    panels, _ = plot_panels(rows)
    methods, proportions, _ = table_cells(rows)
    top, gap = 24, 24
    legend, y = legend_lines(methods, 8) if len(proportions) > 1 else (Markup(""), 0)
    height = max(p.height for p in panels) + top + y if panels else 40
    parts = []
    for at, p in enumerate(panels):
        inner = tag(
            '<text class="strong" x="0" y="14">{}</text><g transform="translate(0 {})">{}</g>', p.title, top, p.content
        )
        parts.append(tag('<g transform="translate({} {})">{}</g>', at * (WIDTH + gap), y, inner))
    width = WIDTH * max(len(panels), 1) + gap * max(len(panels) - 1, 0)
    content = tag('<rect class="ground" width="100%" height="100%"/>{}{}', legend, joined(parts))
    # The page's colours; GitHub and most viewers obey prefers-color-scheme in an image.
    own = "text{font:11px system-ui,sans-serif}.ground{fill:var(--ground)}"
    return tag(
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {} {}" width="{}" role="img">'
        "<style>{}</style>{}</svg>\n",
        width, height, width, Markup(chart_style() + own), content,
    )  # fmt: skip


def legend_lines(methods: Sequence[str], top: int, width: int = 2 * WIDTH) -> tuple[Markup, int]:
    """Names with their symbols, in lines as wide as both panels; and how high that is."""
    out, x, y = [], 6.0, top + 4
    for number, name in enumerate(_short_name(name, int((width - 34) / 6.8)) for name in methods):
        length = 28 + 6.8 * len(name)
        if x > 6 and x + length > width:
            x, y = 6.0, y + 20
        out.append(symbol(number, x, y - 4))
        out.append(tag('<text x="{}" y="{}">{}</text>', round(x + 10, 1), y, name))
        x += length
    return joined(out), y + 10
