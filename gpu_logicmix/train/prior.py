"""How often each category is present, as a finished run sees its training images: the prior of the loss `csl`."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.console import Console
from torch import Tensor

from gpu_logicmix.errors import RunError
from gpu_logicmix.files import check_out, write_whole
from gpu_logicmix.losses.csl import estimate_prior, prior_text
from gpu_logicmix.progress import progress_bar
from gpu_logicmix.train.distributed import joined_world
from gpu_logicmix.train.inputs import open_train
from gpu_logicmix.train.predict import load_run, predict_rows


class Prior(NamedTuple):
    categories: list[str]
    prior: Tensor  # [C]: mean probability
    images: int


def prior_of_run(
    folder: str | Path, out: str | Path, *, weights: str = "model", console: Console | None = None, **options: Any
) -> Prior:
    """The mean probability of each category over the training images of a finished run, un-augmented and unmixed, in
    the CSV file `out`.

    options: of `Config` that need not be those of the run (device, threads, batch_size, workers, cache).
    """
    out = Path(out)
    check_out(out)
    config, model, categories, file = load_run(folder, weights, **options)
    with joined_world(config.device, config.threads) as world:
        console = (console or Console()) if world.main else Console(quiet=True)
        dataset, _ = open_train(config)
        if dataset.categories != categories:
            raise RunError(f"{config.data}: its categories are not those that {file} was trained for")
        model = model.to(world.device, memory_format=torch.channels_last)
        with progress_bar(len(dataset), console=console) as tick:
            logits, rows = predict_rows(model, dataset, config, world, lambda images: tick(images * world.size))
        prior = estimate_prior(logits[rows])
        if not prior.isfinite().all():
            raise RunError(f"{file}: gives non-finite logits")
        if world.main:
            write_whole(out, prior_text(categories, prior))
    return Prior(categories, prior, len(rows))
