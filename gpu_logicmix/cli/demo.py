"""The demo: plain training against LogicMix, side by side, where plain training overfits.

    python train.py                  # or: gpu-logicmix demo
    gpu-logicmix demo --seed 1 --out demo-1

Two runs that differ in one option, `mix`, in two processes of one thread each. It prints what these two runs gave,
whatever that is, and writes one page that shows both. Each run has a folder and a report of its own, as any run has.
How the setting does with seeds that were not used to choose it: studies/demo.toml and docs/study.md.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import statistics
import subprocess
import sys
import threading
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from gpu_logicmix.augment.logicmix import GPULogicMix
from gpu_logicmix.data import ImageDataset
from gpu_logicmix.errors import RunError, shown
from gpu_logicmix.files import write_whole
from gpu_logicmix.machine import keep_memory
from gpu_logicmix.metrics import average_precision
from gpu_logicmix.progress import Bar, progress_bar
from gpu_logicmix.report.charts import Series, chart_series, line_chart
from gpu_logicmix.report.figures import batch_figures
from gpu_logicmix.report.listing import Listing, changes
from gpu_logicmix.report.pages import render
from gpu_logicmix.report.preview import batch_steps, drawn_batch
from gpu_logicmix.report.run_folder import Run, read_run
from gpu_logicmix.report.run_page import report_run
from gpu_logicmix.report.words import duration, percent, points
from gpu_logicmix.train.checkpoint import locked
from gpu_logicmix.train.config import Config
from gpu_logicmix.train.inputs import images_to_do, open_train, open_val
from gpu_logicmix.train.loop import fit
from gpu_logicmix.train.runlog import read_log

COMMAND = "gpu-logicmix demo"  # as the log of a run has it: by it a demo knows its own
# Folder of the run -> what it is called, and the one option in which it differs.
METHODS = {"plain": ("plain training", {"mix": "none"}), "logicmix": ("LogicMix", {"mix": "logicmix"})}
COLOURS = {"plain": "two", "logicmix": "one"}
# Few pictures with many known labels, seen many times: plain training learns them by heart. p and K are the paper's.
# The same as studies/demo.toml.
SETTINGS: dict[str, Any] = {
    "data": "shapes",
    "option": ["count=1500"],
    "known": 0.5,
    "size": 64,
    "randaugment": False,
    "model": "test_resnet",
    "weights": "none",
    "head": "linear",
    "epochs": 80,
    "batch_size": 64,
    "accumulate": 1,
    "lr": 5e-3,
    "weight_decay": 0.02,
    "cl": False,
    "cft": False,
    "keep": "last",  # the best epoch would be chosen by the images it is judged by
    "threads": 1,
    "workers": 0,
    "eval_every": 4,
}
QUICK = {"epochs": 4, "option": ["count=64"], "log_every": 1}
WHEN = (
    "LogicMix is for training that overfits many known labels: here 1,500 pictures, each seen 80 times, with half of "
    "their labels known. With few known labels (10 %), or with so many pictures that plain training does not overfit, "
    "do not expect a gain. docs/study.md has the evidence."
)
QUICK_CAUTION = "This was --quick: a few steps to see that everything works. Its figures mean nothing."


def demo_configs(out: Path, quick: bool = False, **options: Any) -> dict[str, Config]:
    """The two runs, by the names of their folders. Options that are None are left as they are."""
    given = {name: value for name, value in options.items() if value is not None}
    shared = SETTINGS | (QUICK if quick else {}) | {"cache": str(out / "cache")} | given
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
        earlier = [out / name for name in METHODS if (out / name).exists()]
        for folder in earlier:  # all of them before any is removed
            _check_own(folder)
        for folder in earlier:
            with locked(folder):
                shutil.rmtree(folder)
        train, val = open_train(configs["plain"])[0], open_val(configs["plain"])  # draws the pictures
        config = configs["plain"]
        console.print(
            f"{len(train):,} pictures of shapes with {config.known:.0%} of their labels known, {len(val):,} with all "
            f"labels to judge by; {config.model} from scratch, {config.epochs} epochs; two runs side by side",
            highlight=False,
        )
        _train(configs, out, images_to_do(config, len(train), len(val), config.epochs), console)
        runs = {name: read_run(out / name) for name in METHODS}
        said = [QUICK_CAUTION] if quick else [verdict(runs), cost_words(runs["logicmix"], configs["logicmix"]), WHEN]
        page = _write_page(out, runs, configs, train, said)
    console.print(result_table(runs))
    for text in said:
        console.print(text, highlight=False)
    console.print(f"all in {duration(time.perf_counter() - began)}; the page: {shown(page)}", highlight=False)
    return page


def _check_own(folder: Path) -> None:
    """What makes room for a new run must be of an earlier demo: a run that nobody else has trained, or what is left of
    one that was stopped before its first line."""
    own = folder.is_dir() and not folder.is_symlink()
    if own:
        starts = [line.get("command") for line in read_log(folder) if line["kind"] == "start"]
        names = {path.name for path in folder.iterdir()}
        own = set(starts) == {COMMAND} if starts else names <= {"lock", "config.toml"} and names != {"config.toml"}
    if not own:
        raise RunError(f"{folder}: in the way, and not a run of an earlier demo; choose another --out")


# ------------------------------------------------------------------------------------------------------------- the runs
def _train(configs: dict[str, Config], out: Path, total: int, console: Console) -> None:
    """Both runs at once, a process each, with a bar for each."""
    failures: list[str] = []
    names = [f"{METHODS[name][0]:<15}" for name in configs]
    with (
        progress_bar(total, names[0], unit=None, console=console, transient=False) as first,
        contextlib.ExitStack() as stack,
    ):
        followers = []
        bars = [first, *(first.beside(total, name) for name in names[1:])]
        for (name, config), bar in zip(configs.items(), bars, strict=True):
            process = _start(config, out / name)
            stack.callback(_stop, process)  # also where the demo is interrupted
            follower = threading.Thread(target=_follow, args=(process, bar, total, failures), daemon=True)
            follower.start()
            followers.append(follower)
        while any(follower.is_alive() for follower in followers) and not failures:
            for follower in followers:
                follower.join(0.2)
    if failures:
        raise RunError(failures[0])


def _start(config: Config, folder: Path) -> subprocess.Popen:
    """A process of its own, and a session of its own: Ctrl-C reaches it through us alone."""
    here = str(Path(__file__).parents[2])
    path = os.pathsep.join(filter(None, [here, os.environ.get("PYTHONPATH")]))
    process = subprocess.Popen(
        [sys.executable, "-c", "from gpu_logicmix.cli.demo import train_one; train_one()", str(folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": path},
        start_new_session=True,
    )
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError), process.stdin as pipe:  # a process that has died is noticed below
        json.dump(asdict(config), pipe)
    return process


def _stop(process: subprocess.Popen) -> None:
    process.kill()  # does nothing to one that has ended
    process.wait()


def _follow(process: subprocess.Popen, bar: Bar, total: int, failures: list[str]) -> None:
    """Show what a process says, line by line, until it ends."""
    last = ""
    assert process.stdout is not None
    for line in process.stdout:
        last = line.strip()
        if last.isdecimal():
            bar(int(last))
    if last == "done":
        bar.set(done=total)
    else:
        why = last.removeprefix("error: ") if last.startswith("error: ") else "a process of the demo has died"
        failures.append(f"{why}; the same command starts the demo again")


def train_one() -> None:
    """The process of a run: options as JSON on stdin; prints the images it has done, then "done", or "error: why"."""
    keep_memory()
    try:
        config = Config(**json.load(sys.stdin))
        # Quiet, as there are two of them and one bar for each is enough; their reports have all they say.
        fit(config, sys.argv[1], command=COMMAND, console=Console(quiet=True), tick=_say)
        _say("done")
    except (ValueError, OSError) as error:
        _say(f"error: {error}")


def _say(what: object) -> None:
    print(what, flush=True)


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
    shares = ("mAP", "highest", "CF1")
    rows = [
        (METHODS[name][0], *(f"{f[key]:.1%}" for key in shares), duration(f["seconds"]), f"{f['speed']:,.0f}")
        for name, f in found.items()
    ]
    gain = {key: found["logicmix"][key] - found["plain"][key] for key in found["plain"]}
    changed = (f"{points(gain[key])} pt" for key in shares)
    return [*rows, ("difference", *changed, f"{gain['seconds']:+.1f} s", f"{round(gain['speed']) + 0:+,d}")]


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


def verdict(runs: dict[str, Run]) -> str:
    """What these two runs show, in a sentence; whatever that is."""
    curves = {
        name: {epoch["epoch"]: epoch["mAP"] for epoch in run.epochs if epoch.get("mAP") is not None}
        for name, run in runs.items()
    }
    plain, mixed = curves["plain"], curves["logicmix"]
    best = max(plain, key=lambda epoch: plain[epoch])
    text = f"Plain training was at its best in epoch {best} ({percent(plain[best])})"
    behind = [epoch for epoch in plain if mixed.get(epoch, 0) <= plain[epoch]]
    ahead = [epoch for epoch in plain if epoch > max(behind, default=0)]
    if ahead:
        return f"{text}; LogicMix is ahead from epoch {ahead[0]} on."
    return f"{text}; LogicMix is not ahead at the end."


def cost_words(run: Run, config: Config) -> str:
    """What mixing takes of a training step, measured here and now."""
    torch.manual_seed(0)
    mix = GPULogicMix(config.p, config.k_min, config.k_max)
    images = torch.rand(config.batch_size, 3, config.size, config.size)
    targets = torch.randint(-1, 2, (config.batch_size, len(run.categories) or 1))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        times = []
        for _ in range(25):
            began = time.thread_time()  # of this thread alone: other programs do not count
            mix(images, targets)
            times.append(time.thread_time() - began)
    finally:
        torch.set_num_threads(threads)
    mixing, step = 1000 * statistics.median(times[5:]), 1000 * config.batch_size / figures(run)["speed"]
    return (
        f"Its cost: mixing a batch of {config.batch_size} took {mixing:.1f} ms on one thread of the CPU, a "
        f"whole training step {step:.0f} ms. gpu-logicmix bench measures it on a model of your own."
    )


# ------------------------------------------------------------------------------------------------------------- the page
def _write_page(
    out: Path, runs: dict[str, Run], configs: dict[str, Config], train: ImageDataset, said: list[str]
) -> Path:
    config, start = configs["logicmix"], runs["logicmix"].start
    pages = {name: report_run(out / name) for name in runs}
    about = (
        f"{start['images']:,} pictures of shapes, drawn on the fly, with {percent(start['known'])} of their labels "
        f"known: {start['positives']:.2f} known positives per picture. {config.model} from scratch, {config.epochs} "
        f"epochs. The second run mixes {config.p:.0%} of the samples, {config.k_min} to {config.k_max} at a time; all "
        "else is equal."
    )
    charts = [line_chart("mAP on other pictures", *_both(runs, "epochs", "mAP", 100), unit=" %")]
    charts += [line_chart("Loss in training", *_both(runs, "steps", "loss", 1))]
    mix = GPULogicMix(1.0, config.k_min, config.k_max)
    page = render(
        "demo.html",
        title="Plain training and LogicMix",
        subtitle=f"{percent(start['known'])} of labels known",
        about=about,
        head=HEADINGS,
        rows=result_rows(runs),
        said=said,
        links=[(f"{name}/{pages[name].name}", METHODS[name][0]) for name in runs],
        charts=charts,
        categories=_categories(runs),
        batch=batch_figures(batch_steps(*drawn_batch(train, config.seed), mix=mix), train.categories),
    )
    write_whole(out / "demo.html", page)
    return out / "demo.html"


def _both(runs: dict[str, Run], lines: str, key: str, factor: float) -> list[Series]:
    return [
        chart_series(METHODS[name][0], COLOURS[name], getattr(run, lines), key, factor=factor)
        for name, run in runs.items()
    ]


def _categories(runs: dict[str, Run]) -> Listing:
    found = {name: run.predictions for name, run in runs.items()}
    ap = {
        name: average_precision(torch.tensor(p.logits), torch.tensor(p.targets)).tolist() for name, p in found.items()
    }
    both = zip(found["plain"].categories, ap["plain"], ap["logicmix"], strict=True)
    return changes([line for line in both if line[1] == line[1]], ("plain", "LogicMix"))
