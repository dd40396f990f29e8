"""CSL, class-aware selective loss: an unknown label is a weaker negative, unless it is likely to be present.

Ben-Baruch et al., "Multi-label Classification with Partial Annotations using Class-aware Selective Loss", CVPR 2022,
https://arxiv.org/abs/2110.10955; code: Alibaba-MIIL/PartialLabelingCSL.

With q = min(1 - p + clip, 1), a label costs

    alpha_pos * (1 - p)^gamma_pos * -log(p)          if present
    alpha_neg * (1 - q)^gamma_neg * -log(q)          if absent
    alpha_unknown * (1 - q)^gamma_unknown * -log(q)  if unknown; nothing if it is ignored

Modes: "ignore" ignores all unknown labels, "negative" none, "selective" those of categories with a prior above
`threshold` (0: of none), and of the whole batch the `topk` * B unknown labels with the largest logits.

The authors' code sums; "mean" is over the labels that are not ignored. It clamps logarithms at 1e-8; these come from
log-sigmoid, which needs no clamp. Its README prints (gamma_unknown, gamma_neg, gamma_pos) as (4, 1, 1) in a table and
trains with gamma_pos = 0.
"""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from gpu_logicmix.labels import is_unknown
from gpu_logicmix.losses.asymmetric import check_mixed, focal_term
from gpu_logicmix.losses.base import LOSSES, Batch, Loss, Output, check_at_least_zero, check_probability
from gpu_logicmix.losses.everyone import total

MODES = ("selective", "ignore", "negative")
KNOWN = "known"  # a prior from the known labels


@LOSSES.register("csl")
class ClassAwareSelectiveLoss(Loss):
    """CSL: unknown labels are weaker negatives, unless their category is frequent or the model takes them as present.

    mode: "selective", "ignore" or "negative".
    gamma_neg, gamma_pos, gamma_unknown, clip: of the asymmetric loss. Defaults are those of the authors' runs with
        labels dropped at random; with 1,000 labels fixed per category they take gamma_neg=3. Their parser has
        gamma_unknown=2.
    alpha_neg, alpha_pos, alpha_unknown: factors.
    topk: for each sample of the batch, this many unknown labels are ignored: those with the largest logits of all.
    threshold: unknown labels of categories with a larger prior are ignored; 0.5 in the authors' runs, 0.05 in their
        parser. 0 turns this off, as in their code.
    prior: how often each category is present: a CSV file with columns Classes, avg_pred (as `write_prior` and the
        authors' code write it), a tensor [C], "known": the share of present ones among the known labels of the training
        set, or none: no category is ignored as a whole. A file goes by the names of categories and "known" by the
        labels that `prepare` is given, which a run does; in a loop of one's own: `loss.prepare(labels, categories)`.
        Both can be loaded from a `state_dict` as well.
    per_group: rank original and mixed samples apart.
    """

    prior: Tensor | None

    def __init__(
        self,
        gamma_neg: float = 1,
        gamma_pos: float = 0,
        gamma_unknown: float = 4,
        clip: float = 0,
        reduction: str = "mean",
        *,
        mode: Literal["selective", "ignore", "negative"] = "selective",
        topk: int = 5,
        threshold: float = 0.5,
        prior: str | Path | Tensor | None = None,
        alpha_neg: float = 1,
        alpha_pos: float = 1,
        alpha_unknown: float = 1,
        per_group: bool = False,
        unknown: float = -1,
    ) -> None:
        super().__init__(reduction, unknown=unknown)
        check_at_least_zero(gamma_neg=gamma_neg, gamma_pos=gamma_pos, gamma_unknown=gamma_unknown)
        check_at_least_zero(topk=topk, threshold=threshold)
        check_probability(clip=clip)
        if mode not in MODES:
            raise ValueError(f"mode={mode!r}: must be one of {', '.join(MODES)}")
        self.gamma_neg, self.gamma_pos, self.gamma_unknown, self.clip = gamma_neg, gamma_pos, gamma_unknown, clip
        self.alpha_neg, self.alpha_pos, self.alpha_unknown = alpha_neg, alpha_pos, alpha_unknown
        self.mode, self.topk, self.threshold, self.per_group = mode, topk, threshold, per_group
        self._by_name: dict[str, float] | None = None
        self._from_labels = isinstance(prior, str) and prior == KNOWN
        if isinstance(prior, (str, Path)) and not self._from_labels:
            self._by_name = read_prior(prior)
            prior = torch.tensor(list(self._by_name.values()))
        self.register_buffer("prior", None if prior is None or self._from_labels else torch.as_tensor(prior).float())
        if self.prior is not None and self.prior.ndim != 1:
            raise ValueError(f"prior has shape {tuple(self.prior.shape)}: must be [categories], a number for each")

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *others: Any) -> None:
        prior, mine = state_dict.get(f"{prefix}prior"), self.prior
        by_prepare = self._from_labels or self._by_name is not None
        if by_prepare and prior is not None and (mine is None or mine.shape != prior.shape):
            # That one had been prepared, and this one has not.
            self.prior = torch.empty_like(prior, device=None if mine is None else mine.device)
        super()._load_from_state_dict(state_dict, prefix, *others)

    def prepare(self, labels: Any, categories: list[str]) -> None:
        if self._by_name is not None:
            missing = [name for name in categories if name not in self._by_name]
            if missing:
                raise ValueError(f"prior: no row for {len(missing)} categories, the first of them {missing[0]!r}")
            self.prior = torch.tensor([self._by_name[name] for name in categories])
        elif self._from_labels:
            labels = torch.as_tensor(labels)
            known = ~is_unknown(labels)
            self.prior = ((labels == 1).sum(0) / known.sum(0).clamp(min=1)).float()
        self._check_prior(len(categories))

    def _check_prior(self, categories: int) -> None:
        if self.prior is None and self._from_labels:
            raise ValueError("prior='known': call prepare(labels, categories) first, it is counted from these labels")
        if self.prior is not None and len(self.prior) != categories:
            way_out = "; prepare(labels, categories) takes them by name" if self._by_name is not None else ""
            raise ValueError(
                f"prior has {len(self.prior)} entries: must have {categories}, one for each category{way_out}"
            )

    def cells(self, output: Output, batch: Batch) -> tuple[Tensor, Tensor]:
        check_mixed(batch.mixed, output.logits)
        logits = output.logits.to(torch.promote_types(output.logits.dtype, torch.float32))
        unknown = is_unknown(batch.targets, self.unknown)
        y = batch.targets.masked_fill(unknown, 0).to(logits.dtype)
        known = y * self.alpha_pos * focal_term(logits, self.gamma_pos)
        known = known + (1 - y) * self.alpha_neg * focal_term(-logits, self.gamma_neg, self.clip)
        if self.mode == "ignore":
            return known.masked_fill(unknown, 0), (~unknown).sum()
        weak = self.alpha_unknown * focal_term(-logits, self.gamma_unknown, self.clip)
        loss = torch.where(unknown, weak, known)
        if self.mode == "negative":
            return loss, torch.full((), loss.numel(), dtype=loss.dtype, device=loss.device)
        ignored = self.ignored(logits.detach(), unknown, batch.mixed)
        return loss.masked_fill(ignored, 0), (~ignored).sum()

    def ignored(self, logits: Tensor, unknown: Tensor, mixed: Tensor | None) -> Tensor:
        """[B, C] bool: the unknown labels that do not count in mode "selective"."""
        everyone = self.everyone(len(logits), logits.device)
        found, mixed = torch.zeros_like(unknown), self.groups(mixed, logits) if self.per_group else None
        for group in [None] if mixed is None else [mixed, ~mixed]:
            eligible = unknown if group is None else unknown & group[:, None]
            ranked = logits.masked_fill(~eligible, -torch.inf)
            samples = None if group is None else group.sum()
            if everyone is not None:
                ranked = everyone.all(ranked, fill=-torch.inf)
                samples = everyone.valid.sum() if samples is None else total(samples)
            most = min(self.topk * len(ranked), ranked.numel())
            best = ranked.flatten().topk(most).indices
            first = torch.ones_like(best, dtype=torch.bool)
            if samples is not None:
                first = torch.arange(most, device=best.device) < self.topk * samples
            chosen = torch.zeros_like(ranked, dtype=torch.bool).flatten().scatter_(0, best, first).view_as(ranked)
            if everyone is not None:
                chosen = chosen[everyone.own]
            found[: len(chosen)] |= chosen & eligible[: len(chosen)]
        if self.threshold > 0:
            self._check_prior(logits.shape[1])
            if self.prior is not None:
                # Labels of such categories are ranked with the others, as in the authors' code.
                found |= unknown & (self.prior.to(logits.device) > self.threshold)
        return found


# ---------------------------------------------------------------------------------------------------------- the prior
@torch.no_grad()
def estimate_prior(logits: Tensor | Iterable[Tensor]) -> Tensor:
    """The mean probability of each category, [C] in float64, over logits [N, C] or batches of them: of a model that was
    trained for a short while with `mode="ignore"`, on un-augmented and unmixed training images.

    The authors' code takes the mean over all epochs of that training, in train mode and with augmentation.
    """
    total, count = None, 0
    for batch in [logits] if isinstance(logits, Tensor) else logits:
        part = batch.double().sigmoid().sum(0)
        total, count = part if total is None else total + part, count + len(batch)
    if total is None or not count:
        raise ValueError("logits: there are none")
    return total / count


def write_prior(path: str | Path, categories: list[str], prior: Tensor) -> None:
    """A CSV file that `prior=` reads."""
    Path(path).write_text(prior_text(categories, prior), encoding="utf-8")


def prior_text(categories: list[str], prior: Tensor) -> str:
    """What is in that file. A function of its own: what is wrong shows before a file is touched."""
    if len(categories) != len(prior):
        raise ValueError(
            f"categories: {len(categories)} names for a prior of {len(prior)} entries; give one name for each"
        )
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["Classes", "avg_pred"])
    writer.writerows(zip(categories, prior.tolist(), strict=True))
    return text.getvalue()


def read_prior(path: str | Path) -> dict[str, float]:
    """Category -> prior, in the order of the file."""
    try:
        with open(path, newline="", encoding="utf-8") as file:
            rows = list(csv.DictReader(file))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise ValueError(f"prior={str(path)!r}: cannot be read ({error})") from None
    out: dict[str, float] = {}
    for number, row in enumerate(rows, start=2):
        try:
            name, value = row["Classes"], float(row["avg_pred"])
        except (KeyError, TypeError, ValueError):
            raise ValueError(
                f"prior={str(path)!r}, line {number}: must have columns Classes and avg_pred, a name and a number"
            ) from None
        if not 0 <= value <= 1 or math.isnan(value) or name in out:
            raise ValueError(f"prior={str(path)!r}, line {number}: {name!r} {value} is twice there or not from 0 to 1")
        out[name] = value
    if not out:
        raise ValueError(f"prior={str(path)!r}: has no rows below Classes,avg_pred")
    return out
