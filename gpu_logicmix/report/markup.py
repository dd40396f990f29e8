"""Pieces of HTML that all our pages are made of: words and numbers, tables, bars, charts, and the frame around them.

A page is one file that needs nothing else: no script, no network, pictures inside. Plain functions, each of which gives
a piece of HTML; what comes from data or files goes through `safe_text`, without exception.
"""

from __future__ import annotations

import html
import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from gpu_logicmix.report.pictures import ABSENT_TEXT, PRESENT_TEXT, UNKNOWN, UNKNOWN_TEXT

ALL_ROWS = 100  # so many categories are shown whole; of more, the middle is folded
SAME = 1e-6  # changes of AP up to this are none


# --------------------------------------------------------------------------------------------------- words and numbers
def safe_text(value) -> str:
    return html.escape(str(value))


def finite(value) -> float | None:
    """A finite number, or None: logs have null where something was NaN."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        return None
    return value


def percent(value, digits: int = 1) -> str:
    return "–" if finite(value) is None else f"{100 * value:.{digits}f}\u00a0%"


def thousands(value) -> str:
    return "–" if finite(value) is None else f"{value:,.0f}"


def duration(seconds) -> str:
    if finite(seconds) is None:
        return "–"
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


def two_digits(value) -> str:
    return "–" if finite(value) is None else f"{value:.2f}"


# ----------------------------------------------------------------------------------------------------- pieces of a page
def section(title: str, *parts: str) -> str:
    return f"<section><h2>{safe_text(title)}</h2>\n" + "\n".join(part for part in parts if part) + "\n</section>"


def paragraph(text: str, kind: str = "") -> str:
    return f'<p class="{kind}">{safe_text(text)}</p>' if kind else f"<p>{safe_text(text)}</p>"


def fold(summary: str, content: str) -> str:
    return f"<details><summary>{safe_text(summary)}</summary>\n{content}\n</details>"


def tile_list(tiles: Iterable[tuple[str, str, str]]) -> str:
    """Figures to see first: (name, value, remark)."""
    cells = (
        f"<div><dt>{safe_text(name)}</dt><dd>{safe_text(value)}<small>{safe_text(remark)}</small></dd></div>"
        for name, value, remark in tiles
    )
    return f'<dl class="tiles">{"".join(cells)}</dl>'


def pair_list(pairs: Iterable[tuple[str, object]]) -> str:
    rows = "".join(f"<div><dt>{safe_text(name)}</dt><dd>{safe_text(value)}</dd></div>" for name, value in pairs)
    return f'<dl class="pairs">{rows}</dl>'


def html_table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    heading = "".join(f"<th>{safe_text(name)}</th>" for name in head)
    lines = "".join("<tr>" + "".join(f"<td>{safe_text(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f'<div class="wide"><table><thead><tr>{heading}</tr></thead><tbody>{lines}</tbody></table></div>'


def folded_rows(rows: list[str], what: str) -> str:
    """A list of bars, in columns where there is room; the middle of a long one is folded."""
    if len(rows) <= ALL_ROWS:
        return f'<ul class="bars">{"".join(rows)}</ul>'
    ends = 20
    hidden = fold(f"{len(rows) - 2 * ends} {what} between these", f'<ul class="bars">{"".join(rows[ends:-ends])}</ul>')
    top, bottom = (f'<ul class="bars">{"".join(part)}</ul>' for part in (rows[:ends], rows[-ends:]))
    return top + hidden + bottom


def change_bar(name: str, before: float, after: float) -> str:
    """A bar from one value to another."""
    low, high = 100 * min(before, after), 100 * max(before, after)
    kind = "same" if abs(after - before) <= SAME else "up" if after > before else "down"
    return (
        f"<li><span>{safe_text(name)}</span><i><b class='{kind}' style='margin-left:{low:.1f}%;"
        f"width:{max(high - low, 0.5):.1f}%'></b></i><em>{100 * before:.1f} → {100 * after:.1f}</em></li>"
    )


# -------------------------------------------------------------------------------------------------------------- charts
class Series(NamedTuple):
    name: str
    colour: str  # of the style sheet: one, two, present, unknown, absent
    points: list[tuple[float, float | None]]  # None interrupts the line


def chart_series(name: str, colour: str, lines: list[dict], key: str, x: str = "epoch", factor: float = 1) -> Series:
    """What some lines do not have, as the mAP of an epoch without validation, makes no gap; what is no number does."""
    values = [(finite(line.get(x)), finite(line[key])) for line in lines if key in line]
    return Series(name, colour, [(a, None if b is None else b * factor) for a, b in values if a is not None])


def line_chart(title: str, *series: Series, zero: bool = False, unit: str = "", mark: float | None = None) -> str:
    """A line chart over epochs, as SVG; "" if there is nothing to draw.

    zero: the axis begins at 0. mark: an x to point out on the first series, with its value.
    """
    series = [s._replace(points=_thin(s.points)) for s in series if any(y is not None for _, y in s.points)]
    if not series:
        return ""
    xs = [x for s in series for x, _ in s.points]
    ys = [y for s in series for _, y in s.points if y is not None]
    # From 1 up to 20 times as much a linear axis shows all there is to see.
    log = not zero and min(ys) > 0 and max(ys) > 20 * min(ys)
    ticks = _log_ticks(min(ys), max(ys)) if log else _ticks(0 if zero else min(ys), max(ys))
    scale = math.log10 if log else float
    left, right, top, bottom, width, height = 50, 350, 12, 176, 360, 200
    low, high = scale(min(ticks[0], min(ys))), scale(max(ticks[-1], max(ys)))
    first, last = (0.0, max(1.0, math.ceil(max(xs)))) if max(xs) > 0 else (min(xs), min(xs) + 1)

    def place(x: float, y: float) -> tuple[float, float]:
        across = (x - first) / (last - first)
        up = (scale(y) - low) / ((high - low) or 1)
        return round(left + across * (right - left), 1), round(bottom - up * (bottom - top), 1)

    out = []
    for tick in ticks:
        _, y = place(first, tick)
        out.append(f'<line class="grid" x1="{left}" x2="{right}" y1="{y}" y2="{y}"/>')
        out.append(f'<text x="{left - 6}" y="{y + 4}" text-anchor="end">{_short(tick)}{safe_text(unit)}</text>')
    for tick in _ticks(first, last, whole=True):
        if first <= tick <= last:
            x, _ = place(tick, ticks[0])
            out.append(f'<text x="{x}" y="{bottom + 18}" text-anchor="middle">{tick:g}</text>')
    for one in series:
        out.append(f'<path class="{one.colour}" d="{_path(one.points, place)}"/>')
        if len(one.points) <= 30:
            spots = [place(x, y) for x, y in one.points if y is not None]
            out += [f'<circle class="{one.colour}" cx="{x}" cy="{y}" r="3"/>' for x, y in spots]
    marked = [(x, y) for x, y in series[0].points if x == mark and y is not None]
    for value, (x, y) in ((y, place(x, y)) for x, y in marked):
        anchor = "end" if x > (left + right) / 2 else "start"
        below = y + 20 if y < top + 20 else y - 10
        out.append(f'<circle class="mark" cx="{x}" cy="{y}" r="6"/>')
        out.append(
            f'<text class="strong" x="{x}" y="{below}" text-anchor="{anchor}">{value:.1f}{safe_text(unit)}</text>'
        )
    said = "; ".join(f"{s.name}: {y:.4g}{unit} at the end" for s in series for y in [_last(s.points)])
    keys = "".join(f'<span class="key {s.colour}">{safe_text(s.name)}</span>' for s in series)
    words = (" (logarithmic)" if log else "") + (f" {keys}" if len(series) > 1 else "")
    return (
        f'<figure class="chart"><figcaption><b>{safe_text(title)}</b>{words}</figcaption>'
        f'<svg viewBox="0 0 {width} {height}" role="img" aria-label="{safe_text(f"{title} by epoch. {said}")}">'
        f'{"".join(out)}<text x="{left - 10}" y="{bottom + 18}" text-anchor="end">epoch</text></svg></figure>'
    )


def _short(value: float) -> str:
    """For an axis: 0.05, 250, 20k, 1.5M."""
    for size, letter in ((1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:g}{letter}"
    return f"{value:g}"


def _last(points: list[tuple[float, float | None]]) -> float:
    return next(y for _, y in reversed(points) if y is not None)


def _path(points: list[tuple[float, float | None]], place) -> str:
    parts, pen = [], "M"
    for x, y in points:
        if y is None:
            pen = "M"
            continue
        parts.append("{}{} {}".format(pen, *place(x, y)))
        pen = "L"
    return "".join(parts)


def _thin(points: list[tuple[float, float | None]], most: int = 200) -> list[tuple[float, float | None]]:
    """Means of neighbours, where there are more points than pixels to draw them."""
    size = -(-len(points) // most)
    if size <= 1:
        return points
    out = []
    for at in range(0, len(points), size):
        part = points[at : at + size]
        known = [y for _, y in part if y is not None]
        out.append((sum(x for x, _ in part) / len(part), sum(known) / len(known) if known else None))
    return out


def _ticks(low: float, high: float, whole: bool = False) -> list[float]:
    """From three to six round numbers that enclose low and high."""
    span = (high - low) or abs(high) or 1.0
    unit = 10.0 ** math.floor(math.log10(span / 4))
    step = next(unit * factor for factor in (1, 2, 2.5, 5, 10) if unit * factor * 4.5 >= span)
    if whole:
        step = max(1, math.ceil(step))
    first = math.floor(low / step)
    return [float(f"{step * at:.9g}") for at in range(first, math.ceil(high / step - 1e-9) + 1)] or [low, high]


def _log_ticks(low: float, high: float) -> list[float]:
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    ticks = [float(f"{factor}e{power}") for power in powers for factor in (1, 2, 5)]
    inside = [
        t for at, t in enumerate(ticks) if ticks[min(at + 1, len(ticks) - 1)] > low and ticks[max(at - 1, 0)] < high
    ]
    return inside[:: -(-len(inside) // 6)]


# --------------------------------------------------------------------------------------------------------------- frame
def whole_page(title: str, parts: Iterable[str]) -> str:
    return PAGE.format(title=safe_text(title), style=STYLE, body="\n".join(part for part in parts if part))


# Nothing from outside and no script: even if a name got through, the browser would not run it.
PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; img-src data:; style-src 'unsafe-inline'">
<title>{title}</title>
<style>{style}</style>
</head>
<body>
{body}
</body>
</html>
"""

STYLE = f"""
:root {{
  color-scheme: light dark; --ink: #1b1b1b; --soft: #5f5f5f; --line: #dcdcdc; --ground: #fff; --panel: #f5f5f3;
  --present: {PRESENT_TEXT}; --unknown: {UNKNOWN_TEXT}; --absent: {ABSENT_TEXT}; --one: #007A59; --two: #A8487F;
}}
@media (prefers-color-scheme: dark) {{
  :root {{
    --ink: #e8e8e8; --soft: #a9a9a9; --line: #3a3a3a; --ground: #161616; --panel: #222;
    --present: #6CC0F0; --unknown: {UNKNOWN}; --absent: #ababab; --one: #2FC698; --two: #E29BC3;
  }}
}}
* {{ box-sizing: border-box; }}
body {{
  margin: 0 auto; padding: 16px; max-width: 1080px; background: var(--ground); color: var(--ink);
  font: 16px/1.45 system-ui, sans-serif; overflow-wrap: anywhere;
}}
h1 {{ font-size: 1.6rem; line-height: 1.2; margin: 8px 0 16px; }}
h1 small {{ color: var(--soft); font-weight: 400; }}
h2 {{ font-size: 1.2rem; margin: 40px 0 8px; padding-top: 12px; border-top: 1px solid var(--line); }}
h3 {{ font-size: 1rem; margin: 20px 0 8px; }}
p {{ margin: 8px 0; max-width: 75ch; }}
.remark {{ color: var(--soft); font-size: .9rem; }}
.note {{ border-left: 4px solid {UNKNOWN}; background: var(--panel); padding: 8px 12px; }}
.present {{ color: var(--present); font-weight: 600; }} .unknown {{ color: var(--unknown); }}
.absent {{ color: var(--absent); }} .strong {{ font-weight: 700; }}
pre {{ background: var(--panel); padding: 10px 12px; white-space: pre-wrap; font-size: .85rem; margin: 8px 0; }}
summary {{ cursor: pointer; padding: 6px 0; }}
dl {{ margin: 0; }} dd {{ margin: 0; }}
.tiles {{ display: grid; grid-template-columns: repeat(auto-fit, minmax(150px, 1fr)); gap: 8px; margin: 12px 0; }}
.tiles div {{ background: var(--panel); padding: 10px 12px; }}
.tiles dt {{ font-size: .85rem; color: var(--soft); }} .tiles dd {{ font-size: 1.3rem; font-weight: 600; }}
.tiles small {{ display: block; font-size: .8rem; font-weight: 400; color: var(--soft); }}
.pairs {{ display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 300px), 1fr)); gap: 0 24px; }}
.pairs div {{
  display: grid; grid-template-columns: 9.5em 1fr; gap: 8px; font-size: .9rem; padding: 3px 0;
  border-bottom: 1px solid var(--line);
}}
.pairs dt {{ color: var(--soft); }}
.wide {{ overflow-x: auto; }}
table {{ border-collapse: collapse; font-size: .9rem; font-variant-numeric: tabular-nums; margin: 8px 0; }}
th, td {{ text-align: right; padding: 4px 0 4px 14px; border-bottom: 1px solid var(--line); overflow-wrap: normal; }}
th:first-child, td:first-child {{ text-align: left; padding-left: 0; }} th {{ color: var(--soft); font-weight: 400; }}
.charts {{ display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 400px), 1fr)); gap: 16px 24px; }}
figure {{ margin: 0; min-width: 0; }}
.chart figcaption {{ font-size: .9rem; }}
svg {{ display: block; width: 100%; height: auto; }}
svg text {{ font-size: 12.5px; fill: var(--soft); }} svg .strong {{ fill: var(--ink); }}
@media (min-width: 880px) {{ svg text {{ font-size: 10px; }} }}
svg .grid {{ stroke: var(--line); }} svg path {{ fill: none; stroke-width: 2; stroke-linejoin: round; }}
svg path.one {{ stroke: var(--one); }} svg path.two {{ stroke: var(--two); }} svg circle.one {{ fill: var(--one); }}
svg circle.two {{ fill: var(--two); }} svg .mark {{ fill: none; stroke: var(--ink); stroke-width: 1.5; }}
svg path.present {{ stroke: var(--present); }} svg circle.present {{ fill: var(--present); }}
svg path.absent {{ stroke: var(--absent); }} svg circle.absent {{ fill: var(--absent); }}
.key {{ display: inline-block; margin-left: 8px; white-space: nowrap; }}
.key.one {{ color: var(--one); }} .key.two {{ color: var(--two); }}
.key::before {{ content: "● "; }}
@media (max-width: 480px) {{ table {{ font-size: .82rem; }} th, td {{ padding-left: 8px; }} }}
.bars {{ list-style: none; margin: 8px 0; padding: 0; columns: 2 330px; column-gap: 32px; }}
.bars li {{
  display: grid; grid-template-columns: 8em 1fr auto 3.2em; gap: 8px; align-items: center; font-size: .85rem;
  break-inside: avoid; padding: 2px 0; font-variant-numeric: tabular-nums;
}}
.bars i {{ background: var(--panel); height: 12px; display: block; }}
.bars b {{ display: block; height: 12px; background: var(--one); }} .bars b.down {{ background: var(--two); }}
.bars b.same {{ background: var(--soft); }}
.bars em {{ font-style: normal; text-align: right; min-width: 3.6em; }}
.bars small {{ color: var(--soft); text-align: right; }}
.bars em:last-child {{ grid-column: 3 / 5; min-width: 6.6em; }}
.pictures {{ display: grid; grid-template-columns: repeat(auto-fill, minmax(120px, 1fr)); gap: 16px 12px; }}
.large {{ grid-template-columns: repeat(auto-fill, minmax(150px, 1fr)); }}
.pictures figcaption {{ font-size: .8rem; line-height: 1.35; margin-top: 4px; }}
.pictures img {{ display: block; width: 100%; aspect-ratio: 1; }}
.plots {{ max-width: 100%; background: white; }}
.blank {{ background: var(--panel); color: var(--soft); padding: 8px; font-size: .85rem; }}
"""
