"""What a batch goes through on its way to the model: to the device, crop, flip, RandAugment, /255, mix.

A pipeline in place of RandAugment, Kornia's or the user's own, comes after /255. On CUDA the batch stays bytes, as the
loader has them, up to one last pass: mix, /255, normalisation and the dtype that the first layer computes in.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from gpu_logicmix.augment import Mix, make_mix
from gpu_logicmix.augment.base import finished
from gpu_logicmix.augment.crop import MultiScaleCrop
from gpu_logicmix.augment.finish import Finish
from gpu_logicmix.augment.randaugment import RandAugment, RandomHorizontalFlip
from gpu_logicmix.errors import DataError, RunError
from gpu_logicmix.registry import imported
from gpu_logicmix.train.config import Config

Sample = tuple[Tensor, Tensor, Tensor]  # images uint8 [B, 3, H, W], targets int8 [B, C], index int64 [B]


def seed_step(seed: int, step: int, rank: int) -> None:
    """Fix all that a step draws at random, on every device."""
    digest = hashlib.blake2b(f"{seed} {step} {rank}".encode(), digest_size=8).digest()
    torch.manual_seed(int.from_bytes(digest, "little") >> 1)


def mix_of(config: Config, **finish: Any) -> Mix | None:
    """The mix that the options name; `finish`: what the last pass does beside mixing."""
    if config.mix != "logicmix":
        return make_mix(config.mix, **finish)
    return make_mix(
        "logicmix",
        **finish,
        p=config.p,
        k_min=config.k_min,
        k_max=config.k_max,
        bank=config.bank,
        partners=config.partners,
        unknown_as=config.mix_unknown,
    )


def pipeline_of(config: Config) -> nn.Module:
    """What stands between flip and mix: `RandAugment` takes bytes, all others floats in [0, 1]."""
    name = config.augment or ("randaugment" if config.randaugment else "none")
    if name == "none":
        return nn.Identity()
    if name == "randaugment":
        return RandAugment(config.ra_n, config.ra_m)
    if ":" not in name:
        try:
            from gpu_logicmix.augment.kornia import kornia_pipeline
        except ImportError as error:
            raise RunError(f"augment={name!r}: cannot import Kornia ({error}); pip install kornia") from None
        return kornia_pipeline(name, config.ra_n, config.ra_m)
    function = imported("augment", name)
    if not callable(function):
        module, _, own = name.rpartition(":")
        raise ValueError(f"augment={name!r}: {module} has no function {own!r}")
    made = function()
    if not isinstance(made, nn.Module):
        raise ValueError(f"augment={name!r}: must return an nn.Module, not {type(made).__name__}")
    return made


class Augment(nn.Module):
    """From a batch of bytes to what the model sees. `views=2`: a weak view (crop, flip) and a strong one (RandAugment
    or what is in its place too), mixed by the same plan.

    finish: `normalize` and `out_dtype` of the mix. Given, bytes stay bytes until the mix, and what comes out is what
    the first layer takes; None: floats in [0, 1] are mixed and come out."""

    def __init__(self, config: Config, views: int = 1, finish: dict[str, Any] | None = None) -> None:
        super().__init__()
        self.crop = MultiScaleCrop() if config.crop == "multi-scale" else nn.Identity()
        self.flip = RandomHorizontalFlip() if config.flip else nn.Identity()
        self.randaugment = pipeline_of(config)
        self.mix = mix_of(config, **(finish or {}))
        self.finish = None if finish is None else Finish(**finish)
        if views > 1 and config.bank:
            raise ValueError(f"bank={config.bank}: head {config.head} sees two views of each batch; use no bank")
        self.views = views
        self.mixed_epochs = range(config.mix_start - 1, config.epochs - config.clean_epochs)
        self.set_epoch(0)

    def set_epoch(self, epoch: int) -> None:
        """Counted from 0."""
        if self.mix is not None:
            self.mix.set_epoch(epoch)
        self.mixes = self.mix is not None and self.mix.active and epoch in self.mixed_epochs

    def forward(self, images: Tensor, targets: Tensor) -> tuple[list[Tensor], Tensor, Tensor | None]:
        """uint8 images [B, 3, H, W] and labels -> views, labels, which samples are mixed (None: none)."""
        weak = images = self.crop(images)
        if self.views == 1 and isinstance(self.randaugment, RandAugment):
            mirror = self.flip.plan(len(images), images.device) if isinstance(self.flip, RandomHorizontalFlip) else None
            strong = self.randaugment(images, mirror=mirror)
        else:
            weak = self.flip(images)
            takes_bytes = isinstance(self.randaugment, RandAugment | nn.Identity)
            strong = self.randaugment(weak if takes_bytes else _unit(weak))
        views = [weak] * (self.views - 1) + [strong]
        if self.finish is None:
            views = [_unit(view) for view in views]
        if not self.mixes:
            return (views if self.finish is None else [finished(view, self.finish) for view in views]), targets, None
        plan = self.mix.plan(len(images), images.device)
        mixed = [self.mix(view, targets, plan) for view in views]
        return [view for view, _ in mixed], mixed[0][1], plan.mixed


def _unit(images: Tensor) -> Tensor:
    """As floats in [0, 1]."""
    return images.float().div_(255) if images.dtype is torch.uint8 else images


def padded(
    views: list[Tensor], parts: tuple[Tensor | None, ...]
) -> tuple[list[Tensor], tuple[Tensor | None, ...], float]:
    """At least two samples, and by how much to scale the loss: batch norm needs two images, and the processes must stay
    in step where one of them could read none. A single image is taken twice; none are two black ones without a label.
    These add nothing to the sum, but losses that rank or count unknown labels over all processes (LL, CSL, PU-MLC) see
    them."""
    count = len(views[0])
    if count >= 2:
        return views, parts, 1.0
    if count == 1:
        return [torch.cat((v, v)) for v in views], tuple(None if p is None else torch.cat((p, p)) for p in parts), 0.5
    targets, *others = parts
    blank = targets.new_full((2, *targets.shape[1:]), -1)
    # No index either: a method that writes labels has none to write to.
    return [v.new_zeros(2, *v.shape[1:]).float() for v in views], (blank, *(None for _ in others)), 0.0


def moved(loader: Any, device: torch.device) -> Iterator[Sample]:
    """Batches on the device; on CUDA the next one is copied on a stream of its own while this one trains."""
    if device.type != "cuda":
        for batch in _batches(loader):
            yield tuple(part.to(device) for part in batch)
        return
    stream = torch.cuda.Stream(device)

    def move(batch: Sample) -> Sample:
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


def _batches(loader: Any) -> Iterator[Sample]:
    """What goes wrong in a worker process, in the words it has without one."""
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
            f"a worker process that decodes images has died ({str(error).splitlines()[0]}); if memory ran out, use "
            "fewer --workers. Then resume with --resume"
        ) from error
