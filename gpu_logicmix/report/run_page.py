"""The report of a run: one HTML page from the files in its folder.

    write_report("runs/shapes")                                     # -> runs/shapes/report.html

It is made from whatever is in the folder: of a run that goes on or was killed, it shows how far it got. The page itself
is templates/run.html; here is what it shows.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from markupsafe import Markup

from gpu_logicmix.data import DataError, ImageDataset
from gpu_logicmix.files import write_whole
from gpu_logicmix.report.charts import chart_series, has_data, line_chart
from gpu_logicmix.report.decided import decide
from gpu_logicmix.report.figures import batch_figures, example_figures
from gpu_logicmix.report.judged import judge
from gpu_logicmix.report.listing import SAME, Listing, changes
from gpu_logicmix.report.pages import render
from gpu_logicmix.report.preview import Step, batch_steps, drawn_batch
from gpu_logicmix.report.run_folder import Run, read_run
from gpu_logicmix.report.words import duration, finite, gigabytes, option_text, percent, points, thousands, two_digits
from gpu_logicmix.train.batch import Augment
from gpu_logicmix.train.checkpoint import read_config
from gpu_logicmix.train.config import Config
from gpu_logicmix.train.inputs import open_train, open_val

# Shown first where it is not known which options are the default.
MAIN_OPTIONS = ["data", "known", "protocol", "mix", "p", "k_min", "k_max", "randaugment", "cl", "cft", "model"]
MAIN_OPTIONS += ["weights", "size", "epochs", "batch_size", "accumulate", "lr", "loss", "seed"]
MIX_NAMES = {"logicmix": "LogicMix", "mixup": "Mixup", "ormixup": "OR Mixup", "mlmixup": "Multi-label Mixup"}
MIX_NAMES |= {"mixup-pme": "Mixup-PME", "none": "no mixing"}


def report_run(folder: str | Path) -> Path:
    """The page of a run, with pictures from its data if they are still where they were."""
    folder = Path(folder)
    config = read_config(folder)
    train = val = steps = None
    try:
        (train, _), val = open_train(config), open_val(config)
        steps = mixed_batch(train, config)
    except (DataError, OSError):  # the page says that pictures are missing
        pass
    return write_report(folder, train, val, steps, defaults={f.name: f.default for f in fields(Config)})


def mixed_batch(train: ImageDataset, config: Config) -> list[Step] | None:
    """A batch after each step of the run's augmentation. Every sample is mixed, whatever p is: that is what to see."""
    images, targets, names = drawn_batch(train, config.seed)
    if not len(images) or ":" in (config.augment or ""):  # MODULE:NAME: looking at a folder runs nobody's code
        return None
    augment = Augment(config)
    if hasattr(augment.mix, "p"):
        augment.mix.p = 1.0
    parts = [part if hasattr(part, "plan") else None for part in (augment.flip, augment.randaugment, augment.mix)]
    return batch_steps(images, targets, names, *parts)


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
    examples, problem = example_figures(run, val)
    page = render(
        "run.html",
        title=run.data,
        subtitle=_subtitle(run),
        notes=_notes(run),
        tiles=_tiles(run),
        command=run.start.get("command"),
        options=_options(run, defaults or {}),
        machine=_machine(run) if run.start else [],
        messages=[str(message) for message in _list(run.start.get("messages"))],
        skipped=_skipped_images(run),
        charts=_curves(run),
        metrics=_metrics(run),
        judged=judge(run, train),
        decided=decide(run.decisions),
        batch=batch_figures(steps or (), run.categories),
        batch_remark=_batch_remark(run),
        examples=examples,
        problem=problem,
        pseudo=_pseudo_labels(run),
        tuning=_fine_tuning(run),
    )
    path = folder / "report.html"
    write_whole(path, page)
    return path


def _list(value: Any) -> list:
    return value if isinstance(value, list) else []


# ------------------------------------------------------------------------------------------------ the parts of the page
def _subtitle(run: Run) -> str:
    mix = MIX_NAMES.get(str(run.config.get("mix")), str(run.config.get("mix", "–")))
    known = run.start.get("known")
    return mix if finite(known) is None else f"{mix}, {percent(known)} of labels known"


def _done(run: Run) -> tuple[int, Any]:
    return (run.epochs[-1]["epoch"] if run.epochs else 0), run.config.get("epochs", "?")


def _notes(run: Run) -> list[str]:
    notes = list(run.notes)
    done, total = _done(run)
    if not run.end:
        notes.insert(0, f"This run has no end yet: it goes on, or was stopped, after {done} of {total} epochs.")
    if run.end and run.predictions is None:
        notes.append("There are no predictions (predictions.npz): no categories and no examples on this page.")
    if not run.end and run.predictions is not None:
        notes.append("The predictions shown here may be of before the run was resumed.")
    return notes


def _tiles(run: Run) -> list[tuple[str, str, str]]:
    start, end, kept = run.start, run.end, run.kept
    done, total = _done(run)
    best = end.get("mAP") if end else kept.get("mAP")
    which = {"best": "the best one", "last": "the last one"}.get(str((end or {}).get("kept")), "")
    epoch = end.get("epoch") if end else kept.get("epoch")
    elapsed = end.get("elapsed") if end else (run.epochs[-1].get("elapsed") if run.epochs else None)
    categories = f"{thousands(len(run.categories) or None)} categories"
    val_images = f"{thousands(start.get('val_images'))} for validation, {categories}"
    tiles = [
        ("Validation mAP" if end else "Validation mAP, best so far", percent(best), ""),
        ("Weights kept" if end else "Best so far", f"epoch {epoch or '–'}", f"of {total}{which and ', ' + which}"),
        ("Time", duration(elapsed), "all included" if end else f"for {done} of {total} epochs"),
        ("Labels known", percent(start.get("known")), f"{two_digits(start.get('positives'))} positives per image"),
        ("Images", thousands(start.get("images")), val_images),
    ]
    after = finite(((run.cft or {}).get("summary") or {}).get("evaluation_map_after"))
    if after is not None:
        tiles.insert(1, ("mAP after fine-tuning", percent(after), "category by category"))
    return tiles


def _options(run: Run, defaults: Mapping) -> dict[str, Any]:
    config = run.config
    if defaults:
        first = [name for name in config if name not in defaults or config[name] != defaults[name]]
        title = "Options that differ from the default"
    else:
        first, title = [name for name in MAIN_OPTIONS if name in config], "Main options"
    rest = [name for name in config if name not in first]
    return {
        "title": title,
        "first": [(name, option_text(config[name])) for name in first],
        "rest": [(name, option_text(config[name])) for name in rest],
    }


def _machine(run: Run) -> list[tuple[str, Any]]:
    start = run.start
    versions = start.get("versions")
    parameters = f"{thousands(start.get('parameters'))}, {thousands(start.get('trained_parameters'))} of them trained"
    pairs = [
        ("started", start.get("time", "–")),
        ("machine", start.get("machine", "–")),
        ("device", start.get("device", "–")),
        ("processes × threads", f"{start.get('processes', '–')} × {start.get('threads', '–')}"),
        ("parameters", parameters),
        ("maximum memory", gigabytes(max((finite(e.get("memory")) or 0 for e in run.epochs), default=0))),
        *(versions.items() if isinstance(versions, dict) else ()),
        *([("tested", start["version_line"])] if start.get("version_line") else ()),
    ]
    if len(run.starts) > 1:
        times = ", ".join(str(s.get("time", "–")) for s in run.starts)
        pairs.insert(1, (f"resumed {len(run.starts) - 1} ×", times))
    return pairs


def _skipped_images(run: Run) -> dict[str, Any] | None:
    """Images left out with --on-bad-image skip."""
    line = run.bad_images or {}
    count, lines = finite(line.get("count")), [str(text) for text in _list(line.get("lines"))]
    if not count and not lines:
        return None
    return {"count": int(count or len(lines)), "lines": lines}


def _curves(run: Run) -> list[Markup]:
    speed = run.steps or run.epochs
    mAP = [chart_series("validation", "one", run.epochs, "mAP", factor=100)]
    mAP.append(chart_series("held-out training images", "two", run.epochs, "tune_mAP", factor=100))
    waiting = chart_series("waiting", "one", speed, "waiting", factor=100)
    charts = [
        line_chart(
            "Loss",
            chart_series("training", "one", run.steps or run.epochs, "loss"),
            chart_series("validation", "two", run.epochs, "val_loss"),
        ),
        line_chart("Validation mAP", *mAP, unit=" %", mark=run.kept.get("epoch")),
        line_chart("Images per second", chart_series("images", "one", speed, "images_per_second"), zero=True),
        line_chart("Time spent waiting for data", waiting, zero=True, unit=" %"),
    ]
    return [chart for chart in charts if chart]


def _metrics(run: Run) -> dict[str, Any] | None:
    line = run.kept
    if not line:
        return None
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
    tuned = any("tune_mAP" in epoch for epoch in run.epochs)
    if end.get("kept") == "best" and tuned:
        words += " The best epoch was chosen by held-out training images."
    elif end.get("kept") == "best":
        words += " The best epoch was chosen by the same images it is judged by here, which flatters it a little."
    return {"words": words, "head": ("labels taken as present", "above 50 %", "of these, the top 3"), "rows": rows}


def _batch_remark(run: Run) -> str:
    share = finite(run.config.get("p"))
    if run.config.get("mix", "logicmix") != "logicmix" or share is None or share >= 1:
        return ""
    return f"Every sample is mixed here, to show it; in training {share:.0%} of them are."


def _pseudo_labels(run: Run) -> dict[str, Any] | None:
    lines = run.curriculum
    if not lines:
        return None
    present, absent = (
        chart_series(name, name, lines, key) for name, key in (("present", "positives"), ("absent", "negatives"))
    )
    titles = {
        "precision": "Share of the pseudo-labels that are right",
        "recall": "Share of the hidden labels found",
    }
    groups = [("Pseudo-labels: present", "", [present]), ("Pseudo-labels: absent", "", [absent])]
    for kind, title in titles.items():
        pair = [
            chart_series(name, name, lines, f"{kind}_{sign}", factor=100)
            for name, sign in (("present", "positive"), ("absent", "negative"))
        ]
        groups.append((title, " %", pair))
    charts = [
        line_chart(title, *filter(has_data, series), zero=True, unit=unit)
        for title, unit, series in groups
        if any(map(has_data, series))
    ]
    heads, rows = _pseudo_table(lines)
    return {"charts": charts, "head": heads, "rows": rows}


def _pseudo_table(lines: Sequence[dict]) -> tuple[list[str], list[tuple[str, ...]]]:
    keys = [f"{kind}_{sign}" for sign in ("positive", "negative") for kind in ("precision", "recall")]
    heads = ["epoch", "present", "absent", "still unknown"]
    judged = any(finite(line.get(key)) is not None for line in lines for key in keys)
    if judged:
        heads += ["present: precision", "recall", "absent: precision", "recall"]
    rows = [
        (
            thousands(line["epoch"]),
            *(thousands(line.get(key)) for key in ("positives", "negatives", "unknown")),
            *((percent(line.get(key)) for key in keys) if judged else ()),
        )
        for line in lines
    ]
    return heads, rows


# ---------------------------------------------------------------------------------------------------------- fine-tuning
def _fine_tuning(run: Run) -> dict[str, Any] | None:
    if run.cft is None:
        return None
    summary = run.cft.get("summary") or {}
    names = run.categories

    def name(category: Any) -> str:
        at = int(category) if str(category).isdecimal() else -1
        return names[at] if 0 <= at < len(names) else f"category {category}"

    tiles = [
        (title, f"{percent(summary.get(f'{key}_before'))} → {percent(summary.get(f'{key}_after'))}", remark)
        for title, key, remark in (
            ("mAP, held-out labels", "held_out_map", "these chose the heads"),
            ("mAP, validation", "evaluation_map", "these had no say"),
        )
    ]
    tiles.append(("Heads changed", thousands(summary.get("changed")), f"of {thousands(summary.get('categories'))}"))
    tiles.append(("Time", duration(run.cft.get("seconds")), ""))
    skipped = [f"{name(c)}: {why}" for c, why in (run.cft.get("skipped") or {}).items()]
    return {"tiles": tiles, "kept": _kept_weights(run), "skipped": skipped, "lists": _tuned_lists(run, name)}


def _tuned_lists(run: Run, name: Callable[[int], str]) -> list[tuple[str, Listing]]:
    lists = []
    for title, key in (("Validation images", "evaluation"), ("Held-out known training labels", "ap")):
        both = zip(_list(run.cft.get(f"{key}_before")), _list(run.cft.get(f"{key}_after")), strict=False)
        pairs = [(name(c), finite(before), finite(after)) for c, (before, after) in enumerate(both)]
        pairs = sorted((p for p in pairs if None not in p), key=lambda p: p[1] - p[2])
        if pairs:
            better, worse = (sum(s * (after - before) > SAME for _, before, after in pairs) for s in (1, -1))
            words = f"{title}: {better} better, {worse} worse, {len(pairs) - better - worse} as before"
            lists.append((words, changes(pairs, ("before", "after"))))
    return lists


def _kept_weights(run: Run) -> str:
    """Which weights are the run's, and why: by the gain on held-out known labels and its interval."""
    line = {**(run.fine_tuned or {}), **(run.cft or {})}  # `cft` may have been run again since: it writes no log
    kept = line.get("kept")
    if kept not in ("cft", "model"):
        return ""
    gain, interval = finite(line.get("gain")), line.get("gain_interval")
    why = ""
    if gain is not None:
        why = f" The gain on known labels that did not choose the heads is {points(gain)} points"
        if isinstance(interval, (list, tuple)) and len(interval) == 2 and all(finite(v) is not None for v in interval):
            why += f" (95 % interval {points(interval[0])} to {points(interval[1])})"
        why += ": beyond its noise." if kept == "cft" else ": not beyond its noise."
    which = "the fine-tuned weights" if kept == "cft" else "the weights before fine-tuning"
    return f"Kept: {which}; evaluate and predict take them unless told otherwise (--use).{why}"
