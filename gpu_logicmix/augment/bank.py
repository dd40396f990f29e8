"""The last samples of earlier batches, as further partners for batches too small to draw from."""

from __future__ import annotations

import contextlib

import torch
from torch import Tensor

from gpu_logicmix.augment.apply import inverse, memory_order
from gpu_logicmix.augment.plan import MixPlan, inside

_SAVED = ("images", "targets", "seen", "start")


class Bank:
    """A ring on the device: sample number n, counted over all batches, lies in row n % length.

    It is made when the first batch brings shape and device. It holds at least `size` samples besides the batch at hand,
    which is written first, so that a group is read from one table. No step waits for the device: which samples are
    there (`start <= n < seen`, no more than `length`) is known to tensors alone.

    Not a module and without buffers: averages of weights and DDP go over all buffers, and these are none of theirs.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.images: Tensor | None = None
        self.targets: Tensor | None = None
        self.seen: Tensor | None = None  # samples written in all
        self.start: Tensor | None = None  # the first that is still of use

    def clear(self) -> None:
        """Forget all samples. Numbers go on, so that a plan drawn before is known to be old."""
        self.images = self.targets = None
        if self.seen is not None:
            self.start = self.seen.clone()

    def count(self, device: torch.device | str | None) -> Tensor | int:
        """How many samples there are to draw from."""
        if self.seen is None:
            return 0
        return (self.seen - self.start).clamp(max=self.size).to(device)

    def remember(self, images: Tensor, targets: Tensor, plan: MixPlan) -> tuple[Tensor, Tensor, MixPlan]:
        """Write the batch; give back the tables that hold all members of all groups, and the plan in rows of these.

        Partners that are no longer there (overwritten, or before `clear`) are dropped from their groups.
        """
        batch = len(images)
        self._fit(images, targets)
        length = len(self.images)
        drawn = self.seen.clone() if plan.seen is None else plan.seen
        # A plan that is replayed writes where it wrote before: the same plan twice gives the same result.
        base = torch.where(drawn + batch == self.seen, drawn, self.seen)
        row = (base + torch.arange(batch, device=images.device)) % length
        self.images.index_copy_(0, row, images.detach())
        self.targets.index_copy_(0, row, targets)
        self.seen.copy_(base + batch)

        own = plan.index < batch
        number = torch.where(own, base + plan.index, drawn - 1 - (plan.index - batch))
        oldest = torch.maximum(self.start, self.seen - length)
        members = inside(plan) & (own | ((number >= oldest) & (number < base)))
        place = number % length
        if not images.requires_grad:
            return self.images, self.targets, _compact(plan, place, members)
        # The ring holds copies without a history: put the batch itself in front of it.
        place = torch.where(own, plan.index, place + batch)
        tables = torch.cat([images, self.images]), torch.cat([targets, self.targets])
        return *tables, _compact(plan, place, members)

    def state(self) -> dict[str, Tensor]:
        return {f"bank_{name}": value for name in _SAVED if (value := getattr(self, name)) is not None}

    def load(self, state: dict[str, Tensor]) -> None:
        """The opposite of `state`; of a bank of any size."""
        for name in _SAVED:
            saved = state.get(f"bank_{name}")
            setattr(self, name, None if saved is None else saved.detach().clone())
        if self.seen is None:
            return
        if self.start is None:
            self.start = torch.zeros_like(self.seen)
        held = 0 if self.images is None else len(self.images)
        self.start = torch.maximum(self.start, self.seen - held)

    def _fit(self, images: Tensor, targets: Tensor) -> None:
        """Make the ring, or check that the batch is like what it holds, or make it longer for a larger batch."""
        batch, device = len(images), images.device
        # Tensors made in inference mode could never be written to outside of it.
        inference = not torch.compiler.is_compiling() and torch.is_inference_mode_enabled()
        with torch.inference_mode(False) if inference else contextlib.nullcontext():
            if self.seen is None:
                self.seen = torch.zeros((), dtype=torch.int64, device=device)
                self.start = torch.zeros((), dtype=torch.int64, device=device)
            if self.seen.device != device:
                self.seen, self.start = self.seen.to(device), self.start.to(device)
            if self.images is None:
                self.images, self.targets = self._ring(images, batch), self._ring(targets, batch)
            for name, new in (("images", images), ("targets", targets)):
                old = getattr(self, name)
                if new.shape[1:] != old.shape[1:] or new.dtype != old.dtype:
                    raise ValueError(
                        f"{name} are {new.dtype} of shape {tuple(new.shape[1:])}, those in the bank {old.dtype} of "
                        f"shape {tuple(old.shape[1:])}: must be alike; reset_bank() makes the bank start anew"
                    )
                if old.device != device:
                    setattr(self, name, old.to(device))
            if len(self.images) < self.size + batch:
                self._grow(images, targets)

    def _ring(self, like: Tensor, batch: int) -> Tensor:
        order = memory_order(like)
        shape = [like.shape[d] for d in order[1:]]
        return torch.zeros(self.size + batch, *shape, dtype=like.dtype, device=like.device).permute(inverse(order))

    def _grow(self, images: Tensor, targets: Tensor) -> None:
        """A larger batch than ever needs a longer ring. Sample numbers stay, so rows change."""
        number = self.seen - 1 - torch.arange(min(self.size, len(self.images)), device=images.device)
        # A copy that was held back by the smaller ring is not there in the longer one either.
        self.start = torch.maximum(self.start, self.seen - len(number))
        for name, like in (("images", images), ("targets", targets)):
            old, new = getattr(self, name), self._ring(like, len(images))
            new.index_copy_(0, number % len(new), old[number % len(old)])
            setattr(self, name, new)


def _compact(plan: MixPlan, place: Tensor, members: Tensor) -> MixPlan:
    """The plan of these members alone, at `place`, moved to the front of their groups. The first is always one."""
    order = members.logical_not().to(torch.int8).argsort(dim=1, stable=True)
    members = members.gather(1, order)
    place = torch.where(members, place.gather(1, order), place[:, :1])
    size = members.sum(1)
    weight = plan.weight
    if weight is not None:
        weight = torch.where(members, weight.gather(1, order), 0)
        weight = weight / weight.sum(1, keepdim=True)
    return MixPlan(place, size, size > 1, weight)
