"""The command line: `gpu-logicmix`, or `python train.py`."""

from __future__ import annotations

import csv
import inspect
import json
import os
import shlex
import signal
import sys
from collections.abc import Callable
from dataclasses import fields
from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from rich.console import Console
from rich.table import Table

from gpu_logicmix.augment.logicmix import GPULogicMix
from gpu_logicmix.data import DataError, ImageDataset, cache_dataset, open_dataset
from gpu_logicmix.data.cache import verify_cache
from gpu_logicmix.labels import PROTOCOLS, label_counts
from gpu_logicmix.train.config import OPTION_TYPES, PRESETS, Config, dataset_options, hide, make_config

app = typer.Typer(
    name="gpu-logicmix",
    help="Train multi-label classifiers on images of which many labels are missing.\n\n"
    "DATA is coco:PATH, voc2007:PATH, vg200:PATH, csv:PATH or shapes (drawn on the fly, nothing to download).",
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)
console = Console()

RESUME = ("never", "must", "auto")
OnBadImage = Enum("OnBadImage", {"raise": "raise", "skip": "skip"}, type=str)
Protocol = Enum("Protocol", {name: name for name in PROTOCOLS}, type=str)

Data = Annotated[str, typer.Argument(metavar="DATA", help="coco:PATH, voc2007:PATH, vg200:PATH, csv:PATH or shapes")]
Split = Annotated[str, typer.Option(help="Part of the dataset: train or val.")]
Options = Annotated[
    list[str] | None,
    typer.Option(
        "-o",
        "--option",
        metavar="NAME=VALUE",
        help="Option of the dataset, may be repeated. coco: year=2017, empty=drop. voc2007: difficult=ignore. "
        "csv: others=unknown. shapes: count=1000, seed=1.",
    ),
]
Known = Annotated[
    float | None,
    typer.Option(
        help="Hide labels first, to simulate partial labeling: the share that is kept, as 0.1; with --protocol "
        "per-class a number, as 50."
    ),
]
ProtocolOption = Annotated[
    Protocol, typer.Option(help="Which labels are hidden. hcp: the very mask of the SST, HST and SARB papers.")
]
Seed = Annotated[int, typer.Option(help="Of everything drawn at random.")]
P = Annotated[float, typer.Option("--p", help="LogicMix: share of samples that are mixed.")]
KMin = Annotated[int, typer.Option(help="LogicMix: at least so many samples make one.")]
KMax = Annotated[int, typer.Option(help="LogicMix: at most so many.")]
BadImages = Annotated[OnBadImage, typer.Option(help="Stop at an image that cannot be read, or go on without it.")]


def main() -> None:
    """Run the command line. Mistakes of the user end in one line; GPU_LOGICMIX_DEBUG=1 shows where they came from."""
    try:
        app(_with_value(sys.argv[1:]))
    except (ValueError, OSError, ImportError) as error:
        if os.environ.get("GPU_LOGICMIX_DEBUG"):
            raise
        text = " ".join(str(error).split())
        Console(stderr=True, soft_wrap=True).print(f"[bold red]error:[/] {_escape(text)}", highlight=False)
        sys.exit(1)


def _with_value(arguments: list[str]) -> list[str]:
    """`--resume` may stand alone, which the parser of options does not know."""
    out = []
    for argument, following in zip(arguments, [*arguments[1:], ""], strict=True):
        out.append(argument)
        if argument == "--resume" and following not in RESUME:
            out.append("must")
    return out


def _escape(text: str) -> str:
    return text.replace("[", r"\[")


@app.callback(invoke_without_command=True)
def _commands(context: typer.Context) -> None:
    if context.invoked_subcommand is None:
        console.print("the demo; all commands: --help", highlight=False)
        demo()


def _open(data: str, split: str, size: int | None, options: list[str] | None, on_bad_image: str) -> ImageDataset:
    chosen = dataset_options(options)
    with console.status(f"opening {_escape(data)} {split} …"):
        return open_dataset(data, split, size, on_bad_image=on_bad_image, **chosen)


def _list_bad(dataset: ImageDataset) -> None:
    lines = dataset.bad_images()
    if lines:
        console.print(f"[yellow]{len(lines):,} of {len(dataset):,} images were left out:[/]")
        for line in lines[:20]:
            console.print(f"  {_escape(line)}", highlight=False, soft_wrap=True)
        if len(lines) > 20:
            console.print(f"  … and {len(lines) - 20:,} more")


@app.command()
def stats(
    data: Data = "shapes",
    split: Split = "train",
    known: Known = None,
    protocol: ProtocolOption = Protocol.uniform,
    seed: Seed = 0,
    p: P = 0.5,
    k_min: KMin = 2,
    k_max: KMax = 3,
    batch_size: Annotated[int, typer.Option(min=1, help="Samples are mixed within batches of this size.")] = 32,
    show_all: Annotated[
        bool, typer.Option("--all", help="Print all categories, not only the ends of the list.")
    ] = False,
    plot: Annotated[Path | None, typer.Option(help="Also write a picture of it here (PNG, SVG or PDF).")] = None,
    option: Options = None,
) -> None:
    """What a partially labeled dataset looks like, before and after LogicMix.

    Counts labels that are present, absent and unknown, per sample and per category. Reads labels only, no images.

    Example: gpu-logicmix stats coco:/data/coco --known 0.3 --plot stats.png
    """
    from gpu_logicmix.report.pictures import Share, mixed_labels, stats_figure

    dataset = _open(data, split, None, option, "skip")
    if not dataset.categories:
        raise DataError(f"{data}: has no labels to count")
    labels, words = hide(dataset.labels, known, protocol.value, seed)
    all_mixed = mixed_labels(labels, GPULogicMix(1.0, k_min, k_max), batch_size, seed)
    in_training = mixed_labels(labels, GPULogicMix(p, k_min, k_max), batch_size, seed)
    k = f"K={k_min}" if k_min == k_max else f"K={k_min}-{k_max}"
    shares = [
        Share("before", labels),
        Share("mixed samples alone", all_mixed),
        Share(f"LogicMix p={p:g} {k}", in_training),
    ]
    title = f"{dataset.name} {dataset.split}: {len(dataset):,} images, {len(dataset.categories)} categories, {words}"

    table = Table(title=title, title_justify="left", caption="labels of an average sample", caption_justify="left")
    for heading in ("", "present", "absent", "unknown", "known"):
        table.add_column(heading, justify="left" if not heading else "right")
    rows = [Share("all labels", dataset.labels), *shares] if words != "labels as they are" else shares
    for name, values in rows:
        counts = [float(c) / len(values) for c in label_counts(values)]
        table.add_row(name, *(f"{c:.2f}" for c in counts), f"{1 - counts[2] / len(dataset.categories):.1%}")
    console.print(table)
    console.print(_category_table(dataset.categories, labels, in_training, show_all))
    nothing = int((label_counts(labels, 0).positive == 0).sum())
    if nothing:
        console.print(f"[yellow]{nothing} categories have no known positive: they cannot be learnt.[/]")
    if plot is not None:
        stats_figure(shares, dataset.categories, title).savefig(plot, dpi=110)
        console.print(f"wrote {_escape(str(plot))}")


def _category_table(categories: list[str], before: np.ndarray, after: np.ndarray, show_all: bool) -> Table:
    table = Table(caption="samples of each category before and after LogicMix", caption_justify="left")
    table.add_column("category", no_wrap=True)
    for when in ("before", "after"):
        for name in ("present", "absent", "unknown"):
            table.add_column(f"{when}\n{name}", justify="right")
    first, then = label_counts(before, 0), label_counts(after, 0)
    order = np.argsort(-first.positive, kind="stable")
    shown = list(order) if show_all or len(order) <= 20 else [*order[:8], None, *order[-8:]]
    for c in shown:
        if c is None:
            table.add_row(f"… {len(order) - 16} more (--all)", *[""] * 6)
            continue
        table.add_row(categories[c], *(f"{counts[c]:,}" for counts in (*first, *then)))
    return table


@app.command()
def preview(
    data: Data = "shapes",
    split: Split = "train",
    size: Annotated[int, typer.Option(min=8, help="Images are resized to SIZE x SIZE.")] = 192,
    count: Annotated[int, typer.Option(min=1, max=32, help="Images in the batch.")] = 8,
    known: Known = None,
    protocol: ProtocolOption = Protocol.uniform,
    seed: Seed = 0,
    p: Annotated[float, typer.Option("--p", help="LogicMix: share of samples that are mixed; in training 0.5.")] = 1.0,
    k_min: KMin = 2,
    k_max: KMax = 3,
    out: Annotated[Path, typer.Option(help="Where to write the picture.")] = Path("preview.png"),
    option: Options = None,
    on_bad_image: BadImages = OnBadImage["raise"],
) -> None:
    """A picture of a batch before and after each step, with the labels under each image.

    Example: gpu-logicmix preview voc2007:/data/VOCdevkit --known 0.3 --out preview.png
    """
    from gpu_logicmix.augment.randaugment import RandAugment, RandomHorizontalFlip
    from gpu_logicmix.report.pictures import batch_steps, drawn_batch, preview_picture

    dataset = _open(data, split, size, option, on_bad_image.value)
    if dataset.categories:
        dataset.labels, _ = hide(dataset.labels, known, protocol.value, seed)
    images, targets, names = drawn_batch(dataset, seed, count)
    if not len(images):
        raise DataError(f"{data}: none of the {count} images drawn can be read; try another --seed")
    mix = GPULogicMix(p, k_min, k_max)
    steps = batch_steps(images, targets, names, RandomHorizontalFlip(), RandAugment(), mix)
    preview_picture(steps, dataset.categories).save(out)
    console.print(f"wrote {_escape(str(out))}: {len(images)} images, {' → '.join(step.title for step in steps)}")
    _list_bad(dataset)


@app.command()
def cache(
    data: Data,
    to: Annotated[Path, typer.Option(help="Folder for caches. Each dataset, split and size gets a folder in it.")],
    split: Split = "train",
    size: Annotated[int, typer.Option(min=1, help="Images are resized to SIZE x SIZE.")] = 448,
    threads: Annotated[int | None, typer.Option(min=1, help="That decode at once; all cores unless given.")] = None,
    rebuild: Annotated[bool, typer.Option("--rebuild", help="Build anew what is there already.")] = False,
    verify: Annotated[bool, typer.Option("--verify", help="Read all of it and compare the checksums.")] = False,
    option: Options = None,
    on_bad_image: BadImages = OnBadImage["raise"],
) -> None:
    """Decode and resize all images once, into one file that later epochs read without decoding.

    Can be interrupted at any time: the same command goes on where it was. COCO train at 448 takes 50 GB.

    Example: gpu-logicmix cache coco:/data/coco --to /scratch --size 448
    """
    dataset = _open(data, split, size, option, on_bad_image.value)
    cached = cache_dataset(dataset, to, threads=threads, rebuild=rebuild)
    folder = cached.source.file.parent
    if verify:
        verify_cache(folder)
    length = cached.source.file.stat().st_size / 1e9
    console.print(f"{_escape(str(folder))}: {len(cached):,} images, {length:.2f} GB", highlight=False)
    _list_bad(cached)


# --------------------------------------------------------------------------------------------------- training and after
def _with_options(command: Callable) -> Callable:
    """Give a command an option for each field of `Config`. Those that are not given do not reach it."""

    def call(**values: Any) -> None:
        options = {name: values.pop(name) for name in OPTION_TYPES}
        given = {name: value for name, value in options.items() if value not in (None, [])}
        command({name: value.value if isinstance(value, Enum) else value for name, value in given.items()}, **values)

    signature = inspect.signature(command, eval_str=True)
    parameters = [p for p in signature.parameters.values() if p.name != "given"]
    for f in fields(Config):
        kind = OPTION_TYPES[f.name]
        if "choices" in f.metadata:
            kind = Enum(f.name, {choice: choice for choice in f.metadata["choices"]}, type=str)
        if f.name == "data":
            option = typer.Argument(metavar="DATA", help=f.metadata["help"], show_default=False)
        else:
            flag = f"--{f.name.replace('_', '-')}"
            names = (f"{flag}/--no-{flag[2:]}",) if kind is bool else ("-o", flag) if f.name == "option" else (flag,)
            # The option itself has no default, so that a value of a file or preset is not overruled by it.
            words = "" if f.default is None else f" [dim]\\[{_shown(f.default)}][/]"
            option = typer.Option(
                *names, help=f.metadata["help"] + words, rich_help_panel=f.metadata["panel"], show_default=False
            )
        annotation = Annotated[kind | None, option]
        parameters.append(
            inspect.Parameter(f.name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)
        )
    parameters.sort(key=lambda p: p.name != "data")
    call.__signature__ = signature.replace(
        parameters=[p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in parameters]
    )
    call.__annotations__ = {p.name: p.annotation for p in parameters}
    call.__name__, call.__doc__ = command.__name__, command.__doc__
    return call


def _shown(default: Any) -> str:
    if isinstance(default, bool):
        return "on" if default else "off"
    return f"{default:g}" if isinstance(default, float) else str(default)


RunFolder = Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a run, as --out of fit.")]
Weights = Annotated[
    Enum("RunWeights", {"model": "model", "cft": "cft"}, type=str) | None,
    typer.Option(help="model: as trained; cft: after category-wise fine-tuning. The latter if there are any."),
]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1 ...")]
Threads = Annotated[int | None, typer.Option(min=1, help="Of the CPU; torch's choice unless given.")]
BatchSize = Annotated[int, typer.Option(min=1, help="Images at a time.")]


@app.command()
@_with_options
def fit(
    given: dict,
    out: Annotated[Path | None, typer.Option(help="Folder of the run; runs/DATA-KNOWN-MIX-SEED unless given.")] = None,
    resume: Annotated[
        Enum("Resume", {name: name for name in RESUME}, type=str),
        typer.Option(
            help="--resume alone: go on with the run in --out, its options are taken from there; auto: if any."
        ),
    ] = "never",
    config: Annotated[Path | None, typer.Option(metavar="FILE.toml", help="Options from a file: name = value.")] = None,
    preset: Annotated[
        Enum("Preset", {name: name for name in PRESETS}, type=str) | None, typer.Option(help="The paper's settings.")
    ] = None,
) -> None:
    """Train a model, evaluate it after each epoch, and write a report.

    The defaults (in brackets) are the paper's run on COCO: ResNet-101 at 448 x 448, asymmetric loss, RandAugment,
    LogicMix, curriculum labeling, category-wise fine-tuning. Everything goes to the folder of the run. A run can be
    killed at any time: --resume goes on from its last checkpoint.

    Example: gpu-logicmix fit coco:/data/coco --known 0.1 --cache /scratch --out runs/coco-10

    On several GPUs: torchrun --nproc_per_node 4 train.py fit coco:/data/coco --known 0.1 --out runs/coco-10
    """
    from gpu_logicmix.train import engine

    resume = getattr(resume, "value", resume)
    if resume != "never" and config is None:
        if out is None:
            raise ValueError("--resume: which run? Add --out FOLDER")
        config = out / "config.toml" if (out / "config.toml").exists() else None
    chosen = make_config(given, preset.value if preset else None, config)
    folder = out or Path("runs") / engine.default_name(chosen)
    command = f"gpu-logicmix {shlex.join(sys.argv[1:])}"
    try:
        engine.fit(chosen, folder, resume=resume, command=command, console=console)
    except engine.Interrupted as stopped:
        console.print(f"[yellow]{_escape(str(stopped))}[/]", highlight=False, soft_wrap=True)
        raise typer.Exit(130 if stopped.signum == signal.SIGINT else 0) from None
    _write_report(folder)


def _write_report(folder: Path) -> None:
    if int(os.environ.get("RANK", 0)) == 0:
        from gpu_logicmix.report.run_page import report_run

        console.print(f"report: {_escape(str(report_run(folder)))}", highlight=False, soft_wrap=True)


@app.command()
def evaluate(
    run: RunFolder,
    data: Annotated[
        str | None, typer.Option(help="DATA to evaluate on; that of the run's validation unless given.")
    ] = None,
    split: Split = "val",
    weights: Weights = None,
    out: Annotated[Path | None, typer.Option(help="Also write all of it here, as JSON.")] = None,
    show_all: Annotated[bool, typer.Option("--all", help="Print the AP of all categories.")] = False,
    device: Device = "auto",
    threads: Threads = None,
    batch_size: BatchSize = 32,
) -> None:
    """How good a finished run is: mAP, AP of each category, precision, recall and F1.

    Example: gpu-logicmix evaluate runs/coco-10 --all
    """
    from gpu_logicmix.train import engine

    options = {"device": device, "threads": threads, "batch_size": batch_size}
    result = engine.evaluate_run(run, data, split, weights and weights.value, console=console, **options)
    if int(os.environ.get("RANK", 0)):
        return
    metrics = result.metrics
    title = f"{result.weights}: mAP {metrics.mAP:.2%} on {result.images:,} images"
    console.print(_escape(title), highlight=False, soft_wrap=True)
    table = Table()
    for heading in ("", "CP", "CR", "CF1", "OP", "OR", "OF1"):
        table.add_column(heading, justify="right" if heading else "left")
    for name, row in (("probability above 0.5", metrics.threshold), ("at most three an image", metrics.top3)):
        table.add_row(name, *(f"{value:.2%}" for value in row))
    console.print(table)
    judged = [c for c in range(len(metrics.AP)) if c not in metrics.left_out]
    order = sorted(judged, key=lambda c: -metrics.AP[c])
    shown = order if show_all or len(order) <= 20 else [*order[:8], None, *order[-8:]]
    table = Table("category", "AP")
    for c in shown:
        if c is None:
            table.add_row(f"… {len(order) - 16} more (--all)", "")
        else:
            table.add_row(_escape(result.categories[c]), f"{metrics.AP[c]:.2%}")
    console.print(table)
    if metrics.left_out:
        names = ", ".join(result.categories[c] for c in metrics.left_out)
        console.print(f"left out, no known positive: {_escape(names)}", soft_wrap=True)
    if out is not None:
        ap = {result.categories[c]: metrics.AP[c] for c in judged}
        values = {"weights": str(result.weights), "images": result.images, **metrics.as_dict(), "AP": ap}
        out.write_text(json.dumps(values, indent=1) + "\n")
        console.print(f"wrote {_escape(str(out))}")


@app.command()
def predict(
    run: RunFolder,
    images: Annotated[list[Path], typer.Argument(help="Image files, or folders of images.")],
    out: Annotated[Path | None, typer.Option(help="Write all probabilities here, .csv or .json.")] = None,
    top: Annotated[int, typer.Option(min=1, help="Print so many categories an image.")] = 5,
    weights: Weights = None,
    device: Device = "auto",
    threads: Threads = None,
    batch_size: BatchSize = 32,
) -> None:
    """What a trained model sees in images: the likeliest categories on screen, all probabilities in a file.

    Example: gpu-logicmix predict runs/coco-10 holiday/ --out holiday.csv
    """
    from gpu_logicmix.train import engine

    if out is not None and out.suffix not in (".csv", ".json"):
        raise ValueError(f"--out {out}: must end in .csv or .json")
    options = {"device": device, "threads": threads, "batch_size": batch_size}
    names, categories, probabilities, bad = engine.predict(
        run, images, weights and weights.value, console=console, **options
    )
    table = Table("image", "likeliest categories")
    best = probabilities.sort(dim=1, descending=True, stable=True).indices[:, :top]
    for name, row, chosen in list(zip(names, probabilities, best.tolist(), strict=True))[:20]:
        table.add_row(_escape(name), ", ".join(f"{_escape(categories[c])} {row[c]:.0%}" for c in chosen))
    console.print(table)
    if len(names) > 20:
        console.print(f"… and {len(names) - 20:,} more{'' if out else '; --out FILE.csv writes all'}")
    for line in bad:
        console.print(f"[yellow]left out:[/] {_escape(line)}", highlight=False, soft_wrap=True)
    if out is not None:
        rows = [[round(value, 6) for value in row] for row in probabilities.tolist()]
        with open(out, "w", newline="", encoding="utf-8") as file:
            if out.suffix == ".csv":
                writer = csv.writer(file)
                writer.writerow(["image", *categories])
                writer.writerows([name, *row] for name, row in zip(names, rows, strict=True))
            else:
                json.dump(
                    {name: dict(zip(categories, row, strict=True)) for name, row in zip(names, rows, strict=True)},
                    file,
                    indent=1,
                )
        console.print(f"wrote {_escape(str(out))}: {len(names):,} images, {len(categories)} categories")


@app.command()
def cft(
    run: RunFolder,
    epochs: Annotated[int, typer.Option(min=1, help="At most so many.")] = 1000,
    lr: Annotated[float, typer.Option(help="Of Adam.")] = 1e-4,
    method: Annotated[
        Enum("Method", {"adam": "adam", "ga": "ga"}, type=str),
        typer.Option(help="ga: a genetic algorithm on AP itself."),
    ] = "adam",
    device: Device = "auto",
    threads: Threads = None,
    batch_size: BatchSize = 32,
) -> None:
    """Category-wise fine-tuning of a finished run: each category's head alone, on its known labels alone.

    The weights as trained stay where they are; the new ones are written beside them (cft.safetensors).

    Example: gpu-logicmix cft runs/coco-10
    """
    from gpu_logicmix.train import engine

    options = {"cft_epochs": epochs, "cft_lr": lr, "cft_method": getattr(method, "value", method)}
    options |= {"device": device, "threads": threads, "batch_size": batch_size}
    engine.fine_tune(run, console=console, options=options)
    _write_report(run)


@app.command()
def report(run: RunFolder) -> None:
    """Write the page of a run anew: report.html in its folder. fit does this at its end.

    Example: gpu-logicmix report runs/coco-10
    """
    _write_report(run)


@app.command()
def study(
    file: Annotated[Path, typer.Argument(metavar="STUDY.toml", help="The runs to do; see studies/ and docs/study.md.")],
    out: Annotated[
        Path | None, typer.Option(help="Folder for runs and results; studies/results/NAME unless given.")
    ] = None,
    shard: Annotated[
        str, typer.Option(metavar="I/N", help="Do only share I (from 0) of N: one share a machine.")
    ] = "0/1",
    only_report: Annotated[
        bool, typer.Option("--only-report", help="Do no runs: tables and plots from those that have ended.")
    ] = False,
    show_plan: Annotated[bool, typer.Option("--plan", help="List the runs and what is done of them.")] = False,
    data: Annotated[str | None, typer.Option(help="DATA in place of that in the file.")] = None,
    weights: Annotated[str | None, typer.Option(help="Weights in place of those in the file.")] = None,
    cache: Annotated[str | None, typer.Option(help="Folder for decoded images in place of that in the file.")] = None,
    device: Annotated[str | None, typer.Option(help="Device in place of that in the file.")] = None,
    threads: Threads = None,
) -> None:
    """Do the runs of a study, and write tables and plots that compare them.

    Can be stopped at any time; the same command goes on: runs that have ended are kept, a killed one continues.

    Example: gpu-logicmix study studies/coco-mini.toml --shard 0/2
    """
    from gpu_logicmix.study import plan as studies
    from gpu_logicmix.train import engine

    part, _, whole = shard.partition("/")
    if not (part.isdigit() and whole.isdigit() and int(part) < int(whole)):
        raise ValueError(f"--shard {shard}: write I/N with I from 0 to N - 1, as 0/2")
    given = {"data": data, "weights": weights, "cache": cache, "device": device, "threads": threads}
    planned = studies.read_study(file, **{name: value for name, value in given.items() if value is not None})
    out = out or Path("studies") / "results" / file.stem
    if show_plan:
        for title in dict.fromkeys(plan.table for plan in planned):
            table = Table("method", "known", "seed", "mAP", "run", title=_escape(title), title_justify="left")
            for plan in planned:
                if plan.table == title:
                    end = studies.result(out / "runs" / plan.folder, plan.config.cft)
                    done = "" if end is None else f"{end['mAP_cft' if plan.config.cft else 'mAP']:.2%}"
                    table.add_row(_escape(plan.method), f"{plan.known:g}", f"{plan.seed}", done, plan.folder)
            console.print(table)
        return
    failed = []
    try:
        if not only_report:
            failed = studies.run_study(planned, out, shard=(int(part), int(whole)), console=console)
    except engine.Interrupted as stopped:
        console.print(f"[yellow]stopped; the same command goes on ({_escape(str(stopped))})[/]", soft_wrap=True)
        raise typer.Exit(130 if stopped.signum == signal.SIGINT else 0) from None
    rows = studies.collect(planned, out)
    done = len({row.run for row in rows})
    console.print(f"{done} of {len({plan.folder for plan in planned})} runs have ended", highlight=False)
    if rows:
        console.print((out / "results.md").read_text(), highlight=False, markup=False, soft_wrap=True)
        console.print(f"wrote {_escape(str(out / 'index.html'))}, results.csv, results.md and plots", highlight=False)
    if failed:
        raise ValueError(f"{len(failed)} runs failed; the first: {failed[0]}")


@app.command()
def demo(
    out: Annotated[
        Path, typer.Option(help="Folder for the two runs and the page. An earlier demo in it is replaced.")
    ] = Path("demo"),
    seed: Seed = 0,
    quick: Annotated[
        bool, typer.Option("--quick", help="Few pictures and steps: only to see that all of it works.")
    ] = False,
    device: Device = "auto",
    threads: Threads = None,
) -> None:
    """Plain training against LogicMix at 10 % known labels, in about two minutes on a laptop without a GPU.

    Pictures of shapes are drawn on the fly, there is nothing to download. Prints a table, writes a page.

    Example: gpu-logicmix demo --seed 1 --out demo-1
    """
    from gpu_logicmix.cli.demo import run_demo
    from gpu_logicmix.train.engine import Interrupted

    try:
        run_demo(out, quick=quick, console=console, seed=seed, device=device, threads=threads)
    except (KeyboardInterrupt, Interrupted):
        console.print("[yellow]stopped; the same command starts the demo afresh[/]")
        raise typer.Exit(130) from None


@app.command()
def bench(
    model: Annotated[str, typer.Option(help="Any model of timm.")] = "resnet50",
    weights: Annotated[str, typer.Option(help="hub, none or a file; they do not change the time.")] = "none",
    size: Annotated[int, typer.Option(min=16, help="Images are SIZE x SIZE.")] = 224,
    batch_size: BatchSize = 32,
    device: Device = "auto",
    threads: Threads = None,
    amp: Annotated[
        Enum("Amp", {name: name for name in ("auto", "bf16", "fp16", "off")}, type=str),
        typer.Option(help="Mixed precision; auto: bfloat16 on CUDA."),
    ] = "auto",
    compile: Annotated[bool, typer.Option("--compile", help="torch.compile the model.")] = False,
    rounds: Annotated[int, typer.Option(min=1, help="Turns of each variant.")] = 7,
    out: Annotated[Path | None, typer.Option(help="Also write all of it here, as JSON.")] = None,
) -> None:
    """How much flip, RandAugment and LogicMix add to the training step of a model on this machine.

    The step with and without each of them, taking turns in one process; medians.

    Example: gpu-logicmix bench --model resnet101 --size 448 --batch-size 32
    """
    from rich.progress import Progress

    from gpu_logicmix.train.stepbench import VARIANTS, measure_step, step_config, step_table

    options = {"model": model, "weights": weights, "size": size, "batch_size": batch_size, "compile": compile}
    config = step_config(**options, device=device, threads=threads, amp=getattr(amp, "value", amp))
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("steps", total=(rounds + 1) * len(VARIANTS))
        result = measure_step(config, rounds, lambda: progress.advance(task))
    console.print(step_table(result))
    if out is not None:
        out.write_text(json.dumps(result, indent=1) + "\n")
        console.print(f"wrote {_escape(str(out))}")


if __name__ == "__main__":
    main()
