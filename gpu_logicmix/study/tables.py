"""The tables of a study: mAP of each method at each known proportion, and differences with their noise.

Differences are taken seed by seed: with the same seed, two methods have the same images, known labels, order of samples
and initial weights. What is marked, bold for better and ↓ for worse than the first method, is beyond the noise: the
95 % interval of the difference (Student's t) does not contain 0.
"""

from __future__ import annotations

import html
import math
import statistics
from collections.abc import Iterable, Sequence
from functools import cache
from typing import Any, NamedTuple

from gpu_logicmix.study.results import Row


@cache
def t_quantile(freedom: int, inside: float = 0.95) -> float:
    """The t below which, and above -t, Student's t with `freedom` degrees of freedom lies with probability `inside`."""
    low, high = 0.0, 1.0
    while _t_inside(high, freedom) < inside:
        high *= 2
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if _t_inside(middle, freedom) < inside else (low, middle)
    return high


def _t_inside(t: float, freedom: int) -> float:
    """P(|T| < t) for a whole number of degrees of freedom: Abramowitz and Stegun, 26.7.3 and 26.7.4."""
    angle = math.atan(t / math.sqrt(freedom))
    square = math.cos(angle) ** 2
    odd = freedom % 2
    total, term = 0.0, math.cos(angle) if odd else 1.0
    for n in range(1 + odd, freedom, 2):
        total += term
        term *= square * n / (n + 1)
    return 2 / math.pi * (angle + math.sin(angle) * total) if odd else math.sin(angle) * total


def by(rows: Sequence[Row], name: str) -> dict[Any, list[Row]]:
    """In groups by a column, in order of appearance."""
    groups: dict[Any, list[Row]] = {}
    for row in rows:
        groups.setdefault(getattr(row, name), []).append(row)
    return groups


class Cell(NamedTuple):
    """A method at a known proportion."""

    mean: float
    deviation: float | None  # of a sample; None for a single run
    runs: int

    @property
    def text(self) -> str:
        return f"{self.mean:.1f}" if self.deviation is None else f"{self.mean:.1f} ± {self.deviation:.1f}"


def cell(values: Sequence[float | None]) -> Cell | None:
    """None without a value: no run, or none whose mAP is defined."""
    known = [value for value in values if value is not None]
    if not known:
        return None
    return Cell(statistics.fmean(known), statistics.stdev(known) if len(known) > 1 else None, len(known))


class Difference(NamedTuple):
    """To the first method, seed by seed."""

    values: list[float]
    mean: float
    half: float | None  # of the 95 % confidence interval; None where no method of the table has two seeds

    @property
    def beyond_noise(self) -> bool:
        return self.half is not None and abs(self.mean) > self.half


def differences(rows: Sequence[Row], value: str = "mAP") -> dict[tuple[str, float], Difference]:
    """Of one table: (method, known proportion) -> difference to the first method, where a seed has both.

    Two or three seeds alone say little about how much a difference varies. So its variance is taken to be the same all
    over the table, and is estimated from all methods and proportions that have several seeds.
    """
    found = {(r.method, r.known, r.seed): getattr(r, value) for r in rows if getattr(r, value) is not None}
    first = rows[0].method
    values: dict[tuple[str, float], list[float]] = {}
    for method, known, seed in sorted(found, key=lambda key: key[1:]):
        if method != first and (first, known, seed) in found:
            values.setdefault((method, known), []).append(found[method, known, seed] - found[first, known, seed])
    freedom = sum(len(v) - 1 for v in values.values())
    squares = sum((len(v) - 1) * statistics.variance(v) for v in values.values() if len(v) > 1)
    out = {}
    for key, v in values.items():
        half = t_quantile(freedom) * math.sqrt(squares / freedom / len(v)) if freedom else None
        out[key] = Difference(v, statistics.fmean(v), half)
    return out


def table_cells(
    rows: Sequence[Row], value: str = "mAP"
) -> tuple[list[str], list[float], dict[tuple[str, float], Cell | None]]:
    """Methods, known proportions, and the cells of one table."""
    methods, proportions = list(by(rows, "method")), sorted(by(rows, "known"))
    cells = {
        (m, k): cell([getattr(row, value) for row in rows if row.method == m and row.known == k])
        for m in methods
        for k in proportions
    }
    return methods, proportions, cells


def known_words(rows: Sequence[Row], known: float) -> str:
    """A column's heading: the share that was measured, where it is not the one that was asked for."""
    measured = [row.known_measured for row in rows if row.known == known and row.known_measured is not None]
    share = statistics.fmean(measured) if measured else known
    if known <= 1 and abs(share - known) < 0.005:
        share = known
    text = f"{100 * share:.2g}%" if share < 0.995 else f"{share:.0%}"
    if known > 1:  # a number of labels of each class
        return f"{known:g} per class" + (f", {text} known" if measured else "")
    return f"{text} known"


# ------------------------------------------------------------------------------------------------------ tables in words
class Entry(NamedTuple):
    text: str
    strong: bool = False  # better than the first method, beyond the noise
    worse: bool = False  # worse, beyond the noise


class Block(NamedTuple):
    """A table as it is printed."""

    heads: list[str]
    rows: list[list[Entry]]
    remark: str


class Table(NamedTuple):
    title: str
    blocks: list[Block]


TUNED = "The same at the epoch that held-out training images like best:"


def tables(rows: Sequence[Row]) -> list[Table]:
    """In the form of the paper's: mAP in percent, mean ± deviation over seeds."""
    out = []
    for title, part in by(rows, "table").items():
        blocks = _blocks(part, "mAP")
        if any(row.mAP_tuned is not None for row in part):
            first, *rest = _blocks(part, "mAP_tuned")
            blocks += [first._replace(heads=["mAP (%), chosen epoch", *first.heads[1:]]), *rest]
        out.append(Table(title, blocks))
    return out


def _blocks(rows: Sequence[Row], value: str) -> list[Block]:
    methods, proportions, cells = table_cells(rows, value)
    gains = differences(rows, value)
    columns = [known_words(rows, k) for k in proportions]
    several = len(proportions) > 1
    lines = []
    for m in methods:
        line = [Entry(m), *(_entry(cells[m, k], gains.get((m, k))) for k in proportions)]
        if several:
            mean = average(cells, m, proportions)
            line.append(Entry("–" if mean is None else f"{mean:.1f}"))
        lines.append(line)
    noise = any(d.half is not None for d in gains.values())
    blocks = [
        Block(["mAP (%)", *columns, *["average"] * several], lines, _remark(cells, methods[0], bool(gains), noise))
    ]
    if noise:
        remark = (
            "Difference of runs with the same seed, mean ± half of its 95 % interval (Student's t; the variance is "
            "taken to be the same all over the table). Bold: beyond the noise."
        )
        lines = [[Entry(m), *(_gain(gains.get((m, k))) for k in proportions)] for m in methods[1:]]
        blocks.append(Block([f"less {methods[0]}", *columns], lines, remark))
    return blocks


def _entry(own: Cell | None, gain: Difference | None) -> Entry:
    if own is None:
        return Entry("–")
    beyond = gain is not None and gain.beyond_noise
    return Entry(own.text, beyond and gain.mean > 0, beyond and gain.mean < 0)


def _gain(d: Difference | None) -> Entry:
    return Entry("–") if d is None else Entry(f"{d.mean:+.1f} ± {d.half:.1f}", d.beyond_noise)


def _remark(cells: dict[tuple[str, float], Cell | None], first: str, compared: bool, noise: bool) -> str:
    runs = sorted({found.runs for found in cells.values() if found})
    if not runs:
        return "No run has an mAP: the validation images have no known positive label."
    many = f"{runs[0]} run{'s' if runs[0] > 1 else ''}" if len(runs) == 1 else f"{runs[0]} to {runs[-1]} runs"
    text = f"Each cell is {many}{'; ± is the standard deviation over seeds' if runs[-1] > 1 else ''}."
    if noise:
        return f"{text} Bold: better than {first} beyond the noise; ↓: worse beyond it."
    return f"{text} No method has two seeds: nothing tells the noise, so nothing is marked." if compared else text


def average(cells: dict[tuple[str, float], Cell | None], method: str, proportions: Sequence[float]) -> float | None:
    """Over all proportions; None if one is missing."""
    means = [found.mean for k in proportions if (found := cells[method, k])]
    return statistics.fmean(means) if len(means) == len(proportions) else None


# ------------------------------------------------------------------------------------------------------------- markdown
def markdown(rows: Sequence[Row]) -> str:
    """All tables. Names come from a file that anybody may have written: they stay text."""
    parts = []
    for table in tables(rows):
        parts.append(f"**{safe(table.title)}**")
        for block in table.blocks:
            parts += [markdown_table(block), safe(block.remark)]
    return "\n\n".join(parts) + "\n"


def markdown_table(block: Block) -> str:
    heads = _line([safe(head) for head in block.heads])
    return "\n".join([heads, f"|---|{'--:|' * (len(block.heads) - 1)}", *(_line(map(_marked, r)) for r in block.rows)])


def _marked(entry: Entry) -> str:
    text = safe(entry.text)
    return (f"**{text}**" if entry.strong else text) + (" ↓" if entry.worse else "")


def _line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def safe(text: str) -> str:
    """As Markdown that shows it as it is."""
    text = html.escape(" ".join(str(text).split()), quote=False)
    for sign in "\\|*`[]$_":
        text = text.replace(sign, f"\\{sign}")
    return text
