"""What all mixes share: checks, draw, apply, and when they are on."""

from __future__ import annotations

from numbers import Integral, Real

import numpy as np
import torch
from torch import Tensor, nn

from gpu_logicmix.augment.apply import mix_images, or_targets
from gpu_logicmix.augment.finish import Finish
from gpu_logicmix.augment.plan import MixPlan, draw_groups, still_plan
from gpu_logicmix.labels import check_labels, check_unknown


def finished(images: Tensor, finish: Finish) -> Tensor:
    """Nothing mixed, but normalised and cast, if that is asked for."""
    ending = finish.of(images)
    if ending is None:
        return images
    if ending.scale is None or images.shape[0] == 0:
        return images.to(ending.dtype)
    return mix_images(images, still_plan(images.shape[0], 1, images.device), ending=ending)


class Mix(nn.Module):
    """What all mixes share: checks, draw, apply. A child says how it draws and what becomes of the labels."""

    alternate = False  # True: on in even epochs only
    k_max = 2  # samples in a group
    bank = 0

    def __init__(
        self,
        unknown: float = -1,
        generator: torch.Generator | None = None,
        validate: bool = False,
        normalize: tuple | None = None,
        out_dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        unknown = unknown.item() if isinstance(unknown, np.generic) else unknown
        if not isinstance(unknown, (int, float)):
            raise TypeError(f"unknown={unknown!r}: must be a number, or NaN")
        if unknown in (0, 1):
            raise ValueError(f"unknown={unknown}: 0 and 1 mean absent and present; take another number, or NaN")
        if generator is not None and not isinstance(generator, torch.Generator):
            raise TypeError(f"generator={generator!r}: must be a torch.Generator or None")
        self.unknown, self.generator, self.validate = unknown, generator, validate
        self.finish = Finish(normalize, out_dtype)
        self.epoch = 0
        self.mixup_enabled = True  # timm's switch: its training script turns it off for the last epochs

    def set_epoch(self, epoch: int) -> None:
        """Call at the start of each epoch, counted from 0."""
        self.epoch = epoch

    @property
    def active(self) -> bool:
        """Whether `forward` mixes anything now: not in `eval()`, nor with `mixup_enabled = False`, nor in odd epochs of
        a mix that alternates."""
        return self.training and self.mixup_enabled and not (self.alternate and self.epoch % 2)

    def plan(self, batch_size: int, device: torch.device | str | None = None) -> MixPlan:
        """Draw who is mixed with whom: nobody, if not `active`. `device` is where the batch is: the generator's, or
        torch's default."""
        if batch_size < 1:
            raise ValueError(f"batch_size={batch_size}: must be at least 1")
        if device is None and self.generator is not None:
            device = self.generator.device
        if not self.active or (batch_size == 1 and not self.bank):
            return still_plan(batch_size, self.k_max, device)
        return self._draw(batch_size, device)

    def forward(self, images: Tensor, targets: Tensor, plan: MixPlan | None = None) -> tuple[Tensor, Tensor]:
        """Mix a batch: `images` [B, ...] and `targets` [B, C]. New tensors, or the same ones if not `active`,
        apart from `normalize` and `out_dtype`."""
        if not self.active:
            return finished(images, self.finish), targets
        self._check(images, targets, plan)
        if images.shape[0] == 0:
            return finished(images, self.finish), targets
        if plan is None:
            plan = self.plan(images.shape[0], images.device)
        return self._mix(images, targets, plan)

    def _draw(self, batch_size: int, device: torch.device | str | None) -> MixPlan:
        """Two samples of each group, the first with the share that `_share` draws."""
        index = draw_groups(batch_size, 2, batch_size, device, self.generator)
        share = self._share(batch_size, device)
        size = torch.full((batch_size,), 2, device=device)
        return MixPlan(index, size, size > 1, torch.stack([share, 1 - share], dim=1))

    def _share(self, batch_size: int, device: torch.device | str | None) -> Tensor:
        raise NotImplementedError

    def _mix(self, images: Tensor, targets: Tensor, plan: MixPlan) -> tuple[Tensor, Tensor]:
        return mix_images(images, plan, ending=self.finish.of(images)), self._mix_targets(targets, plan)

    def _mix_targets(self, targets: Tensor, plan: MixPlan) -> Tensor:
        """Assume unknown labels absent, then OR."""
        return or_targets(targets, plan, self.unknown, assume="absent")

    def _check(self, images: Tensor, targets: Tensor, plan: MixPlan | None) -> None:
        """Everything that can be said without asking the device; label values only if `validate`."""
        for name, value in (("images", images), ("targets", targets)):
            if not isinstance(value, Tensor):
                raise TypeError(f"{name} is a {type(value).__name__}: must be a tensor")
        if not 3 <= images.ndim <= 5:
            raise ValueError(
                f"images has shape {tuple(images.shape)}: must be a batch of images [B, C, H, W], features [B, N, D] "
                "or videos [B, C, T, H, W]"
            )
        if not (images.is_floating_point() or images.dtype == torch.uint8):
            raise TypeError(f"images.dtype={images.dtype}: must be a floating type or uint8")
        if targets.ndim != 2:
            raise ValueError(f"targets has shape {tuple(targets.shape)}: must be [batch, categories]")
        if images.shape[0] != targets.shape[0]:
            raise ValueError(f"images has {images.shape[0]} samples and targets {targets.shape[0]}: must be as many")
        if images.device != targets.device:
            raise ValueError(f"images are on {images.device} and targets on {targets.device}: must be the same device")
        check_unknown(targets, self.unknown)
        if plan is not None and plan.index.shape[0] != images.shape[0]:
            raise ValueError(
                f"plan is for {plan.index.shape[0]} samples, images has {images.shape[0]}: must be as many"
            )
        if plan is not None and plan.index.device != images.device:
            raise ValueError(f"plan is on {plan.index.device} and images on {images.device}: must be the same device")
        if plan is not None and plan.seen is not None and not self.bank:
            raise ValueError(
                "plan was drawn by a mix with a bank, and this one has none: draw one with this mix, or give it a bank"
            )
        if self.validate:
            check_labels(targets, unknown=self.unknown)


def check_share(name: str, value: float) -> float:
    if not isinstance(value, Real) or isinstance(value, bool):
        raise TypeError(f"{name}={value!r}: must be a number from 0 to 1")
    if not 0 <= value <= 1:
        raise ValueError(f"{name}={value}: must be from 0 to 1")
    return float(value)


def check_whole(name: str, value: int, least: int, rule: str = "") -> int:
    if not isinstance(value, Integral) or isinstance(value, bool):
        raise TypeError(f"{name}={value!r}: must be a whole number")
    if value < least:
        raise ValueError(f"{name}={value}: must be {rule or f'at least {least}'}")
    return int(value)
