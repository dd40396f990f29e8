"""One HTML page of a run, from the files in its folder.

    write_report("runs/shapes")                                     # -> runs/shapes/report.html

The page is one file that needs nothing else: no script, no network, pictures inside. It is made from whatever is in the
folder: of a run that goes on or was killed, it shows how far it got. Plain functions, each of which gives a piece of
HTML; what comes from data or files goes through `safe_text`, without exception.
"""

from __future__ import annotations

import base64
import html
import io
import json
import math
import os
import zipfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from gpu_logicmix.config import Config, read_toml
from gpu_logicmix.data import DataError, ImageDataset
from gpu_logicmix.data.files import written_whole
from gpu_logicmix.metrics import average_precision
from gpu_logicmix.report import (
    ABSENT_TEXT,
    PRESENT_TEXT,
    UNKNOWN,
    UNKNOWN_TEXT,
    Step,
    batch_steps,
    drawn_batch,
    to_picture,
)
from gpu_logicmix.runfolder import read_config
from gpu_logicmix.step import Augment, open_train, open_val

# Shown first where it is not known which options are the default.
MAIN_OPTIONS = ["data", "known", "protocol", "mix", "p", "k_min", "k_max", "randaugment", "cl", "cft", "model"]
MAIN_OPTIONS += ["weights", "size", "epochs", "batch_size", "accumulate", "lr", "loss", "seed"]
MIX_NAMES = {"logicmix": "LogicMix", "mixup": "Mixup", "ormixup": "OR Mixup", "mlmixup": "Multi-label Mixup"}
MIX_NAMES |= {"mixup-pme": "Mixup-PME", "none": "no mixing"}
EXAMPLES = 6  # pictures of each kind
THUMBNAIL = 192  # pixels
SAME = 1e-6  # changes of AP up to this are none
ALL_ROWS = 100  # so many categories are shown whole; of more, the middle is folded


def report_run(folder: str | Path) -> Path:
    """The page of a run, with pictures from its data if they are still where they were."""
    folder = Path(folder)
    config = read_config(folder)
    train = val = steps = None
    try:
        (train, _), val = open_train(config), open_val(config)
        images, targets, names = drawn_batch(train, config.seed)
        augment = Augment(config)
        parts = [part if hasattr(part, "plan") else None for part in (augment.flip, augment.randaugment, augment.mix)]
        steps = batch_steps(images, targets, names, *parts) if len(images) else None
    except (DataError, OSError):  # the page says that pictures are missing
        pass
    return write_report(folder, train, val, steps, defaults={f.name: f.default for f in fields(Config)})


def write_report(
    folder: str | os.PathLike,
    train: ImageDataset | None = None,
    val: ImageDataset | None = None,
    steps: Sequence[Step] | None = None,
    *,
    defaults: Mapping | None = None,
) -> Path:
    """Write `report.html` into the folder of a run, and give back its path.

    train: its labels as the run saw them, for the known positives of each category.
    val: for the pictures of the best and worst predictions. Must be the dataset the predictions were made on.
    steps: a batch after each step of the augmentation; left out of the page if None.
    defaults: of the options: those that differ are shown first.
    """
    folder = Path(folder)
    run = read_run(folder)
    parts = [
        _headline(run),
        _options(run, defaults or {}),
        _curves(run),
        _metrics(run),
        _categories(run, train),
        batch_pictures(steps or (), run.categories),
        _examples(run, val),
        _pseudo_labels(run),
        _fine_tuning(run),
    ]
    title = f"{run.data} – GPU LogicMix"
    page = PAGE.format(title=safe_text(title), style=STYLE, body="\n".join(part for part in parts if part))
    path = folder / "report.html"
    with written_whole(path, "wb") as file:
        file.write(page.encode(errors="replace"))  # a file name that is no UTF-8 is no reason to lose the page
    return path


# ----------------------------------------------------------------------------------------------- what is in the folder
class Predictions(NamedTuple):
    logits: np.ndarray  # float [N, C]
    targets: np.ndarray  # int8 [N, C]
    index: np.ndarray  # [N] row in the validation dataset
    ids: list[str]
    categories: list[str]


@dataclass
class Run:
    """What the folder of a run says. Lists are empty and the rest is None where there is nothing (yet)."""

    folder: Path
    config: dict = field(default_factory=dict)
    starts: list[dict] = field(default_factory=list)  # more than one if it was resumed
    steps: list[dict] = field(default_factory=list)
    epochs: list[dict] = field(default_factory=list)
    curriculum: list[dict] = field(default_factory=list)
    end: dict | None = None
    predictions: Predictions | None = None
    cft: dict | None = None
    notes: list[str] = field(default_factory=list)  # what could not be read, in words

    @property
    def start(self) -> dict:
        return self.starts[-1] if self.starts else {}

    @property
    def categories(self) -> list[str]:
        names = self.start.get("categories") or (self.predictions.categories if self.predictions else [])
        return [str(name) for name in names]

    @property
    def data(self) -> str:
        """The dataset, without the folders it is in."""
        kind, _, path = str(self.config.get("data", self.folder.name)).partition(":")
        return f"{kind} · {Path(path).name}" if path else kind

    @property
    def kept(self) -> dict:
        """The epoch whose weights were kept; of a run that goes on, the best so far; {} if there is none."""
        if self.end is not None:
            return next((e for e in self.epochs if e["epoch"] == self.end.get("epoch")), {})
        judged = [e for e in self.epochs if _number(e.get("mAP")) is not None]
        return max(judged, key=lambda e: e["mAP"], default={})


def read_run(folder: Path) -> Run:
    """Read the files of a run folder. Those that are missing or damaged are left out; the latter are noted."""
    run = Run(folder)
    if not ((folder / "config.toml").exists() or (folder / "log.jsonl").exists()):
        raise FileNotFoundError(f"{folder}: no run here, neither config.toml nor log.jsonl")
    readers = {
        "config.toml": ("config", read_toml),
        "predictions.npz": ("predictions", _read_predictions),
        "cft.json": ("cft", _read_object),
    }
    for name, (attribute, read) in readers.items():
        if (folder / name).exists():
            try:
                setattr(run, attribute, read(folder / name))
            except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
                run.notes.append(f"{name} cannot be read: {error}")
    if (folder / "log.jsonl").exists():
        _read_log(folder / "log.jsonl", run)
    return run


def _read_object(path: Path) -> dict:
    value = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(value, dict):
        raise ValueError("no JSON object")
    return value


def _read_predictions(path: Path) -> Predictions:
    with np.load(path) as file:
        logits, targets, index = file["logits"], file["targets"], file["index"]
        ids, categories = file["ids"].astype(str).tolist(), file["categories"].astype(str).tolist()
    if logits.shape != targets.shape or logits.shape != (len(ids), len(categories)) or len(index) != len(ids):
        raise ValueError(
            f"logits {logits.shape}, targets {targets.shape}, {len(ids)} ids, {len(categories)} categories"
        )
    return Predictions(logits, targets, index, ids, categories)


def _read_log(path: Path, run: Run) -> None:
    damaged = 0
    counters = {"step": (run.steps, "step"), "epoch": (run.epochs, "epoch"), "curriculum": (run.curriculum, "epoch")}
    for text in path.read_text(encoding="utf-8", errors="replace").split("\n"):
        if not text.strip():
            continue
        try:
            line = json.loads(text)
            kind = line["kind"]
        except (ValueError, TypeError, KeyError):
            damaged += 1
            continue
        if kind == "start":
            run.starts.append(line)
            run.end = None
        elif kind == "end":
            run.end = line
        elif kind in counters:
            lines, counter = counters[kind]
            if _number(line.get(counter)) is None:
                damaged += 1
                continue
            # A resumed run goes on from its last checkpoint and logs what came after it once more.
            while lines and lines[-1][counter] >= line[counter]:
                lines.pop()
            lines.append(line)
    if damaged:
        run.notes.append(f"log.jsonl: {damaged} damaged line{'s' if damaged > 1 else ''} left out")


# --------------------------------------------------------------------------------------------------- words and numbers
def safe_text(value) -> str:
    return html.escape(str(value))


def _number(value) -> float | None:
    """A finite number, or None: logs have null where something was NaN."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        return None
    return value


def percent(value, digits: int = 1) -> str:
    return "–" if _number(value) is None else f"{100 * value:.{digits}f}\u00a0%"


def _count(value) -> str:
    return "–" if _number(value) is None else f"{value:,.0f}"


def duration(seconds) -> str:
    if _number(seconds) is None:
        return "–"
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


def _probability(logit: float) -> str:
    value = 1 / (1 + math.exp(-min(max(logit, -50.0), 50.0)))
    if not 0.001 <= value <= 0.999:
        return f"{'<' if value < 0.5 else '>'}{percent(0.001 if value < 0.5 else 0.999)}"
    return percent(value, digits=0 if 0.01 <= value <= 0.99 else 1)


# ----------------------------------------------------------------------------------------------------- pieces of a page
def section(title: str, *parts: str) -> str:
    return f"<section><h2>{safe_text(title)}</h2>\n" + "\n".join(part for part in parts if part) + "\n</section>"


def paragraph(text: str, kind: str = "") -> str:
    return f'<p class="{kind}">{safe_text(text)}</p>' if kind else f"<p>{safe_text(text)}</p>"


def _fold(summary: str, content: str) -> str:
    return f"<details><summary>{safe_text(summary)}</summary>\n{content}\n</details>"


def _tiles(tiles: Iterable[tuple[str, str, str]]) -> str:
    """Figures to see first: (name, value, remark)."""
    cells = (
        f"<div><dt>{safe_text(name)}</dt><dd>{safe_text(value)}<small>{safe_text(remark)}</small></dd></div>"
        for name, value, remark in tiles
    )
    return f'<dl class="tiles">{"".join(cells)}</dl>'


def _pairs(pairs: Iterable[tuple[str, object]]) -> str:
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
    hidden = _fold(f"{len(rows) - 2 * ends} {what} between these", f'<ul class="bars">{"".join(rows[ends:-ends])}</ul>')
    top, bottom = (f'<ul class="bars">{"".join(part)}</ul>' for part in (rows[:ends], rows[-ends:]))
    return top + hidden + bottom


# -------------------------------------------------------------------------------------------------------------- charts
class Series(NamedTuple):
    name: str
    colour: str  # of the style sheet: one, two, present, unknown, absent
    points: list[tuple[float, float | None]]  # None interrupts the line


def chart_series(name: str, colour: str, lines: list[dict], key: str, x: str = "epoch", factor: float = 1) -> Series:
    """What some lines do not have, as the mAP of an epoch without validation, makes no gap; what is no number does."""
    values = [(_number(line.get(x)), _number(line[key])) for line in lines if key in line]
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


# ------------------------------------------------------------------------------------------------ the parts of the page
def _headline(run: Run) -> str:
    start, end, kept = run.start, run.end, run.kept
    mix = MIX_NAMES.get(str(run.config.get("mix")), str(run.config.get("mix", "–")))
    total = run.config.get("epochs", "?")
    done = run.epochs[-1]["epoch"] if run.epochs else 0
    best = end.get("mAP") if end else kept.get("mAP")
    which = {"best": "the best one", "last": "the last one"}.get(str((end or {}).get("kept")), "")
    epoch = end.get("epoch") if end else kept.get("epoch")
    elapsed = end.get("elapsed") if end else (run.epochs[-1].get("elapsed") if run.epochs else None)
    categories = f"{_count(len(run.categories) or None)} categories"
    tiles = [
        ("Validation mAP" if end else "Validation mAP, best so far", percent(best), ""),
        ("Weights kept" if end else "Best so far", f"epoch {epoch or '–'}", f"of {total}{which and ', ' + which}"),
        ("Time", duration(elapsed), "all included" if end else f"for {done} of {total} epochs"),
        ("Labels known", percent(start.get("known")), f"{_fixed(start.get('positives'))} positives an image"),
        ("Images", _count(start.get("images")), f"{_count(start.get('val_images'))} for validation, {categories}"),
    ]
    if run.cft and _number((run.cft.get("summary") or {}).get("evaluation_map_after")) is not None:
        after = run.cft["summary"]["evaluation_map_after"]
        tiles.insert(1, ("mAP after fine-tuning", percent(after), "category by category"))
    notes = list(run.notes)
    if not end:
        notes.insert(0, f"This run has no end yet: it goes on, or was stopped, after {done} of {total} epochs.")
    if end and run.predictions is None:
        notes.append("There are no predictions (predictions.npz): no categories and no examples on this page.")
    if not end and run.predictions is not None:
        notes.append("The predictions shown here may be of before the run was resumed.")
    alerts = "".join(paragraph(note, "note") for note in notes)
    words = f"{mix}, {percent(start['known'])} of labels known" if _number(start.get("known")) is not None else mix
    return f"<header><h1>{safe_text(run.data)} <small>{safe_text(words)}</small></h1>{alerts}{_tiles(tiles)}</header>"


def _fixed(value) -> str:
    return "–" if _number(value) is None else f"{value:.2f}"


def _options(run: Run, defaults: Mapping) -> str:
    config, start = run.config, run.start
    if defaults:
        first = [name for name in config if name not in defaults or config[name] != defaults[name]]
        words = ("Options that differ from the default", "All other options")
    else:
        first = [name for name in MAIN_OPTIONS if name in config]
        words = ("Main options", "All other options")
    rest = [name for name in config if name not in first]
    versions = start.get("versions")
    versions = versions if isinstance(versions, dict) else {}
    parameters = f"{_count(start.get('parameters'))}, {_count(start.get('trained_parameters'))} of them trained"
    machine = [
        ("started", start.get("time", "–")),
        ("machine", start.get("machine", "–")),
        ("device", start.get("device", "–")),
        ("processes × threads", f"{start.get('processes', '–')} × {start.get('threads', '–')}"),
        ("parameters", parameters),
        ("memory, most", _bytes(max((_number(e.get("memory")) or 0 for e in run.epochs), default=0))),
        *((name, version) for name, version in versions.items()),
    ]
    if len(run.starts) > 1:
        times = ", ".join(str(s.get("time", "–")) for s in run.starts)
        machine.insert(1, (f"resumed {len(run.starts) - 1} ×", times))
    return section(
        "What was run",
        f"<pre>{safe_text(start['command'])}</pre>" if start.get("command") else "",
        f"<h3>{words[0]}</h3>" + _pairs((name, _option(config[name])) for name in first) if first else "",
        _fold(words[1], _pairs((name, _option(config[name])) for name in rest)) if rest else "",
        _fold("Machine and versions", _pairs(machine)) if start else "",
        *(paragraph(str(message), "note") for message in start.get("messages") or ()),
    )


def _option(value) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list):
        return ", ".join(map(str, value)) or "none"
    return str(value)


def _bytes(value: float) -> str:
    return f"{value / 1e9:.2f} GB" if value else "–"


def _curves(run: Run) -> str:
    speed = run.steps or run.epochs
    charts = [
        line_chart(
            "Loss",
            chart_series("training", "one", run.steps or run.epochs, "loss"),
            chart_series("validation", "two", run.epochs, "val_loss"),
        ),
        line_chart(
            "Validation mAP",
            chart_series("mAP", "one", run.epochs, "mAP", factor=100),
            unit=" %",
            mark=run.kept.get("epoch"),
        ),
        line_chart("Images a second", chart_series("images", "one", speed, "images_per_second"), zero=True),
        line_chart(
            "Time spent waiting for data",
            chart_series("waiting", "one", speed, "waiting", factor=100),
            zero=True,
            unit=" %",
        ),
    ]
    if not any(charts):
        return section("Curves", paragraph("Nothing is logged yet."))
    return section("Curves", f'<div class="charts">{"".join(charts)}</div>')


def _metrics(run: Run) -> str:
    line = run.kept
    if not line:
        return ""
    names = {"CP": "precision, mean of categories", "CR": "recall, mean of categories", "CF1": "F1 of the two"}
    names |= {"OP": "precision, all labels at once", "OR": "recall, all labels at once", "OF1": "F1 of the two"}
    rows = [
        (f"{name}: {words}", percent(line.get(name)), percent(line.get(f"{name}_top3")))
        for name, words in names.items()
    ]
    end = run.end or {}
    words = f"Epoch {line['epoch']}: mAP {percent(line.get('mAP'))}."
    if _number(end.get("mAP_best")) is not None and _number(end.get("mAP_last")) is not None:
        words += f" Best of all epochs {percent(end['mAP_best'])}, last {percent(end['mAP_last'])}."
    if end.get("kept") == "best":
        words += " The best epoch was chosen by the same images it is judged by here, which flatters it a little."
    table = html_table(("labels taken as present", "above 50 %", "of these, the top 3"), rows)
    return section("On the validation images", paragraph(words), table)


def _categories(run: Run, train: ImageDataset | None) -> str:
    found = run.predictions
    if found is None or not found.logits.size:
        return ""
    broken = ~np.isfinite(found.logits)
    targets = np.where(broken, -1, found.targets)
    ap = average_precision(torch.from_numpy(np.where(broken, 0, found.logits)), torch.from_numpy(targets)).numpy()
    positives = None
    if train is not None and list(train.categories) == found.categories:
        positives = (train.labels == 1).sum(0)
    order = [c for c in np.argsort(-ap, kind="stable") if not np.isnan(ap[c])]
    rows = [
        _bar(found.categories[c], ap[c], "" if positives is None else f"{positives[c]:,}", width=100 * ap[c])
        for c in order
    ]
    out = [found.categories[c] for c in np.flatnonzero(np.isnan(ap))]
    words = f"The mean over {len(order)} categories is {percent(float(np.nanmean(ap)) if order else None)}."
    if positives is not None:
        words += " The small figure: training images in which the category is known to be present."
    missing = f"Left out, without a known positive among the validation labels: {', '.join(out)}." if out else ""
    wrong = f"{int(broken.sum()):,} predictions are no finite numbers and are left out." if broken.any() else ""
    return section(
        "Average precision of each category",
        paragraph(words),
        paragraph(missing, "note") if missing else "",
        paragraph(wrong, "note") if wrong else "",
        folded_rows(rows, "categories"),
    )


def _bar(name: str, value: float, remark: str, width: float) -> str:
    small = f"<small>{safe_text(remark)}</small>" if remark else ""
    bar = f"<i><b style='width:{width:.1f}%'></b></i>"
    return f"<li><span>{safe_text(name)}</span>{bar}<em>{percent(value)}</em>{small}</li>"


def _fine_tuning(run: Run) -> str:
    if run.cft is None:
        return ""
    summary = run.cft.get("summary") or {}
    skipped = run.cft.get("skipped") or {}
    names = run.categories

    def name(category) -> str:
        at = int(category) if str(category).isdecimal() else -1
        return names[at] if 0 <= at < len(names) else f"category {category}"

    tiles = [
        (title, f"{percent(summary.get(f'{key}_before'))} → {percent(summary.get(f'{key}_after'))}", remark)
        for title, key, remark in (
            ("mAP, held-out labels", "held_out_map", "these chose the heads"),
            ("mAP, validation", "evaluation_map", "these had no say"),
        )
    ]
    changed = f"of {_count(summary.get('categories'))} categories"
    tiles.append(("Heads changed", _count(summary.get("changed")), changed))
    tiles.append(("Time", duration(run.cft.get("seconds")), ""))
    out = ""
    if skipped:
        lines = "".join(f"<li>{safe_text(name(c))}: {safe_text(why)}</li>" for c, why in skipped.items())
        out = _fold(f"Too few labels to fit, head kept: {len(skipped)} of the categories", f"<ul>{lines}</ul>")
    lists = []
    for title, key in (("Validation images", "evaluation"), ("Held-out known training labels", "ap")):
        pairs = zip(run.cft.get(f"{key}_before") or (), run.cft.get(f"{key}_after") or (), strict=False)
        pairs = [(name(c), _number(b), _number(a)) for c, (b, a) in enumerate(pairs)]
        pairs = sorted((p for p in pairs if None not in p), key=lambda p: p[1] - p[2])
        if pairs:
            better, worse = (sum(s * (a - b) > SAME for _, b, a in pairs) for s in (1, -1))
            words = f"{title}: {better} better, {worse} worse, {len(pairs) - better - worse} as before"
            lists.append(_fold(words, folded_rows([change_bar(*p) for p in pairs], "categories")))
    explained = (
        "After training, the head of each category is fitted alone to its known labels. Some of these are held out "
        "and choose the state that each head keeps: by them it cannot get worse, and looks better than it is. What "
        "counts is the change on the validation images."
    )
    return section("Category-wise fine-tuning", paragraph(explained, "remark"), _tiles(tiles), out, *lists)


def change_bar(name: str, before: float, after: float) -> str:
    """A bar from one value to another."""
    low, high = 100 * min(before, after), 100 * max(before, after)
    kind = "same" if abs(after - before) <= SAME else "up" if after > before else "down"
    return (
        f"<li><span>{safe_text(name)}</span><i><b class='{kind}' style='margin-left:{low:.1f}%;"
        f"width:{max(high - low, 0.5):.1f}%'></b></i><em>{100 * before:.1f} → {100 * after:.1f}</em></li>"
    )


def _pseudo_labels(run: Run) -> str:
    lines = run.curriculum
    if not lines:
        return ""
    charts = [
        line_chart("Pseudo-labels: present", chart_series("present", "present", lines, "positives"), zero=True),
        line_chart("Pseudo-labels: absent", chart_series("absent", "absent", lines, "negatives"), zero=True),
    ]
    for kind, title in (
        ("precision", "Share of the pseudo-labels that are right"),
        ("recall", "Share of the hidden labels found"),
    ):
        charts.append(
            line_chart(
                title,
                chart_series("present", "present", lines, f"{kind}_positive", factor=100),
                chart_series("absent", "absent", lines, f"{kind}_negative", factor=100),
                zero=True,
                unit=" %",
            )
        )
    counts = [
        (_count(line["epoch"]), *(_count(line.get(key)) for key in ("positives", "negatives", "unknown")))
        for line in lines
    ]
    tables = html_table(("epoch", "present", "absent", "still unknown"), counts)
    keys = [f"{kind}_{sign}" for sign in ("positive", "negative") for kind in ("precision", "recall")]
    if any(_number(line.get(key)) is not None for line in lines for key in keys):
        rows = [(_count(line["epoch"]), *(percent(line.get(key)) for key in keys)) for line in lines]
        tables += html_table(("epoch", "present: precision", "recall", "absent: precision", "recall"), rows)
    words = (
        "After each epoch the model guesses the unknown labels of the training images; what it is sure of counts as "
        "known for the next epoch alone."
    )
    return section(
        "Pseudo-labels (curriculum labeling)",
        paragraph(words, "remark"),
        f'<div class="charts">{"".join(charts)}</div>',
        _fold("The same as a table", tables),
    )


# ------------------------------------------------------------------------------------------------------------ pictures
def batch_pictures(steps: Sequence[Step], categories: Sequence[str]) -> str:
    """The batch first and last, and what is between them folded: on a phone each row of it is a screen."""
    if not steps:
        return ""
    parts = []
    for at, step in enumerate(steps):
        figures = "".join(
            _figure(image, f"<div>{safe_text(caption)}</div>" + _labels(target, categories), caption)
            for image, target, caption in zip(step.images, step.targets, step.captions, strict=True)
        )
        grid = f'<div class="pictures">{figures}</div>'
        between = 0 < at < len(steps) - 1
        parts.append(_fold(f"after: {step.title}", grid) if between else f"<h3>{safe_text(step.title)}</h3>{grid}")
    legend = (
        '<p><b class="present">present</b> <span class="unknown">unknown</span> <span class="absent">absent</span></p>'
    )
    return section("A mixed batch", legend, *parts)


def _labels(targets: Tensor, categories: Sequence[str]) -> str:
    if len(categories) != len(targets):
        return ""  # names are not at hand
    targets = targets.detach().cpu().float()
    unknown = [categories[c] for c in (targets.isnan() | (targets < 0)).nonzero().flatten()]
    # Soft labels, as Mixup makes them, with their share.
    present = [
        categories[c] + ("" if targets[c] == 1 else f" {targets[c]:.2f}") for c in (targets > 0).nonzero().flatten()
    ]
    parts = [f'<div class="present">{safe_text(_some(present, 8))}</div>' if present else "<div>none known</div>"]
    if unknown:
        parts.append(f'<div class="unknown">{len(unknown)} unknown: {safe_text(_some(unknown, 3))}</div>')
    parts.append(f'<div class="absent">{int((targets == 0).sum())} absent</div>')
    return "".join(parts)


def _some(words: Sequence[str], most: int) -> str:
    more = f" +{len(words) - most}" if len(words) > most else ""
    return ", ".join(words[:most]) + more


def _figure(image: Tensor | None, caption: str, alt: str) -> str:
    """`caption` is HTML; `alt` is text, which stands in where there is no image."""
    picture = f'<div class="blank">{safe_text(alt)}</div>'
    if image is not None:
        file = io.BytesIO()
        to_picture(image, min(THUMBNAIL, image.shape[-1])).save(file, "JPEG", quality=88)
        data = base64.b64encode(file.getvalue()).decode()
        picture = f'<img src="data:image/jpeg;base64,{data}" alt="{safe_text(alt)}">'
    return f"<figure>{picture}<figcaption>{caption}</figcaption></figure>"


class Examples(NamedTuple):
    """(row, category) of predictions to look at."""

    right: list[tuple[int, int]]  # known to be present, highest probability
    false: list[tuple[int, int]]  # known to be absent, highest probability
    missed: list[tuple[int, int]]  # known to be present, lowest probability


def pick_examples(logits: np.ndarray, targets: np.ndarray, count: int = EXAMPLES) -> Examples:
    """The best and the worst predictions, [N, C]. In each list no image and no category comes twice."""
    # Infinite ones at the ends, so that -inf is free to mean "not eligible"; NaN is never shown.
    scores = np.clip(np.asarray(logits, np.float64), -1e300, 1e300)

    def pick(value: int, sign: int) -> list[tuple[int, int]]:
        left = np.where((targets == value) & ~np.isnan(scores), sign * scores, -np.inf)
        chosen = []
        while left.size and len(chosen) < count:
            row, category = np.unravel_index(left.argmax(), left.shape)
            if left[row, category] == -np.inf:
                break
            chosen.append((int(row), int(category)))
            left[row], left[:, category] = -np.inf, -np.inf
        return chosen

    return Examples(right=pick(1, 1), false=pick(0, 1), missed=pick(1, -1))


def _examples(run: Run, val: ImageDataset | None) -> str:
    found = run.predictions
    if found is None:
        return ""
    examples = pick_examples(found.logits, found.targets)
    if not any(examples):
        return ""
    pictures, problem = _pictures(found, val, sorted({row for part in examples for row, _ in part}))
    titles = ("Best: present, highest probability", "Worst: absent, highest probability")
    titles += ("Worst: present, lowest probability",)
    parts = []
    for title, pairs in zip(titles, examples, strict=True):
        figures = "".join(
            _figure(pictures.get(row), _guess(found, row, category), found.ids[row]) for row, category in pairs
        )
        parts.append(f'<h3>{title}</h3><div class="pictures large">{figures}</div>' if pairs else "")
    words = (
        "Of all labels of the validation images that are known to be present, those with the highest and the lowest "
        "probability; of those known to be absent, the highest. In each list no image and no category twice. Under an "
        "image: the label it is here for, what else is present, the highest probabilities of all others. Among the "
        "worst may be mistakes of the labels."
    )
    return section(
        "Best and worst predictions",
        paragraph(words, "remark"),
        paragraph(problem, "note") if problem else "",
        *parts,
    )


def _pictures(found: Predictions, val: ImageDataset | None, rows: list[int]) -> tuple[dict[int, Tensor], str]:
    """Images of some rows of the predictions; and why there are none, if so."""
    if val is None:
        return {}, "The validation images were not at hand when this page was written."
    try:
        if any(str(val.ids[found.index[row]]) != found.ids[row] for row in rows):
            return {}, "The validation images at hand are not those of the predictions."
        images, _, index = val[[int(found.index[row]) for row in rows]]
    except (OSError, ValueError, IndexError) as error:
        return {}, f"The validation images cannot be read: {error}"
    place = {int(found.index[row]): row for row in rows}
    return {place[at]: image for at, image in zip(index.tolist(), images, strict=True)}, ""


def _guess(found: Predictions, row: int, category: int) -> str:
    """What the model says about an image, in HTML."""
    logits, targets = found.logits[row], found.targets[row]

    def words(c: int) -> str:
        return f"{found.categories[c]} {_probability(logits[c]) if np.isfinite(logits[c]) else '–'}"

    order = [int(c) for c in np.argsort(-np.nan_to_num(logits, nan=-np.inf), kind="stable") if c != category]
    present = [words(c) for c in order if targets[c] == 1]
    kinds = {1: "present", 0: "absent", -1: "unknown"}
    others = [(kinds[int(targets[c])], words(c)) for c in [c for c in order if targets[c] != 1][:3]]
    lines = [("strong", f"{words(category)}, {kinds[int(targets[category])]}"), ("present", _some(present, 8))]
    lines += [(kind, f"{text}, {kind}") for kind, text in others]
    return "".join(f'<div class="{kind}">{safe_text(text)}</div>' for kind, text in lines if text)


# --------------------------------------------------------------------------------------------------------------- frame
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
.blank {{ background: var(--panel); color: var(--soft); padding: 8px; font-size: .85rem; }}
"""
