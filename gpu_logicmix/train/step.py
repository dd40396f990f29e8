"""What a step and an evaluation are made of: the processes, the data, the batch on the device."""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import json
import os
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from gpu_logicmix.augment.logicmix import GPULogicMix
from gpu_logicmix.augment.randaugment import RandAugment, RandomHorizontalFlip
from gpu_logicmix.augment.siblings import Mixup, MixupPME, MultiLabelMixup, OrMixup
from gpu_logicmix.data import DataError, ImageDataset, cache_dataset, make_loader, open_dataset
from gpu_logicmix.losses import (
    DecoupledAsymmetricLoss,
    PartialAsymmetricLoss,
    PartialBCELoss,
    PartialFocalLoss,
    PartialLoss,
)
from gpu_logicmix.train.config import Config, dataset_options, hide
from gpu_logicmix.train.runfolder import RunError


# ------------------------------------------------------------------------------------------------------- the processes
class World(NamedTuple):
    rank: int
    size: int
    device: torch.device

    @property
    def main(self) -> bool:
        return self.rank == 0

    def sum_(self, tensor: Tensor) -> Tensor:
        """Add up over all processes, in place."""
        if self.size > 1:
            dist.all_reduce(tensor)
        return tensor

    def wait(self) -> None:
        """Until all processes are here: what the first one has written can be read."""
        if self.size > 1:
            dist.barrier()

    def any(self, number: int) -> int:
        """The largest of what the processes say; waits for the device."""
        if self.size == 1:
            return number
        said = torch.tensor(number, device=self.device)
        dist.all_reduce(said, dist.ReduceOp.MAX)
        return int(said)


@contextlib.contextmanager
def joined_world(device: str = "auto", threads: int | None = None) -> Iterator[World]:
    """This process's place among those that torchrun started, or alone."""
    if threads:
        torch.set_num_threads(threads)
    local = int(os.environ.get("LOCAL_RANK", 0))
    if device == "auto":
        device = f"cuda:{local}" if torch.cuda.is_available() else "cpu"
    try:
        chosen = torch.device(device)
        torch.zeros(1, device=chosen).item()  # what is no device for arithmetic, as "meta", says so here
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise RunError(f"device={device!r}: {str(error).splitlines()[0]}") from None
    if chosen.type == "cuda":
        torch.cuda.set_device(chosen)
    else:
        keep_memory()
    size = int(os.environ.get("WORLD_SIZE", 1))
    if size == 1:
        yield World(0, 1, chosen)
        return
    # torchrun keeps one store over all its restarts: without a name of its own, a process would find the addresses of
    # those that are dead.
    store, rank, size = next(dist.rendezvous("env://"))
    store = dist.PrefixStore(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"), store)
    dist.init_process_group("nccl" if chosen.type == "cuda" else "gloo", store=store, rank=rank, world_size=size)
    try:
        yield World(rank, size, chosen)
    finally:
        dist.destroy_process_group()


def keep_memory() -> None:
    """Let glibc keep the memory of large tensors that are freed, for the next ones. By default it goes back to the
    system, which hands it out again page by page: a fifth to a third of a training step on a CPU."""
    with contextlib.suppress(OSError, AttributeError):  # not glibc
        libc = ctypes.CDLL("libc.so.6")
        trim_threshold, mmap_max = -1, -4  # from malloc.h
        libc.mallopt(mmap_max, 0)
        libc.mallopt(trim_threshold, 2**31 - 1)


# ------------------------------------------------------------------------------------------------------------ the data
def open_labeled(config: Config, spec: str, split: str) -> ImageDataset:
    """A dataset as the run wants it: size, options, cache. It must have images and labels."""
    options = dataset_options(config.option)
    if spec.partition(":")[0] != config.data.partition(":")[0]:
        options = {}  # they are those of another format
    dataset = open_dataset(spec, split, config.size, on_bad_image=config.on_bad_image, **options)
    if not len(dataset):
        raise DataError(f"{spec} {split}: has no images")
    if not dataset.categories:
        raise DataError(f"{spec}: has no labels to train with")
    return cache_dataset(dataset, config.cache) if config.cache else dataset


class Rows(NamedTuple):
    """Of the training set: to train on, to validate on in place of the val split, to choose the best epoch by."""

    train: np.ndarray
    held_out: np.ndarray
    tune: np.ndarray


def _rows(config: Config, count: int) -> Rows:
    """None of them depends on the seed of the run. Images to tune by come from the end of the order: with
    `images=20_000` of 40,000 the training images are the same with and without them."""
    order = torch.randperm(count, generator=torch.Generator().manual_seed(0)).numpy()
    held = round(count * config.holdout)
    if config.holdout and not 0 < held < count:
        raise DataError(f"holdout={config.holdout:g}: of {count} images that are {held}; both parts need some")
    left = count - held - config.tune_images
    if left < 1:
        raise DataError(f"tune_images={config.tune_images}: {count - held} training images leave none to train on")
    return Rows(
        np.sort(order[held : held + left][: config.images]), np.sort(order[:held]), np.sort(order[held + left :])
    )


def open_train(config: Config) -> tuple[ImageDataset, np.ndarray]:
    """The training images with the labels that are known, and all their labels. Which labels are hidden does not depend
    on how many images are used."""
    dataset = open_labeled(config, config.data, "train")
    full = dataset.labels
    dataset.labels, _ = hide(full, config.known, config.protocol, config.seed)
    rows = _rows(config, len(dataset)).train
    if len(rows) < len(dataset):
        dataset, full = dataset.take(rows), full[rows]
    if not (dataset.labels == 1).any():
        raise DataError(
            f"{config.data}: of the labels of {len(dataset):,} images none is known to be present, there is nothing to "
            "learn from; a larger --known or more images may help"
        )
    return dataset, full


def open_val(config: Config) -> ImageDataset:
    """The images to validate on, with all their labels."""
    if config.holdout:
        dataset = open_labeled(config, config.data, "train")
        return dataset.take(_rows(config, len(dataset)).held_out)
    return open_labeled(config, config.val or config.data, "val")


def open_tune(config: Config) -> ImageDataset | None:
    """The training images to choose the best epoch by, with the labels of theirs that are known; None if there are
    none."""
    if not config.tune_images:
        return None
    dataset = open_labeled(config, config.data, "train")
    dataset.labels, _ = hide(dataset.labels, config.known, config.protocol, config.seed)
    return dataset.take(_rows(config, len(dataset)).tune)


def fingerprint(dataset: ImageDataset) -> str:
    """Of what a run learns from: categories, images by name, known labels."""
    digest = hashlib.sha256(json.dumps([dataset.categories, list(dataset.ids)]).encode())
    digest.update(dataset.labels.tobytes())
    return digest.hexdigest()[:16]


# ------------------------------------------------------------------------------------------------- a step on the device
class Augment(nn.Module):
    """What happens to a batch on the device before the model sees it: flip, RandAugment, mix; in this order."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.flip = RandomHorizontalFlip() if config.flip else nn.Identity()
        self.randaugment = RandAugment(config.ra_n, config.ra_m) if config.randaugment else nn.Identity()
        makers = {
            "logicmix": lambda: GPULogicMix(config.p, config.k_min, config.k_max),
            "mixup": Mixup,
            "ormixup": OrMixup,
            "mlmixup": MultiLabelMixup,
            "mixup-pme": MixupPME,
        }
        self.mix = makers[config.mix]() if config.mix in makers else None
        self.mixed_epochs = config.epochs - config.clean_epochs
        self.set_epoch(0)

    def set_epoch(self, epoch: int) -> None:
        """Counted from 0."""
        alternate = isinstance(self.mix, OrMixup)
        if alternate:
            self.mix.set_epoch(epoch)
        self.mixes = self.mix is not None and epoch < self.mixed_epochs and not (alternate and epoch % 2)

    def forward(self, images: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """uint8 images [B, 3, H, W] and labels -> floats in [0, 1], labels, which samples are mixed (None: none)."""
        images = self.randaugment(self.flip(images)).float().div_(255)
        if not self.mixes:
            return images, targets, None
        plan = self.mix.plan(len(images), images.device)
        return *self.mix(images, targets, plan), plan.mixed


def make_loss(config: Config, reduction: str = "sum") -> PartialLoss:
    shared = {"reduction": reduction, "assume_negative": config.assume_negative}
    policy = {"gamma_neg": config.gamma_neg, "gamma_pos": config.gamma_pos, "clip": config.clip}
    if config.loss == "bce":
        return PartialBCELoss(**shared)
    if config.loss == "focal":
        return PartialFocalLoss(config.gamma_pos or 2, **shared)
    return (DecoupledAsymmetricLoss if config.loss == "dp-asl" else PartialAsymmetricLoss)(**policy, **shared)


def _batches(loader) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """What goes wrong in a process that decodes, in the words it has when there is none."""
    try:
        yield from loader
    except DataError as error:
        if not str(error).startswith("Caught "):
            raise
        # torch has put the traceback before it, and the name of the class.
        raise type(error)(str(error).strip().splitlines()[-1].partition(": ")[2]) from error
    except RuntimeError as error:
        if "DataLoader worker" not in str(error):
            raise
        raise RunError(
            f"a process that decodes images has died ({str(error).splitlines()[0]}); if memory ran out, fewer "
            "--workers may help. Go on with --resume"
        ) from error


def moved(loader, device: torch.device) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Batches on the device; on CUDA the next one travels on a stream of its own while this one trains."""
    if device.type != "cuda":
        for batch in _batches(loader):
            yield tuple(part.to(device) for part in batch)
        return
    stream = torch.cuda.Stream(device)

    def move(batch):
        with torch.cuda.stream(stream):
            return tuple(part.to(device, non_blocking=True) for part in batch)

    coming = None
    for batch in _batches(loader):
        now, coming = coming, move(batch)
        if now is not None:
            yield now
        torch.cuda.current_stream(device).wait_stream(stream)
        for part in coming:
            part.record_stream(torch.cuda.current_stream(device))
    if coming is not None:
        yield coming


def seed_step(seed: int, step: int, rank: int) -> None:
    """Fix all that a step draws at random, on every device."""
    digest = hashlib.blake2b(f"{seed} {step} {rank}".encode(), digest_size=8).digest()
    torch.manual_seed(int.from_bytes(digest, "little") >> 1)


def autocast(config: Config, device: torch.device):
    kinds = {"bf16": torch.bfloat16, "fp16": torch.float16}
    amp = ("bf16" if device.type == "cuda" else "off") if config.amp == "auto" else config.amp
    return torch.autocast(device.type, dtype=kinds.get(amp), enabled=amp in kinds)


def images_to_do(config: Config, train: int, val: int, epochs: int, world: int = 1) -> int:
    """Images that `epochs` epochs of a run work through: to train on, to validate, to label. For progress bars."""
    size = config.batch_size * world
    trained = train // size * size if train >= size else train
    judged = epochs // config.eval_every + (epochs == config.epochs and epochs % config.eval_every > 0)
    labelled = max(0, min(epochs, config.epochs - 1) - config.cl_start + 1) if config.cl else 0
    return epochs * trained + judged * (val + config.tune_images) + labelled * train


@torch.inference_mode()
def predicted(
    function: Callable[[Tensor], Tensor], dataset: ImageDataset, config: Config, world: World
) -> Iterator[tuple[Tensor, Tensor]]:
    """`function` of un-augmented images, batch by batch, and their rows. Each process takes a share of the images."""
    loader = make_loader(dataset, config.batch_size, workers=config.workers, rank=world.rank, world=world.size)
    for images, _, index in moved(loader, world.device):
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
) -> tuple[Tensor, np.ndarray]:
    """`function` of every un-augmented image, [N, ...] on the CPU, and the rows that could be read. Each process takes
    a share of the images; all get all results."""
    out: Tensor | None = None
    seen = torch.zeros(len(dataset), dtype=torch.int32)
    for index, rows in predicted(function, dataset, config, world):
        index, rows = index.cpu(), rows.float().cpu()
        if out is None:
            out = torch.zeros(len(dataset), *rows.shape[1:])
        out[index], seen[index] = rows, 1
        tick(len(index))
    if world.size > 1:
        # A process may have had no image at all: it learns the width from the others.
        width = world.any(0 if out is None else out.shape[1])
        whole = torch.zeros(len(dataset), width) if out is None else out
        # Each row is zero everywhere but in one process: the sum is exact.
        out = world.sum_(whole.to(world.device)).cpu()
        seen = world.sum_(seen.to(world.device)).cpu()
    if out is None or not seen.any():
        first = next(iter(dataset.bad_images()), "")
        raise DataError(f"{dataset.name} {dataset.split}: none of the {len(dataset)} images can be read. {first}")
    good = seen.nonzero()[:, 0].numpy()
    return out, good
