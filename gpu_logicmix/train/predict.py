"""Predictions: of the images of a run while it trains, and by a finished run of any images."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from rich.console import Console
from torch import Tensor

from gpu_logicmix.data import DataError, ImageDataset, make_loader
from gpu_logicmix.data.folder import list_folder
from gpu_logicmix.data.images import FileSource
from gpu_logicmix.decisions import Decisions, read_decisions
from gpu_logicmix.errors import RunError
from gpu_logicmix.metrics import Metrics, PrecisionRecall, evaluate, precision_recall
from gpu_logicmix.models.classifier import Classifier
from gpu_logicmix.progress import progress_bar
from gpu_logicmix.train.batch import moved
from gpu_logicmix.train.build import amp_dtype, make_model
from gpu_logicmix.train.checkpoint import read_categories, read_config
from gpu_logicmix.train.config import PATH_OPTIONS, Config, located
from gpu_logicmix.train.distributed import World, joined_world
from gpu_logicmix.train.inputs import open_labeled, open_val

PIECE = 1 << 26  # numbers that processes exchange at a time


def autocast(config: Config, device: torch.device) -> torch.autocast:
    dtype = amp_dtype(config, device)
    on = dtype is not torch.float32
    return torch.autocast(device.type, dtype=dtype if on else None, enabled=on)


def plain_loader(dataset: ImageDataset, config: Config, world: World) -> Any:
    """All images in their order, each process its share."""
    return make_loader(dataset, config.batch_size, workers=config.workers, rank=world.rank, world=world.size)


class PlainLoaders:
    """One loader for each dataset of a run, made when first needed: its worker processes stay."""

    def __init__(self, config: Config, world: World) -> None:
        self.config, self.world = config, world
        self.loaders: dict[tuple[int, int], Any] = {}

    def of(self, dataset: ImageDataset, world: World | None = None) -> Any:
        """world: in place of the run's, of one process that reads all images."""
        world = world or self.world
        key = id(dataset), world.size
        if key not in self.loaders:
            self.loaders[key] = plain_loader(dataset, self.config, world)
        return self.loaders[key]


@torch.inference_mode()
def predicted(
    function: Callable[[Tensor], Tensor], dataset: ImageDataset, config: Config, world: World, loader: Any = None
) -> Iterator[tuple[Tensor, Tensor]]:
    """`function` of un-augmented images, batch by batch, and their rows. Each process takes a share of the images.

    loader: of `plain_loader`, to keep its worker processes from one call to the next.
    """
    for images, _, index in moved(loader or plain_loader(dataset, config, world), world.device):
        if len(images):
            with autocast(config, world.device):
                rows = function(images.float().div_(255))
            yield index, rows


@torch.inference_mode()
def predict_rows(
    function: Callable[[Tensor], Tensor],
    dataset: ImageDataset,
    config: Config,
    world: World,
    tick: Callable[[int], None] = lambda images: None,
    loader: Any = None,
    *,
    everywhere: bool = True,
) -> tuple[Tensor, np.ndarray]:
    """`function` of every un-augmented image, [N, ...] on the CPU, and the rows that could be read. Each process takes
    a share of the images; all get all results, or with `everywhere=False` the first one alone: others get no rows."""
    out: Tensor | None = None
    share = len(range(world.rank, len(dataset), world.size))  # row by row in turn, as the loader has it
    seen = torch.zeros(len(dataset), dtype=torch.int32)
    for index, rows in predicted(function, dataset, config, world, loader):
        index, rows = index.cpu(), rows.float().cpu()
        if out is None:
            out = torch.zeros(share, *rows.shape[1:])
        out[index // world.size], seen[index] = rows, 1
        tick(len(index))
    if world.size > 1:
        # A process may have had no image at all: it learns the width from the others.
        width = world.maximum(0 if out is None else out.shape[1])
        out = _gathered(torch.zeros(share, width) if out is None else out, len(dataset), world, everywhere)
        seen = world.sum_(seen.to(world.device)).cpu()
    if out is None or not seen.any():
        first = next(iter(dataset.bad_images()), "")
        raise DataError(f"{dataset.name} {dataset.split}: none of the {len(dataset)} images can be read. {first}")
    good = seen.nonzero()[:, 0].numpy()
    return out, good


def _gathered(own: Tensor, count: int, world: World, everywhere: bool) -> Tensor:
    """[count, width] of the rows that each process has of it: a piece at a time, since features of millions of images
    do not fit onto a device, nor twice into memory."""
    rows = max(1, PIECE // max(1, own.shape[1] * world.size)) * world.size
    out = own.new_empty(count if everywhere or world.main else 0, own.shape[1])
    for start in range(0, count, rows):
        piece = torch.zeros(min(rows, count - start), own.shape[1])
        mine = piece[world.rank :: world.size]
        mine.copy_(own[start // world.size :][: len(mine)])
        piece = world.sum_(piece.to(world.device))  # each row is zero everywhere but in one process: the sum is exact
        if len(out):
            out[start : start + rows] = piece
    return out


def plain_samples(run: Any) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """All training images of a `loop.Training`, un-augmented and unmixed: what the head sees of them, their known
    labels, their rows; the same in every process."""
    alone = World(0, 1, run.world.device)
    run.model.eval()
    loader = run.plain.of(run.train_set, alone)
    for index, features in predicted(run.model.features, run.train_set, run.config, alone, loader):
        targets = torch.from_numpy(run.train_set.labels_of(index.cpu()))
        yield features.float(), targets.to(features.device), index  # a head takes them without mixed precision


def evaluate_on(
    run: Any, model: Classifier, dataset: ImageDataset, tick: Callable[[int], None] = lambda images: None
) -> tuple[Metrics, Tensor, np.ndarray]:
    """Of a `loop.Training`: metrics of a model on a dataset, logits, and the rows that could be read."""
    model.eval()
    logits, rows = predict_rows(model, dataset, run.config, run.world, tick, run.plain.of(dataset))
    if not torch.isfinite(logits).all():
        raise RunError(
            f"the model gives non-finite logits (epoch {run.closed + 1}); the last checkpoint in {run.folder} is from "
            "before. A smaller --lr or --amp off may help"
        )
    return evaluate(logits[rows], torch.from_numpy(dataset.labels_of(rows))), logits, rows


def val_loss(run: Any, logits: Tensor, rows: np.ndarray) -> float:
    """Of a `loop.Training`: the loss of validation images, by a loss that is prepared but has not been trained with."""
    targets = torch.from_numpy(run.val_set.labels_of(rows))
    return copy.deepcopy(run.unused_loss)(logits[rows], targets).item()


# ------------------------------------------------------------------------------------------------------- a finished run
class FinishedRun(NamedTuple):
    config: Config
    model: Classifier
    categories: list[str]
    file: Path  # of the weights


def load_run(folder: str | Path, weights: str | None = None, **options: Any) -> FinishedRun:
    """Options, model, categories and weights file of a finished run.

    weights: "cft" or "model"; unless given, the fine-tuned ones if the run kept them: if the gain on held-out known
        labels was beyond its noise.
    options: of `Config`, in place of those of the run.
    """
    folder = Path(folder)
    config = read_config(folder)
    file = folder / f"{weights or kept_weights(folder)}.safetensors"
    if not file.exists():
        raise RunError(
            f"{folder}: has no {file.name}: the run has not ended; resume it: gpu-logicmix fit --out {folder} --resume"
        )
    categories = read_categories(file)
    config = replace(config, **{"freeze": 0, "init": None, **options})
    return FinishedRun(config, make_model(config, len(categories), weights=file).eval(), categories, file)


def kept_weights(folder: Path) -> str:
    """ "cft" or "model": which weights of a finished run are its result."""
    try:
        record = json.loads((folder / "cft.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return "model"
    kept = isinstance(record, dict) and record.get("kept", "cft") == "cft"
    return "cft" if kept and (folder / "cft.safetensors").exists() else "model"


class Evaluation(NamedTuple):
    metrics: Metrics
    categories: list[str]
    images: int
    weights: Path
    decided: PrecisionRecall | None = None  # at the thresholds of the run, if it has any


def decisions_of(folder: str | Path, file: Path, categories: list[str]) -> Decisions | None:
    """Thresholds and temperature that a run has for these weights."""
    found = read_decisions(folder, file.stem)
    return found if found is not None and found.names == categories else None


def evaluate_run(
    folder: str | Path,
    data: str | None = None,
    split: str = "val",
    weights: str | None = None,
    *,
    console: Console | None = None,
    **options: Any,
) -> Evaluation:
    """How good a finished run is on the data it was validated on, or on others with the same categories.

    weights: "model", or "cft": the fine-tuned ones; unless given, those that the run kept.
    options: of `Config` that need not be those of the run (device, threads, batch_size, workers, cache, option ...).
    """
    config, model, categories, file = load_run(folder, weights, **options)
    with joined_world(config.device, config.threads) as world:
        console = (console or Console()) if world.main else Console(quiet=True)
        own = data is None and split == "val"
        if data is not None and "option" not in options:
            _check_place(config, data)
        dataset = open_val(config) if own else open_labeled(config, data or config.data, split)
        if dataset.categories != categories:
            raise RunError(f"{data or config.data}: its categories are not those that {file} was trained for")
        model = model.to(world.device, memory_format=torch.channels_last)
        with progress_bar(len(dataset), console=console) as tick:
            logits, rows = predict_rows(model, dataset, config, world, lambda images: tick(images * world.size))
        logits, labels = logits[rows], torch.from_numpy(dataset.labels_of(rows))
    found = decisions_of(folder, file, categories)
    decided = None if found is None else precision_recall(found.margins(logits).clamp(-1e9, 1e9), labels)
    return Evaluation(evaluate(logits, labels), categories, len(rows), file, decided)


def _check_place(config: Config, data: str) -> None:
    """A folder of images that the run was told of is that of its own data: others may have images of the same names."""
    places = [option for option in config.option or () if option.partition("=")[0] in PATH_OPTIONS]
    same_format = data.partition(":")[0] == config.data.partition(":")[0]
    if places and same_format and located(replace(config, data=data)).data not in (config.data, config.val):
        raise RunError(
            f"data={data!r}: the run has the option {places[0]} for its own data; name the folder for these, be it the "
            f"same: option='{places[0].partition('=')[0]}=DIR'"
        )


class Predicted(NamedTuple):
    """Some images, in order."""

    names: list[str]
    probabilities: Tensor  # [n, C], calibrated where the run has a temperature
    decided: Tensor  # bool [n, C]: above the threshold of the category, 0.5 where it has none


class Predictions:
    """What a finished run says of images, batch by batch: the memory it takes does not grow with their number.

        predictions = Predictions("runs/photos", ["holiday/"])
        for names, probabilities, decided in predictions: ...
        predictions.bad_images()

    paths: of image files, and of folders in which all images are taken.
    weights, options: as in `load_run`.
    """

    def __init__(
        self, folder: str | Path, paths: Sequence[str | Path], weights: str | None = None, **options: Any
    ) -> None:
        self.config, self.model, self.categories, file = load_run(folder, weights, **options)
        self.decisions = found = decisions_of(folder, file, self.categories)
        self.thresholds = [0.5] * len(self.categories) if found is None else found.thresholds.tolist()
        self.files: list[str] = []
        for path in map(Path, paths):
            if path.is_dir():
                self.files += [str(path / name) for name in list_folder(path, "").paths]
            elif path.exists():
                self.files.append(str(path))
            else:
                raise DataError(f"{path}: no such file or folder")
        source = FileSource(Path(), self.files, self.config.size)
        nothing = np.zeros((len(self.files), 0), dtype=np.int8)
        self.dataset = ImageDataset("images", "to predict", source, nothing, [], self.files, "skip")

    def bad_images(self) -> list[str]:
        """A line for each image that could not be read."""
        return self.dataset.bad_images()

    def __iter__(self) -> Iterator[Predicted]:
        """In this process, whatever their number."""
        found, any_read = self.decisions, False
        with joined_world(self.config.device, self.config.threads) as world:
            alone = World(0, 1, world.device)
            model = self.model.to(world.device, memory_format=torch.channels_last)
            for index, rows in predicted(model, self.dataset, self.config, alone):
                logits, any_read = rows.float().cpu(), True
                probabilities = logits.sigmoid() if found is None else found.probabilities(logits)
                decided = logits > 0 if found is None else found.decide(logits)
                yield Predicted([self.files[i] for i in index.tolist()], probabilities, decided)
        if not any_read:
            first = next(iter(self.bad_images()), "")
            raise DataError(f"none of the {len(self.files)} images can be read. {first}")


def default_name(config: Config) -> str:
    """Of a run's folder. The same options give the same name, so that a run is found again."""
    known = config.protocol if config.known is None else f"{config.known:g}"
    known = "full" if known == "uniform" else known
    return f"{config.data.partition(':')[0]}-{known}-{config.mix}-{config.seed}"
