"""Category-wise fine-tuning: after training, each category's head alone, on that category's known labels alone.

    weight, bias, record = category_wise_fine_tune(features, targets, head.weight, head.bias)
    head.weight.data.copy_(weight), head.bias.data.copy_(bias)
    print(record.summary())

Wrong pseudo-labels bend the heads; known labels bend them back. `features` [N, D] is what the frozen backbone gives the
head, computed once. Some known labels are held out of the fit, and each head keeps its best state by average precision
on those, the original one among them: on the held-out labels no category gets worse. That is no proof that the new
heads are better: `record.gain` is, with `record.gain_interval`, and `record.kept` says which heads to keep by them.

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
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gpu_logicmix.cft.genetic import Genetic
from gpu_logicmix.cft.heldout import Judge, split_known
from gpu_logicmix.cft.options import CFTOptions
from gpu_logicmix.cft.products import finite_rows
from gpu_logicmix.cft.solver import Adam
from gpu_logicmix.labels import check_labels


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
    evaluation_before: Tensor | None = None  # [C] on the evaluation set, by which nothing is chosen
    evaluation_after: Tensor | None = None
    rows_left_out: int = 0  # samples that were ignored because their features are non-finite
    evaluation_rows_left_out: int = 0
    gain: float = math.nan  # in mAP on held-out labels that did not choose the heads' states; NaN: too few of them
    gain_interval: tuple[float, float] = (math.nan, math.nan)  # its 95 % interval, from a paired bootstrap

    @property
    def changed(self) -> list[int]:
        """The categories whose head is not the original one."""
        return self.best_epoch.nonzero()[:, 0].tolist()

    @property
    def kept(self) -> str:
        """ "cft": the gain is beyond its noise; "model": it is not, and the original heads are the ones to use."""
        return "cft" if self.changed and self.gain_interval[0] > 0 else "model"

    def summary(self) -> dict[str, Any]:
        """Numbers for a log: means over the categories that have an AP."""
        out = {
            "categories": len(self.best_epoch),
            "changed": len(self.changed),
            "skipped": len(self.skipped),
            "rows_left_out": self.rows_left_out,
            "held_out_map_before": self.ap_before.nanmean().item(),
            "held_out_map_after": self.ap_after.nanmean().item(),
            "gain": self.gain,
            "gain_interval": list(self.gain_interval),
            "kept": self.kept,
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
    options: CFTOptions | None = None,
    *,
    evaluation: tuple[Tensor | np.ndarray, Tensor | np.ndarray] | None = None,
    **changes: Any,
) -> tuple[Tensor, Tensor, CFTRecord]:
    """Fit the heads `weight` [C, D] and `bias` [C] to known labels; gives back new ones and a record.

    features: [N, D] of any floating type, in memory or mapped into it (`numpy.memmap`, `torch.from_file`), on any
        device; read a piece at a time, to the device of `weight`. A row with a non-finite number is ignored, with a
        warning; `record.rows_left_out` counts them.
    targets: [N, C]: 1 present, 0 absent, -1 or NaN unknown. Labels of the data set, no pseudo-labels.
    weight, bias: the heads. Those of half precision are fitted in float32 and given back in their own type.
    options: see `CFTOptions`; any of its fields can also be given by name, as `epochs=100, lr=1e-3`.
    evaluation: (features, targets) of another data set, only to report AP on it before and after.
    """
    options = replace(options or CFTOptions(), **changes)
    features = _as_features("features", features, weight, bias)
    labels = _as_labels("targets", targets, features, weight)
    if evaluation is not None:
        seen = _as_features("evaluation features", evaluation[0], weight, bias)
        evaluation = (seen, _as_labels("evaluation targets", evaluation[1], seen, weight))
    options.check_lr(len(weight))
    own = torch.promote_types(weight.dtype, torch.float32)
    original = [weight.detach().to(own), bias.detach().to(own)[:, None]]
    labels, left_out = _without_broken("features", features, labels, original[0])
    best, record = _fit(features, labels, original, options, weight.dtype)
    record.rows_left_out = left_out
    if evaluation is not None:
        seen, truth = evaluation
        truth, record.evaluation_rows_left_out = _without_broken("evaluation features", seen, truth, original[0])
        judge = Judge(seen, truth, original[0])
        record.evaluation_before, record.evaluation_after = judge(*original).cpu(), judge(*best).cpu()
    return best[0].to(weight.dtype), best[1][:, 0].to(weight.dtype), record


def _fit(
    features: Tensor, labels: Tensor, original: list[Tensor], options: CFTOptions, dtype: torch.dtype
) -> tuple[list[Tensor], CFTRecord]:
    """Heads as they can be held in `dtype`, and the record of how they came about."""
    generator = torch.Generator().manual_seed(options.seed)
    fit, held, skipped = split_known(labels, options.holdout, options.min_known, generator)
    judge = Judge(features, held, original[0], halves=True)
    now = [tensor.clone() for tensor in original]
    optimiser = (Adam if options.method == "adam" else Genetic)(features, fit, now, options, generator)
    ap = judge(*original)
    history = [ap[0]]
    best, *by_half = (_Best(original, each) for each in ap)
    epochs_run = torch.zeros_like(best.epoch)
    active = torch.ones_like(best.epoch, dtype=torch.bool)
    active[list(skipped)] = False
    for epoch in range(1, options.epochs + 1):
        heads = active.nonzero()[:, 0]
        if not len(heads):
            break
        optimiser.epoch(heads)
        epochs_run[heads] = epoch
        ap = judge(*now).masked_fill(~active, math.nan)
        history.append(ap[0])
        for state, each in zip((best, *by_half), ap, strict=True):
            state.see(epoch, now, each)
        if options.on_epoch is not None:
            options.on_epoch()
        if options.patience is not None:
            active &= epoch - best.epoch < options.patience
    if dtype != original[0].dtype:
        best.round_to(dtype, original, judge)
    record = CFTRecord(
        ap_before=history[0].cpu(),
        ap_after=best.ap.cpu(),
        best_epoch=best.epoch.cpu(),
        epochs=epochs_run.cpu(),
        history=torch.stack(history).cpu(),
        held_out=(held != -1).t().contiguous().cpu(),
        skipped=skipped,
    )
    if record.changed:
        chosen = [state.heads for state in by_half]
        record.gain, record.gain_interval = judge.gain(original, chosen, options.resamples, generator)
    return best.heads, record


class _Best:
    """The best state of each head so far, by some labels."""

    def __init__(self, heads: list[Tensor], ap: Tensor) -> None:
        self.heads, self.ap = [tensor.clone() for tensor in heads], ap
        self.epoch = torch.zeros(len(ap), dtype=torch.int64, device=ap.device)

    def see(self, epoch: int, heads: list[Tensor], ap: Tensor) -> None:
        better = ap > self.ap + 1e-12  # not by rounding alone; False where either is NaN
        self.ap = torch.where(better, ap, self.ap)
        self.epoch[better] = epoch
        for kept, tensor in zip(self.heads, heads, strict=True):
            kept[better] = tensor[better]

    def round_to(self, dtype: torch.dtype, original: list[Tensor], judge: Judge) -> None:
        """As the heads can be held in `dtype`; the original ones, which can, where rounding has cost the gain."""
        self.heads = [tensor.to(dtype).to(tensor.dtype) for tensor in self.heads]
        first, ap = judge(*original)[0], judge(*self.heads)[0]
        lost = ~(ap > first + 1e-12)
        for kept, tensor in zip(self.heads, original, strict=True):
            kept[lost] = tensor[lost]
        self.ap, self.epoch = torch.where(lost, first, ap), self.epoch.masked_fill(lost, 0)


# --------------------------------------------------------------------------------------------------------------- checks
def _without_broken(name: str, features: Tensor, labels: Tensor, like: Tensor) -> tuple[Tensor, int]:
    """Labels [C, N] that are unknown where the features of a sample are non-finite, and how many samples those are."""
    finite = finite_rows(features, like)
    count = len(finite) - int(finite.sum())
    if count:
        warnings.warn(f"{count} of {len(features)} rows of {name} are non-finite: they are ignored", stacklevel=4)
        labels = labels.masked_fill(~finite, -1)
    return labels, count


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
    if not features.numel():
        raise ValueError(f"{name} has shape {tuple(features.shape)}: must have at least one sample and one feature")
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
    targets = torch.as_tensor(targets)
    if targets.is_floating_point():
        targets = targets.nan_to_num(nan=-1)
    check_labels(targets)
    return targets.to(weight.device, torch.int8).t().contiguous()


def _kind(value: object) -> str:
    return str(value.dtype) if isinstance(value, (Tensor, np.ndarray)) else type(value).__name__
