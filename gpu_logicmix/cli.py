"""The command line: `gpu-logicmix`, or `python train.py`."""

from __future__ import annotations

import os
import sys
from enum import Enum
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
import typer
from rich.console import Console
from rich.table import Table

from gpu_logicmix.data import DataError, ImageDataset, cache_dataset, open_dataset
from gpu_logicmix.data.cache import verify_cache
from gpu_logicmix.labels import PROTOCOLS, hide_labels, label_counts
from gpu_logicmix.mix import GPULogicMix

app = typer.Typer(
    name="gpu-logicmix",
    help="Train multi-label classifiers on images of which many labels are missing.\n\n"
    "DATA is coco:PATH, voc2007:PATH, vg200:PATH, csv:PATH or shapes (drawn on the fly, nothing to download).",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)
console = Console()

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
    str | None,
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
        app()
    except (ValueError, OSError, ImportError) as error:
        if os.environ.get("GPU_LOGICMIX_DEBUG"):
            raise
        text = " ".join(str(error).split())
        Console(stderr=True, soft_wrap=True).print(f"[bold red]error:[/] {_escape(text)}", highlight=False)
        sys.exit(1)


def _escape(text: str) -> str:
    return text.replace("[", r"\[")


@app.callback()
def _commands() -> None:
    """Keeps `gpu-logicmix COMMAND` the form of the call, however many commands there are."""


def _open(data: str, split: str, size: int | None, options: list[str] | None, on_bad_image: str) -> ImageDataset:
    chosen = {}
    for option in options or []:
        name, equals, value = option.partition("=")
        if not equals:
            raise DataError(f"--option {option!r}: write NAME=VALUE")
        if name in ("spec", "split", "size", "on_bad_image"):
            raise DataError(f"--option {option!r}: no option of a dataset; write --{name.replace('_', '-')} {value}")
        chosen[name] = value
    with console.status(f"opening {_escape(data)} {split} …"):
        return open_dataset(data, split, size, on_bad_image=on_bad_image, **chosen)


def _hide(labels: np.ndarray, known: str | None, protocol: str, seed: int) -> tuple[np.ndarray, str]:
    """The labels that are left, and a few words about it."""
    if known is None and protocol != "single-positive":
        return labels, "labels as they are"
    if protocol == "single-positive":
        return hide_labels(labels, seed=seed, protocol=protocol), "one positive label a sample"
    try:
        number = int(known) if protocol == "per-class" else float(known)
    except ValueError:
        raise DataError(f"--known {known!r}: must be a number") from None
    if protocol != "per-class" and not 0 < number <= 1:
        raise DataError(f"--known {known}: must be above 0 and at most 1")
    words = f"{known} labels of each kind a class" if protocol == "per-class" else f"{number:.0%} of labels known"
    return hide_labels(labels, number, seed, protocol), f"{words} ({protocol})"


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
    from gpu_logicmix.report import Share, mixed_labels, stats_figure

    dataset = _open(data, split, None, option, "skip")
    if not dataset.categories:
        raise DataError(f"{data}: has no labels to count")
    labels, words = _hide(dataset.labels, known, protocol.value, seed)
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
    from gpu_logicmix.report import preview_picture

    dataset = _open(data, split, size, option, on_bad_image.value)
    if dataset.categories:
        dataset.labels, _ = _hide(dataset.labels, known, protocol.value, seed)
    torch.manual_seed(seed)
    images, targets, index = dataset[torch.randperm(len(dataset))[:count].tolist()]
    if not len(images):
        raise DataError(f"{data}: none of the {count} images drawn can be read; try another --seed")
    names = [f"{number + 1}: {dataset.ids[row]}" for number, row in enumerate(index.tolist())]
    steps = _steps(images, targets, names, GPULogicMix(p, k_min, k_max))
    preview_picture(steps, dataset.categories).save(out)
    console.print(f"wrote {_escape(str(out))}: {len(images)} images, {' → '.join(step.title for step in steps)}")
    _list_bad(dataset)


def _steps(images: torch.Tensor, targets: torch.Tensor, names: list[str], mix: GPULogicMix) -> list:
    """The batch after each step of the training run, in its order."""
    from gpu_logicmix.randaugment import RandAugment, RandomHorizontalFlip
    from gpu_logicmix.report import Step

    steps = [Step("original", images, targets, names)]
    flip, augment = RandomHorizontalFlip(), RandAugment()
    flipped = flip.plan(len(images))
    images = flip(images, flipped)
    steps.append(Step("flip", images, targets, ["flipped" if f else "as it is" for f in flipped]))
    drawn = augment.plan(len(images))
    images = augment(images, drawn)
    captions = [", ".join(augment.ops[i] for i in row) for row in drawn.operations.tolist()]
    steps.append(Step("RandAugment", images, targets, captions))
    plan = mix.plan(len(images), images.device)
    images, targets = mix(images, targets, plan)
    members = [(row[:size] + 1).tolist() for row, size in zip(plan.index, plan.size, strict=True)]
    captions = ["images " + " + ".join(map(str, m)) if len(m) > 1 else "as it is" for m in members]
    steps.append(Step("LogicMix", images, targets, captions))
    return steps


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


if __name__ == "__main__":
    main()
