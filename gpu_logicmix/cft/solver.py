"""Category-wise fine-tuning: after training, each category's head alone, on that category's known labels alone.

    weight, bias, record = category_wise_fine_tune(features, targets, head.weight, head.bias)
    head.weight.data.copy_(weight), head.bias.data.copy_(bias)
    print(record.summary())

Wrong pseudo-labels bend the heads; known labels bend them back. `features` [N, D] is what the frozen backbone gives the
head, computed once. Some known labels are held out of the fit, and each head keeps its best state by average precision
on those, the original one among them: on the held-out labels no category gets worse.

A head has only its own row of the weight, so the heads are independent problems. Here they are solved side by side: one
matrix product for all of them, and whatever an optimiser would keep once (steps taken, moments, learning rate, best
state) is a tensor with an entry for each head. On a CPU, where few labels are known, the product is one that leaves out
the unknown ones. The result is that of fitting the heads one after the other, which comes down to how mini-batches are
drawn. Each epoch draws *one* random order of the samples, and each head goes through its
own known labels in that order, `batch_size` at a time. Seen from any one head, that is a uniform shuffle of its labels.
Seen from all of them, the same step needs nearly the same stretch of samples, which is gathered once and multiplied
once. Nothing a head sees depends on what other heads there are.

- Chong et al., "Category-wise Fine-Tuning for Image Multi-label Classification with Partial Labels", ICONIP 2023, and
  "Category-wise Fine-Tuning: Resisting Incorrect Pseudo-Labels in Multi-label Image Classification with Partial
  Labels", 2024: asymmetric loss with Adam (lr 1e-4, all labels in a batch), or a genetic algorithm on AP itself.
- Ridnik et al., "Asymmetric Loss For Multi-Label Classification", ICCV 2021.
- Kingma and Ba, "Adam: A Method for Stochastic Optimization", ICLR 2015.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import embedding_bag

from gpu_logicmix.labels import check_labels
from gpu_logicmix.metrics import average_precision

METHODS = ("adam", "ga")
SCHEDULES = ("constant", "cosine")
# Features are read in pieces of this many bytes. On a CPU a piece should still be in the cache when the gradient needs
# it again; elsewhere it should be worth the launch.
_PIECE_CPU, _PIECE_ELSEWHERE = 5 << 20, 1 << 28
_SUMS = 1 << 28  # bytes for sums over pieces, before they are added up
# On a CPU, with a smaller share of known labels than this, the unknown ones are left out of the products.
_SPARSE = 0.25


@dataclass
class CFTRecord:
    """What became of each category. Tensors are on the CPU; AP is NaN where there is nothing to compute it from."""

    ap_before: Tensor  # [C] on the held-out known labels, original heads
    ap_after: Tensor  # [C] the same, heads returned
    best_epoch: Tensor  # [C] the epoch whose head is returned; 0: the original
    epochs: Tensor  # [C] how many epochs the head was trained
    history: Tensor  # [E + 1, C] AP on the held-out labels after each epoch, from the original on; NaN once stopped
    held_out: Tensor  # [N, C] bool: the known labels that were held out
    skipped: dict[int, str] = field(default_factory=dict)  # category -> why it was left as it was
    evaluation_before: Tensor | None = None  # [C] on the evaluation set, which has no say in anything
    evaluation_after: Tensor | None = None

    @property
    def changed(self) -> list[int]:
        """The categories whose head is not the original one."""
        return self.best_epoch.nonzero()[:, 0].tolist()

    def summary(self) -> dict:
        """Numbers for a log: means over the categories that have an AP."""
        out = {
            "categories": len(self.best_epoch),
            "changed": len(self.changed),
            "skipped": len(self.skipped),
            "held_out_map_before": self.ap_before.nanmean().item(),
            "held_out_map_after": self.ap_after.nanmean().item(),
        }
        if self.evaluation_before is not None:
            out["evaluation_map_before"] = self.evaluation_before.nanmean().item()
            out["evaluation_map_after"] = self.evaluation_after.nanmean().item()
        return out


@torch.no_grad()
def category_wise_fine_tune(
    features: Tensor | np.ndarray,
    targets: Tensor | np.ndarray,
    weight: Tensor,
    bias: Tensor,
    *,
    method: str = "adam",
    epochs: int = 1000,
    patience: int | None = 100,
    batch_size: int | None = None,
    lr: float | Tensor = 1e-4,
    schedule: str = "constant",
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    gamma_neg: float = 4.0,
    gamma_pos: float = 0.0,
    clip: float = 0.05,
    holdout: float = 0.2,
    min_known: int = 5,
    seed: int = 0,
    evaluation: tuple[Tensor | np.ndarray, Tensor | np.ndarray] | None = None,
    population: int = 50,
    mutation: float = 1e-3,
) -> tuple[Tensor, Tensor, CFTRecord]:
    """Fit the heads `weight` [C, D] and `bias` [C] to known labels; gives back new ones and a record.

    features: [N, D] of any floating type, in memory or mapped into it (`numpy.memmap`, `torch.from_file`), on any
        device; read a piece at a time, to the device and in the type of `weight`.
    targets: [N, C]: 1 present, 0 absent, -1 unknown. Labels of the data set, no pseudo-labels.
    method: "adam" fits the asymmetric loss; "ga" breeds heads for AP itself (all labels at once, `batch_size` is None).
    epochs, patience: at most so many; a head stops after `patience` epochs without a better AP (None: never). The
        authors take 5,000 and 300.
    batch_size: known labels of its category that a head sees in a step; None: all of them.
    lr, schedule: the learning rate, one for all heads or [C]; "constant", or "cosine" to 0 at each head's last step.
    betas, eps: of Adam.
    gamma_neg, gamma_pos, clip: of the asymmetric loss.
    holdout: share of the known positives, and of the known negatives, of each category that choose its best state.
    min_known: a category with fewer known positives or negatives than this keeps its head, bit for bit.
    seed: fixes the held-out labels, the batches and, for "ga", all else that is random.
    evaluation: (features, targets) of another data set, only to report AP on it before and after.
    population, mutation: for "ga": heads bred at a time for each category; how far a mutation moves a weight at most.
    """
    features = _as_features("features", features, weight, bias)
    labels = _as_labels("targets", targets, features, weight)
    if evaluation is not None:
        seen = _as_features("evaluation features", evaluation[0], weight, bias)
        evaluation = (seen, _as_labels("evaluation targets", evaluation[1], seen, weight))
    _check_choice("method", method, METHODS)
    _check_choice("schedule", schedule, SCHEDULES)
    whole = {"epochs": (epochs, 0), "min_known": (min_known, 2), "population": (population, 2)}
    whole |= {"patience": (patience, 1)} if patience is not None else {}
    whole |= {"batch_size": (batch_size, 1)} if batch_size is not None else {}
    for name, (value, least) in whole.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise ValueError(f"{name}={value!r}: must be a whole number from {least} on")
    _check_number("gamma_neg", gamma_neg, gamma_neg >= 0, "at least 0")
    _check_number("gamma_pos", gamma_pos, gamma_pos >= 0, "at least 0")
    _check_number("clip", clip, 0 <= clip < 1, "from 0 to below 1")
    _check_number("holdout", holdout, 0 < holdout < 1, "above 0 and below 1")
    _check_number("mutation", mutation, mutation > 0, "above 0")
    if method == "ga" and batch_size is not None:
        raise ValueError(f"batch_size={batch_size}: must be None with method='ga', which ranks all labels at once")
    lr = torch.as_tensor(lr, dtype=torch.float64, device=weight.device)
    if lr.shape not in ((), (len(weight),)) or not (lr > 0).all():
        raise ValueError(f"lr={lr.tolist()}: must be above 0, one number or one for each of {len(weight)} categories")

    generator = torch.Generator().manual_seed(seed)
    fit, held, skipped = split_known(labels, holdout, min_known, generator)
    judge = _Judge(features, held, weight)
    original = [weight.detach(), bias.detach()[:, None]]
    now, best = ([tensor.clone() for tensor in original] for _ in range(2))
    if method == "adam":
        loss = (gamma_neg, gamma_pos, clip)
        optimiser = _Adam(features, fit, now, batch_size, epochs, lr, schedule, betas, eps, loss, generator)
    else:
        optimiser = _Genetic(features, fit, now, population, mutation, generator)
    best_ap = judge(*original)
    history = [best_ap]
    best_epoch = torch.zeros(len(weight), dtype=torch.int64, device=weight.device)
    epochs_run = torch.zeros_like(best_epoch)
    active = torch.ones_like(best_epoch, dtype=torch.bool)
    active[list(skipped)] = False
    for epoch in range(1, epochs + 1):
        heads = active.nonzero()[:, 0]
        if not len(heads):
            break
        optimiser.epoch(heads)
        epochs_run[heads] = epoch
        ap = judge(*now).masked_fill(~active, math.nan)
        history.append(ap)
        better = ap > best_ap + 1e-12  # not by rounding alone; False where either is NaN
        best_ap = torch.where(better, ap, best_ap)
        best_epoch[better] = epoch
        for kept, tensor in zip(best, now, strict=True):
            kept[better] = tensor[better]
        if patience is not None:
            active &= epoch - best_epoch < patience

    record = CFTRecord(
        ap_before=history[0].cpu(),
        ap_after=best_ap.cpu(),
        best_epoch=best_epoch.cpu(),
        epochs=epochs_run.cpu(),
        history=torch.stack(history).cpu(),
        held_out=(held != -1).t().contiguous().cpu(),
        skipped=skipped,
    )
    if evaluation is not None:
        judge = _Judge(*evaluation, weight)
        record.evaluation_before, record.evaluation_after = judge(*original).cpu(), judge(*best).cpu()
    return best[0], best[1][:, 0], record


# ------------------------------------------------------------------------------------------------------ held-out labels
def split_known(
    labels: Tensor, holdout: float, min_known: int, generator: torch.Generator
) -> tuple[Tensor, Tensor, dict[int, str]]:
    """Labels [C, N] to fit and labels [C, N] to judge by, -1 elsewhere; and why some categories have none of either.

    Of each category `holdout` of the known positives and `holdout` of the known negatives are held out, at least one of
    each. All categories take the first ones in the same random order of the samples. For any one category that is as
    random as an order of its own, and together the held-out labels need few samples.
    """
    order = torch.randperm(labels.shape[1], generator=generator).to(labels.device)
    shuffled = labels.index_select(1, order)
    held = torch.zeros_like(shuffled, dtype=torch.bool)
    skipped: dict[int, str] = {}
    for value, name in ((1, "positive"), (0, "negative")):
        mask = shuffled == value
        count = mask.sum(1)
        wanted = (count * holdout).round().clamp(min=1).minimum(count - 1)
        held |= mask & (mask.cumsum(1, dtype=torch.int32) <= wanted[:, None])
        for category in (count < min_known).nonzero()[:, 0].tolist():
            before = f"{skipped[category]}, " if category in skipped else ""
            skipped[category] = f"{before}{int(count[category])} known {name} labels, min_known is {min_known}"
    held = torch.empty_like(held).index_copy_(1, order, held)
    usable = torch.ones(len(labels), 1, dtype=torch.bool, device=labels.device)
    usable[sorted(skipped)] = False
    return labels.masked_fill(held | ~usable, -1), labels.masked_fill(~(held & usable), -1), skipped


class _Judge:
    """AP [C] of heads on the known ones of `labels` [C, N]."""

    def __init__(self, features: Tensor, labels: Tensor, like: Tensor) -> None:
        known = labels != -1
        self.features, self.rows = features, known.any(0).nonzero()[:, 0]
        # Known labels to the front, so that what is sorted is as long as the category with most of them, not N.
        longest = int(known.sum(1).max()) if labels.numel() else 0
        labels = labels.index_select(1, self.rows)
        self.place = (labels == -1).to(torch.int8).argsort(dim=1, stable=True)[:, :longest]
        self.labels = labels.gather(1, self.place)
        self.pattern = None
        if _leave_out_unknown(features, labels, like):
            place, heads = (labels != -1).t().nonzero().t().contiguous()
            self.pattern = _pattern(self.rows[place], heads, (len(features), len(labels)), like)
            # Where each of them is in `self.labels`: it goes by head, and within a head by sample as well.
            self.slots = torch.empty_like(heads)
            self.slots[heads.argsort(stable=True)] = (self.labels != -1).view(-1).nonzero()[:, 0]

    def __call__(self, weight: Tensor, bias: Tensor) -> Tensor:
        if self.pattern is not None:
            logits = weight.new_zeros(self.labels.shape)
            logits.view(-1)[self.slots] = _logits_at(self.pattern, self.features, weight, bias)
            return _average_precision(logits, self.labels)
        logits = [torch.addmm(bias[:, 0], x, weight.t()) for x in _pieces(self.features, self.rows, weight)]
        logits = torch.cat(logits) if logits else weight.new_zeros(0, len(weight))
        return _average_precision(logits.t().gather(1, self.place), self.labels)


def _average_precision(logits: Tensor, labels: Tensor) -> Tensor:
    """AP of each row of `logits` by the known ones of `labels`, both [G, N]; NaN for a head that gives NaN."""
    broken = logits.isnan()
    return average_precision(logits.masked_fill(broken, 0).t(), labels.t()).masked_fill(broken.any(1), math.nan)


def _pieces(features: Tensor, rows: Tensor, like: Tensor) -> Iterator[Tensor]:
    """The rows of `features`, some at a time, where `like` is and of its type. A piece is overwritten by the next."""
    piece = _PIECE_CPU if like.device.type == "cpu" else _PIECE_ELSEWHERE
    length = max(1, piece // (features.shape[1] * like.element_size()))
    buffer = features.new_empty(min(length, len(rows)), features.shape[1])
    for part in rows.to(features.device).split(length):
        yield torch.index_select(features, 0, part, out=buffer[: len(part)]).to(like.device, like.dtype)


# -------------------------------------------------------------------------------------------- Adam, all heads at a time
class _Batch(NamedTuple):
    """Labels of a step of G heads, as a table of the samples that any of them needs."""

    size: Tensor  # [G] labels of each head
    rows: Tensor  # [w] samples
    labels: Tensor  # [w, G], -1 for those not in the batch


class _SparseBatch(NamedTuple):
    """The same as a list of K labels, sorted by sample, and again in bags: one for each head and piece of the features,
    so that a piece is still in the cache when the next head needs it."""

    size: Tensor  # [G]
    pattern: Tensor  # [N, G] sparse: where they are
    labels: Tensor  # [K]
    turn: Tensor  # [K] which of them comes next in the bags
    rows: Tensor  # [K] its sample
    bags: Tensor  # [pieces * G + 1] where each bag starts


class _Group(NamedTuple):
    """Heads that take the same number of steps in an epoch."""

    heads: Tensor  # [G]
    steps: int
    labels: Tensor  # [N, G] to fit
    needed: Tensor  # [N] bool: samples with any label to fit
    known: _Known | None  # labels to fit, if unknown ones are to be left out
    everything: _Batch | _SparseBatch  # all labels as one batch


class _Adam:
    """Adam on the asymmetric loss of the labels `fit` [C, N], for any of the heads (weight [C, D], bias [C, 1])."""

    def __init__(self, features, fit, heads, batch_size, epochs, lr, schedule, betas, eps, loss, generator) -> None:
        self.features, self.labels, self.heads = features, fit.t().contiguous(), heads
        self.batch_size, self.generator = batch_size, generator
        self.steps = -(-(fit != -1).sum(1) // (batch_size or fit.shape[1]))  # [C] in an epoch
        self.taken = torch.zeros(len(fit), dtype=torch.float64, device=fit.device)  # [C]
        self.last = self.steps * epochs
        self.lr, self.schedule, self.betas, self.eps, self.loss = lr.expand(len(fit)), schedule, betas, eps, loss
        self.moments = [torch.zeros_like(tensor) for tensor in (*heads, *heads)]
        self.groups: list[_Group] = []

    def epoch(self, active: Tensor) -> None:
        """Each of the heads `active` goes once through its labels."""
        if sum(len(group.heads) for group in self.groups) != len(active):  # heads stop, and none starts again
            self.groups = self._group(active)
        if self.batch_size is not None:
            order = torch.randperm(len(self.labels), generator=self.generator).to(active.device)
        for group in self.groups:
            if self.batch_size is None:
                self._go_through(group.heads, [group.everything])
            elif group.known is not None:
                self._go_through(group.heads, group.known.batches(order, self.batch_size, group.steps))
            else:
                needed = order[group.needed[order]]
                self._go_through(group.heads, _batches(group.labels, needed, self.batch_size, group.steps))

    def _group(self, active: Tensor) -> list[_Group]:
        """The same number of steps in an epoch means about the same share of known labels, so that step t of all such
        heads is about the same stretch of any order. Heads that go at another pace are another group."""
        groups = []
        pace = self.steps[active]
        for steps in pace.unique().tolist():
            heads = active[pace == steps]
            labels = self.labels.index_select(1, heads)
            needed = (labels != -1).any(1)
            rows = needed.nonzero()[:, 0]
            everything = _Batch((labels != -1).sum(0), rows, labels.index_select(0, rows))
            known = None
            if _leave_out_unknown(self.features, everything.labels, self.heads[0]):
                known = _Known(self.features, labels)
                everything = known.everything()
            groups.append(_Group(heads, steps, labels, needed, known, everything))
        return groups

    def _go_through(self, heads: Tensor, batches: Iterable[_Batch | _SparseBatch]) -> None:
        state = [tensor[heads] for tensor in (*self.heads, *self.moments)]
        taken, last, lr = self.taken[heads], self.last[heads], self.lr[heads]
        for batch in batches:
            method = _sparse_gradients if isinstance(batch, _SparseBatch) else _gradients
            gradients = method(self.features, batch, *state[:2], self.loss)
            rate = lr * (0.5 + 0.5 * (math.pi * taken / last).cos()) if self.schedule == "cosine" else lr
            taken += 1
            for gradient, *tensors in zip(gradients, state[0:2], state[2:4], state[4:6], strict=True):
                _adam_step(gradient.div_(batch.size[:, None]), *tensors, taken, rate, self.betas, self.eps)
        self.taken[heads] = taken
        for tensor, new in zip((*self.heads, *self.moments), state, strict=True):
            tensor[heads] = new


def _adam_step(gradient, parameter, first, second, step, lr, betas, eps) -> None:
    """In place, as torch.optim.Adam, with a step number and a learning rate for each row."""
    first.lerp_(gradient, 1 - betas[0])
    second.mul_(betas[1]).addcmul_(gradient, gradient, value=1 - betas[1])
    size = (lr / (1 - betas[0] ** step)).to(parameter.dtype)[:, None]
    scale = (1 - betas[1] ** step).sqrt().to(parameter.dtype)[:, None]
    parameter.addcdiv_(first * size, (second.sqrt() / scale).add_(eps), value=-1)


def _batches(labels: Tensor, order: Tensor, batch_size: int, steps: int) -> Iterator[_Batch]:
    """Cut the known labels of each column of `labels` [N, G], in the given order, into `steps` batches."""
    labels = labels.index_select(0, order)
    rank = (labels != -1).t().contiguous().cumsum(1, dtype=torch.int32)  # [G, w]: 1 at the first known label
    first = (torch.arange(steps, dtype=torch.int32, device=rank.device) * batch_size + 1).repeat(len(rank), 1)
    last = (first + (batch_size - 1)).minimum(rank[:, -1:])
    start, stop = torch.searchsorted(rank, first), torch.searchsorted(rank, last) + 1
    size = last - first + 1
    for t, (low, high) in enumerate(zip(start.amin(0).tolist(), stop.amax(0).tolist(), strict=True)):
        place = torch.arange(low, high, device=rank.device)[:, None]
        inside = (place >= start[:, t]) & (place < stop[:, t])
        yield _Batch(size[:, t], order[low:high], labels[low:high].masked_fill(~inside, -1))


def _gradients(features: Tensor, batch: _Batch, weight: Tensor, bias: Tensor, loss: tuple) -> tuple[Tensor, Tensor]:
    """Gradient of the summed loss with respect to weight [G, D] and bias [G, 1]."""
    for_weight, for_bias, done = torch.zeros_like(weight), torch.zeros_like(bias), 0
    for x in _pieces(features, batch.rows, weight):
        logits = torch.addmm(bias[:, 0], x, weight.t())
        gradient = asymmetric_gradient(logits, batch.labels[done : done + len(x)], *loss)
        for_weight.addmm_(gradient.t(), x)
        for_bias += gradient.sum(0)[:, None]
        done += len(x)
    return for_weight, for_bias


def asymmetric_gradient(logits: Tensor, labels: Tensor, gamma_neg: float, gamma_pos: float, clip: float) -> Tensor:
    """Derivative of `losses.PartialAsymmetricLoss` by each logit, 0 where the label is -1; written out, as autograd
    would go over the labels twice as often.

    The loss is -(1-p)^gamma_pos log(p) for a positive, -(1-s)^gamma_neg log(s) with s = min(1-p+clip, 1) for a
    negative; as in its authors' code, the powers are weights that have no derivative themselves.
    """
    q = (-logits).sigmoid_()  # 1 - p, exact where p is nearly 1
    p = 1 - q
    excess = (p - clip).clamp_(min=0)  # 1 - s
    negative = _power(excess, gamma_neg).mul_(p)
    if clip:
        negative.mul_(q).div_(1 - excess)
    if gamma_neg == 0:
        negative.masked_fill_(excess == 0, 0)
    positive = q.neg_() if gamma_pos == 0 else -q.pow_(gamma_pos + 1)
    return torch.where(labels == 1, positive, negative).masked_fill_(labels == -1, 0)


def _power(x: Tensor, exponent: float) -> Tensor:
    """torch.pow takes many times as long for an exponent of 4."""
    return x.square().square_() if exponent == 4 else x.pow(exponent)


# ------------------------------------------------------------------------------------- the same, without unknown labels
# With a tenth of the labels known, nine tenths of the products would be for nothing. Two kernels of torch compute the
# rest alone, straight from the features: `sampled_addmm` some entries of a matrix product, `embedding_bag` weighted
# sums of rows. A label costs them several times what it costs the product of whole matrices, hence _SPARSE.
def _leave_out_unknown(features: Tensor, labels: Tensor, like: Tensor) -> bool:
    """Whether that is possible, and faster."""
    ready = features.is_contiguous() and features.dtype == like.dtype and like.dtype in (torch.float32, torch.float64)
    on_cpu = features.device.type == like.device.type == "cpu"  # a GPU would have to wait for the number of labels
    return ready and on_cpu and 0 < int((labels != -1).sum()) < _SPARSE * labels.numel()


def _starts(index: Tensor, length: int) -> Tensor:
    """Where 0, 1, ... `length` would start in `index` if it were sorted."""
    return torch.cat([index.new_zeros(1), index.bincount(minlength=length).cumsum(0)])


def _inverse(order: Tensor) -> Tensor:
    """Where each number is in a permutation."""
    return torch.empty_like(order).scatter_(0, order, torch.arange(len(order)))


def _pattern(samples: Tensor, heads: Tensor, shape: tuple[int, int], like: Tensor) -> Tensor:
    """Sparse matrix of zeros at (sample, head), which are sorted."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # that such matrices are in beta
        return torch.sparse_csr_tensor(_starts(samples, shape[0]), heads, like.new_zeros(len(heads)), shape)


def _logits_at(pattern: Tensor, features: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """[K], one for each entry of the pattern."""
    logits = torch.sparse.sampled_addmm(pattern, features, weight.t(), beta=0).values()
    return logits.add_(bias[:, 0].index_select(0, pattern.col_indices()))


class _Known:
    """The known ones of `labels` [N, G], one by one, sorted by sample."""

    def __init__(self, features: Tensor, labels: Tensor) -> None:
        self.features, self.shape = features, labels.shape
        self.samples, self.heads = (labels != -1).nonzero().t().contiguous()
        self.labels = labels[self.samples, self.heads]

    def everything(self) -> _SparseBatch:
        (batch,) = self._cut(torch.zeros_like(self.heads), 1)
        return batch

    def batches(self, order: Tensor, batch_size: int, steps: int) -> Iterator[_SparseBatch]:
        """As `_batches`."""
        place = _inverse(order).index_select(0, self.samples)
        walk = (self.heads * len(order) + place).argsort()  # one head after the other, each in the given order
        starts = _starts(self.heads, self.shape[1])
        rank = torch.arange(len(walk)) - starts[:-1].repeat_interleave(starts.diff())
        return self._cut(torch.empty_like(walk).scatter_(0, walk, rank // batch_size), steps)

    def _cut(self, step: Tensor, steps: int) -> Iterator[_SparseBatch]:
        """Each label into the batch of its step."""
        n, g = self.shape
        width = self.features.shape[1] * self.features.element_size()
        # A step needs about one sample in `steps`. Not so many pieces that the sums of the bags fill the memory.
        pieces = min(-(-n * width // (_PIECE_CPU * steps)), _SUMS // (g * width))
        length = -(-n // max(1, pieces))
        bags = -(-n // length) * g
        bag, by_bag = (step * bags + self.samples // length * g + self.heads).sort(stable=True)
        by_step = step.argsort(stable=True)
        turn = _inverse(by_step).index_select(0, by_bag)
        done, sizes = 0, step.bincount(minlength=steps).tolist()
        for t, (mine, bagged) in enumerate(zip(by_step.split(sizes), by_bag.split(sizes), strict=True)):
            samples, heads, labels = (each.index_select(0, mine) for each in (self.samples, self.heads, self.labels))
            yield _SparseBatch(
                size=heads.bincount(minlength=g),
                pattern=_pattern(samples, heads, self.shape, self.features),
                labels=labels,
                turn=turn[done : done + len(mine)] - done,
                rows=self.samples.index_select(0, bagged),
                bags=_starts(bag[done : done + len(mine)] - t * bags, bags),
            )
            done += len(mine)


def _sparse_gradients(
    features: Tensor, batch: _SparseBatch, weight: Tensor, bias: Tensor, loss: tuple
) -> tuple[Tensor, Tensor]:
    """As `_gradients`."""
    gradient = asymmetric_gradient(_logits_at(batch.pattern, features, weight, bias), batch.labels, *loss)
    sums = embedding_bag(
        batch.rows,
        features,
        batch.bags,
        mode="sum",
        per_sample_weights=gradient.index_select(0, batch.turn),
        include_last_offset=True,
    )
    for_bias = torch.zeros_like(bias).index_add_(0, batch.pattern.col_indices(), gradient[:, None])
    return sums.view(-1, *weight.shape).sum(0), for_bias


# ----------------------------------------------------------------------------------------- genetic algorithm, on AP
class _Genetic:
    """Breeds heads for AP on the labels `fit` [C, N]; the fittest of each category is its head.

    The numbers are the authors': parents are drawn in proportion to their AP, a child has each weight from
    one of them with probability 0.2, else from the other, every second child is mutated, the fittest lives on as it is.
    Unlike with Adam, what a head becomes depends on the others: the random numbers are drawn for all of them together.
    """

    def __init__(self, features, fit, heads, population, mutation, generator) -> None:
        self.features, self.heads, self.mutation = features, heads, mutation
        self.rows = [(labels != -1).nonzero()[:, 0] for labels in fit]
        self.labels = [labels[rows] for labels, rows in zip(fit, self.rows, strict=True)]
        self.people = torch.cat(heads, dim=1)[:, None].repeat(1, population, 1)  # [C, P, D + 1]
        self.generator = torch.Generator(fit.device).manual_seed(generator.initial_seed())

    def epoch(self, active: Tensor) -> None:
        people = self.people[active]
        fitness = torch.stack([self._fitness(c, some) for c, some in zip(active.tolist(), people, strict=True)])
        fittest = people[torch.arange(len(people), device=people.device), fitness.argmax(1)]
        self.heads[0][active], self.heads[1][active] = fittest[:, :-1], fittest[:, -1:]
        mother, father = (self._draw(people, fitness) for _ in range(2))
        children = torch.where(self._random(people) < 0.2, mother, father)
        mutated = self._random(people[:, :, :1]) < 0.5
        children += (self._random(people) * 2 - 1).mul_(self.mutation) * mutated
        children[:, 0] = fittest
        self.people[active] = children

    def _fitness(self, category: int, people: Tensor) -> Tensor:
        weight, bias = people[:, :-1], people[:, -1]
        logits = [torch.addmm(bias, x, weight.t()) for x in _pieces(self.features, self.rows[category], people)]
        ap = _average_precision(torch.cat(logits).t(), self.labels[category].expand(len(people), -1))
        return ap.nan_to_num(0) + 1e-12  # a head that overflowed has no children

    def _draw(self, people: Tensor, fitness: Tensor) -> Tensor:
        chosen = torch.multinomial(fitness, people.shape[1], replacement=True, generator=self.generator)
        return people.gather(1, chosen[:, :, None].expand_as(people))

    def _random(self, like: Tensor) -> Tensor:
        return torch.rand(like.shape, dtype=like.dtype, device=like.device, generator=self.generator)


# --------------------------------------------------------------------------------------------------------------- checks
def _as_features(name: str, features: Tensor | np.ndarray, weight: Tensor, bias: Tensor) -> Tensor:
    for head, value, dimensions in (("weight", weight, 2), ("bias", bias, 1)):
        if not isinstance(value, Tensor) or not value.is_floating_point():
            raise TypeError(f"{head} is {_kind(value)}: must be a tensor of a floating type")
        if value.ndim != dimensions:
            raise ValueError(f"{head} has shape {tuple(value.shape)}: must be {['[C]', '[C, D]'][dimensions - 1]}")
    if bias.shape != weight.shape[:1] or bias.dtype != weight.dtype or bias.device != weight.device:
        raise ValueError(
            f"bias is {_kind(bias)} of shape {tuple(bias.shape)} on {bias.device}: must have an entry for each row of "
            f"weight, its type and its device: {_kind(weight)}, {tuple(weight.shape[:1])}, {weight.device}"
        )
    if isinstance(features, np.ndarray):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # mapped read-only, and nothing here writes into it
            features = torch.from_numpy(features)
    if not isinstance(features, Tensor) or not features.is_floating_point():
        raise TypeError(f"{name} is {_kind(features)}: must be a tensor or numpy array of a floating type")
    if features.ndim != 2 or features.shape[1] != weight.shape[1]:
        raise ValueError(
            f"{name} has shape {tuple(features.shape)}: must be [samples, {weight.shape[1]}], as weight has shape "
            f"{tuple(weight.shape)}"
        )
    return features.detach()


def _as_labels(name: str, targets: Tensor | np.ndarray, features: Tensor, weight: Tensor) -> Tensor:
    """int8 [C, N] on the device of `weight`."""
    if not isinstance(targets, (Tensor, np.ndarray)):
        raise TypeError(f"{name} is {_kind(targets)}: must be a tensor or a numpy array")
    if tuple(targets.shape) != (len(features), len(weight)):
        raise ValueError(
            f"{name} has shape {tuple(targets.shape)}: must be ({len(features)}, {len(weight)}), a row for each sample "
            "and a column for each category"
        )
    check_labels(targets)
    return torch.as_tensor(targets).to(weight.device, torch.int8).t().contiguous()


def _kind(value: object) -> str:
    return str(value.dtype) if isinstance(value, (Tensor, np.ndarray)) else type(value).__name__


def _check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(f"{name}={value!r}: must be one of {', '.join(choices)}")


def _check_number(name: str, value: float, right: bool, rule: str) -> None:
    if not right:
        raise ValueError(f"{name}={value}: must be {rule}")
