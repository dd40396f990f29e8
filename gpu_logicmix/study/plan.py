"""Many runs that differ in a few options, and the tables and plots that compare them.

    gpu-logicmix study studies/coco-mini.toml --out results/coco-mini

A study is a TOML file: `[base]` has options of `fit` for all runs; each `[[table]]` has the known proportions, the
seeds, and its methods with the options that make them. The first method of a table is what the others are compared
with.

    [base]
    data = "coco:/data/coco"
    epochs = 60

    [[table]]
    title = "Ways to mix"
    known = [0.1, 0.5, 0.9]
    seed = [0, 1, 2]
    [table.methods]
    none = { mix = "none" }
    LogicMix = { mix = "logicmix" }
    Mixup = { mix = "mixup", seed = [0] }

Runs are folders in OUT/runs, named after their options; two tables that need the same run share it, and so do a method
with fine-tuning at the end and the same without. All methods get their first seed before any gets its second. A
finished run is kept, a killed one goes on. So a study can be stopped at any time, split over machines (`--shard 0/2` on
one, `--shard 1/2` on the other) and put together again by copying folders.

What counts for a run is its mAP on the validation set after its last epoch (after fine-tuning, where that is on): with
`keep = "last"`, which is a study's default, nothing is chosen on the images it is judged by.
"""

from __future__ import annotations

import contextlib
import csv
import hashlib
import io
import json
import math
import re
import statistics
import textwrap
from base64 import b64encode
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from gpu_logicmix.errors import RunError
from gpu_logicmix.files import waited_lock, write_whole, written_whole
from gpu_logicmix.report.markup import html_table, paragraph, section, whole_page
from gpu_logicmix.train.config import FREE, OPTION_TYPES, Config, changed, read_toml
from gpu_logicmix.train.inputs import images_to_do, open_train, open_val
from gpu_logicmix.train.loop import fit
from gpu_logicmix.train.runlog import read_log

# Two-sided 95 % quantiles of Student's t for 1, 2, 3 ... degrees of freedom; the normal one beyond.
T95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131, 2.120)
# Colours of Okabe and Ito, which colour-blind people tell apart, and a marker each for print.
STYLES = (
    ("#000000", "o"), ("#0072B2", "s"), ("#D55E00", "^"), ("#009E73", "D"), ("#CC79A7", "v"), ("#E69F00", "P"),
    ("#56B4E9", "X"), ("#7F7F7F", "*"),
)  # fmt: skip


class Planned(NamedTuple):
    """A cell of a table: one run."""

    table: str
    method: str
    known: float
    seed: int
    config: Config

    @property
    def folder(self) -> str:
        """The same for runs that train the same, whatever table they are in, fine-tuned at the end or not; also
        when `fit` gets new options one day."""
        parts = {k: v for k, v in changed(self.config).items() if k not in FREE or k == "keep"}
        digest = hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:8]
        return f"{self.config.mix}-known{self.known:g}-seed{self.seed}-{digest}"


class Row(NamedTuple):
    """A line of results.csv."""

    table: str
    method: str
    known: float
    seed: int
    mAP: float  # what counts, in percent
    mAP_before_cft: float
    mAP_best: float  # of the best epoch, chosen on the validation set: for information
    CF1: float
    OF1: float
    epochs: int
    minutes: float
    run: str


def read_study(file: str | Path, **overrides: Any) -> list[Planned]:
    """All runs of a study, in the order in which they are to be done. overrides: options for all of them."""
    content = read_toml(file)
    for name in content:
        if name not in ("base", "table"):
            raise ValueError(f"{file}: there is no section [{name}]; a study has [base] and [[table]]")
    base = {"keep": "last", **content.get("base", {}), **overrides}
    tables = content.get("table") or []
    if not isinstance(tables, list) or not tables:
        raise ValueError(f"{file}: has no [[table]]")
    planned = []
    for number, table in enumerate(tables, 1):
        title = table.get("title", f"Table {number}")
        methods = table.get("methods")
        if not isinstance(methods, dict) or not methods:
            raise ValueError(f"{file}, table {title!r}: has no [table.methods]")
        shared = {k: v for k, v in table.items() if k not in ("title", "methods")}
        for method, own in methods.items():
            options = {**base, **shared, **own}
            for name in options:
                if name not in OPTION_TYPES:
                    raise ValueError(f"{file}, table {title!r}, {method!r}: fit has no option {name!r}")
            for known in _list(options.get("known", 1.0)):
                for seed in _list(options.get("seed", 0)):
                    config = Config(**{**options, "known": known, "seed": seed})
                    planned.append(Planned(title, method, known, seed, config))
    return planned


def _list(value: Any) -> list:
    return value if isinstance(value, list) else [value]


# ----------------------------------------------------------------------------------------------------------------- runs
def run_study(
    planned: Sequence[Planned],
    out: str | Path,
    *,
    shard: tuple[int, int] = (0, 1),
    console: Console | None = None,
) -> list[str]:
    """Do what is not done yet of share `shard[0]` of `shard[1]`. Returns a line for each run that failed."""
    out, console = Path(out), console or Console()
    mine = distinct(planned)[shard[0] :: shard[1]]
    sizes = _sizes(mine)
    failed = []
    with _grid_bar(console, sum(sizes)) as show:
        done = 0
        for number, (plan, size) in enumerate(zip(mine, sizes, strict=True), 1):
            words = f"run {number}/{len(mine)}: {plan.method}, {plan.known:.0%} known, seed {plan.seed}"
            folder = out / "runs" / plan.folder
            if result(folder, plan.config.cft) is None:
                so_far = done

                def tick(images: int, words: str = words, size: int = size, start: int = so_far) -> None:
                    nonlocal done
                    done = min(done + images, start + size)
                    show(words, done)

                try:
                    show(words, done)
                    end = fit(plan.config, folder, resume="auto", console=Console(quiet=True), tick=tick)
                    fine_tuned = f", fine-tuned {end['mAP_cft']:.2%}" if plan.config.cft else ""
                    text = f"{words}: mAP {end['mAP']:.2%}{fine_tuned}, {end['elapsed'] / 60:.1f} minutes"
                    console.print(escape(text), highlight=False, soft_wrap=True)
                except RunError as error:
                    failed.append(f"{words}: {error}")
                    console.print(f"[red]{escape(failed[-1])}[/]", highlight=False, soft_wrap=True)
                collect(planned, out, pictures=False)
            done = sum(sizes[:number])
            show(words, done)
    return failed


def distinct(planned: Sequence[Planned]) -> list[Planned]:
    """Every run once, with fine-tuning if any table wants it; first seeds first."""
    runs: dict[str, Planned] = {}
    for plan in planned:
        if plan.folder not in runs or plan.config.cft:
            runs[plan.folder] = plan
    return sorted(runs.values(), key=lambda plan: plan.seed)


def _sizes(planned: Sequence[Planned]) -> list[int]:
    """Images that each run works through, so that the bar knows how much is left."""
    known: dict[tuple, tuple[int, int]] = {}
    sizes = []
    for plan in planned:
        c = plan.config
        key = (c.data, c.val, c.size, c.images, c.holdout, c.cache, *(c.option or []))
        if key not in known:
            known[key] = len(open_train(c)[0]), len(open_val(c))
        sizes.append(images_to_do(c, *known[key], c.epochs))
    return sizes


@contextlib.contextmanager
def _grid_bar(console: Console, total: int) -> Iterator[Callable[[str, int], None]]:
    """A bar for all runs. Yields `show(words, done)`."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=None),
        TextColumn("{task.percentage:>3.0f} %"),
        TimeElapsedColumn(),
        TextColumn("gone,"),
        TimeRemainingColumn(),
        TextColumn("left"),
    )
    with Progress(*columns, console=console, speed_estimate_period=3600, transient=True) as progress:
        task = progress.add_task("study", total=total)
        yield lambda words, done: progress.update(task, description=escape(words), completed=done)


def result(folder: Path, fine_tuned: bool = False) -> dict[str, Any] | None:
    """The last line of a finished run's log, and of its last epoch. None if it has not ended, or lacks fine-tuning."""
    lines = read_log(folder)
    if not lines or lines[-1]["kind"] != "end" or (fine_tuned and lines[-1].get("mAP_cft") is None):
        return None
    epochs = [line for line in lines if line["kind"] == "epoch"]
    return {**epochs[-1], **lines[-1]}


# -------------------------------------------------------------------------------------------------------------- results
def collect(planned: Sequence[Planned], out: str | Path, *, pictures: bool = True) -> list[Row]:
    """Read the finished runs and write results.csv, the tables and, with `pictures`, plots and the page anew."""
    out = Path(out)
    rows = []
    for plan in planned:
        found = result(out / "runs" / plan.folder, plan.config.cft)
        if found is None:
            continue
        counts = found["mAP_cft"] if plan.config.cft else found["mAP"]
        percent = [round(100 * found[k], 4) for k in ("mAP", "mAP_best", "CF1", "OF1")]
        rows.append(
            Row(plan.table, plan.method, plan.known, plan.seed, round(100 * counts, 4), *percent, plan.config.epochs,
                round(found["elapsed"] / 60, 2), plan.folder)
        )  # fmt: skip
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(Row._fields)
    writer.writerows(rows)
    out.mkdir(parents=True, exist_ok=True)
    with waited_lock(out):  # another shard may have got here too
        write_whole(out / "results.csv", text.getvalue())
        if rows:
            write_results(out, pictures=pictures)
    return rows


def read_results(file: str | Path) -> list[Row]:
    """results.csv again."""
    with open(file, newline="", encoding="utf-8") as f:
        lines = list(csv.DictReader(f))
    kinds = {"known": float, "seed": int, "epochs": int, "table": str, "method": str, "run": str}
    return [Row(**{name: kinds.get(name, float)(line[name]) for name in Row._fields}) for line in lines]


def write_results(folder: str | Path, *, pictures: bool = True) -> None:
    """Tables, plots and page from results.csv alone."""
    folder = Path(folder)
    rows = read_results(folder / "results.csv")
    write_whole(folder / "results.md", markdown(rows))
    if not pictures:
        return
    figures = {}
    for number, (title, part) in enumerate(by(rows, "table").items(), 1):
        figures[title] = plot_table(title, part)
        with written_whole(folder / f"table{number}.png", "wb") as file:
            figures[title].savefig(file, dpi=110, format="png")
    write_whole(folder / "index.html", page(rows, figures))


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


def cell(values: Sequence[float]) -> Cell | None:
    if not values:
        return None
    return Cell(statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else None, len(values))


class Difference(NamedTuple):
    """To the first method, seed by seed: the same images, labels and order in both."""

    values: list[float]
    mean: float
    error: float | None  # the standard error of the mean; None where no method of the table has two seeds
    half: float | None  # of the 95 % confidence interval (Student's t)


def differences(rows: Sequence[Row]) -> dict[tuple[str, float], Difference]:
    """Of one table: (method, known proportion) -> difference to the first method, where a seed has both.

    Two or three seeds alone say little about how much a difference varies. So its variance is taken to be the same all
    over the table, and is estimated from all methods and proportions that have several seeds.
    """
    found = {(row.method, row.known, row.seed): row.mAP for row in rows}
    first = rows[0].method
    values: dict[tuple[str, float], list[float]] = {}
    for method, known, seed in sorted(found, key=lambda key: key[1:]):
        if method != first and (first, known, seed) in found:
            values.setdefault((method, known), []).append(found[method, known, seed] - found[first, known, seed])
    freedom = sum(len(v) - 1 for v in values.values())
    squares = sum((len(v) - 1) * statistics.variance(v) for v in values.values() if len(v) > 1)
    quantile = T95[freedom - 1] if 0 < freedom <= len(T95) else 1.96
    out = {}
    for key, v in values.items():
        error = math.sqrt(squares / freedom / len(v)) if freedom else None
        out[key] = Difference(v, statistics.fmean(v), error, None if error is None else quantile * error)
    return out


def table_cells(rows: Sequence[Row]) -> tuple[list[str], list[float], dict[tuple[str, float], Cell | None]]:
    """Methods, known proportions, and the cells of one table."""
    methods, proportions = list(by(rows, "method")), sorted(by(rows, "known"))
    cells = {
        (m, k): cell([row.mAP for row in rows if row.method == m and row.known == k])
        for m in methods
        for k in proportions
    }
    return methods, proportions, cells


class Table(NamedTuple):
    """A table in words, as it is printed; what stands out is in **bold**."""

    title: str
    heads: list[str]
    rows: list[list[str]]  # ↓ for what is worse than the first method
    remark: str
    gain_heads: list[str]
    gains: list[list[str]]  # differences to the first method; none if there is one seed alone
    gain_remark: str


def tables(rows: Sequence[Row]) -> list[Table]:
    """In the form of the paper's: mAP in percent, mean ± deviation over seeds."""
    return [_table(title, part) for title, part in by(rows, "table").items()]


def _table(title: str, rows: Sequence[Row]) -> Table:
    methods, proportions, cells = table_cells(rows)
    several = len(proportions) > 1
    averages = {m: average(cells, m, proportions) for m in methods}
    lines = []
    for m in methods:
        columns = []
        for k in proportions:
            column = {other: cells[other, k].mean for other in methods if cells[other, k]}
            own = cells[m, k]
            columns.append(_marked(own.text if own else "", column, m, methods[0]))
        if several:
            whole = {other: value for other, value in averages.items() if value is not None}
            columns.append(_marked("" if averages[m] is None else f"{averages[m]:.1f}", whole, m, methods[0]))
        lines.append([m, *columns])
    seeds = sorted({cells[key].runs for key in cells if cells[key]})
    many = f"{seeds[0]} run{'s' if seeds[0] > 1 else ''}" if len(seeds) == 1 else f"{seeds[0]} to {seeds[-1]} runs"
    spread = "; ± is the standard deviation over seeds" if seeds[-1] > 1 else ""
    heads = ["mAP (%)", *(f"{k:.0%} known" for k in proportions), *["average"] * several]
    found = differences(rows)
    gains = []
    if any(d.half is not None for d in found.values()):
        gains = [[m, *(_gain_text(found.get((m, k))) for k in proportions)] for m in methods[1:]]
    remark = (
        "Difference of runs with the same seed, mean ± half of its 95 % interval (Student's t; the variance is taken "
        "to be the same all over the table). Bold: beyond the noise."
    )
    gain_heads = [f"less {methods[0]}", *heads[1 : len(proportions) + 1]]
    return Table(title, heads, lines, f"Each cell is {many}{spread}.", gain_heads, gains, remark)


def _gain_text(d: Difference | None) -> str:
    if d is None:
        return "–"
    text = f"{d.mean:+.1f} ± {d.half:.1f}"
    return f"**{text}**" if abs(d.mean) > d.half else text


def markdown(rows: Sequence[Row]) -> str:
    parts = []
    for table in tables(rows):
        parts += [f"**{table.title}**", _markdown_table(table.heads, table.rows), table.remark]
        if table.gains:
            parts += [_markdown_table(table.gain_heads, table.gains), table.gain_remark]
    return "\n\n".join(parts) + "\n"


def _markdown_table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return "\n".join([_line(heads), f"|---|{'--:|' * (len(heads) - 1)}", *map(_line, rows)])


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def average(cells: dict[tuple[str, float], Cell | None], method: str, proportions: Sequence[float]) -> float | None:
    """Over all proportions; None if one is missing."""
    means = [cells[method, k].mean for k in proportions if cells[method, k]]
    return statistics.fmean(means) if len(means) == len(proportions) else None


def _marked(text: str, column: dict[str, float], method: str, baseline: str) -> str:
    if not text:
        return "–"
    if len(column) > 1 and column[method] == max(column.values()):
        text = f"**{text}**"
    return f"{text} ↓" if baseline in column and column[method] < column[baseline] else text


def plot_table(title: str, rows: Sequence[Row]):
    """A table as plots: over the known proportion, or method by method where there is one proportion alone."""
    from matplotlib.figure import Figure

    methods, proportions, cells = table_cells(rows)
    gains = differences(rows)
    over = len(proportions) > 1
    figure = Figure(figsize=(13, 4.6) if over else (11, 1.5 + 0.36 * len(methods)), layout="constrained")
    figure.suptitle(title, fontsize=13)
    (_plot_over_known if over else _plot_methods)(figure, methods, proportions, cells, gains)
    for axes in figure.axes:
        axes.spines[["top", "right"]].set_visible(False)
    return figure


def _room(gains: dict[tuple[str, float], Difference]) -> tuple[float, float]:
    """Limits for differences: very wide intervals (two seeds) must not hide where the points are."""
    values = [0.0, *(v for d in gains.values() for v in d.values)]
    room = max(2.0, max(values) - min(values)) / 4
    return min(values) - room, max(values) + room


def _plot_over_known(figure, methods, proportions, cells, gains) -> None:
    """mAP; gain over the first method with error bars; the pairs themselves."""
    left, middle, right = figure.subplots(1, 3)
    for number, m in enumerate(methods):
        colour, marker = STYLES[number % len(STYLES)]
        have = [k for k in proportions if cells[m, k]]
        at = {k: 100 * k + 1.4 * (number - len(methods) / 2) for k in proportions}  # side by side
        bars = [cells[m, k].deviation or 0 for k in have]
        means = [cells[m, k].mean for k in have]
        left.errorbar([at[k] for k in have], means, bars, color=colour, marker=marker, label=m, capsize=3)
        for k, d in ((k, gains[m, k]) for k in proportions if (m, k) in gains):
            middle.errorbar([at[k]], [d.mean], [d.error or 0], color=colour, marker=marker, capsize=3)
            right.plot([at[k]] * len(d.values), d.values, marker, color=colour, mfc="none", ls="none", ms=6)
            if d.half is not None:
                right.errorbar([at[k]], [d.mean], [d.half], color=colour, marker="_", capsize=4, ms=9)
    for axes, words in (
        (left, "mAP (%), mean ± deviation"),
        (middle, f"gain over {methods[0]}, mean ± standard error"),
        (right, f"difference to {methods[0]}, seed by seed; bars: 95\u00a0% interval"),
    ):
        axes.set_title(textwrap.fill(words, 48), loc="left", fontsize=10)
        axes.set_xlabel("% of labels known")
        axes.set_xticks([100 * k for k in proportions])
        axes.set_xlim(100 * proportions[0] - 10, 100 * proportions[-1] + 10)
    for axes in (middle, right):
        axes.axhline(0, color="#888888", lw=1)
        axes.set_ylim(_room(gains))
    left.legend(frameon=False, fontsize=9)


def _plot_methods(figure, methods, proportions, cells, gains) -> None:
    """mAP of each method, and its difference to the first one."""
    left, right = figure.subplots(1, 2, sharey=True)
    (k,) = proportions
    for number, m in enumerate(methods):
        colour, marker = STYLES[number % len(STYLES)]
        own = cells[m, k]
        left.errorbar([own.mean], [number], xerr=[own.deviation or 0], color=colour, marker=marker, capsize=3)
        left.annotate(own.text, (own.mean, number), (0, 6), textcoords="offset points", ha="center", fontsize=8)
        if (d := gains.get((m, k))) is not None:
            right.plot(d.values, [number] * len(d.values), marker, color=colour, mfc="none", ls="none")
            if d.half is not None:
                right.errorbar([d.mean], [number], xerr=[d.half], color=colour, marker="|", capsize=4, ms=9)
    left.set_yticks(range(len(methods)), methods)
    left.set_ylim(len(methods) - 0.4, -0.8)
    left.margins(x=0.1)
    left.set_title(f"mAP (%), {k:.0%} of labels known", loc="left", fontsize=10)
    right.axvline(0, color="#888888", lw=1)
    right.set_xlim(_room(gains))
    right.tick_params(left=False)
    several = any(d.half is not None for d in gains.values())
    words = f"difference to {methods[0]}" + (", seed by seed; bars: 95\u00a0% interval" if several else "")
    right.set_title(words, loc="left", fontsize=10)


def page(rows: Sequence[Row], figures: dict[str, Any]) -> str:
    """Everything on one page that needs nothing else."""
    parts = ["<header><h1>Study</h1></header>"]
    for table in tables(rows):
        picture = io.BytesIO()
        figures[table.title].savefig(picture, dpi=110, format="png")
        image = b64encode(picture.getvalue()).decode()
        pieces = [_page_table(table.heads, table.rows), paragraph(table.remark, "remark")]
        if table.gains:
            pieces += [_page_table(table.gain_heads, table.gains), paragraph(table.gain_remark, "remark")]
        plots = f'<img class="plots" alt="the same as plots" src="data:image/png;base64,{image}">'
        parts.append(section(table.title, *pieces, plots))
    runs = {row.run: row.minutes for row in rows}
    parts.append(paragraph(f"{len(runs)} runs, {sum(runs.values()) / 60:.1f} hours."))
    return whole_page("Study – GPU LogicMix", parts)


def _page_table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return re.sub(r"\*\*(.+?)\*\*", r"<b>\1</b>", html_table(heads, rows))
