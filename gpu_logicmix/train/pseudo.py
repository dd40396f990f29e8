"""Pseudo-labels of sets whose label matrix would not fit: known labels stay sparse, and of each sample the surest
pseudo-labels are kept, up to a number. In place of `CurriculumLabels`, with the same results where that number is not
reached. 9 million samples with 32 pseudo-labels each take 1.2 GB, where the matrix would take 86."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from gpu_logicmix.curriculum import PseudoLabelCounts, beyond, moved_logits, several_ranks, share_of
from gpu_logicmix.data.sparse import SparseLabels, labels_digest
from gpu_logicmix.machine import sent

PER_SAMPLE = 32
SELECTIONS = ("score", "positive-score")  # the others rank all logits of all samples
_NONE = -1
_BLOCK = 1 << 16  # samples whose pseudo-labels are compared at a time


class SparseCurriculum(nn.Module):
    """As `CurriculumLabels`, of sparse labels.

    A pseudo-label is kept as 2 x category + value. Where a sample has more than `per_sample`, the present ones go
    first, and then the surest: nearly all of ten thousand categories are absent, and surely so.
    """

    cells: Tensor
    digest: Tensor

    def __init__(
        self,
        labels: SparseLabels,
        theta_pos: float = 2.0,
        theta_neg: float = -2.0,
        *,
        select: str = "score",
        full: SparseLabels | None = None,
        per_sample: int = PER_SAMPLE,
    ) -> None:
        super().__init__()
        if select not in SELECTIONS:
            raise ValueError(f"select={select!r}: of sparse labels the selections are {', '.join(SELECTIONS)}")
        self.theta_pos, self.theta_neg, self.select = theta_pos, theta_neg, select
        self.labels, self.full = labels, full
        self.known = labels.table()
        shape = (len(labels), min(per_sample, labels.shape[1]))
        self.register_buffer("cells", torch.full(shape, _NONE, dtype=torch.int32))
        digest = hashlib.sha256(labels_digest(labels).encode()).digest()
        self.register_buffer("digest", torch.frombuffer(bytearray(digest), dtype=torch.uint8))
        self.register_load_state_dict_pre_hook(_check_same_known)

    def lookup(self, index: Tensor) -> Tensor:
        """int8 labels [B, C] of the samples `index` [B]: known ones, pseudo-labels, and -1 for those still unknown."""
        index = sent(index, self.cells.device)
        known, cells = self.known(index), self.cells.index_select(0, index)
        # What is no pseudo-label goes to a column that is cut off.
        wide = torch.cat((known, known.new_zeros(len(known), 1)), 1)
        column = torch.where(cells == _NONE, known.shape[1], cells >> 1).long()
        return wide.scatter_(1, column, (cells & 1).to(torch.int8))[:, :-1]

    def begin_update(self) -> None:
        """Forget all pseudo-labels."""
        self.cells.fill_(_NONE)

    @torch.no_grad()
    def update(self, index: Tensor, logits: Tensor) -> None:
        """Take in the logits [B, C] that the model gives the samples `index` [B]."""
        device = self.cells.device
        index, logits = moved_logits(index, logits, self.labels.shape[1], device)
        # Which of several rows for one sample wins would be open: let all of them be the last one.
        place = torch.arange(len(index), device=device)
        logits = logits.index_select(0, torch.where(index[:, None] == index, place, -1).amax(1))
        above, below = beyond(logits, self.theta_pos, self.theta_neg, self.select)
        chosen = (above | below) & (self.known(index) == -1)
        sure = logits.abs().clamp_(max=1e30)
        sure = (sure / (1 + sure) + above).masked_fill_(~chosen, -1)  # present: from 1 to 2; absent: from 0 to 1
        column = sure.topk(self.cells.shape[1], dim=1).indices
        cells = (2 * column + above.gather(1, column)).masked_fill_(~chosen.gather(1, column), _NONE)
        self.cells.index_copy_(0, index, cells.to(torch.int32))

    @torch.no_grad()
    def end_update(self, group: dist.ProcessGroup | None = None) -> None:
        """Give all ranks of `group` the same table, after each has updated its share of the samples."""
        self.synchronize(group)

    def synchronize(self, group: dist.ProcessGroup | None = None) -> None:
        if several_ranks(group):
            dist.all_reduce(self.cells, dist.ReduceOp.MAX, group=group)  # nothing (-1) is below every pseudo-label

    def counts(self) -> PseudoLabelCounts:
        """How many pseudo-labels there are and, given the full labels, how good. Waits for the device."""
        there, present = self.cells != _NONE, (self.cells & 1) == 1
        positives, negatives = int((there & present).sum()), int((there & ~present).sum())
        unknown = self.labels.size - self.labels.known - positives - negatives
        if self.full is None:
            return PseudoLabelCounts(positives, negatives, unknown)
        right, said = self._judged()
        hidden = [int(a) - int(b) for a, b in zip(self.full.counts()[:2], self.labels.counts()[:2], strict=True)]
        return PseudoLabelCounts(
            positives,
            negatives,
            unknown,
            precision=share_of(right.sum(), said.sum()),
            recall=share_of(right.sum(), sum(hidden)),
            precision_positive=share_of(right[1], said[1]),
            recall_positive=share_of(right[1], hidden[0]),
            precision_negative=share_of(right[0], said[0]),
            recall_negative=share_of(right[0], hidden[1]),
        )

    def _judged(self) -> tuple[np.ndarray, np.ndarray]:
        """[absent, present]: pseudo-labels that are right, and those whose true label is known."""
        assert self.full is not None
        right, said, width = np.zeros(2, dtype=np.int64), np.zeros(2, dtype=np.int64), self.labels.shape[1]
        for start in range(0, len(self.labels), _BLOCK):
            cells = self.cells[start : start + _BLOCK].cpu().numpy().astype(np.int64)
            rows, _ = np.nonzero(cells != _NONE)
            cells = cells[cells != _NONE]
            lengths, flat = self.full.places(np.arange(start, min(start + _BLOCK, len(self.labels))))
            truth = np.repeat(np.arange(len(lengths)), lengths) * width + self.full.columns[flat]
            wanted = rows * width + (cells >> 1)
            at = np.minimum(np.searchsorted(truth, wanted), max(len(truth) - 1, 0))
            found = truth[at] == wanted if len(truth) else np.zeros(len(wanted), dtype=bool)
            value = cells & 1
            said += np.bincount(value[found], minlength=2)
            true = found.copy()
            true[found] = self.full.values[flat][at[found]] == value[found]
            right += np.bincount(value[true], minlength=2)
        return right, said


def _check_same_known(module: SparseCurriculum, state: dict, prefix: str, *_: Any) -> None:
    digest = state.get(prefix + "digest")
    if digest is not None and not torch.equal(digest.cpu(), module.digest.cpu()):
        raise ValueError(
            "state_dict has other known labels: it belongs to another data set, or labels were hidden with another seed"
        )
