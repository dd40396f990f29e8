"""From scores to decisions: calibration, and a threshold for each category, fitted on held-out known labels.

    found = fit_decisions(logits, targets, categories)       # of held-out images; -1 is unknown
    found.probabilities(logits)                              # calibrated: sigmoid(logit / temperature + shift)
    found.decide(logits)                                     # bool [N, C]: probability above the category's threshold
    found.write(folder / "decisions.json"); read_decisions(folder)

Temperature and shift, the same for all categories, minimise the log loss of the known labels. The shift is what a loss
needs that weighs positive and negative labels differently, as the asymmetric one: it moves all probabilities up, and no
temperature brings them down again. A threshold maximises the F1 of its category, or its recall
where its precision is at least a given one. A category with too few known labels keeps 0.5, and is listed.

Guo et al., "On Calibration of Modern Neural Networks", ICML 2017; Platt, "Probabilistic Outputs for Support Vector
Machines", 1999; Lipton et al., "Thresholding Classifiers to Maximize F1 Score", 2014.

decisions.json
--------------
    format          1
    weights         "model" or "cft": the weights of the run that it belongs to
    digest          the checksum of these weights, as in the header of their file; "" in files of earlier versions
    fitted_on       words, as "200 held-out images" or "held-out known labels of 4,000 training images"
    trained_on      whether the backbone has seen these images: its scores are then better than on new ones
    images          how many
    goal            "f1", or "precision": the highest recall at `floor`
    floor           the least precision, or null
    min_labels      known labels of either kind that a category needs
    temperature     a probability is sigmoid(logit / temperature + shift)
    shift           0 in files of earlier versions, which do not have it
    log_loss        [before, after] calibration, mean over the known labels
    ece             [before, after]: expected calibration error, 15 bins of equal width
    reliability     {"before": bins, "after": bins}, for a reliability diagram; a bin is
                    {"low", "high", "count", "confidence": mean probability, "positive": share of positive labels};
                    empty bins are left out
    categories      one entry each, in the order of the model:
        name
        threshold       a calibrated probability; predicted is what lies above
        logit           the same threshold for the logit as the model gives it
        decided         false: too few labels, or the floor is not reached with any threshold (which is 1.0 then)
        reason          why, where `decided` is false; else ""
        positives, negatives     known labels it was fitted on
        precision, recall, f1    on these labels, at the threshold; null where there are none
        f1_at_half               on these labels, at probability 0.5 as the model gives it
"""

from __future__ import annotations

import json
import math
import warnings
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from gpu_logicmix.labels import check_labels, is_unknown

FILE = "decisions.json"
WEIGHTS = ("model", "cft")
MIN_LABELS = 5
BINS = 15
HOTTEST = 10.0  # temperatures from 0.1 to 10: beyond, all probabilities would be 0.5, or 0 and 1


class OtherWeights(UserWarning):
    """A run has thresholds, but of weights that are no longer there."""


@dataclass
class Decisions:
    """What decisions.json holds; see above. `outdated`, which it does not hold: the weights are others by now."""

    outdated = False

    temperature: float
    categories: list[dict[str, Any]]
    goal: str = "f1"
    floor: float | None = None
    min_labels: int = MIN_LABELS
    log_loss: list[float | None] | None = None
    ece: list[float | None] | None = None
    reliability: dict[str, list[dict[str, float]]] | None = None
    images: int = 0
    weights: str = "model"
    fitted_on: str = ""
    trained_on: bool = False
    shift: float = 0.0
    digest: str = ""
    format: int = 1

    @property
    def names(self) -> list[str]:
        return [category["name"] for category in self.categories]

    @property
    def thresholds(self) -> Tensor:
        """Calibrated probabilities, [C]."""
        return torch.tensor([category["threshold"] for category in self.categories], dtype=torch.float64)

    @property
    def undecided(self) -> list[str]:
        """Names of the categories that have no threshold of their own."""
        return [category["name"] for category in self.categories if not category["decided"]]

    def calibrated(self, logits: Tensor) -> Tensor:
        """Logits whose sigmoid is a calibrated probability."""
        return logits / self.temperature + self.shift

    def probabilities(self, logits: Tensor) -> Tensor:
        return self.calibrated(logits).sigmoid()

    def margins(self, logits: Tensor) -> Tensor:
        """Logits less the thresholds: above 0 is predicted. What judges logits at 0 judges these at the thresholds."""
        cuts = [math.inf if c["logit"] is None else c["logit"] for c in self.categories]
        return logits.double() - torch.tensor(cuts, dtype=torch.float64, device=logits.device)

    def decide(self, logits: Tensor) -> Tensor:
        return self.margins(logits) > 0

    def write(self, file: Path) -> None:
        from gpu_logicmix.files import write_whole

        write_whole(file, json.dumps(asdict(self), indent=1) + "\n")


def read_decisions(folder: str | Path, weights: str | None = None) -> Decisions | None:
    """Of a run, if it has some that can be read.

    weights: "model" or "cft": for these weights alone. If they have been written anew since, there are none, and a
        warning `OtherWeights` says so. Without it those are given too, and are `outdated`.
    """
    found = _read(Path(folder))
    if found is None or weights not in (None, found.weights):
        return None
    found.outdated = _is_outdated(Path(folder), found)
    if not found.outdated or weights is None:
        return found
    warnings.warn(outdated_words(folder, found), OtherWeights, stacklevel=2)
    return None


def outdated_words(folder: str | Path, found: Decisions) -> str:
    return (
        f"{Path(folder) / FILE}: fitted before {found.weights}.safetensors was written anew, so its thresholds are not "
        f"used; fit them again: gpu-logicmix decide {folder} --use {found.weights}"
    )


def weights_digest(file: Path) -> str:
    """The checksum in the header of a weights file, without reading the weights; "" where there is none."""
    if not file.is_file():
        return ""
    try:
        from safetensors import SafetensorError, safe_open
    except ImportError:
        return ""
    try:
        with safe_open(file, "pt") as opened:
            return str((opened.metadata() or {}).get("digest", ""))
    except (OSError, SafetensorError):  # it is damaged, which who loads it will say
        return ""


def _is_outdated(folder: Path, found: Decisions) -> bool:
    """By the checksum. A file of an earlier version has none: then by the dates."""
    if found.weights not in WEIGHTS:
        return False
    file = folder / f"{found.weights}.safetensors"
    if found.digest:
        return weights_digest(file) not in ("", found.digest)
    try:
        return file.stat().st_mtime > (folder / FILE).stat().st_mtime
    except OSError:  # there are no weights to compare with
        return False


def _read(folder: Path) -> Decisions | None:
    try:
        values = json.loads((folder / FILE).read_text(encoding="utf-8"))
        if values["format"] != 1:
            return None
        found = Decisions(**values)
        good = found.temperature > 0 and all(
            {"name", "threshold", "logit", "decided"} <= set(c) for c in found.categories
        )
    except (OSError, ValueError, TypeError, KeyError):
        return None
    return found if good else None


def fit_decisions(
    logits: Tensor,
    targets: Tensor,
    categories: list[str],
    *,
    precision: float | None = None,
    min_labels: int = MIN_LABELS,
    unknown: float = -1,
    **about: Any,
) -> Decisions:
    """Of logits [N, C] and targets [N, C] of 0, 1 and `unknown`.

    precision: the least precision; the thresholds then give the highest recall that has it. None: maximise F1.
    min_labels: known positives and known negatives that a category needs for a threshold of its own.
    about: `weights`, `digest`, `fitted_on` and `trained_on`, for the record.
    """
    logits, targets = torch.as_tensor(logits).detach().cpu().double(), torch.as_tensor(targets).cpu()
    if logits.ndim != 2 or logits.shape != targets.shape or logits.shape[1] != len(categories):
        raise ValueError(
            f"logits {list(logits.shape)} and targets {list(targets.shape)} must both be [images, {len(categories)}]"
        )
    check_labels(targets, unknown=unknown)
    if not torch.isfinite(logits).all():
        raise ValueError("logits are non-finite: there is nothing to decide by")
    if precision is not None and not 0 < precision <= 1:
        raise ValueError(f"precision={precision}: must be above 0 and at most 1")
    if min_labels < 1:
        raise ValueError(f"min_labels={min_labels}: must be at least 1")
    known = ~is_unknown(targets, unknown)
    z, y = logits[known], (targets[known] == 1).double()
    temperature, shift = calibration = fit_calibration(z, y)
    both = [_calibration(z / t + s, y) for t, s in ((1.0, 0.0), calibration)]
    return Decisions(
        temperature=temperature,
        shift=shift,
        categories=_thresholds(logits, targets == 1, known, categories, calibration, precision, min_labels),
        goal="f1" if precision is None else "precision",
        floor=precision,
        min_labels=min_labels,
        log_loss=[loss for loss, _, _ in both],
        ece=[error for _, error, _ in both],
        reliability={"before": both[0][2], "after": both[1][2]},
        images=len(logits),
        **about,
    )


def fit_calibration(z: Tensor, y: Tensor) -> tuple[float, float]:
    """The temperature and shift with the least log loss, for logits and labels of 0 and 1; 1 and 0 without labels of
    both kinds.

    The log loss of a * z + shift is convex in both. With the best shift for each a = 1 / temperature it is convex in a,
    so the sign of its slope leads to the minimum.
    """
    if not len(z) or (y == y[0]).all():
        return 1.0, 0.0
    low, high = -math.log(HOTTEST), math.log(HOTTEST)
    present, shift = y.mean().item(), 0.0
    for _ in range(50):
        middle = (low + high) / 2
        scaled = math.exp(middle) * z
        shift = _best_shift(scaled, present, shift)
        slope = (z * ((scaled + shift).sigmoid() - y)).sum()
        low, high = (low, middle) if slope > 0 else (middle, high)
    return math.exp(-(low + high) / 2), shift


def _best_shift(z: Tensor, present: float, start: float) -> float:
    """The shift at which the mean probability is the share of present labels: Newton's steps, kept within bounds."""
    wanted = math.log(present / (1 - present))
    low, high = wanted - z.max().item(), wanted - z.min().item()
    shift = min(max(start, low), high)
    for _ in range(60):
        p = (z + shift).sigmoid()
        over, slope = (p.mean() - present).item(), (p * (1 - p)).mean().item()
        low, high = (low, shift) if over > 0 else (shift, high)
        if abs(over) < 1e-13 or high - low < 1e-12:
            break
        step = shift - over / slope if slope > 0 else low
        shift = step if low < step < high else (low + high) / 2
    return shift


def _calibration(z: Tensor, y: Tensor) -> tuple[float | None, float | None, list[dict[str, float]]]:
    """Log loss, expected calibration error and the bins of a reliability diagram."""
    if not len(z):
        return None, None, []
    p = z.sigmoid()
    place = (p * BINS).long().clamp(max=BINS - 1)
    count, confidence, positive = (
        torch.zeros(BINS, dtype=torch.float64).index_add_(0, place, part) for part in (torch.ones_like(p), p, y)
    )
    bins = [
        {
            "low": b / BINS,
            "high": (b + 1) / BINS,
            "count": int(count[b]),
            "confidence": (confidence[b] / count[b]).item(),
            "positive": (positive[b] / count[b]).item(),
        }
        for b in range(BINS)
        if count[b]
    ]
    error = (confidence - positive).abs().sum() / len(z)
    return F.binary_cross_entropy_with_logits(z, y).item(), error.item(), bins


def _thresholds(
    logits: Tensor,
    positive: Tensor,
    known: Tensor,
    names: list[str],
    calibration: tuple[float, float],
    floor: float | None,
    min_labels: int,
) -> list[dict[str, Any]]:
    temperature, shift = calibration
    out = []
    for c, name in enumerate(names):
        z, y = logits[known[:, c], c], positive[known[:, c], c]
        positives, negatives = int(y.sum()), int((~y).sum())
        cut, reason = -shift * temperature, ""  # a calibrated 0.5
        if min(positives, negatives) < min_labels:
            reason = f"{positives} positive and {negatives} negative labels are known, {min_labels} of each are needed"
        else:
            cut = best_cut(z, y, floor)
            if math.isinf(cut):
                reason = f"no threshold has a precision of {floor:g}"
        chosen, half = _scores(z > cut, y), _scores(z > 0, y)
        out.append(
            {
                "name": name,
                "threshold": torch.tensor(cut / temperature + shift, dtype=torch.float64).sigmoid().item(),
                "logit": None if math.isinf(cut) else cut,
                "decided": not reason,
                "reason": reason,
                "positives": positives,
                "negatives": negatives,
                "precision": chosen[0],
                "recall": chosen[1],
                "f1": chosen[2],
                "f1_at_half": half[2],
            }
        )
    return out


def best_cut(z: Tensor, y: Tensor, floor: float | None = None) -> float:
    """The logit above which to predict, for logits [n] and bool labels [n]: the best F1, or with `floor` the highest
    recall that has this precision (infinite: none has). Of several, the highest; it lies half-way to the next logit."""
    z, order = z.sort(descending=True)
    true, seen = y[order].cumsum(0).double(), torch.arange(1, len(z) + 1, dtype=torch.float64)
    allowed = torch.ones(len(z), dtype=torch.bool)
    allowed[:-1] = z[:-1] != z[1:]  # equal scores are predicted together
    if floor is None:
        value = 2 * true / (seen + true[-1])
    else:
        value, allowed = true, allowed & (true / seen >= floor) & (true > 0)
        if not allowed.any():
            return math.inf
    best = int(value.masked_fill(~allowed, -1).argmax())
    after = z[best + 1] if best + 1 < len(z) else z[best] - 1
    return ((z[best] + after) / 2).item()


def _scores(predicted: Tensor, y: Tensor) -> tuple[float | None, float | None, float | None]:
    """Precision, recall and F1; None where there is no positive label."""
    if not y.any():
        return None, None, None
    hits, guesses, positives = (int(part.sum()) for part in (predicted & y, predicted, y))
    return hits / guesses if guesses else 0.0, hits / positives, 2 * hits / (guesses + positives)
