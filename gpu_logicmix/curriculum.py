"""Curriculum labeling: after each epoch, the model fills in the unknown labels it is sure of, for one epoch.

    curriculum = CurriculumLabels(targets, theta_pos=2.0, theta_neg=-2.0).to(device)
    ...
    targets = curriculum.lookup(index)          # in the training step: known labels and pseudo-labels

    curriculum.begin_update()                   # after the epoch: back to the known labels
    for images, _, index in loader:             # un-augmented; each rank its own share of the samples
        curriculum.update(index, ema_model(images))
    curriculum.end_update()                     # put together what the ranks found; on every rank
    print(curriculum.counts())

The table is one int8 tensor on the training device: 82,783 samples with 80 categories are 6.6 MB. Neither `lookup` nor
`update` waits for the device.

- Two thresholds: Chong et al., "Free Performance Gain from Mixing Multiple Partially Labeled Samples in Multi-label
  Image Classification", 2024, section 3.2.
- The curriculum, one threshold (theta_neg = -theta_pos) and the selection of a fixed share: Durand et al., "Learning a
  Deep ConvNet for Multi-label Classification with Partial Labels", CVPR 2019, section 3.3.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from gpu_logicmix.labels import check_labels
from gpu_logicmix.machine import sent

SELECTIONS = ("score", "positive-score", "top", "top-per-category")
_FOR_GOOD = 2  # in the table: marked present by `mark_positive`; `lookup` gives 1
_COUNTED = 1 << 26  # labels at a time
_UNSEEN = -math.inf  # as a logit: below every real one, so that the largest over all ranks is the one that was seen


class PseudoLabelCounts(NamedTuple):
    """What is in the table. The last six are None unless the full labels were given."""

    positives: int  # pseudo-labels that say present
    negatives: int  # pseudo-labels that say absent
    unknown: int  # labels that are still unknown
    precision: float | None = None  # share of the pseudo-labels that are right
    recall: float | None = None  # share of the labels not known from the start that have the right pseudo-label
    precision_positive: float | None = None  # the same of those that say present, out of those that are present
    recall_positive: float | None = None
    precision_negative: float | None = None
    recall_negative: float | None = None


class CurriculumLabels(nn.Module):
    """Known labels, and for one epoch at a time the model's confident guesses in place of the unknown ones.

    targets: [N, C] labels of the training set, numpy or torch: 1 present, 0 absent, -1 unknown. They never change.
    theta_pos, theta_neg: with select="score", an unknown label becomes 1 where the logit is above `theta_pos`, 0 where
        it is below `theta_neg`. The paper has 2 and -2 for COCO, 2 and -1 for VG-200, 2.5 and -1 for VOC 2007, after
        every epoch; the code that its authors released later has 4 and -4, from the 20th epoch on.
    select: "score"; "positive-score": by `theta_pos` alone, no label becomes 0; "top": the `fraction` of all unknown
        labels whose logits are farthest from 0 get the sign's label; "top-per-category": that fraction of the unknown
        labels of each category. The last two know what to take only when all logits are there: `end_update` selects,
        and until then the table has the known labels alone.
    fraction: for "top" and "top-per-category", from 0 to 1; counts are rounded down.
    full: [N, C] true labels where they are known (a simulation; -1 where not), for `counts` alone.

    A sample may be updated more than once: its last logits count, within one call as well as over several. NaN is never
    a pseudo-label. The buffers `known` and `table` make up the `state_dict`; loading one that belongs to other known
    labels is an error.

    `mark_positive` is for methods that correct labels for good (LL-Cp): its marks survive all updates.

    >>> curriculum = CurriculumLabels(torch.tensor([[1, -1], [-1, 0]]))
    >>> curriculum.begin_update()
    >>> curriculum.update(torch.tensor([0, 1]), torch.tensor([[5.0, -3.0], [0.5, 4.0]]))
    >>> curriculum.end_update()
    >>> curriculum.lookup(torch.tensor([0, 1])).tolist()
    [[1, 0], [-1, 0]]
    """

    def __init__(
        self,
        targets: Tensor | np.ndarray,
        theta_pos: float = 2.0,
        theta_neg: float = -2.0,
        *,
        select: str = "score",
        fraction: float = 0.5,
        full: Tensor | np.ndarray | None = None,
    ) -> None:
        super().__init__()
        if not theta_neg <= theta_pos:  # also rejects NaN
            raise ValueError(f"theta_neg={theta_neg}, theta_pos={theta_pos}: theta_neg must not be above theta_pos")
        if select not in SELECTIONS:
            raise ValueError(f"select={select!r}: the selections are {', '.join(SELECTIONS)}")
        if not 0 <= fraction <= 1:
            raise ValueError(f"fraction={fraction}: must be from 0 to 1")
        self.theta_pos, self.theta_neg, self.select, self.fraction = theta_pos, theta_neg, select, fraction
        known = _as_labels("targets", targets)
        self.register_buffer("known", known)
        self.register_buffer("table", known.clone())
        self.register_buffer("full", None, persistent=False)
        # Not made at the first update, which may be under inference_mode: it could not be written to afterwards.
        ranked = torch.full(known.shape, _UNSEEN, device=known.device) if select.startswith("top") else None
        self.register_buffer("logits", ranked, persistent=False)
        if full is not None:
            full = _as_labels("full", full).to(known.device)
            if full.shape != known.shape:
                raise ValueError(f"full has shape {tuple(full.shape)}, targets {tuple(known.shape)}: must be the same")
            self.full = full
        self.register_load_state_dict_pre_hook(_check_same_known)

    def extra_repr(self) -> str:
        rules = {"score": f"{self.theta_pos}, {self.theta_neg}", "positive-score": f"{self.theta_pos}"}
        rule = rules.get(self.select, f"fraction={self.fraction}")
        return f"{len(self.known)} samples, {self.known.shape[1]} categories, select={self.select!r}, {rule}"

    def lookup(self, index: Tensor) -> Tensor:
        """int8 labels [B, C] of the samples `index` [B]: known ones, pseudo-labels, and -1 for those still unknown."""
        return self.table.index_select(0, moved_index(index, self.table.device)).clamp_(max=1)

    @torch.no_grad()
    def mark_positive(self, index: Tensor, where: Tensor) -> None:
        """Make labels of the samples `index` [B] present for good, those that are True in `where` [B, C]. Known labels
        stay as they are. With several ranks, `synchronize` (or `end_update`) puts their marks together."""
        index = moved_index(index, self.table.device)
        where = where & (self.known.index_select(0, index) == -1)
        marks = where.to(torch.int8).mul_(_FOR_GOOD + 1).sub_(1)  # 2 or -1, below which no label lies
        self.table.scatter_reduce_(0, index[:, None].expand_as(marks), marks, "amax")

    def begin_update(self) -> None:
        """Forget all pseudo-labels: none survives an update that does not confirm it. Marks stay."""
        self.table.copy_(self._with_marks(self.table, self.known))
        if self.logits is not None:
            self.logits.fill_(_UNSEEN)

    @torch.no_grad()
    def update(self, index: Tensor, logits: Tensor) -> None:
        """Take in the logits [B, C] that the model gives the samples `index` [B]."""
        device = self.known.device
        index, logits = moved_logits(index, logits, self.known.shape[1], device)
        # index_copy_ leaves open which of several rows for one sample wins: let all of them be the last one.
        place = torch.arange(len(index), device=device)
        last = torch.zeros(len(self.known), dtype=place.dtype, device=device)
        logits = logits.index_select(0, last.scatter_reduce_(0, index, place, "amax").index_select(0, index))
        if self.logits is None:
            found = self._by_score(self.known.index_select(0, index), logits)
            self.table.index_copy_(0, index, self._with_marks(self.table.index_select(0, index), found))
        else:
            most = torch.finfo(torch.float32).max
            seen = logits.clamp(-most, most).float()  # an infinite logit is very sure, not unseen
            self.logits.index_copy_(0, index, seen.masked_fill(logits.isnan(), _UNSEEN))

    @torch.no_grad()
    def end_update(self, group: dist.ProcessGroup | None = None) -> None:
        """Select (where `select` is "top" or "top-per-category"), and give all ranks of `group` the same table.

        Every rank calls it after updating its share of the samples; one process needs it for "top" alone. A sample that
        several ranks have updated, as when a sampler pads its shares, gets the largest of what they found: their
        logits are those of one model on one image.
        """
        self.synchronize(group)
        if self.logits is not None:
            if several_ranks(group):
                dist.all_reduce(self.logits, dist.ReduceOp.MAX, group=group)
            self.table.copy_(self._with_marks(self.table, self._by_rank(self.known, self.logits)))

    def synchronize(self, group: dist.ProcessGroup | None = None) -> None:
        """Give all ranks of `group` what any of them has found or marked."""
        if several_ranks(
            group
        ):  # unknown (-1) is below both pseudo-labels; where a label is known all ranks hold the same
            dist.all_reduce(self.table, dist.ReduceOp.MAX, group=group)

    @staticmethod
    def _with_marks(table: Tensor, labels: Tensor) -> Tensor:
        return torch.where(table == _FOR_GOOD, table, labels)

    def _by_score(self, known: Tensor, logits: Tensor) -> Tensor:
        above, below = beyond(logits, self.theta_pos, self.theta_neg, self.select)
        pseudo = above.to(torch.int8).masked_fill_(~(above | below), -1)
        return torch.where(known == -1, pseudo, known)

    def _by_rank(self, known: Tensor, logits: Tensor) -> Tensor:
        unknown = known == -1
        eligible = unknown & (logits != _UNSEEN)
        sureness = logits.abs().masked_fill_(~eligible, -1)
        if self.select == "top":
            sureness = sureness.view(-1, 1)
        # Stable: ties go to the earlier sample, on every rank and device alike.
        order = sureness.sort(dim=0, descending=True, stable=True).indices
        wanted = unknown.view(sureness.shape).sum(0, dtype=torch.float64) * self.fraction
        wanted = (wanted * (1 + 1e-15)).floor()  # a little more: 100 * 0.29 is 29, not 28.999999999999996
        within = torch.arange(len(order), device=order.device)[:, None] < wanted
        chosen = torch.zeros_like(within).scatter_(0, order, within).view(known.shape) & eligible
        return torch.where(chosen, (logits > 0).to(torch.int8), known)

    def counts(self) -> PseudoLabelCounts:
        """How many pseudo-labels there are and, given the full labels, how good. Waits for the device."""
        # Some samples at a time: the masks of all would take several times the memory of the table.
        step = max(1, _COUNTED // max(1, self.known.shape[1]))
        sums = sum(self._sums(slice(start, start + step)) for start in range(0, max(1, len(self.known)), step)).tolist()
        if self.full is None:
            return PseudoLabelCounts(*sums)
        *numbers, right_pos, said_pos, all_pos, right_neg, said_neg, all_neg = sums
        return PseudoLabelCounts(
            *numbers,
            precision=share_of(right_pos + right_neg, said_pos + said_neg),
            recall=share_of(right_pos + right_neg, all_pos + all_neg),
            precision_positive=share_of(right_pos, said_pos),
            recall_positive=share_of(right_pos, all_pos),
            precision_negative=share_of(right_neg, said_neg),
            recall_negative=share_of(right_neg, all_neg),
        )

    def _sums(self, rows: slice) -> Tensor:
        """Of some samples: pseudo-labels that say present, that say absent, unknown labels; of either of the former,
        given the full labels: how many are right, how many can be judged, how many there were to find."""
        table, hidden = self.table[rows], self.known[rows] == -1
        positive, negative = hidden & (table >= 1), hidden & (table == 0)
        masks = [positive, negative, hidden & (table == -1)]
        if self.full is not None:
            present, absent = hidden & (self.full[rows] == 1), hidden & (self.full[rows] == 0)
            judged = present | absent
            masks += [positive & present, positive & judged, present, negative & absent, negative & judged, absent]
        return torch.stack([mask.sum() for mask in masks])


def moved_index(index: Tensor, device: torch.device) -> Tensor:
    """In int64, which all that reads or writes rows takes."""
    if index.dtype.is_floating_point or index.dtype is torch.bool:
        raise TypeError(f"index is {index.dtype}: must be the numbers of samples, of a whole type")
    return sent(index, device).long()


def moved_logits(index: Tensor, logits: Tensor, categories: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Both on `device`, logits [B, categories] in float32 or float64: a threshold is not rounded to bfloat16."""
    if logits.shape != (len(index), categories):
        raise ValueError(
            f"logits has shape {tuple(logits.shape)}: must be [{len(index)}, {categories}], "
            "a row for each index and a column for each category"
        )
    index, logits = moved_index(index, device), sent(logits, device)
    return index, logits if logits.dtype == torch.float64 else logits.float()


def beyond(logits: Tensor, theta_pos: float, theta_neg: float, select: str) -> tuple[Tensor, Tensor]:
    """Which logits make a label present, which absent. NaN is neither above nor below anything and stays unknown."""
    above, below = logits > theta_pos, logits < theta_neg
    return above, torch.zeros_like(above) if select == "positive-score" else below


def several_ranks(group: dist.ProcessGroup | None) -> bool:
    return dist.is_available() and dist.is_initialized() and dist.get_world_size(group) > 1


def share_of(part: int, whole: int) -> float:
    return part / whole if whole else math.nan


def _as_labels(name: str, labels: Tensor | np.ndarray) -> Tensor:
    """A copy in int8, on the device the labels are on."""
    if not isinstance(labels, (Tensor, np.ndarray)):
        raise TypeError(f"{name} is a {type(labels).__name__}: must be a tensor or a numpy array")
    if labels.ndim != 2:
        raise ValueError(f"{name} has shape {tuple(labels.shape)}: must be [samples, categories]")
    labels = torch.as_tensor(labels)
    if labels.is_floating_point():
        labels = labels.nan_to_num(nan=-1)
    check_labels(labels)
    return labels.to(torch.int8, copy=True).contiguous()


def _check_same_known(module: CurriculumLabels, state: dict, prefix: str, *_: Any) -> None:
    known = state.get(prefix + "known")
    if known is None or known.shape != module.known.shape:
        return  # load_state_dict has its own words for these
    different = int((known.to(module.known.device) != module.known).sum())
    if different:
        raise ValueError(
            f"state_dict has other known labels ({different} of {known.numel()} differ): it belongs to another data "
            "set, or labels were hidden with another seed"
        )
