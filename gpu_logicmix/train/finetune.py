"""Category-wise fine-tuning of a finished run: each category's linear head, on its known labels alone."""

from __future__ import annotations

import contextlib
import json
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from torch import Tensor

from gpu_logicmix.data import ImageDataset
from gpu_logicmix.errors import RunError
from gpu_logicmix.files import write_whole
from gpu_logicmix.progress import Bar, progress_bar
from gpu_logicmix.train.checkpoint import write_model, write_predictions
from gpu_logicmix.train.config import Config
from gpu_logicmix.train.distributed import World, joined_world
from gpu_logicmix.train.inputs import open_train, open_val
from gpu_logicmix.train.predict import load_run, predict_rows
from gpu_logicmix.train.runlog import no_nan
from gpu_logicmix.train.tuneblocks import block_size, labels_by_category, tuned


def fine_tune(
    folder: str | Path,
    *,
    world: World | None = None,
    console: Console | None = None,
    datasets: tuple[ImageDataset, ImageDataset] | None = None,
    options: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Fine-tune the heads of a finished run. Writes cft.json, the new weights and what they predict; the old ones stay.
    Returns what is in cft.json.

    datasets: to train and to validate on, where they are open already.
    options: of `Config`, in place of those of the run.
    """
    folder = Path(folder)
    console = console or Console()
    config, model, categories, _ = load_run(folder, "model", **options or {})
    if model.classifier is None:
        raise RunError(f"{folder}: head {config.head} has no last linear layer to fine-tune")
    with contextlib.nullcontext(world) if world else joined_world(config.device, config.threads) as world:
        train, val = datasets or (open_train(config)[0], open_val(config))
        model = model.to(world.device, memory_format=torch.channels_last)
        began = time.perf_counter()
        with progress_bar(len(train) + len(val), "features", console=console) as bar:

            def features_of(dataset: ImageDataset) -> tuple[Tensor, Any]:
                tick = lambda images: bar(images * world.size)  # noqa: E731
                return predict_rows(model.embed, dataset, config, world, tick, everywhere=False)

            (features, rows), (val_features, val_rows) = features_of(train), features_of(val)
        if not world.main:
            return {}
        head = model.classifier
        blocks = math.ceil(len(categories) / block_size(len(categories), max(len(rows), len(val_rows))))
        with progress_bar(config.cft_epochs * blocks, "fine-tuning", unit="epochs", console=console) as bar:
            read = features if len(rows) == len(features) else features[rows]  # not twice in memory
            weight, bias, record = _tuned(
                config, read, labels_by_category(train, rows), head, (val_features, val, val_rows), bar
            )
        model.set_classifier(weight, bias)
        write_model(folder / "cft.safetensors", model, categories)
        write_predictions(folder / "cft_predictions.npz", torch.addmm(bias, val_features, weight.t()), val_rows, val)
        result = _result(record, time.perf_counter() - began)
        result["unread"] = np.setdiff1d(np.arange(len(train)), rows).tolist()  # with them, other labels are held out
        write_whole(folder / "cft.json", json.dumps(no_nan(result)))
        _say(result, lambda text: console.print(text, highlight=False, soft_wrap=True, markup=False))
        return result


def _tuned(config: Config, features: Tensor, labels: Any, head: torch.nn.Linear, judged: tuple, bar: Bar) -> tuple:
    val_features, val, val_rows = judged
    return tuned(
        features,
        labels,
        head.weight.detach().cpu(),
        head.bias.detach().cpu(),
        method=config.cft_method,
        epochs=config.cft_epochs,
        lr=config.cft_lr,
        seed=config.seed,
        on_epoch=lambda: bar(1),
        evaluation=(val_features[val_rows], labels_by_category(val, val_rows)),
    )


def _result(record: Any, seconds: float) -> dict[str, Any]:
    summary = record.summary()
    return {
        "summary": summary,
        "ap_before": record.ap_before.tolist(),
        "ap_after": record.ap_after.tolist(),
        "evaluation_before": record.evaluation_before.tolist(),
        "evaluation_after": record.evaluation_after.tolist(),
        "best_epoch": record.best_epoch.tolist(),
        "skipped": {str(k): v for k, v in record.skipped.items()},
        "seconds": seconds,
        "kept": record.kept,
        "gain": record.gain,
        "gain_interval": list(record.gain_interval),
        "weights": "cft.safetensors",
        "mAP": summary["evaluation_map_after"],
    }


def _say(result: dict[str, Any], say: Callable[[str], None]) -> None:
    s = result["summary"]
    say(
        f"fine-tuned {s['changed']} of {s['categories']} heads in {result['seconds']:.0f} s ({s['skipped']} with too "
        f"few known labels left alone): mAP on held-out known labels {s['held_out_map_before']:.2%} → "
        f"{s['held_out_map_after']:.2%}, on validation {s['evaluation_map_before']:.2%} → "
        f"{s['evaluation_map_after']:.2%}"
    )
    low, high = (f"{100 * value:+.1f}" for value in result["gain_interval"])
    measured = f"gain on labels that did not choose {100 * result['gain']:+.1f} points, 95 % interval {low} to {high}"
    if result["kept"] == "cft":
        say(f"the fine-tuned heads are kept: {measured}; evaluate and predict take the others with --use model")
    else:
        reason = measured if math.isfinite(result["gain"]) else "no gain could be shown"
        say(f"the heads as trained are kept: {reason}; evaluate and predict take the fine-tuned ones with --use cft")
    if s.get("rows_left_out"):
        say(f"{s['rows_left_out']:,} images were ignored: their features are non-finite")
