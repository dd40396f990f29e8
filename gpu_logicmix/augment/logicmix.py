"""LogicMix on the batch that is already on the device.

    mix = GPULogicMix()
    images, targets = mix(images, targets)      # inside the training step; in eval() it does nothing

It first draws a `MixPlan` (who is mixed with whom) and then applies it. Nothing here waits for the device or has a
shape that depends on the draw, so all of it runs under `torch.compile(fullgraph=True)` and inside a CUDA graph.

Chong et al., "Free Performance Gain from Mixing Multiple Partially Labeled Samples in Multi-label Image
Classification", 2024.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gpu_logicmix.augment.apply import inverse, memory_order, mix_images, or_targets
from gpu_logicmix.augment.base import Mix, check_share
from gpu_logicmix.augment.plan import MixPlan, draw_groups, filled

_BANK = ("bank_images", "bank_targets", "bank_seen")


class GPULogicMix(Mix):
    """LogicMix: the mean of K images, the logical OR of their labels.

    With probability `p`, a sample is mixed with K - 1 others of the batch, K uniform from `k_min` to `k_max`. A
    category is then present if any of them has it, absent if all lack it, and else unknown. All other samples stay as
    they are. A batch smaller than K mixes what there is.

    p: share of samples that are mixed (the paper's s).
    k_min, k_max: how many samples make one, the sample itself among them. COCO and VG-200: 2 and 3; VOC 2007: 3 and 4.
    unknown: the value of an unknown label, which may be NaN.
    generator: where the random numbers come from; torch's own generator of the device if None.
    bank: also draw partners from the last `bank` samples of earlier batches, kept on the device as they came in. For
        batches too small to draw from. They take `bank` + B samples of memory and are part of `state_dict`.
    validate: check that all labels are 0, 1 or `unknown`, which has to wait for the device once a call.
    """

    def __init__(
        self,
        p: float = 0.5,
        k_min: int = 2,
        k_max: int = 3,
        *,
        unknown: float = -1,
        generator: torch.Generator | None = None,
        bank: int = 0,
        validate: bool = False,
    ) -> None:
        super().__init__(unknown, generator, validate)
        check_share("p", p)
        for name, value, least in (("k_min", k_min, 1), ("k_max", k_max, k_min), ("bank", bank, 0)):
            if not isinstance(value, int) or isinstance(value, bool):
                raise TypeError(f"{name}={value!r}: must be a whole number")
            if value < least:
                rule = f"at least k_min={k_min}" if name == "k_max" else f"at least {least}"
                raise ValueError(f"{name}={value}: must be {rule}")
        self.p, self.k_min, self.k_max, self.bank = p, k_min, k_max, bank
        if bank:
            # The first batch makes the ring, as it brings shape and device. Sample number n lies in row n % length.
            for name in _BANK:
                self.register_buffer(name, None)

    def extra_repr(self) -> str:
        bank = f", bank={self.bank}" if self.bank else ""
        return f"p={self.p}, k_min={self.k_min}, k_max={self.k_max}, unknown={self.unknown}{bank}"

    def _draw(self, batch_size: int, device) -> MixPlan:
        pool = batch_size
        if self.bank and self.bank_seen is not None:
            pool = batch_size + self.bank_seen.to(device).clamp(max=self.bank)
        index = draw_groups(batch_size, self.k_max, pool, device, self.generator)
        k = torch.randint(self.k_min, self.k_max + 1, (batch_size,), device=device, generator=self.generator)
        chosen = torch.rand(batch_size, device=device, generator=self.generator) < self.p
        size = torch.where(chosen, k.clamp(max=pool), 1)
        return filled(MixPlan(index, size, size > 1))

    def _mix(self, images: Tensor, targets: Tensor, plan: MixPlan) -> tuple[Tensor, Tensor]:
        if not self.bank:
            return super()._mix(images, targets, plan)
        row = self._remember(images, targets, plan.index)
        if images.requires_grad:  # the ring holds copies without a history: put the batch itself in front of it
            table = torch.cat([images, self.bank_images])
            table_row = torch.where(plan.index < len(images), plan.index, row + len(images))
        else:
            table, table_row = self.bank_images, row
        mixed = mix_images(images, plan._replace(index=table_row), table)
        return mixed, self._mix_targets(self.bank_targets, plan._replace(index=row))

    def _mix_targets(self, targets: Tensor, plan: MixPlan) -> Tensor:
        return or_targets(targets, plan, self.unknown)

    def reset_bank(self) -> None:
        """Forget all earlier samples, for instance before the image size changes."""
        if self.bank:
            self.bank_images = self.bank_targets = self.bank_seen = None

    def _remember(self, images: Tensor, targets: Tensor, index: Tensor) -> Tensor:
        """Write the batch over the oldest samples of the ring and say in which rows the samples of `index` lie."""
        batch = len(images)
        if self.bank_seen is None:
            self.bank_images, self.bank_targets = self._ring(images, batch), self._ring(targets, batch)
            self.bank_seen = torch.zeros((), dtype=torch.int64, device=images.device)
        for name, new, old in (("images", images, self.bank_images), ("targets", targets, self.bank_targets)):
            if new.shape[1:] != old.shape[1:] or new.dtype != old.dtype:
                raise ValueError(
                    f"{name} are {new.dtype} of shape {tuple(new.shape[1:])}, those in the bank {old.dtype} of shape "
                    f"{tuple(old.shape[1:])}: must be alike; reset_bank() makes the bank start anew"
                )
        if self.bank_images.device != images.device:
            self.to(images.device)
        if len(self.bank_images) < self.bank + batch:
            self._grow(images, targets)
        length = len(self.bank_images)
        row = (self.bank_seen + torch.arange(batch, device=images.device)) % length
        self.bank_images.index_copy_(0, row, images.detach())
        self.bank_targets.index_copy_(0, row, targets)
        self.bank_seen += batch
        age = torch.where(index < batch, batch - 1 - index, index)  # 0 is the last sample of this batch
        return (self.bank_seen - 1 - age) % length

    def _ring(self, like: Tensor, batch: int) -> Tensor:
        order = memory_order(like)
        shape = [like.shape[d] for d in order[1:]]
        return like.new_zeros(self.bank + batch, *shape).permute(inverse(order))

    def _grow(self, images: Tensor, targets: Tensor) -> None:
        """A larger batch than ever needs a longer ring. Sample numbers stay, so rows change."""
        number = self.bank_seen - 1 - torch.arange(min(self.bank, len(self.bank_images)), device=images.device)
        for name, like in (("bank_images", images), ("bank_targets", targets)):
            old, new = getattr(self, name), self._ring(like, len(images))
            new.index_copy_(0, number % len(new), old[number % len(old)])
            setattr(self, name, new)

    def _load_from_state_dict(self, state_dict, prefix, *args) -> None:
        for name in _BANK if self.bank else ():
            saved = state_dict.get(prefix + name)  # brings the shape, as the first batch would
            setattr(self, name, None if saved is None else saved.clone())
        super()._load_from_state_dict(state_dict, prefix, *args)
