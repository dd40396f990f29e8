"""The demo: plain training against LogicMix on pictures drawn on the fly, at 10 % known labels.

    python train.py                  # or: gpu-logicmix demo
    gpu-logicmix demo --seed 1 --out demo-1

Two runs of the engine that differ in one option, `mix`. It prints what these two runs gave, whatever that is, and
writes one page that shows both. Each run has a folder and a page of its own, as any run has.
"""

from __future__ import annotations

import shutil
import time
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from gpu_logicmix.augment.logicmix import GPULogicMix
from gpu_logicmix.errors import RunError
from gpu_logicmix.files import write_whole
from gpu_logicmix.metrics import average_precision
from gpu_logicmix.report.markup import (
    Series,
    change_bar,
    chart_series,
    duration,
    folded_rows,
    html_table,
    line_chart,
    paragraph,
    percent,
    safe_text,
    section,
    whole_page,
)
from gpu_logicmix.report.pictures import batch_steps, drawn_batch
from gpu_logicmix.report.run_page import Run, batch_pictures, read_run, report_run
from gpu_logicmix.train.checkpoint import locked
from gpu_logicmix.train.config import Config
from gpu_logicmix.train.inputs import images_to_do, open_train, open_val
from gpu_logicmix.train.loop import fit

# Folder of the run -> what it is called, and the one option in which it differs.
METHODS = {"plain": ("plain training", {"mix": "none"}), "logicmix": ("LogicMix", {"mix": "logicmix"})}
# Small enough for a CPU, and long enough for plain training to learn its few known labels by heart. Where one label in
# ten is known, a group of three has hardly a label left that is known to be absent: hence two at a time, and not many.
SETTINGS: dict[str, Any] = {
    "data": "shapes",
    "known": 0.1,
    "size": 32,
    "p": 0.3,
    "k_max": 2,
    "randaugment": False,
    "model": "test_resnet",
    "weights": "none",
    "head": "linear",
    "epochs": 24,
    "batch_size": 64,
    "accumulate": 1,
    "lr": 3e-3,
    "weight_decay": 1e-2,
    "ema_decay": 0.99,
    "cl": False,
    "cft": False,
    "keep": "last",  # the best epoch would be chosen by the images it is judged by
    "workers": 0,
    "eval_every": 2,
    "log_every": 20,
}
QUICK = {"epochs": 4, "option": ["count=64"]}
CAUTION = (
    "So short a run is not the place to see what LogicMix gains: one seed, a small network without pretrained weights, "
    "a minute of training. A few points either way are chance; --seed 1, 2, 3 ... shows how much it varies. What it is "
    "good for: to see in the curves of the page whether mAP falls again while the loss goes on falling, and when."
)


def demo_configs(out: Path, quick: bool = False, **options: Any) -> dict[str, Config]:
    """The two runs, by the names of their folders."""
    shared = SETTINGS | (QUICK if quick else {}) | {"cache": str(out / "cache")} | options
    return {name: Config(**shared | own) for name, (_, own) in METHODS.items()}


def run_demo(out: str | Path, *, quick: bool = False, console: Console | None = None, **options: Any) -> Path:
    """Both runs, the table and the page. Returns the path of the page.

    out: a folder. Runs of an earlier demo in it are replaced; the pictures are kept.
    quick: a few pictures and steps, to see that all of it works.
    options: of `Config` that both runs get.
    """
    out, console = Path(out), console or Console()
    configs = demo_configs(out, quick, **options)
    began = time.perf_counter()
    out.mkdir(parents=True, exist_ok=True)
    with locked(out):
        for name in METHODS:
            _remove_run(out / name)
        train, val = open_train(configs["plain"])[0], open_val(configs["plain"])  # draws the pictures
        config = configs["plain"]
        console.print(
            f"{len(train):,} pictures of shapes with {config.known:.0%} of their labels known, {len(val):,} with all "
            f"labels to judge by; {config.model} from scratch, {config.epochs} epochs",
            highlight=False,
        )
        _train(configs, out, len(train), len(val), console)
        runs = {name: read_run(out / name) for name in METHODS}
        page = _write_page(out, runs, configs, train)
    console.print(result_table(runs))
    console.print(CAUTION, highlight=False)
    console.print(f"all in {duration(time.perf_counter() - began)}; the page: {escape(str(page))}", highlight=False)
    return page


def _remove_run(folder: Path) -> None:
    """Make room for a new run; only what looks like a run is removed."""
    if not folder.exists():
        return
    if not (folder / "lock").exists():
        raise RunError(f"{folder}: in the way, and not a run of an earlier demo; choose another --out")
    with locked(folder):
        shutil.rmtree(folder)


def _train(configs: dict[str, Config], out: Path, images: int, val_images: int, console: Console) -> None:
    columns = TextColumn("{task.description:<15}"), BarColumn(), TextColumn("{task.percentage:>3.0f} %")
    columns += TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn()
    with Progress(*columns, console=console) as progress:
        tasks = {name: progress.add_task(METHODS[name][0], total=None, start=False) for name in configs}
        for name, config in configs.items():
            total = images_to_do(config, images, val_images, config.epochs)
            progress.start_task(tasks[name])
            progress.update(tasks[name], total=total)
            # Quiet, as there are two of them and one bar for each is enough; their pages have all they say.
            fit(
                config,
                out / name,
                command="gpu-logicmix demo",
                console=Console(quiet=True),
                tick=lambda done, task=tasks[name]: progress.advance(task, done),
            )
            progress.update(tasks[name], completed=total)


# ---------------------------------------------------------------------------------------------------------- the result
def figures(run: Run) -> dict[str, float]:
    """What is compared: of the last epoch, and of the whole run."""
    last, seconds = run.epochs[-1], sum(epoch["seconds"] for epoch in run.epochs)
    images = sum(epoch["images_per_second"] * epoch["seconds"] for epoch in run.epochs)
    highest = max(epoch["mAP"] for epoch in run.epochs if "mAP" in epoch)
    found = {"mAP": last["mAP"], "CF1": last["CF1"], "highest": highest}
    return found | {"seconds": run.end["elapsed"], "speed": images / seconds}


def result_rows(runs: dict[str, Run]) -> list[tuple[str, ...]]:
    """The table, also that of the page: a line for each method and one for the difference."""
    found = {name: figures(run) for name, run in runs.items()}
    percent = ("mAP", "highest", "CF1")
    rows = [
        (METHODS[name][0], *(f"{f[key]:.1%}" for key in percent), duration(f["seconds"]), f"{f['speed']:,.0f}")
        for name, f in found.items()
    ]
    gain = {key: found["logicmix"][key] - found["plain"][key] for key in found["plain"]}
    points = (f"{100 * gain[key]:+.1f} pt" for key in percent)
    return [*rows, ("difference", *points, f"{gain['seconds']:+.1f} s", f"{gain['speed']:+,.0f}")]


HEADINGS = ("", "mAP", "highest mAP", "CF1", "time", "images/s")


def result_table(runs: dict[str, Run]) -> Table:
    table = Table(title="after the last epoch, on pictures that were not trained on", title_justify="left")
    for heading in HEADINGS:
        table.add_column(heading, justify="right" if heading else "left")
    *rows, difference = result_rows(runs)
    for row in rows:
        table.add_row(*row)
    table.add_section()
    table.add_row(*difference, style="bold")
    return table


def _write_page(out: Path, runs: dict[str, Run], configs: dict[str, Config], train) -> Path:
    config, start = configs["logicmix"], runs["logicmix"].start
    pages = {name: report_run(out / name) for name in runs}
    links = " · ".join(f'<a href="{name}/{pages[name].name}">{safe_text(METHODS[name][0])}</a>' for name in runs)
    about = (
        f"{start['images']:,} pictures of shapes, drawn on the fly, with {percent(start['known'])} of their labels "
        f"known: {start['positives']:.2f} known positives a picture. {config.model} from scratch, {config.epochs} "
        f"epochs. The second run mixes {config.p:.0%} of the samples, {config.k_min} to {config.k_max} at a time; all "
        "else is equal."
    )
    charts = [line_chart("mAP on other pictures", *_both(runs, "epochs", "mAP", 100), unit=" %")]
    charts += [line_chart("Loss in training", *_both(runs, "steps", "loss", 1))]
    batch, mix = drawn_batch(train, config.seed), GPULogicMix(1.0, config.k_min, config.k_max)
    parts = [
        f"<header><h1>Plain training and LogicMix <small>{percent(start['known'])} of labels known</small></h1>"
        f"{paragraph(about)}{html_table(HEADINGS, result_rows(runs))}{paragraph(CAUTION, 'note')}"
        f"<p>The pages of the two runs: {links}</p></header>",
        section("Curves", f'<div class="charts">{"".join(charts)}</div>'),
        _categories(runs),
        batch_pictures(batch_steps(*batch, mix=mix), train.categories),
    ]
    write_whole(out / "demo.html", whole_page("Demo – GPU LogicMix", parts))
    return out / "demo.html"


def _both(runs: dict[str, Run], lines: str, key: str, factor: float) -> list[Series]:
    colours = {"plain": "two", "logicmix": "one"}
    return [
        chart_series(METHODS[name][0], colours[name], getattr(run, lines), key, factor=factor)
        for name, run in runs.items()
    ]


def _categories(runs: dict[str, Run]) -> str:
    found = {name: run.predictions for name, run in runs.items()}
    ap = {
        name: average_precision(torch.tensor(p.logits), torch.tensor(p.targets)).tolist() for name, p in found.items()
    }
    lines = [
        change_bar(name, before, after)
        for name, before, after in zip(found["plain"].categories, ap["plain"], ap["logicmix"], strict=True)
        if before == before
    ]
    words = "Average precision in percent, plain training → LogicMix; from common to rare."
    return section("Each category", paragraph(words, "remark"), folded_rows(lines, "categories"))
