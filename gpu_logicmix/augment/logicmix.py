"""LogicMix and its siblings, on the batch that is already on the device.

    mix = GPULogicMix()
    images, targets = mix(images, targets)      # inside the training step; in eval() it does nothing

Each method first draws a `MixPlan` (who is mixed with whom, and how much of each) and then applies it. The draw can be
kept, replayed and tested apart from the arithmetic. Nothing here waits for the device or has a shape that depends on
the draw, so all of it runs under `torch.compile(fullgraph=True)` and inside a CUDA graph.

- LogicMix: Chong et al., "Free Performance Gain from Mixing Multiple Partially Labeled Samples in Multi-label Image
  Classification", 2024.
- Mixup: Zhang et al., "mixup: Beyond Empirical Risk Minimization", ICLR 2018.
- OrMixup: Wang et al., "A Baseline for Multi-Label Image Classification Using an Ensemble of Deep Convolutional Neural
  Networks", ICIP 2019.
- Multi-label Mixup: Gao et al., "Dynamic Mixup for Multi-Label Long-Tailed Food Ingredient Recognition", 2022.
- Mixup-PME: Dong et al., "Revisiting Vicinal Risk Minimization for Partially Supervised Multi-Label Classification
  Under Data Scarcity", CVPR workshops 2022.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gpu_logicmix.labels import check_labels, from_bits, is_unknown, to_bits

# Samples are cut into rows of at most this many numbers, so that a sum stays in the first-level cache while it grows.
_ROW = 4096
_BANK = ("bank_images", "bank_targets", "bank_seen")


class MixPlan(NamedTuple):
    """Who is mixed with whom: sample i with `index[i, :size[i]]`, of which the first is sample i itself.

    Indices past the end of the batch stand for the bank (see `GPULogicMix`): `batch_size` is the sample seen last
    before this batch, `batch_size + 1` the one before it, and so on.
    """

    index: Tensor  # [B, k_max] int64; places past `size` repeat the sample itself
    size: Tensor  # [B] int64: 1 where a sample stays as it is
    mixed: Tensor  # [B] bool: size > 1
    weight: Tensor | None = None  # [B, k_max] float32: the share of each image, 1 in all; None: 1 / size each


def draw_groups(batch_size: int, k: int, pool: int | Tensor, device=None, generator=None) -> Tensor:
    """[B, k]: i itself, then k - 1 others out of `pool` samples: distinct, all orders equally likely, O(B * k) memory.

    Each place draws its rank among the samples not yet taken (a Lehmer code); decoding the code from the right turns
    ranks into samples. Where the pool is too small for k, the last places hold nothing of use.
    """
    index = torch.arange(batch_size, device=device)[:, None]
    if k == 1:
        return index
    left = (pool - 1 - torch.arange(k - 1, device=device)).clamp(min=1)
    # 63 random bits, so that the remainder is uniform for every pool that fits into memory.
    rank = torch.randint(2**63 - 1, (batch_size, k - 1), device=device, generator=generator) % left
    index = torch.cat([index, rank], dim=1)
    for j in range(k - 2, -1, -1):
        later = index[:, j + 1 :]
        later += later >= index[:, j, None]
    return index


def mix_images(images: Tensor, plan: MixPlan, table: Tensor | None = None) -> Tensor:
    """The weighted mean of each group, in the dtype and memory format of `images`; groups of one are copied.

    `table` holds the samples that `plan.index` speaks of, where these are not the images themselves.
    """
    table = images if table is None else table
    order = _memory_order(images)
    rows = table.permute(order)
    shape = (images.shape[0], *rows.shape[1:])
    rows = rows.reshape(rows.shape[0], -1)  # a view, unless `images` has holes in it
    mean = _mean_of_bytes if rows.dtype == torch.uint8 else _mean_of_floats
    return mean(rows, plan).view(shape).permute(_inverse(order))


def _mean_of_floats(rows: Tensor, plan: MixPlan) -> Tensor:
    """Places past the size of a group repeat the sample itself, so its share is split over them: no weight is 0, which
    would turn an infinite pixel into NaN. Halves, smallest first, add up without rounding, so a group of one comes out
    bit for bit."""
    inside = None
    if plan.weight is not None:
        weight = plan.weight
    elif _sizes_are_at_hand(rows):
        inside = _inside(plan)
        weight = (1 / plan.size.to(rows.dtype))[:, None].expand_as(inside)
    else:
        k_max = plan.index.shape[1]
        halves = torch.exp2(torch.arange(-k_max, 0, device=rows.device).to(rows.dtype))
        weight = torch.where(_inside(plan), 1.0, halves)
        weight[:, 0] = torch.exp2((plan.size - k_max).to(rows.dtype))
        weight = weight / plan.size[:, None]
    return _sum_rows(rows, _bags(rows, plan.index, weight, inside))


def _mean_of_bytes(rows: Tensor, plan: MixPlan) -> Tensor:
    """Rounded to nearest, halves to even. In columns, to keep the float copy small."""
    inside = _inside(plan)
    # Where all shares are equal, the sum of bytes is exact and only the division rounds.
    weight = inside.float() if plan.weight is None else plan.weight
    out = rows.new_empty(plan.index.shape[0], rows.shape[1])
    pieces = 8 if rows.is_cuda else max(8, rows.numel() >> 19)  # few kernels on a GPU, 2 MB for the cache of a CPU
    width = -(-rows.shape[1] // pieces // _ROW) * _ROW if rows.shape[1] > 8 * _ROW else -(-rows.shape[1] // 8)
    bags = None
    for piece, mean in zip(rows.split(width, dim=1), out.split(width, dim=1), strict=True):
        if bags is None or piece.shape[1] != width:
            bags = _bags(piece, plan.index, weight.float(), inside if _sizes_are_at_hand(rows) else None)
        total = _sum_rows(piece.float(), bags)
        if plan.weight is None:
            total /= plan.size[:, None]
        mean.copy_(total.round_().to(torch.int16))  # torch has no fast way from floats to bytes on the CPU
    return out


def _inside(plan: MixPlan) -> Tensor:
    return torch.arange(plan.index.shape[1], device=plan.size.device) < plan.size[:, None]


def _filled(plan: MixPlan) -> MixPlan:
    """The plan with the sample itself in the places past the size of its group."""
    return plan._replace(index=torch.where(_inside(plan), plan.index, plan.index[:, :1]))


def _sizes_are_at_hand(rows: Tensor) -> bool:
    """True on the CPU, run as written: there, reading only the members of each group waits for nothing."""
    return rows.is_cpu and type(rows) is Tensor and not rows.requires_grad and not torch.compiler.is_compiling()


class _Bags(NamedTuple):
    """The arguments of `embedding_bag` that sum rows."""

    index: Tensor
    weight: Tensor
    start: Tensor | None
    cuts: int  # how many rows of the table make one sample


def _bags(rows: Tensor, index: Tensor, weight: Tensor, inside: Tensor | None) -> _Bags:
    """For each sample i the sum of weight[i, k] * rows[index[i, k]] over k.

    Samples are cut into short rows, so that a sum stays in the first-level cache while it grows. `inside` leaves out
    places, for which their number must be known on the host. Without it all are read, which costs little: what is read
    again is in that cache.
    """
    cuts = _cuts(rows.shape[1])
    index = (index[:, None] * cuts + torch.arange(cuts, device=index.device)[:, None]).flatten(0, 1)
    weight = weight.repeat_interleave(cuts, dim=0)
    if inside is None:
        return _Bags(index, weight, None, cuts)
    inside = inside.repeat_interleave(cuts, dim=0)
    size = inside.sum(1)
    return _Bags(index[inside], weight[inside], size.cumsum(0) - size, cuts)


def _sum_rows(rows: Tensor, bags: _Bags) -> Tensor:
    """One pass and no temporary: every device has `embedding_bag`; half precision it adds up in float32."""
    table = rows.reshape(-1, rows.shape[1] // bags.cuts)
    weight = bags.weight.to(rows.dtype)
    return F.embedding_bag(bags.index, table, bags.start, mode="sum", per_sample_weights=weight).view(-1, rows.shape[1])


def _cuts(length: int) -> int:
    """Into how many equal rows to cut a sample: as few as give rows of at most _ROW; 1 where none come out even."""
    for cuts in range(-(-length // _ROW), length // 256 + 1):
        if length % cuts == 0:
            return cuts
    return 1


def or_targets(targets: Tensor, plan: MixPlan, unknown: float = -1) -> Tensor:
    """`logic_or` over each group. Places past its size repeat the sample itself, which OR does not mind."""
    categories = targets.shape[1]
    words = F.pad(to_bits(targets, unknown), (0, -categories % 8)).view(torch.int64)  # eight labels each
    # On the CPU so many samples at a time that their labels stay in its cache; that matters to thousands of categories.
    rows = len(plan.index) if words.is_cuda else max(1, 2**17 // max(1, words.shape[1]))
    joined = []
    for index in plan.index.split(rows):
        joined.append(words.index_select(0, index[:, 0]))
        for partner in index.unbind(1)[1:]:
            joined[-1] |= words.index_select(0, partner)
    return from_bits(torch.cat(joined).view(torch.int8)[:, :categories], targets.dtype, unknown)


class _Mix(nn.Module):
    """What all mixes share: checks, draw, apply. A child says how it draws and what becomes of the labels."""

    def __init__(self, unknown: float = -1, generator: torch.Generator | None = None, validate: bool = False) -> None:
        super().__init__()
        if unknown in (0, 1):
            raise ValueError(f"unknown={unknown}: 0 and 1 mean absent and present; take another number, or NaN")
        if generator is not None and not isinstance(generator, torch.Generator):
            raise TypeError(f"generator={generator!r}: must be a torch.Generator or None")
        self.unknown, self.generator, self.validate = unknown, generator, validate

    def plan(self, batch_size: int, device: torch.device | str | None = None) -> MixPlan:
        """Draw who is mixed with whom. `device` is where the batch is: the generator's, or torch's default."""
        if batch_size < 1:
            raise ValueError(f"batch_size={batch_size}: must be at least 1")
        if device is None and self.generator is not None:
            device = self.generator.device
        return self._draw(batch_size, device)

    def forward(self, images: Tensor, targets: Tensor, plan: MixPlan | None = None) -> tuple[Tensor, Tensor]:
        """Mix a batch: `images` [B, ...] and `targets` [B, C]. New tensors in training, the same ones in `eval()`."""
        if not self.training:
            return images, targets
        self._check(images, targets, plan)
        if images.shape[0] == 0:
            return images, targets
        # A plan that is given may be made by hand, with anything past the sizes.
        plan = self.plan(images.shape[0], images.device) if plan is None else _filled(plan)
        return self._mix(images, targets, plan)

    def _draw(self, batch_size: int, device) -> MixPlan:
        """Two samples of each group, the first with the share that `_share` draws."""
        index = draw_groups(batch_size, 2, batch_size, device, self.generator)
        share = self._share(batch_size, device)
        if batch_size == 1:  # with itself, which half and half leaves as it is
            index, share = torch.zeros_like(index), torch.full_like(share, 0.5)
        size = torch.full((batch_size,), min(2, batch_size), device=device)
        return MixPlan(index, size, size > 1, torch.stack([share, 1 - share], dim=1))

    def _share(self, batch_size: int, device) -> Tensor:
        raise NotImplementedError

    def _mix(self, images: Tensor, targets: Tensor, plan: MixPlan) -> tuple[Tensor, Tensor]:
        return mix_images(images, plan), self._mix_targets(targets, plan)

    def _mix_targets(self, targets: Tensor, plan: MixPlan) -> Tensor:
        """Assume unknown labels absent, then OR."""
        return or_targets(targets.masked_fill(is_unknown(targets, self.unknown), 0), plan, self.unknown)

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
        if self.unknown != self.unknown and not targets.is_floating_point():
            raise TypeError(f"targets.dtype={targets.dtype} cannot hold unknown=NaN: use a floating type or unknown=-1")
        if plan is not None and plan.index.shape[0] != images.shape[0]:
            raise ValueError(
                f"plan is for {plan.index.shape[0]} samples, images has {images.shape[0]}: must be as many"
            )
        if plan is not None and plan.index.device != images.device:
            raise ValueError(f"plan is on {plan.index.device} and images on {images.device}: must be the same device")
        if self.validate:
            check_labels(targets, unknown=self.unknown)


class GPULogicMix(_Mix):
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
        _check_share("p", p)
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
        return _filled(MixPlan(index, size, size > 1))

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
        order = _memory_order(like)
        shape = [like.shape[d] for d in order[1:]]
        return like.new_zeros(self.bank + batch, *shape).permute(_inverse(order))

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


class Mixup(_Mix):
    """Mixup with unknown labels taken as absent: each sample with another one, shares from Beta(alpha, alpha).

    The labels come back soft: floating types are kept, others become float32. This and the other siblings mix every
    sample; `unknown`, `generator` and `validate` are as in `GPULogicMix`.
    """

    def __init__(self, alpha: float = 0.2, *, unknown: float = -1, generator=None, validate: bool = False) -> None:
        super().__init__(unknown, generator, validate)
        if not alpha > 0:
            raise ValueError(f"alpha={alpha}: must be above 0")
        self.alpha = alpha

    def _share(self, batch_size: int, device) -> Tensor:
        # Beta as a ratio of Gammas. Gamma(alpha) = Gamma(alpha + 1) * U^(1 / alpha) in logarithms, because for small
        # alpha both would underflow to 0.
        gamma = torch._standard_gamma(torch.full((2, batch_size), self.alpha + 1.0, device=device), self.generator)
        uniform = 1 - torch.rand(2, batch_size, device=device, generator=self.generator)
        log = gamma.log() + uniform.log() / self.alpha
        return torch.sigmoid(log[0] - log[1])

    def _mix_targets(self, targets: Tensor, plan: MixPlan) -> Tensor:
        return _soft(targets.masked_fill(is_unknown(targets, self.unknown), 0), plan)


class OrMixup(_Mix):
    """Wang et al.: each sample with another one, `lam` of it, labels by OR with unknown taken as absent.

    On in the first epoch, off in the next, and so on: call `set_epoch(epoch)` at the start of each.
    """

    def __init__(self, lam: float = 0.5, *, unknown: float = -1, generator=None, validate: bool = False) -> None:
        super().__init__(unknown, generator, validate)
        _check_share("lam", lam)
        self.lam, self.epoch = lam, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def _share(self, batch_size: int, device) -> Tensor:
        return torch.full((batch_size,), self.lam, device=device)

    def forward(self, images: Tensor, targets: Tensor, plan: MixPlan | None = None) -> tuple[Tensor, Tensor]:
        if self.epoch % 2:
            return images, targets
        return super().forward(images, targets, plan)


class MultiLabelMixup(_Mix):
    """Gao et al.: each sample with another one, share uniform from 0 to 1, labels by OR with unknown as absent."""

    def __init__(self, *, unknown: float = -1, generator=None, validate: bool = False) -> None:
        super().__init__(unknown, generator, validate)

    def _share(self, batch_size: int, device) -> Tensor:
        return torch.rand(batch_size, device=device, generator=self.generator)


class MixupPME(_Mix):
    """Dong et al.: each sample with another one, share uniform from `alpha` to 1; an unknown label counts 0.5 in the
    mean, and stays unknown where the sample's own is. The labels come back soft, as from `Mixup`."""

    def __init__(self, alpha: float = 0.75, *, unknown: float = -1, generator=None, validate: bool = False) -> None:
        super().__init__(unknown, generator, validate)
        _check_share("alpha", alpha)
        self.alpha = alpha

    def _share(self, batch_size: int, device) -> Tensor:
        return self.alpha + (1 - self.alpha) * torch.rand(batch_size, device=device, generator=self.generator)

    def _mix_targets(self, targets: Tensor, plan: MixPlan) -> Tensor:
        hidden = is_unknown(targets, self.unknown)
        return _soft(_floating(targets).masked_fill(hidden, 0.5), plan).masked_fill_(hidden, self.unknown)


def _soft(targets: Tensor, plan: MixPlan) -> Tensor:
    targets = _floating(targets)
    weight = plan.weight.to(targets.dtype)
    return weight[:, :1] * targets + weight[:, 1:] * targets[plan.index[:, 1]]


def _floating(targets: Tensor) -> Tensor:
    return targets if targets.is_floating_point() else targets.float()


def _check_share(name: str, value: float) -> None:
    if not 0 <= value <= 1:
        raise ValueError(f"{name}={value}: must be from 0 to 1")


def _memory_order(tensor: Tensor) -> list[int]:
    """The dimensions after the first as they lie in memory, so that one permute undoes channels_last."""
    return [0, *sorted(range(1, tensor.ndim), key=tensor.stride, reverse=True)]


def _inverse(order: list[int]) -> list[int]:
    return sorted(range(len(order)), key=order.__getitem__)
