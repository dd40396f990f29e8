"""LL-R, LL-Ct, LL-Cp: unknown labels are taken as absent, and those with the largest loss are treated.

Kim et al., "Large Loss Matters in Weakly Supervised Multi-Label Classification", CVPR 2022,
https://arxiv.org/abs/2206.03740. Networks fit clean labels first: an assumed negative with a large loss is probably a
missing positive. It is rejected (LL-R), corrected to present for this step (LL-Ct), or for good (LL-Cp). The share r of
treated labels is 0 in the first epoch and grows by `delta` percent with every epoch; with LL-Cp it is `delta` percent
in every epoch after the first.

How many labels are treated, k, differs between the paper and the codes (`rule`):

- "paper": k = ceil(r * unknown labels of the batch).
- "released" (snucml/LargeLossMatters): k = ceil(r * all labels of the batch). The same for single-positive data, far
  more where many labels are known.
- "mlcpl" (the LogicMix authors; not LL-Cp): k = round(r * unknown labels with a loss), and what is treated has a loss
  strictly above the k-th largest: k - 1 labels. The paper's figures with LogicMix have delta = 1 by this rule.

Where the released code and this one part: it also rejects or corrects *known* labels once k exceeds the number of
unknown ones; here no known label is ever treated, nor an unknown one that costs nothing. Its LL-Cp runs as LL-Ct, since
a name is compared with `is`; here it corrects labels for good. "mean" is over all labels, treated ones included.

k is counted over the samples of all processes, and over one of several accumulated batches.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from gpu_logicmix.labels import is_unknown
from gpu_logicmix.losses.asymmetric import PartialAsymmetricLoss, PartialBCELoss, check_mixed
from gpu_logicmix.losses.base import LOSSES, Batch, Loss, Output, PartialLoss, check_at_least_zero
from gpu_logicmix.losses.everyone import total

BASES = {"bce": PartialBCELoss, "asl": PartialAsymmetricLoss}
RULES = ("paper", "released", "mlcpl")


class _LargeLoss(Loss):
    """What the three share: assume negative, and find the labels whose loss is large."""

    growing = True  # whether the share grows with the epochs
    share: Tensor

    def __init__(
        self,
        delta: float,
        reduction: str = "mean",
        *,
        rule: Literal["paper", "released", "mlcpl"] = "paper",
        base: Literal["bce", "asl"] | PartialLoss = "bce",
        per_group: bool = False,
        unknown: float = -1,
    ) -> None:
        super().__init__(reduction, unknown=unknown)
        check_at_least_zero(delta=delta)
        if rule not in RULES:
            raise ValueError(f"rule={rule!r}: must be one of {', '.join(RULES)}")
        if not isinstance(base, PartialLoss) and base not in BASES:
            raise ValueError(f"base={base!r}: must be one of {', '.join(BASES)}, or a PartialLoss")
        if isinstance(base, PartialLoss) and base.normalize is not None:
            # The mean is over all labels, since unknown ones count: a weight by known ones would contradict it.
            raise ValueError(f"base has normalize={base.normalize!r}: must be None, unknown labels count as well here")
        self.delta, self.rule, self.per_group = delta, rule, per_group
        self.base = base if isinstance(base, PartialLoss) else BASES[base]()
        # Of labels to treat in this epoch. A tensor: torch.compile would make a new graph for every other number.
        self.register_buffer("share", torch.zeros((), dtype=torch.float64), persistent=False)

    @property
    def epoch(self) -> int:
        return self._epoch

    @epoch.setter
    def epoch(self, epoch: int) -> None:
        self._epoch = epoch
        if "share" in self._buffers:
            times = epoch if self.growing else min(epoch, 1)
            self.share.fill_(min(1.0, times * self.delta / 100))

    def cells(self, output: Output, batch: Batch) -> tuple[Tensor, Tensor]:
        check_mixed(batch.mixed, output.logits)
        present, absent = self.base.terms(output.logits, batch.mixed)
        unknown = is_unknown(batch.targets, self.unknown)
        y = batch.targets.masked_fill(unknown, 0).to(present.dtype)
        loss = y * present + (1 - y) * absent
        large = self.large(loss.detach(), unknown, batch.mixed)
        count = torch.full((), loss.numel(), dtype=loss.dtype, device=loss.device)
        return self.treat(loss, present, large, batch), count

    def large(self, losses: Tensor, unknown: Tensor, mixed: Tensor | None) -> Tensor:
        """[B, C] bool: the labels to treat."""
        mixed = self.groups(mixed, losses) if self.per_group else None
        if mixed is None:
            return self._large(losses, unknown, losses.numel())
        found = torch.zeros_like(unknown)
        for group in (mixed, ~mixed):
            found |= self._large(losses, unknown & group[:, None], group.sum() * losses.shape[1])
        return found

    def _large(self, losses: Tensor, eligible: Tensor, cells: int | Tensor) -> Tensor:
        everyone = self.everyone(len(losses), losses.device)
        if self.rule == "paper":
            cells = eligible.sum()
        eligible = eligible & (losses > 0)
        if self.rule == "mlcpl":
            cells = eligible.sum()
        cells = torch.zeros((), dtype=torch.float64, device=losses.device) + cells
        costs = losses.masked_fill(~eligible, -torch.inf)
        if everyone is not None:
            cells, costs = total(cells), everyone.all(costs, fill=-torch.inf)
        if self.rule == "mlcpl":
            wanted = (cells * self.share).round().clamp(min=1)
        else:
            wanted = (cells * self.share - 1e-9).ceil()  # less a little: 0.3 * 10 is 3, not 3.0000000000000004
        ranked = costs.flatten().sort(descending=True).values
        if not len(ranked):
            return eligible  # nowhere is a label
        place = (wanted.long() - 1).clamp(min=0, max=len(ranked) - 1)
        limit = ranked.index_select(0, place.view(1))
        if self.rule == "mlcpl":
            return eligible & (losses > limit)
        return eligible & (losses >= limit) & (wanted > 0)

    def treat(self, loss: Tensor, present: Tensor, large: Tensor, batch: Batch) -> Tensor:
        raise NotImplementedError


@LOSSES.register("ll-r")
class LargeLossRejection(_LargeLoss):
    """LL-R: unknown labels are taken as absent; those with the largest loss are left out.

    delta: by how many percent the share of rejected labels grows with every epoch. The authors' follow-up takes 0.5 for
        10 epochs, the LogicMix paper 1 for 60 (with rule="mlcpl").
    rule: how many that is: "paper", "released" or "mlcpl".
    base: the loss of a label: "bce" or "asl".
    per_group: rank original and mixed samples apart. Unknown labels of mixed samples are more often present.
    """

    def __init__(self, delta: float = 0.5, reduction: str = "mean", **shared: Any) -> None:
        super().__init__(delta, reduction, **shared)

    def treat(self, loss: Tensor, present: Tensor, large: Tensor, batch: Batch) -> Tensor:
        return loss.masked_fill(large, 0)


@LOSSES.register("ll-ct")
class LargeLossCorrection(_LargeLoss):
    """LL-Ct: unknown labels are taken as absent; those with the largest loss are taken as present instead.

    delta: by how many percent the share of corrected labels grows with every epoch; none: 0.2 as in the authors'
        follow-up, or their 0.1 with `permanent`.
    permanent: LL-Cp: what is corrected stays so, in the table of pseudo-labels, and the share is the same in every
        epoch after the first. In a loop of one's own, `corrected` [B, C] has the labels of the last call to write back.
    rule, base, per_group: as for LL-R.
    """

    def __init__(
        self, delta: float | None = None, reduction: str = "mean", *, permanent: bool = False, **shared: Any
    ) -> None:
        if delta is None:
            delta = 0.1 if permanent else 0.2
        super().__init__(delta, reduction, **shared)
        if permanent and self.rule == "mlcpl":
            raise ValueError("rule='mlcpl' with permanent=True: mlcpl has no LL-Cp; take rule='paper' or 'released'")
        self.permanent = self.writes_labels = permanent
        self.growing = not permanent
        self._corrected: Tensor | None = None

    @property
    def corrected(self) -> Tensor | None:
        """[B, C] bool: the labels of the last call that are to be present from now on, with `permanent`."""
        return self._corrected

    def treat(self, loss: Tensor, present: Tensor, large: Tensor, batch: Batch) -> Tensor:
        if self.permanent and self.training:
            # A mixed sample has no row of its own to write to.
            self._corrected = large if batch.mixed is None else large & ~batch.mixed[:, None]
            if self.table is not None and batch.index is not None:
                self.table.mark_positive(batch.index, self._corrected)
        return torch.where(large, present, loss)

    def set_epoch(self, epoch: int, epochs: int | None = None) -> None:
        super().set_epoch(epoch, epochs)
        if self.table is not None:
            self.table.synchronize()  # a sample may go to another process in this epoch


@LOSSES.register("ll-cp")
class LargeLossPermanentCorrection(LargeLossCorrection):
    """LL-Cp: unknown labels are taken as absent; those with the largest loss become present, for the rest of the run.

    delta: the share of labels, in percent, to correct in every step after the first epoch; the authors' follow-up takes
        0.1. Mixed samples are corrected for the step alone.
    rule, base, per_group: as for LL-R; there is no "mlcpl".
    """

    def __init__(self, delta: float = 0.1, reduction: str = "mean", *, permanent: bool = True, **shared: Any) -> None:
        super().__init__(delta, reduction, permanent=permanent, **shared)
