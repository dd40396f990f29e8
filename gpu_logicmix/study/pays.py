"""Where LogicMix pays: its gain over the number of known positives per category, with a line through it.

A pair is two runs that differ in mixing alone: same data, seed and options. Pairs of one setting (a study's table and
known proportion) are repetitions and make one point, their mean. The line is fitted to the points by least squares over
the logarithm of the number of known positives. Its noise is how the points lie about it, so settings of different kinds
widen the interval.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from markupsafe import Markup

from gpu_logicmix.report.charts import BOTTOM, HEIGHT, LEFT, RIGHT, TOP, WIDTH, Axes, joined, key, panel, tag, ticks
from gpu_logicmix.report.pages import chart_style
from gpu_logicmix.study.plots import COLOURS, SYMBOLS, legend_lines, ring, symbol
from gpu_logicmix.study.results import Row
from gpu_logicmix.study.tables import by, t_quantile

METHOD = "LogicMix"


class Point(NamedTuple):
    """A setting: runs with LogicMix less runs without, in points of mAP, seed by seed."""

    study: str
    table: str
    known: float
    images: int | None
    positives: float  # known ones of a category (median), mean over the pairs
    gains: list[float]
    tuned: float | None = None  # mean gain at the epochs that held-out training images like best

    @property
    def gain(self) -> float:
        return statistics.fmean(self.gains)


def gain_points(studies: Iterable[tuple[str, Sequence[Row]]], method: str = METHOD) -> list[Point]:
    """Of the tables that have the method and another that comes first. A pair that several tables share counts once."""
    seen: set[tuple[str, str]] = set()
    found = []
    for study, rows in studies:
        for title, table in by(rows, "table").items():
            first = {(r.known, r.seed): r for r in table if r.method == table[0].method and r.mAP is not None}
            groups: dict[float, list[tuple[Row, Row]]] = {}
            for row in table:
                other = first.get((row.known, row.seed))
                if row.method != method or other is None or row is other or row.mAP is None or not row.positives:
                    continue
                if (other.run, row.run) not in seen:
                    seen.add((other.run, row.run))
                    groups.setdefault(row.known, []).append((other, row))
            for known, pairs in sorted(groups.items()):
                mean = statistics.fmean(row.positives or 0.0 for _, row in pairs)
                gains = [(row.mAP or 0.0) - (other.mAP or 0.0) for other, row in pairs]
                tuned = [r.mAP_tuned - o.mAP_tuned for o, r in pairs if None not in (r.mAP_tuned, o.mAP_tuned)]
                best = statistics.fmean(tuned) if tuned else None
                found.append(Point(study, title, known, pairs[0][1].images, mean, gains, best))
    return found


class Line(NamedTuple):
    """gain = height + slope * (log10(positives) - middle), and what its interval needs."""

    height: float
    slope: float
    middle: float
    spread: float  # sum of squares of log10(positives) about the middle
    noise: float | None  # variance about the line; None with two points
    count: int

    def at(self, positives: float) -> tuple[float, float | None]:
        """The line, and half of its 95 % interval."""
        far = math.log10(positives) - self.middle
        value = self.height + self.slope * far
        if self.noise is None:
            return value, None
        half = t_quantile(self.count - 2) * math.sqrt(self.noise * (1 / self.count + far**2 / self.spread))
        return value, half

    def crossing(self) -> float | None:
        """Known positives at which the line crosses 0; None if it falls."""
        return 10 ** (self.middle - self.height / self.slope) if self.slope > 0 else None

    def limits(self) -> tuple[float, float] | None:
        """Below the first the whole interval is under 0, above the second over it (Fieller). None if the slope is
        within the noise: nothing can be said then."""
        if self.noise is None or self.slope <= 0:
            return None
        wide = t_quantile(self.count - 2) ** 2 * self.noise
        a = self.slope**2 - wide / self.spread
        b, c = 2 * self.height * self.slope, self.height**2 - wide / self.count
        if a <= 0:
            return None
        root = math.sqrt(max(b * b - 4 * a * c, 0.0))
        low, high = ((-b + sign * root) / (2 * a) for sign in (-1, 1))
        return 10 ** (self.middle + low), 10 ** (self.middle + high)


def gain_line(points: Sequence[Point]) -> Line | None:
    """None with fewer than two different numbers of known positives."""
    xs, ys = [math.log10(p.positives) for p in points], [p.gain for p in points]
    if len(set(xs)) < 2:
        return None
    middle, height = statistics.fmean(xs), statistics.fmean(ys)
    spread = sum((x - middle) ** 2 for x in xs)
    slope = sum((x - middle) * (y - height) for x, y in zip(xs, ys, strict=True)) / spread
    rest = sum((y - height - slope * (x - middle)) ** 2 for x, y in zip(xs, ys, strict=True))
    return Line(height, slope, middle, spread, rest / (len(xs) - 2) if len(xs) > 2 else None, len(xs))


# ------------------------------------------------------------------------------------------------------------- the plot
class GainPlot(NamedTuple):
    names: list[str]  # of the marks: the studies where there are several, else the tables
    content: Markup
    said: str


TITLE = "Gain of LogicMix (points of mAP)"
PLOT_HEIGHT = HEIGHT + 16  # room for the name of the axis


def draw_gains(points: Sequence[Point], fitted: Sequence[Point] | None = None) -> GainPlot:
    """A mark for each setting, a ring for each pair of runs, and the line with its 95 % interval.

    fitted: the points that the line goes through; all unless given.
    """
    line = gain_line(points if fitted is None else fitted)
    several = len({p.study for p in points}) > 1
    names = list(dict.fromkeys(p.study if several else p.table for p in points))
    low = math.log10(min(p.positives for p in points)) - 0.15
    high = math.log10(max(p.positives for p in points)) + 0.15
    places = [low + (high - low) * n / 40 for n in range(41)]
    curve = [] if line is None else [(x, *line.at(10**x)) for x in places]
    ends = [y + sign * (half or 0.0) for _, y, half in curve for sign in (-1, 1)]
    ends += [gain for p in points for gain in p.gains] + [0.0]
    values = ticks(min(ends), max(ends))
    axes = Axes((low, high), (values[0], values[-1]))
    parts = [_grid(axes, values), _band(axes, curve)]
    for p in points:
        number, at = names.index(p.study if several else p.table), math.log10(p.positives)
        if len(p.gains) > 1:
            parts += [ring(number, *axes.place(at, gain)) for gain in p.gains]
        parts.append(symbol(number, *axes.place(at, p.gain)))
    said = "; ".join(f"{p.study} {p.table}, {p.known:g} known: {p.positives:.0f}, {p.gain:+.1f}" for p in points)
    return GainPlot(names, joined(parts), said)


def gain_plot(points: Sequence[Point], fitted: Sequence[Point] | None = None) -> str:
    """The same as an SVG file, light or dark as the reader's screen is."""
    names, content, said = draw_gains(points, fitted)
    legend, top = legend_lines(names, 24, WIDTH)
    own = "text{font:11px system-ui,sans-serif}.ground{fill:var(--ground)}"
    return tag(
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {} {}" width="{}" role="img" aria-label="{}">'
        '<style>{}</style><rect class="ground" width="100%" height="100%"/><text class="strong" x="0" y="14">{}</text>'
        '{}<g transform="translate(0 {})">{}</g></svg>\n',
        WIDTH, top + PLOT_HEIGHT, 2 * WIDTH, f"{TITLE}. {said}", Markup(chart_style() + own), TITLE, legend, top,
        content,
    )  # fmt: skip


def gain_figure(points: Sequence[Point]) -> tuple[Markup, Markup]:
    """As a figure of a page, and its legend."""
    names, content, said = draw_gains(points)
    keys = joined(key(name, f"c{n % COLOURS}", SYMBOLS[n % COLOURS]) for n, name in enumerate(names))
    return panel(tag("<b>{}</b>", TITLE), "", f"{TITLE}. {said}", content, PLOT_HEIGHT), keys


def _grid(axes: Axes, values: Sequence[float]) -> Markup:
    out = []
    for value in values:
        _, y = axes.place(axes.x[0], value)
        kind, text = ("grid", f"{value:+g}") if value else ("zero", "0")
        out.append(tag('<line class="{}" x1="{}" x2="{}" y1="{}" y2="{}"/>', kind, LEFT, RIGHT, y, y))
        out.append(tag('<text x="{}" y="{}" text-anchor="end">{}</text>', LEFT - 6, y + 4, text))
    first, last = 10 ** axes.x[0], 10 ** axes.x[1]
    for mark in [n * 10.0**power for power in range(-1, 8) for n in (1, 2, 5) if first <= n * 10.0**power <= last]:
        x, _ = axes.place(math.log10(mark), values[0])
        out.append(tag('<line class="grid" x1="{}" x2="{}" y1="{}" y2="{}"/>', x, x, BOTTOM, TOP))
        out.append(tag('<text x="{}" y="{}" text-anchor="middle">{}</text>', x, BOTTOM + 15, f"{mark:,g}"))
    words = "known positives per category (median)"
    return joined([*out, tag('<text x="{}" y="{}" text-anchor="middle">{}</text>', WIDTH / 2 + 20, BOTTOM + 31, words)])


def _band(axes: Axes, curve: Sequence[tuple[float, float, float | None]]) -> Markup:
    """The line, and its interval as an area."""
    if not curve:
        return Markup("")
    out = []
    if curve[0][2] is not None:
        edge = [axes.place(x, y + (half or 0)) for x, y, half in curve]
        edge += [axes.place(x, y - (half or 0)) for x, y, half in reversed(curve)]
        out.append(tag('<polygon class="band" points="{}"/>', " ".join(f"{x},{y}" for x, y in edge)))
    places = "L".join(f"{x} {y}" for x, y in (axes.place(x, y) for x, y, _ in curve))
    return joined([*out, tag('<path class="dashed c0" d="M{}"/>', places)])
