"""Commands that look at data and prepare it: stats, preview, cache, pack."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from rich.table import Table

from gpu_logicmix.augment.logicmix import GPULogicMix
from gpu_logicmix.cli import screen
from gpu_logicmix.cli.options import (
    MAX_SIZE,
    BadImages,
    Data,
    KMax,
    KMin,
    Known,
    Options,
    P,
    Protocol,
    Seed,
    Split,
    ends,
    list_bad_images,
    opened,
)
from gpu_logicmix.data import DataError, ImageDataset, cache_dataset, pack_dataset
from gpu_logicmix.data.cache import list_caches, prune, verify_cache
from gpu_logicmix.data.sparse import SparseLabels
from gpu_logicmix.errors import printable, shown
from gpu_logicmix.files import check_out
from gpu_logicmix.labels import LabelCounts, label_counts
from gpu_logicmix.progress import progress_bar
from gpu_logicmix.train.config import hide
from gpu_logicmix.train.hint import mixing_hint

# With more than LARGE samples, plans are drawn for larger batches, which saves minutes.
LARGE, LARGE_BATCH = 1 << 20, 1 << 15


def stats(
    data: Data = "shapes",
    split: Split = "train",
    known: Known = None,
    protocol: Protocol = "uniform",
    seed: Seed = 0,
    p: P = 0.5,
    k_min: KMin = 2,
    k_max: KMax = 3,
    batch_size: Annotated[int, typer.Option(min=1, help="Samples are mixed within batches of this size.")] = 32,
    show_all: Annotated[
        bool, typer.Option("--all", help="Print all categories, not only both ends of the list.")
    ] = False,
    plot: Annotated[Path | None, typer.Option(help="Also write a figure (PNG, SVG or PDF).")] = None,
    option: Options = None,
) -> None:
    """Count known labels per sample and per category, before and after LogicMix.

    Counts labels that are present, absent and unknown. Reads labels only, no images.

        gpu-logicmix stats csv:photos/labels.csv --plot stats.png

        gpu-logicmix stats coco:/data/coco --known 0.3
    """
    from gpu_logicmix.report.label_stats import Share, mixed_labels, stats_figure
    from gpu_logicmix.report.label_tail import tail_figure

    check_out(plot, "--plot")
    dataset = opened(data, split, None, option, "skip")
    if not dataset.categories:
        raise DataError(f"{data}: has no labels to count")
    labels, words = hide(dataset.labels, known, protocol, seed)
    mix = GPULogicMix(p, k_min, k_max)
    if isinstance(labels, SparseLabels):
        title, before, after = _sparse_stats(dataset, labels, words, mix, batch_size, seed)
        figure = lambda: tail_figure(before, after, _named(mix), title)  # noqa: E731
    else:
        in_training = mixed_labels(labels, mix, batch_size, seed)
        mixed_alone = mixed_labels(labels, GPULogicMix(1.0, k_min, k_max), batch_size, seed)
        shares = [Share("before", labels), Share("mixed samples alone", mixed_alone), Share(_named(mix), in_training)]
        title = (
            f"{dataset.name} {dataset.split}: {len(dataset):,} images, {len(dataset.categories)} categories, {words}"
        )
        rows = [Share("all labels", dataset.labels), *shares] if labels is not dataset.labels else shares
        screen.console.print(_sample_table(title, rows, len(dataset.categories)))
        before, after = label_counts(labels, 0), label_counts(in_training, 0)
        figure = lambda: stats_figure(shares, dataset.categories, title)  # noqa: E731
    screen.console.print(_category_table(dataset.categories, before, after, show_all))
    nothing = int((before.positive == 0).sum())
    if nothing:
        screen.say(f"{nothing:,} categories have no known positive label: they cannot be learned.", "yellow")
    screen.say(mixing_hint(before.positive))
    if plot is not None:
        figure().savefig(plot, dpi=110)
        screen.say(f"wrote {printable(plot)}")


def _sparse_stats(
    dataset: ImageDataset, labels: SparseLabels, words: str, mix: GPULogicMix, batch_size: int, seed: int
) -> tuple[str, LabelCounts, LabelCounts]:
    """Of a set that is too large for a matrix. Returns title and counts per category, before and after mixing."""
    from gpu_logicmix.report.label_mix import mixed_counts

    n, width = labels.shape
    title = f"{dataset.name} {dataset.split}: {n:,} images, {width:,} categories, {words}"
    title += f" (sparse: {labels.known:,} known)"
    with progress_bar(n, "mixing", unit="samples", console=screen.console) as advance:
        found = mixed_counts(labels, mix, batch_size if n <= LARGE else max(batch_size, LARGE_BATCH), seed, advance)
    before = label_counts(labels, 0)
    rows = [("before", before, n), ("mixed samples alone", found.of_mixed, found.mixed), (_named(mix), found.after, n)]
    table = _empty_sample_table(title)
    if labels is not dataset.labels:
        rows.insert(0, ("all labels", label_counts(dataset.labels, 0), n))
    for name, counts, samples in rows:
        _add_means(table, name, [int(np.sum(values)) / max(samples, 1) for values in counts], width)
    screen.console.print(table)
    return title, before, found.after


def _named(mix: GPULogicMix) -> str:
    k = f"K={mix.k_min}" if mix.k_min == mix.k_max else f"K={mix.k_min}-{mix.k_max}"
    return f"LogicMix p={mix.p:g} {k}"


def _sample_table(title: str, rows: list, categories: int) -> Table:
    table = _empty_sample_table(title)
    for name, values in rows:
        _add_means(table, name, [float(c) / len(values) for c in label_counts(values)], categories)
    return table


def _empty_sample_table(title: str) -> Table:
    table = Table(title=shown(title), title_justify="left", caption="mean labels per sample", caption_justify="left")
    for heading in ("", "present", "absent", "unknown", "known"):
        table.add_column(heading, justify="left" if not heading else "right")
    return table


def _add_means(table: Table, name: str, means: list[float], categories: int) -> None:
    known = 1 - means[2] / categories
    table.add_row(name, *(f"{c:.2f}" for c in means), f"{known:.1%}" if known >= 0.01 else f"{known:.3%}")


def _category_table(categories: list[str], before: LabelCounts, after: LabelCounts, show_all: bool) -> Table:
    table = Table(caption="samples per category before and after LogicMix", caption_justify="left")
    table.add_column("category", no_wrap=True)
    for when in ("before", "after"):
        for name in ("present", "absent", "unknown"):
            table.add_column(f"{when}\n{name}", justify="right")
    order = np.argsort(-before.positive, kind="stable")
    for c in ends(order, show_all):
        if c is None:
            table.add_row(f"… {len(order) - 16:,} more (--all)", *[""] * 6)
        else:
            table.add_row(shown(categories[c]), *(f"{counts[c]:,}" for counts in (*before, *after)))
    return table


def preview(
    data: Data = "shapes",
    split: Split = "train",
    size: Annotated[int, typer.Option(min=8, max=MAX_SIZE, help="Images are resized to SIZE x SIZE.")] = 192,
    count: Annotated[int, typer.Option(min=1, max=32, help="Images in the batch.")] = 8,
    known: Known = None,
    protocol: Protocol = "uniform",
    seed: Seed = 0,
    p: Annotated[float, typer.Option("--p", help="LogicMix: probability that a sample is mixed; fit uses 0.5.")] = 1.0,
    k_min: KMin = 2,
    k_max: KMax = 3,
    out: Annotated[Path, typer.Option(help="File to write.")] = Path("preview.png"),
    option: Options = None,
    on_bad_image: BadImages = "raise",
) -> None:
    """Draw a batch before and after each augmentation, with its labels.

    The steps are those of a training run: flip, RandAugment, LogicMix.

        gpu-logicmix preview csv:photos/labels.csv --out preview.png

        gpu-logicmix preview voc2007:/data/VOCdevkit --known 0.3 --count 6
    """
    from gpu_logicmix.augment.randaugment import RandAugment, RandomHorizontalFlip
    from gpu_logicmix.report.preview import batch_steps, drawn_batch, preview_picture

    check_out(out)
    dataset = opened(data, split, size, option, on_bad_image)
    if dataset.categories:
        dataset.labels, _ = hide(dataset.labels, known, protocol, seed)
    images, targets, names = drawn_batch(dataset, seed, count)
    if not len(images):
        raise DataError(f"{data}: none of the {count} images drawn can be read; try another --seed")
    mix = GPULogicMix(p, k_min, k_max)
    steps = batch_steps(images, targets, names, RandomHorizontalFlip(), RandAugment(), mix)
    preview_picture(steps, dataset.categories).save(out)
    screen.say(f"wrote {printable(out)}: {len(images)} images, {' → '.join(step.title for step in steps)}")
    list_bad_images(dataset)


def cache(
    *,
    data: Annotated[str | None, typer.Argument(metavar="DATA", help="As for stats.", show_default=False)] = None,
    to: Annotated[Path, typer.Option(help="Folder for caches, with a subfolder per dataset, split and size.")],
    split: Split = "train",
    size: Annotated[int, typer.Option(min=1, max=MAX_SIZE, help="Images are resized to SIZE x SIZE.")] = 448,
    threads: Annotated[int | None, typer.Option(min=1, help="Decoding threads; all cores unless given.")] = None,
    rebuild: Annotated[bool, typer.Option("--rebuild", help="Build again what is there already.")] = False,
    verify: Annotated[bool, typer.Option("--verify", help="Read everything and compare checksums.")] = False,
    show: Annotated[bool, typer.Option("--list", help="List the caches in the folder --to.")] = False,
    remove: Annotated[
        bool, typer.Option("--prune", help="Remove caches that are unfinished, damaged or superseded; none in use.")
    ] = False,
    days: Annotated[float | None, typer.Option(min=0, help="With --prune, also those unused for so many days.")] = None,
    option: Options = None,
    on_bad_image: BadImages = "raise",
) -> None:
    """Decode and resize all images once, for faster epochs.

    Writes one file that later epochs read without decoding. Can be interrupted at any time: the same command resumes.
    COCO train at 448 px takes 50 GB. `fit --cache FOLDER` does the same before its first epoch.

        gpu-logicmix cache coco:/data/coco --to /scratch --size 448
    """
    if days is not None and not remove:
        raise ValueError(f"--days {days:g}: goes with --prune")
    if show or remove:
        _caches(to, remove, days)
        return
    if data is None:
        raise DataError("which dataset? Write gpu-logicmix cache DATA --to FOLDER")
    dataset = opened(data, split, size, option, on_bad_image)
    cached = cache_dataset(dataset, to, threads=threads, rebuild=rebuild)
    folder = cached.source.file.parent
    if verify:
        verify_cache(folder)
    length = cached.source.file.stat().st_size / 1e9
    screen.say(f"{printable(folder)}: {len(cached):,} images, {length:.2f} GB")
    list_bad_images(cached)
    for line in cached.warnings:
        screen.say(f"warning: {printable(line)}")


def pack(
    data: Data,
    out: Annotated[Path, typer.Option(help="Folder to write the shards to.")],
    split: Split = "train",
    size: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=MAX_SIZE,
            help="Resize images to SIZE x SIZE (JPEG). Unless given, image files are copied as they are; images from "
            "shards or tables become PNG of 448 x 448.",
        ),
    ] = None,
    per_shard: Annotated[int, typer.Option(min=1, help="Images per shard.")] = 1000,
    option: Options = None,
    on_bad_image: BadImages = "raise",
) -> None:
    """Write a dataset as shards that tar:PATH reads, also over a network.

    WebDataset shards: each holds images and, as JSON, their labels. Can be interrupted: the same command resumes.

        gpu-logicmix pack coco:/data/coco --out shards --size 512
    """
    # At this size, so that images which are not in files are resized once and not from 448 pixels.
    dataset = opened(data, split, size, option, on_bad_image)
    pack_dataset(dataset, out, per_shard=per_shard, resize=size)
    screen.say(f"wrote {len(dataset):,} images; use them as tar:{printable(out)}")
    list_bad_images(dataset)


def _caches(directory: Path, remove: bool, days: float | None) -> None:
    """`cache --list` and `cache --prune`."""
    for info in prune(directory, days=days) if remove else ():
        screen.say(f"removed {printable(info.folder)}: {info.state}, {info.bytes / 1e9:.2f} GB")
    infos = list_caches(directory)
    for info in infos:
        state = "in use" if info.in_use else "superseded" if info.outdated else info.state
        what = f"{info.count:,} images of {info.size} px from {info.source}" if info.count else "nothing finished"
        screen.say(f"{printable(info.folder.name)}: {state}, {info.bytes / 1e9:.2f} GB, {printable(what)}")
    screen.say(f"{len(infos)} caches in {printable(directory)}, {sum(i.bytes for i in infos) / 1e9:.2f} GB")
