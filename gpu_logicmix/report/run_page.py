"""One HTML page of a run, from the files in its folder.

    write_report("runs/shapes")                                     # -> runs/shapes/report.html

It is made from whatever is in the folder: of a run that goes on or was killed, it shows how far it got. What it is made
of is in markup.py.
"""

from __future__ import annotations

import base64
import io
import json
import math
import os
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from gpu_logicmix.data import DataError, ImageDataset
from gpu_logicmix.files import written_whole
from gpu_logicmix.metrics import average_precision
from gpu_logicmix.report.markup import (
    SAME,
    change_bar,
    chart_series,
    duration,
    finite,
    fold,
    folded_rows,
    html_table,
    line_chart,
    pair_list,
    paragraph,
    percent,
    safe_text,
    section,
    thousands,
    tile_list,
    two_digits,
    whole_page,
)
from gpu_logicmix.report.pictures import (
    Step,
    batch_steps,
    drawn_batch,
    to_picture,
)
from gpu_logicmix.train.batch import Augment
from gpu_logicmix.train.checkpoint import read_config
from gpu_logicmix.train.config import Config, read_toml
from gpu_logicmix.train.inputs import open_train, open_val

# Shown first where it is not known which options are the default.
MAIN_OPTIONS = ["data", "known", "protocol", "mix", "p", "k_min", "k_max", "randaugment", "cl", "cft", "model"]
MAIN_OPTIONS += ["weights", "size", "epochs", "batch_size", "accumulate", "lr", "loss", "seed"]
MIX_NAMES = {"logicmix": "LogicMix", "mixup": "Mixup", "ormixup": "OR Mixup", "mlmixup": "Multi-label Mixup"}
MIX_NAMES |= {"mixup-pme": "Mixup-PME", "none": "no mixing"}
EXAMPLES = 6  # pictures of each kind
THUMBNAIL = 192  # pixels


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
    page = whole_page(f"{run.data} – GPU LogicMix", parts)
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
        judged = [e for e in self.epochs if finite(e.get("mAP")) is not None]
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
            if finite(line.get(counter)) is None:
                damaged += 1
                continue
            # A resumed run goes on from its last checkpoint and logs what came after it once more.
            while lines and lines[-1][counter] >= line[counter]:
                lines.pop()
            lines.append(line)
    if damaged:
        run.notes.append(f"log.jsonl: {damaged} damaged line{'s' if damaged > 1 else ''} left out")


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
    categories = f"{thousands(len(run.categories) or None)} categories"
    tiles = [
        ("Validation mAP" if end else "Validation mAP, best so far", percent(best), ""),
        ("Weights kept" if end else "Best so far", f"epoch {epoch or '–'}", f"of {total}{which and ', ' + which}"),
        ("Time", duration(elapsed), "all included" if end else f"for {done} of {total} epochs"),
        ("Labels known", percent(start.get("known")), f"{two_digits(start.get('positives'))} positives an image"),
        (
            "Images",
            thousands(start.get("images")),
            f"{thousands(start.get('val_images'))} for validation, {categories}",
        ),
    ]
    if run.cft and finite((run.cft.get("summary") or {}).get("evaluation_map_after")) is not None:
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
    words = f"{mix}, {percent(start['known'])} of labels known" if finite(start.get("known")) is not None else mix
    return (
        f"<header><h1>{safe_text(run.data)} <small>{safe_text(words)}</small></h1>{alerts}{tile_list(tiles)}</header>"
    )


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
    parameters = f"{thousands(start.get('parameters'))}, {thousands(start.get('trained_parameters'))} of them trained"
    machine = [
        ("started", start.get("time", "–")),
        ("machine", start.get("machine", "–")),
        ("device", start.get("device", "–")),
        ("processes × threads", f"{start.get('processes', '–')} × {start.get('threads', '–')}"),
        ("parameters", parameters),
        ("memory, most", _bytes(max((finite(e.get("memory")) or 0 for e in run.epochs), default=0))),
        *((name, version) for name, version in versions.items()),
    ]
    if len(run.starts) > 1:
        times = ", ".join(str(s.get("time", "–")) for s in run.starts)
        machine.insert(1, (f"resumed {len(run.starts) - 1} ×", times))
    return section(
        "What was run",
        f"<pre>{safe_text(start['command'])}</pre>" if start.get("command") else "",
        f"<h3>{words[0]}</h3>" + pair_list((name, _option(config[name])) for name in first) if first else "",
        fold(words[1], pair_list((name, _option(config[name])) for name in rest)) if rest else "",
        fold("Machine and versions", pair_list(machine)) if start else "",
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
    if finite(end.get("mAP_best")) is not None and finite(end.get("mAP_last")) is not None:
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
    changed = f"of {thousands(summary.get('categories'))} categories"
    tiles.append(("Heads changed", thousands(summary.get("changed")), changed))
    tiles.append(("Time", duration(run.cft.get("seconds")), ""))
    out = ""
    if skipped:
        lines = "".join(f"<li>{safe_text(name(c))}: {safe_text(why)}</li>" for c, why in skipped.items())
        out = fold(f"Too few labels to fit, head kept: {len(skipped)} of the categories", f"<ul>{lines}</ul>")
    lists = []
    for title, key in (("Validation images", "evaluation"), ("Held-out known training labels", "ap")):
        pairs = zip(run.cft.get(f"{key}_before") or (), run.cft.get(f"{key}_after") or (), strict=False)
        pairs = [(name(c), finite(b), finite(a)) for c, (b, a) in enumerate(pairs)]
        pairs = sorted((p for p in pairs if None not in p), key=lambda p: p[1] - p[2])
        if pairs:
            better, worse = (sum(s * (a - b) > SAME for _, b, a in pairs) for s in (1, -1))
            words = f"{title}: {better} better, {worse} worse, {len(pairs) - better - worse} as before"
            lists.append(fold(words, folded_rows([change_bar(*p) for p in pairs], "categories")))
    explained = (
        "After training, the head of each category is fitted alone to its known labels. Some of these are held out "
        "and choose the state that each head keeps: by them it cannot get worse, and looks better than it is. What "
        "counts is the change on the validation images."
    )
    return section("Category-wise fine-tuning", paragraph(explained, "remark"), tile_list(tiles), out, *lists)


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
        (thousands(line["epoch"]), *(thousands(line.get(key)) for key in ("positives", "negatives", "unknown")))
        for line in lines
    ]
    tables = html_table(("epoch", "present", "absent", "still unknown"), counts)
    keys = [f"{kind}_{sign}" for sign in ("positive", "negative") for kind in ("precision", "recall")]
    if any(finite(line.get(key)) is not None for line in lines for key in keys):
        rows = [(thousands(line["epoch"]), *(percent(line.get(key)) for key in keys)) for line in lines]
        tables += html_table(("epoch", "present: precision", "recall", "absent: precision", "recall"), rows)
    words = (
        "After each epoch the model guesses the unknown labels of the training images; what it is sure of counts as "
        "known for the next epoch alone."
    )
    return section(
        "Pseudo-labels (curriculum labeling)",
        paragraph(words, "remark"),
        f'<div class="charts">{"".join(charts)}</div>',
        fold("The same as a table", tables),
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
        parts.append(fold(f"after: {step.title}", grid) if between else f"<h3>{safe_text(step.title)}</h3>{grid}")
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


def _probability(logit: float) -> str:
    value = 1 / (1 + math.exp(-min(max(logit, -50.0), 50.0)))
    if not 0.001 <= value <= 0.999:
        return f"{'<' if value < 0.5 else '>'}{percent(0.001 if value < 0.5 else 0.999)}"
    return percent(value, digits=0 if 0.01 <= value <= 0.99 else 1)


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
