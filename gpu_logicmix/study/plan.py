"""The runs of a study: which there are, by a TOML file, and doing them.

    gpu-logicmix study studies/coco-mini.toml --out results/coco-mini

A study is a TOML file: `[base]` has options of `fit` for all runs; each `[[table]]` has the known proportions, the
seeds, and its methods with the options that make them. The first method of a table is what the others are compared
with.

    title = "Ways to mix on COCO"

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
with fine-tuning at the end and the same without. All methods get their first seed before any gets its second. A run
that has ended, or has a line in OUT/results.csv, is not done again; a killed one continues. So a study can be stopped
at any time, split over machines (`--shard 0/2` on one, `--shard 1/2` on the other) and put together again by copying
folders. With `uses = ["coco-64"]` at the top of a file, runs that the study coco-64 has finished count here too: its
results.csv is looked for in the folder beside OUT.

Finished runs count wherever the data lies now: what lies there is compared with what they had. Other data, or options
of a method that have changed, need another OUT.

What counts for a run is its mAP on the validation set after its last epoch (after fine-tuning, where that is on): with
`keep = "last"`, which is a study's default, nothing is chosen on the images it is judged by.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from rich.console import Console
from rich.table import Table

from gpu_logicmix.errors import DataError, RunError, shown
from gpu_logicmix.files import at_home
from gpu_logicmix.progress import Bar, progress_bar
from gpu_logicmix.report.words import percent
from gpu_logicmix.study.results import collect, median, result, row_for, start_words, usable_rows
from gpu_logicmix.train.config import FREE, OPTION_TYPES, Config, changed, read_toml
from gpu_logicmix.train.inputs import images_to_do, label_counts_of, open_train, open_val
from gpu_logicmix.train.loop import fit

# What `fit` may resume with another value of, and what still tells two methods apart.
TOLD = ("data", "val", "weights", "init", "cft_epochs", "cft_lr", "cft_method")


class Planned(NamedTuple):
    """A cell of a table: one run."""

    table: str
    method: str
    known: float
    seed: int
    config: Config
    study: str = "Study"  # the title of the file
    uses: tuple[str, ...] = ()  # studies whose finished runs count here too
    own: tuple[str, ...] = ()  # options that the table or the method gives

    @property
    def folder(self) -> str:
        """The same for runs that train the same, whatever table they are in, fine-tuned at the end or not; also
        when `fit` gets new options one day. Where the data and the weights lie counts only if a table or a method says
        so: those of `[base]` may be somewhere else on another machine."""
        parts = {k: v for k, v in changed(self.config).items() if k not in FREE or k == "keep"}
        parts |= {name: getattr(self.config, name) for name in self.own if name in TOLD}
        digest = hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:8]
        return f"{self.config.mix}-known{self.known:g}-seed{self.seed}-{digest}"


# ------------------------------------------------------------------------------------------------------------- the file
def read_study(file: str | Path, **overrides: Any) -> list[Planned]:
    """All runs of a study, in the order in which they are to be done. overrides: options for all of them."""
    try:
        content = read_toml(file)
    except RecursionError:
        raise ValueError(f"{file}: nested too deeply; a study has [base] and [[table]]") from None
    for name in content:
        if name not in ("title", "uses", "base", "table"):
            raise ValueError(f"{file}: unknown section [{name}]; a study has title, uses, [base] and [[table]]")
    title = _text(content.get("title", Path(file).stem), f"{file}: title")
    uses = tuple(_text(name, f"{file}: uses") for name in _list(content.get("uses", [])))
    base = {"keep": "last", **_section(content.get("base", {}), f"{file}: base"), **overrides}
    tables = content.get("table")
    if not isinstance(tables, list) or not tables:
        raise ValueError(f"{file}: has no [[table]]; write one for each comparison")
    planned: list[Planned] = []
    for number, table in enumerate(tables, 1):
        planned += _read_table(file, title, base, number, _section(table, f"{file}: table {number}"))
    cells = Counter((plan.table, plan.method, plan.known, plan.seed) for plan in planned)
    for (title, method, known, seed), count in cells.items():
        if count > 1:  # would count as several runs
            raise ValueError(
                f"{file}, table {title!r}, {method!r}: known {known:g}, seed {seed} is there {count} times"
            )
    return [plan._replace(uses=uses) for plan in planned]


def _read_table(file: str | Path, study: str, base: dict, number: int, table: dict) -> list[Planned]:
    title = _text(table.get("title", f"Table {number}"), f"{file}, table {number}: title")
    place = f"{file}, table {title!r}"
    methods = table.get("methods")
    if not isinstance(methods, dict) or not methods:
        raise ValueError(f'{place}: has no [table.methods]; write NAME = {{ mix = "none" }} for each method')
    shared = {k: v for k, v in table.items() if k not in ("title", "methods")}
    planned = []
    for method, own in methods.items():
        options = {**base, **shared, **_section(own, f"{place}, {method!r}")}
        for name in options:
            if name not in OPTION_TYPES:
                raise ValueError(f"{place}, {method!r}: fit has no option {name!r}")
        for known in _list(options.get("known", 1.0)):
            for seed in _list(options.get("seed", 0)):
                try:
                    config = Config(**{**options, "known": known, "seed": seed})
                except ValueError as error:
                    raise ValueError(f"{place}, {method!r}: {error}") from None
                planned.append(Planned(title, method, known, seed, config, study, own=(*shared, *own)))
    return planned


def _section(value: Any, place: str) -> dict:
    if not isinstance(value, dict):
        raise ValueError(f"{place}: must be a section of options, not {str(value)[:40]!r}")
    return value


def _text(value: Any, place: str) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{place}: must be text in quotes, not {str(value)[:40]!r}")
    return value


def _list(value: Any) -> list:
    return value if isinstance(value, list) else [value]


# ------------------------------------------------------------------------------------------------------------- the runs
def run_study(
    planned: Sequence[Planned],
    out: str | Path,
    *,
    shard: tuple[int, int] = (0, 1),
    console: Console | None = None,
) -> list[str]:
    """Do what is not done yet of share `shard[0]` of `shard[1]`. Returns a line for each run that failed."""
    out, console = Path(out), console or Console()
    todo = left_to_do(planned, out, shard)
    sizes = run_sizes(todo)
    failed = []
    with progress_bar(sum(sizes), "study", console=console, period=3600.0) as bar:
        for number, (plan, size) in enumerate(zip(todo, sizes, strict=True), 1):
            words = f"run {number}/{len(todo)}: {run_words(plan)}"
            failed += _one_run(plan, out / "runs" / plan.folder, words, sum(sizes[: number - 1]), size, bar, console)
            collect(planned, out, pictures=False)
    return failed


def _one_run(plan: Planned, folder: Path, words: str, start: int, size: int, bar: Bar, console: Console) -> list[str]:
    """One run, shown as images `start` to `start + size` of the bar. Returns why it failed, if it did."""
    done = start

    def tick(images: int) -> None:
        nonlocal done
        done = min(done + images, start + size)
        bar.set(done=done)

    bar.set(words, start)
    try:
        end = fit(plan.config, folder, resume="auto", console=Console(quiet=True), tick=tick)
    except (RunError, ValueError, OSError) as error:
        console.print(f"[red]{shown(f'{words}: {error}')}[/]", highlight=False, soft_wrap=True)
        return [f"{words}: {error}"]
    fine_tuned = f", fine-tuned {percent(end.get('mAP_cft'), 2)}" if plan.config.cft else ""
    text = f"{words}: mAP {percent(end.get('mAP'), 2)}{fine_tuned}, {end['elapsed'] / 60:.1f} minutes"
    console.print(shown(text), highlight=False, soft_wrap=True)
    bar.set(done=start + size)
    return []


def run_words(plan: Planned) -> str:
    return f"{plan.method}, known {plan.known:g}, seed {plan.seed}"


def distinct(planned: Sequence[Planned]) -> list[Planned]:
    """Every run once, with fine-tuning if any table wants it; first seeds first."""
    runs: dict[str, Planned] = {}
    for plan in planned:
        if plan.folder not in runs or plan.config.cft:
            runs[plan.folder] = plan
    return sorted(runs.values(), key=lambda plan: plan.seed)


def left_to_do(planned: Sequence[Planned], out: Path, shard: tuple[int, int] = (0, 1)) -> list[Planned]:
    """Runs of a share that have neither ended nor a line in results.csv."""
    rows = usable_rows(planned, out)
    return [plan for plan in distinct(planned)[shard[0] :: shard[1]] if row_for(plan, out, rows) is None]


def check_same_start(planned: Sequence[Planned], out: Path, say: Callable[[str], None], *, data: bool) -> None:
    """Finished runs count wherever the data and the weights lie now. So what lies there must be what they had, as far
    as a line of results.csv tells: started from scratch or not; with `data`, which opens each dataset once, as many
    images and known positives."""
    rows, opened = usable_rows(planned, out), set()
    for plan in distinct(planned):
        config, row = plan.config, row_for(plan, out, rows)
        if row is None:
            continue
        now = start_words(asdict(config))
        if row.weights is not None and (row.weights == "none") != (now == "none"):
            raise RunError(
                f"{row.run}: is finished, and began with weights={row.weights}, not weights={now}; choose another --out"
            )
        if not data or row.images is None or (key := (config.data, *(config.option or []))) in opened:
            continue
        opened.add(key)
        try:
            train, _ = open_train(replace(config, cache=None))
        except (DataError, OSError) as error:
            say(f"finished runs count, not compared with the data: {error}")
            continue
        positives = median(np.asarray(label_counts_of(train, 0).positive).tolist())
        if (len(train), positives) != (row.images, positives if row.positives is None else row.positives):
            raise RunError(
                f"{row.run}: is finished, with {row.images:,} images and {row.positives or 0:g} known positives per "
                f"category (median); {config.data} has {len(train):,} and {positives:g}: other data; choose another "
                "--out"
            )


# Images to train and to validate on of the paper's datasets, to plan with where they are not at hand.
PUBLISHED = {"coco": (82_783, 40_504), "vg200": (82_904, 10_000), "voc2007": (5_011, 4_952)}


def run_sizes(planned: Sequence[Planned], *, plan_only: bool = False) -> list[int]:
    """Images that each run works through, so that the bar knows how much is left. Opens the datasets.

    plan_only: published datasets that are not there have the size they were published with.
    """
    known: dict[tuple, tuple[int, int]] = {}
    sizes = []
    for plan in planned:
        c = plan.config
        key = (c.data, c.val, c.size, c.images, c.holdout, c.tune_images, c.cache, *(c.option or []))
        if key not in known:
            known[key] = _counts(c, plan_only)
        sizes.append(images_to_do(c, *known[key], c.epochs))
    return sizes


def _counts(config: Config, plan_only: bool) -> tuple[int, int]:
    """Images to train on, and to validate on."""
    kind, _, path = config.data.partition(":")
    if plan_only and kind in PUBLISHED and config.val is None and not at_home(path).exists():
        train, val = PUBLISHED[kind]
        held = round(train * config.holdout)
        train = train - held - config.tune_images
        return min(train, config.images or train), held or val
    return len(open_train(config)[0]), len(open_val(config))


def study_hours(planned: Sequence[Planned], out: str | Path, images_per_second: float) -> tuple[float, float]:
    """Hours of all runs, and of those that are left, on a machine of that speed."""
    if not images_per_second > 0:
        raise ValueError(f"images_per_second={images_per_second:g}: must be above 0")
    runs = distinct(planned)
    left = {plan.folder for plan in left_to_do(planned, Path(out))}
    sizes = dict(zip((plan.folder for plan in runs), run_sizes(runs, plan_only=True), strict=True))
    per_hour = 3600 * images_per_second
    return sum(sizes.values()) / per_hour, sum(size for name, size in sizes.items() if name in left) / per_hour


def print_plan(
    planned: Sequence[Planned], out: str | Path, console: Console, images_per_second: float | None = None
) -> None:
    """The runs of a study and what is done of them; with images_per_second, also the hours it takes."""
    rows = usable_rows(planned, Path(out))
    for title in dict.fromkeys(plan.table for plan in planned):
        table = Table("method", "known", "seed", "mAP", "run", title=shown(title), title_justify="left")
        for plan in planned:
            if plan.table == title:
                row = row_for(plan, Path(out), rows)
                done = "" if row is None else "–" if row.mAP is None else f"{row.mAP:.2f} %"
                table.add_row(shown(plan.method), f"{plan.known:g}", f"{plan.seed}", done, shown(plan.folder))
        console.print(table)
    if images_per_second is not None:
        whole, left = study_hours(planned, out, images_per_second)
        text = f"{len(distinct(planned))} runs: {whole:.1f} hours at {images_per_second:g} images/s, {left:.1f} left"
        console.print(text, highlight=False)


__all__ = [
    "Planned", "check_same_start", "collect", "distinct", "left_to_do", "print_plan", "read_study", "result",
    "run_study", "study_hours",
]  # fmt: skip
