"""Thresholds and temperature of a finished run, from known labels that were held out. Never from the validation images.

A run with `tune_images` has images that it never trained on: these. Otherwise it is the known training labels that
category-wise fine-tuning holds out too, the very same ones: it writes down which images it could not read, since
without them the draw is another. The backbone has seen those images, so its scores on them are better than they will be
on new ones, and `decisions.json` says so.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from torch import Tensor

from gpu_logicmix.cft import CFTOptions
from gpu_logicmix.cft.heldout import split_known
from gpu_logicmix.data import ImageDataset
from gpu_logicmix.decisions import FILE, MIN_LABELS, Decisions, fit_decisions, weights_digest
from gpu_logicmix.errors import RunError
from gpu_logicmix.progress import progress_bar
from gpu_logicmix.train.config import Config
from gpu_logicmix.train.distributed import World, joined_world
from gpu_logicmix.train.inputs import open_train, open_tune
from gpu_logicmix.train.predict import load_run, predict_rows
from gpu_logicmix.train.tuneblocks import block_size, labels_by_category

MAX_IMAGES = 20_000  # more would not move a threshold


def decide(
    folder: str | Path,
    weights: str | None = None,
    *,
    precision: float | None = None,
    min_labels: int = MIN_LABELS,
    world: World | None = None,
    console: Console | None = None,
    datasets: tuple[ImageDataset, ImageDataset | None] | None = None,
    **options: Any,
) -> Decisions:
    """Fit thresholds and temperature of a finished run and write them into its folder as decisions.json.

    weights: "model" or "cft"; unless given, those that the run kept.
    precision, min_labels: see `fit_decisions`.
    datasets: to train on and to tune by, where they are open already.
    options: of `Config`, in place of those of the run.
    """
    folder = Path(folder)
    if world is not None:
        world.wait()  # for the first process, which may be fine-tuning: which weights are kept is in what it writes
    config, model, categories, file = load_run(folder, weights, **options)
    with contextlib.nullcontext(world) if world else joined_world(config.device, config.threads) as world:
        train, tune = datasets or (open_train(config)[0], open_tune(config))
        if (tune or train).categories != categories:
            raise RunError(f"{config.data}: its categories are not those that {file} was trained for")
        dataset, labels, words = _held_out(config, train, tune, unread_rows(folder))
        console = (console or Console()) if world.main else Console(quiet=True)
        model = model.to(world.device, memory_format=torch.channels_last)
        with progress_bar(len(dataset), "thresholds", console=console) as bar:
            logits, rows = predict_rows(model, dataset, config, world, lambda images: bar(images * world.size))
    about = {"weights": file.stem, "digest": weights_digest(file), "fitted_on": words, "trained_on": tune is None}
    found = fit_decisions(logits[rows], labels[rows], categories, precision=precision, min_labels=min_labels, **about)
    if world.main:
        found.write(folder / FILE)
    return found


def unread_rows(folder: Path) -> list[int]:
    """Training images that category-wise fine-tuning of a run could not read. None where it is not known: there was no
    fine-tuning, or one by an earlier version."""
    try:
        rows = json.loads((folder / "cft.json").read_text(encoding="utf-8"))["unread"]
        return [int(row) for row in rows]
    except (OSError, ValueError, TypeError, KeyError):
        return []


def _held_out(
    config: Config, train: ImageDataset, tune: ImageDataset | None, unread: Sequence[int] = ()
) -> tuple[ImageDataset, Tensor, str]:
    """Images, labels [N, C] of which only held-out ones are known, and a few words about them.

    unread: rows that fine-tuning went without.
    """
    if tune is not None:
        return tune, torch.from_numpy(tune.labels_of(range(len(tune)))), f"{len(tune):,} images held out by tune_images"
    cft = CFTOptions(seed=config.seed)
    read = np.setdiff1d(np.arange(len(train)), unread)
    labels, width = labels_by_category(train, read), len(train.categories)
    step, cells = block_size(width, len(read)), []
    for start in range(0, width, step):
        block = torch.from_numpy(labels(start, min(start + step, width))).t()
        # As `category_wise_fine_tune` does: the order of the samples is the same for each block.
        generator = torch.Generator().manual_seed(cft.seed)
        _, held, _ = split_known(block, cft.holdout, cft.min_known, generator)
        column, row = (held != -1).nonzero(as_tuple=True)
        cells.append(torch.stack((row, column + start, held[column, row].long())))
    row, column, value = torch.cat(cells, 1)
    rows = row.unique()
    if not len(rows):  # no category has enough: there is nothing to fit, and that is what the file will say
        rows = torch.arange(1)
    rows = rows[torch.randperm(len(rows), generator=generator)[:MAX_IMAGES]].sort().values
    found = torch.full((len(rows), width), -1, dtype=torch.int8)
    chosen = torch.isin(row, rows)
    found[torch.searchsorted(rows, row[chosen]), column[chosen]] = value[chosen].to(torch.int8)
    words = f"{cft.holdout:.0%} of the known labels of {len(read):,} training images"
    return train.take(read[rows.numpy()]), found, words


def say_decisions(found: Decisions, say: Callable[[str], None]) -> None:
    goal = "F1" if found.floor is None else f"recall at precision {found.floor:g}"
    count = len(found.categories)
    say(
        f"thresholds by {goal} for {count - len(found.undecided)} of {count} categories, "
        f"temperature {found.temperature:.2f}, shift {found.shift:.2f}; fitted on {found.fitted_on}"
    )
    if found.undecided:
        names = ", ".join(found.undecided[:10])
        more = f" and {len(found.undecided) - 10} more" if len(found.undecided) > 10 else ""
        say(f"no threshold of their own: {names}{more}")
