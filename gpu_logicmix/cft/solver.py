"""Adam on the asymmetric loss, for all heads side by side."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import embedding_bag

from gpu_logicmix.cft import products
from gpu_logicmix.cft.options import CFTOptions
from gpu_logicmix.cft.products import inverse, leave_out_unknown, logits_at, pieces, sparse_pattern, starts_of

SUMS = 1 << 28  # bytes for sums over pieces, before they are added up


class Batch(NamedTuple):
    """Labels of a step of G heads, as a table of the samples that any of them needs."""

    size: Tensor  # [G] labels of each head
    rows: Tensor  # [w] samples
    labels: Tensor  # [w, G], -1 for those not in the batch


class SparseBatch(NamedTuple):
    """The same as a list of K labels, sorted by sample, and again in bags: one for each head and piece of the features,
    so that a piece is still in the cache when the next head needs it."""

    size: Tensor  # [G]
    pattern: Tensor  # [N, G] sparse: where they are
    labels: Tensor  # [K]
    turn: Tensor  # [K] which of them comes next in the bags
    rows: Tensor  # [K] its sample
    bags: Tensor  # [pieces * G + 1] where each bag starts


class Group(NamedTuple):
    """Heads that take the same number of steps in an epoch."""

    heads: Tensor  # [G]
    steps: int
    labels: Tensor  # [N, G] to fit
    needed: Tensor  # [N] bool: samples with any label to fit
    known: Known | None  # labels to fit, if unknown ones are to be left out
    everything: Batch | SparseBatch  # all labels as one batch


class Adam:
    """Adam on the asymmetric loss of the labels `fit` [C, N], for any of the heads (weight [C, D], bias [C, 1])."""

    def __init__(
        self, features: Tensor, fit: Tensor, heads: list[Tensor], options: CFTOptions, generator: torch.Generator
    ) -> None:
        self.features, self.labels, self.heads, self.options = features, fit.t().contiguous(), heads, options
        self.batch_size, self.generator = options.batch_size, generator
        self.steps = -(-(fit != -1).sum(1) // (self.batch_size or fit.shape[1]))  # [C] in an epoch
        self.taken = torch.zeros(len(fit), dtype=torch.float64, device=fit.device)  # [C]
        self.last = self.steps * options.epochs
        self.lr = torch.as_tensor(options.lr, dtype=torch.float64, device=fit.device).expand(len(fit))
        self.loss = (options.gamma_neg, options.gamma_pos, options.clip)
        self.moments = [torch.zeros_like(tensor) for tensor in (*heads, *heads)]
        self.groups: list[Group] = []

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

    def _group(self, active: Tensor) -> list[Group]:
        """The same number of steps in an epoch means about the same share of known labels, so that step t of all such
        heads is about the same stretch of any order. Heads that go at another pace are another group."""
        groups = []
        pace = self.steps[active]
        for steps in pace.unique().tolist():
            heads = active[pace == steps]
            labels = self.labels.index_select(1, heads)
            needed = (labels != -1).any(1)
            rows = needed.nonzero()[:, 0]
            everything = Batch((labels != -1).sum(0), rows, labels.index_select(0, rows))
            known = None
            if leave_out_unknown(self.features, everything.labels, self.heads[0]):
                known = Known(self.features, labels)
                everything = known.everything()
            groups.append(Group(heads, steps, labels, needed, known, everything))
        return groups

    def _go_through(self, heads: Tensor, batches: Iterable[Batch | SparseBatch]) -> None:
        state = [tensor[heads] for tensor in (*self.heads, *self.moments)]
        taken, last, lr = self.taken[heads], self.last[heads], self.lr[heads]
        betas, eps = self.options.betas, self.options.eps
        for batch in batches:
            method = _sparse_gradients if isinstance(batch, SparseBatch) else _gradients
            gradients = method(self.features, batch, *state[:2], self.loss)
            rate = lr * (0.5 + 0.5 * (math.pi * taken / last).cos()) if self.options.schedule == "cosine" else lr
            taken += 1
            for gradient, *tensors in zip(gradients, state[0:2], state[2:4], state[4:6], strict=True):
                _adam_step(gradient.div_(batch.size[:, None]), *tensors, taken, rate, betas, eps)
        self.taken[heads] = taken
        for tensor, new in zip((*self.heads, *self.moments), state, strict=True):
            tensor[heads] = new


def _adam_step(
    gradient: Tensor,
    parameter: Tensor,
    first: Tensor,
    second: Tensor,
    step: Tensor,
    lr: Tensor,
    betas: tuple[float, float],
    eps: float,
) -> None:
    """In place, as torch.optim.Adam, with a step number and a learning rate for each row."""
    first.lerp_(gradient, 1 - betas[0])
    second.mul_(betas[1]).addcmul_(gradient, gradient, value=1 - betas[1])
    size = (lr / (1 - betas[0] ** step)).to(parameter.dtype)[:, None]
    scale = (1 - betas[1] ** step).sqrt().to(parameter.dtype)[:, None]
    parameter.addcdiv_(first * size, (second.sqrt() / scale).add_(eps), value=-1)


def _batches(labels: Tensor, order: Tensor, batch_size: int, steps: int) -> Iterator[Batch]:
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
        yield Batch(size[:, t], order[low:high], labels[low:high].masked_fill(~inside, -1))


def _gradients(features: Tensor, batch: Batch, weight: Tensor, bias: Tensor, loss: tuple) -> tuple[Tensor, Tensor]:
    """Gradient of the summed loss with respect to weight [G, D] and bias [G, 1]."""
    for_weight, for_bias, done = torch.zeros_like(weight), torch.zeros_like(bias), 0
    for x in pieces(features, batch.rows, weight):
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


class Known:
    """The known ones of `labels` [N, G], one by one, sorted by sample."""

    def __init__(self, features: Tensor, labels: Tensor) -> None:
        self.features, self.shape = features, labels.shape
        self.samples, self.heads = (labels != -1).nonzero().t().contiguous()
        self.labels = labels[self.samples, self.heads]

    def everything(self) -> SparseBatch:
        (batch,) = self._cut(torch.zeros_like(self.heads), 1)
        return batch

    def batches(self, order: Tensor, batch_size: int, steps: int) -> Iterator[SparseBatch]:
        """As `_batches`."""
        place = inverse(order).index_select(0, self.samples)
        walk = (self.heads * len(order) + place).argsort()  # one head after the other, each in the given order
        starts = starts_of(self.heads, self.shape[1])
        rank = torch.arange(len(walk)) - starts[:-1].repeat_interleave(starts.diff())
        return self._cut(torch.empty_like(walk).scatter_(0, walk, rank // batch_size), steps)

    def _cut(self, step: Tensor, steps: int) -> Iterator[SparseBatch]:
        """Each label into the batch of its step."""
        n, g = self.shape
        width = self.features.shape[1] * self.features.element_size()
        # A step needs about one sample in `steps`. Not so many pieces that the sums of the bags fill the memory.
        pieces = min(-(-n * width // (products.PIECE_CPU * steps)), SUMS // (g * width))
        length = -(-n // max(1, pieces))
        bags = -(-n // length) * g
        bag, by_bag = (step * bags + self.samples // length * g + self.heads).sort(stable=True)
        by_step = step.argsort(stable=True)
        turn = inverse(by_step).index_select(0, by_bag)
        done, sizes = 0, step.bincount(minlength=steps).tolist()
        for t, (mine, bagged) in enumerate(zip(by_step.split(sizes), by_bag.split(sizes), strict=True)):
            samples, heads, labels = (each.index_select(0, mine) for each in (self.samples, self.heads, self.labels))
            yield SparseBatch(
                size=heads.bincount(minlength=g),
                pattern=sparse_pattern(samples, heads, self.shape, self.features),
                labels=labels,
                turn=turn[done : done + len(mine)] - done,
                rows=self.samples.index_select(0, bagged),
                bags=starts_of(bag[done : done + len(mine)] - t * bags, bags),
            )
            done += len(mine)


def _sparse_gradients(
    features: Tensor, batch: SparseBatch, weight: Tensor, bias: Tensor, loss: tuple
) -> tuple[Tensor, Tensor]:
    """As `_gradients`."""
    gradient = asymmetric_gradient(logits_at(batch.pattern, features, weight, bias), batch.labels, *loss)
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
