"""What a loss is: the call in a loop of one's own, the call in a training run, and what passes between them.

In a loop of one's own a loss is called with logits and targets, and `mixed` where it matters:

    value = loss(logits, targets, mixed=plan.mixed)        # reduced as `reduction` says

In a training run it is called with what the head gave and with the batch, and returns a sum and what it is a sum over,
so that accumulated steps and several processes weigh every label alike:

    total, count = loss(output, batch)

A loss is one file in this folder: a class derived from `Loss` (or from `PartialLoss`, where unknown labels are left
out) that has a method `cells` and registers itself under its name on the command line. See docs/architecture.md.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from gpu_logicmix.labels import is_unknown
from gpu_logicmix.losses.everyone import Everyone, world
from gpu_logicmix.registry import Registry

LOSSES = Registry("loss", "gpu_logicmix.losses", given=("reduction", "unknown"))
REDUCTIONS = ("mean", "sum", "none")


class Batch(NamedTuple):
    """The labels of a step, after mixing."""

    targets: Tensor  # [B, C]: 1 present, 0 absent, -1 unknown; soft targets in [0, 1] with Mixup
    index: Tensor | None = None  # [B]: rows of the training set; of a mixed sample, that of its first image
    mixed: Tensor | None = None  # [B] bool: which samples are mixtures; None: none is
    epoch: int = 0  # counted from 0


class Output(NamedTuple):
    """What a head gives."""

    logits: Tensor  # [B, C]
    extra: dict[str, Any] = {}  # noqa: RUF012  # what it wants its own losses to see; never written to


class LossSum(NamedTuple):
    """A sum, and what to divide it by for a mean: 0-d tensors on the device."""

    total: Tensor
    count: Tensor


class Loss(nn.Module):
    """A loss with unknown labels.

    reduction (of the call with logits and targets):
        "mean"  the sum divided by the number of labels that count; 0 where there are none.
        "sum"   the sum.
        "none"  each label's own, [B, C]; 0 where it does not count.
    unknown: the value of an unknown label, for that call. NaN is unknown whatever it is.

    `epoch` and `epochs` are where training stands, for losses that change on the way; a loop of one's own sets them
    with `set_epoch`.
    """

    writes_labels = False  # True: wants `table`, the pseudo-labels of the run, and writes to it
    table: Any = None
    # True: all processes call it in step, so that what it ranks or takes means over is the batch of all. A run sets it.
    together = False
    _capacity: int | None = None

    def __init__(self, reduction: str = "mean", *, unknown: float = -1) -> None:
        super().__init__()
        if reduction not in REDUCTIONS:
            raise ValueError(f"reduction={reduction!r}: must be one of {', '.join(REDUCTIONS)}")
        self.reduction, self.unknown = reduction, unknown
        self.epoch, self.epochs = 0, 1

    def prepare(self, labels: Any, categories: list[str]) -> None:
        """Before the first step of a run: the known labels of the training set [N, C], names of the categories."""

    def set_epoch(self, epoch: int, epochs: int | None = None) -> None:
        """At the start of an epoch, counted from 0."""
        self.epoch, self.epochs = epoch, self.epochs if epochs is None else epochs

    def everyone(self, rows: int, device: torch.device) -> Everyone | None:
        """The rows of all processes; None where there are those of this one alone."""
        if not self.together or world()[1] == 1:
            return None
        if self._capacity is None:
            self._capacity = Everyone.agree(rows, device)
        return Everyone(rows, self._capacity, device)

    def groups(self, mixed: Tensor | None, rows: Tensor) -> Tensor | None:
        """`mixed`, or that none is: a process without images has no plan of a mix, and must go with the others."""
        return rows.new_zeros(len(rows), dtype=torch.bool) if mixed is None and self.together else mixed

    def cells(self, output: Output, batch: Batch) -> tuple[Tensor, Tensor]:
        """The loss of each label [B, C] (or of each category [C], where it is no sum over labels), and how many count.
        Must not make the host wait for the device."""
        raise NotImplementedError

    def forward(self, output: Tensor | Output, batch: Tensor | Batch, mixed: Tensor | None = None) -> Tensor | LossSum:
        if isinstance(output, Output):
            values, count = self.cells(output, batch)
            return LossSum(values.sum(), count)
        check_logits(output, batch)
        values, count = self.cells(Output(output), Batch(batch, None, mixed, self.epoch))
        if self.reduction == "none":
            return values
        return values.sum() if self.reduction == "sum" else values.sum() / count.clamp(min=1)

    def extra_repr(self) -> str:
        hidden = ("training", "epoch", "epochs", "table")
        return ", ".join(f"{k}={v!r}" for k, v in vars(self).items() if not k.startswith("_") and k not in hidden)


class PartialLoss(Loss):
    """What losses share that leave unknown labels out: they have `terms`, what a label costs that is 1 and that is 0.

    assume_negative: take unknown labels as absent instead of leaving them out.
    normalize: how much a sample counts by its share `s` of known labels.
        None         not at all.
        "known"      the loss of a sample is its mean over its known labels: g(s) = 1/s of Durand et al.
        (a, b, c)    the loss of a sample is g(s)/C times its sum over its known labels, g(s) = a * s^c + b; Durand et
                     al. train with (-4.45, 5.45, 1).
        "mlcpl"      each label weighs 1 + 1/(1 + known labels of the sample), as with mlcpl's `normalize=True`.

    "mean" divides by the number of known labels in the batch: of all labels with `assume_negative`, of samples that
    have a known label with Durand's normalisation.
    """

    def __init__(
        self,
        reduction: str = "mean",
        *,
        unknown: float = -1,
        assume_negative: bool = False,
        normalize: str | tuple[float, float, float] | None = None,
    ) -> None:
        super().__init__(reduction, unknown=unknown)
        if normalize == "known":
            normalize = (1.0, 0.0, -1.0)
        elif normalize not in (None, "mlcpl") and not (isinstance(normalize, tuple) and len(normalize) == 3):
            raise ValueError(
                f"normalize={normalize!r}: must be None, 'known', 'mlcpl' or (a, b, c) for a weight of a * share^c + b"
            )
        self.assume_negative = assume_negative
        self.normalize = normalize

    def terms(self, logits: Tensor, mixed: Tensor | None) -> tuple[Tensor, Tensor]:
        """What each logit costs if its label is 1, and what if it is 0; [B, C], at least float32."""
        raise NotImplementedError

    def count(self, targets: Tensor) -> Tensor:
        """What "mean" divides the sum by (a tensor on the device)."""
        return self._count(self._known(targets))

    def costs(self, logits: Tensor, present: Tensor, absent: Tensor, mixed: Tensor | None) -> Tensor:
        """What each label costs, [B, C]; `present` and `absent` say how much it is either."""
        positive, negative = self.terms(logits, mixed)
        return present * positive + absent * negative

    def cells(self, output: Output, batch: Batch) -> tuple[Tensor, Tensor]:
        logits = output.logits.to(torch.promote_types(output.logits.dtype, torch.float32))
        unknown = is_unknown(batch.targets, self.unknown)
        if batch.targets.is_floating_point() or self.unknown != -1 or not batch.targets.dtype.is_signed:
            y = batch.targets.masked_fill(unknown, 0).to(logits.dtype)
        else:
            y = batch.targets.clamp(min=0).to(logits.dtype)  # the same, in half the time on a CPU
        known = torch.ones_like(unknown) if self.assume_negative else ~unknown
        # Sums of products: on a CPU they take a fifth of the time of masks and choices.
        not_y = 1 - y if self.assume_negative else known.to(y.dtype) - y
        loss = self.costs(logits, y, not_y, batch.mixed)
        if self.normalize is not None:
            loss = loss * self._weight(known.sum(1, keepdim=True).to(loss.dtype), known.shape[1])
        return loss, self._count(known)

    def _known(self, targets: Tensor) -> Tensor:
        if self.assume_negative:
            return torch.ones_like(targets, dtype=torch.bool)
        return ~is_unknown(targets, self.unknown)

    def _count(self, known: Tensor) -> Tensor:
        return known.any(1).sum() if isinstance(self.normalize, tuple) else known.sum()

    def _weight(self, known: Tensor, categories: int) -> Tensor:
        if self.normalize == "mlcpl":
            return 1 + 1 / (1 + known)
        a, b, c = self.normalize
        # A sample without known labels has no loss to weigh; 1 keeps its share off 0^-1.
        return (a * (known.clamp(min=1) / categories) ** c + b) / categories


def check_logits(logits: Tensor, targets: Tensor) -> None:
    if logits.ndim != 2 or logits.shape != targets.shape:
        raise ValueError(
            f"logits {list(logits.shape)} and targets {list(targets.shape)} must both be [samples, categories]"
        )
    if not logits.is_floating_point():
        raise ValueError(f"logits must be of a floating-point type, not {logits.dtype}")


def check_at_least_zero(**values: float) -> None:
    for name, value in values.items():
        if not value >= 0:
            raise ValueError(f"{name}={value!r}: must be 0 or more")


def check_at_least_one(**values: int | None) -> None:
    """None is none given."""
    for name, value in values.items():
        if value is not None and not value >= 1:
            raise ValueError(f"{name}={value!r}: must be 1 or more")


def check_probability(**values: float) -> None:
    for name, value in values.items():
        if not 0 <= value < 1:
            raise ValueError(f"{name}={value!r}: must be at least 0 and below 1")
