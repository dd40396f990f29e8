"""The three-valued label: 1 present, 0 absent, unknown (-1 unless told otherwise).

Everything here takes numpy arrays or torch tensors and gives back the same kind.

- `logic_or`: OR of several labels, true whatever the unknown ones turn out to be (Chong et al., LogicMix, eq. 8).
- `convert_labels`: to and from the encodings of other projects.
- `hide_labels`: make a partially labeled data set out of a fully labeled one.
- `label_counts`: how many labels are present, absent and unknown.
"""

from __future__ import annotations

from numbers import Integral, Real
from typing import NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

Labels = TypeVar("Labels", np.ndarray, Tensor)

# (absent, unknown, present) in each encoding.
ENCODINGS = {
    "logic": (0, -1, 1),  # ours
    "nan": (0, float("nan"), 1),  # mlcpl
    "hcp": (-1, 0, 1),  # the SST / HST / SARB code (HCP-MLR-PL)
}
PROTOCOLS = ("uniform", "hcp", "per-class", "single-positive")
# torch stores these, and can hardly compute with them.
NO_ARITHMETIC = (torch.uint16, torch.uint32, torch.uint64)


def logic_or(targets: Labels, dim: int = 1, unknown: float = -1) -> Labels:
    """OR over `dim`: 1 where any label is 1, 0 where all are 0, `unknown` elsewhere. The dtype is kept.

    A label that is neither 0 nor 1 counts as unknown, whatever its value.

    >>> logic_or(np.array([[[1, 0, 0], [-1, -1, 0]]]))
    array([[ 1, -1,  0]])

    >>> logic_or(torch.tensor([[1, 0, 0, -1], [-1, 0, -1, -1]]), dim=0).tolist()
    [1, 0, -1, -1]
    """
    check_unknown(targets, unknown)
    if isinstance(targets, np.ndarray):
        known = np.where((targets == 1).any(dim), 1, 0).astype(targets.dtype)
        open_ = ~(targets == 1).any(dim) & ~(targets == 0).all(dim)
        return np.where(open_, np.asarray(unknown).astype(targets.dtype), known)
    return from_bits(to_bits(targets).view(torch.uint8).amax(dim).view(torch.int8), targets.dtype, unknown)


def to_bits(targets: Tensor, out: Tensor | None = None) -> Tensor:
    """Labels as int8 [...]: absent 00000000, present 11111111, everything else (unknown) 00000001.

    In this form logical OR is bitwise OR, of eight labels at a time if need be, and also the maximum of unsigned bytes.
    On a CPU they can go into `out`.
    """
    if type(targets) is not Tensor or not targets.is_cpu or targets.ndim == 0 or torch.compiler.is_compiling():
        return (targets != 0).view(torch.int8).sub((targets == 1).view(torch.int8), alpha=2)
    # On a CPU a comparison takes several times as long as a conversion to bool, which is a comparison with 0.
    targets = targets.view(torch.uint8) if targets.dtype is torch.bool else targets
    bits = torch.empty(targets.shape, dtype=torch.int8) if out is None else out
    if not targets.is_floating_point() and targets.numel():
        low, high = (bound.item() for bound in targets.aminmax())
        if low >= -1 and high <= 1:
            return torch.neg(targets.to(torch.int8), out=bits)
    # In blocks of rows, so that what lies between two lines stays in the cache.
    rows = max(1, 2**17 * len(targets) // max(1, targets.numel()))
    for source, part in zip(targets.split(rows), bits.split(rows), strict=True):
        not_one = (source - 1).bool().view(torch.int8)
        torch.bitwise_or(source.bool().view(torch.int8), not_one.sub_(1), out=part)
    return bits


def from_bits(bits: Tensor, dtype: torch.dtype, unknown: float = -1) -> Tensor:
    """Back from `to_bits` to labels."""
    labels = bits.neg().to(dtype)
    return labels if unknown == -1 else labels.masked_fill_(bits.clamp(min=0).bool(), unknown)


def check_unknown(targets: Labels, unknown: float) -> None:
    """Raise a TypeError if labels of this type cannot hold `unknown`: cast to it, it could become absent. Looks at no
    label. -1, the default, is always taken: unsigned labels hold it as their largest number, bool knows all labels."""
    dtype = targets.dtype
    if isinstance(targets, Tensor):
        if dtype in NO_ARITHMETIC:
            raise TypeError(f"targets.dtype={dtype}: torch cannot compute with it; use int8, uint8 or a floating type")
        whole, limits = not dtype.is_floating_point, torch.finfo if dtype.is_floating_point else torch.iinfo
    else:
        whole, limits = dtype.kind in "iub", np.iinfo
    finite = unknown - unknown == 0  # in words that torch.compile knows
    if unknown == -1 or not (whole or (finite and isinstance(targets, Tensor))):
        return
    low, high = (0, 1) if dtype in (torch.bool, bool) else (limits(dtype).min, limits(dtype).max)
    if not (low <= unknown <= high and (unknown % 1 == 0 or not whole)):
        value = "NaN" if unknown != unknown else unknown
        other = "floating" if whole else "wider"
        raise TypeError(f"targets.dtype={dtype} cannot hold unknown={value}: use a {other} type or unknown=-1")


def is_unknown(targets: Labels, unknown: float = -1) -> Labels:
    """True where a label is unknown: where it is `unknown`, or NaN in a floating type, whatever `unknown` says."""
    floating = targets.is_floating_point() if isinstance(targets, Tensor) else targets.dtype.kind == "f"
    if not floating:
        return targets == unknown
    missing = targets != targets  # NaN equals nothing
    return missing if unknown != unknown else missing | (targets == unknown)


def convert_labels(targets: Labels, source: str, target: str) -> Labels:
    """Translate labels between the encodings "logic" (-1 unknown, 0 absent, 1 present), "nan" (NaN unknown, as in
    mlcpl) and "hcp" (-1 absent, 0 unknown, 1 present). The result is int8, or float32 for "nan"."""
    for name, value in (("source", source), ("target", target)):
        if value not in ENCODINGS:
            raise ValueError(f"{name}={value!r}: the label encodings are {', '.join(ENCODINGS)}")
    check_labels(targets, *ENCODINGS[source])
    absent, unknown, present = ENCODINGS[target]
    if isinstance(targets, Tensor):
        out = torch.full_like(targets, unknown, dtype=torch.float32 if target == "nan" else torch.int8)
    else:
        out = np.full_like(targets, unknown, dtype=np.float32 if target == "nan" else np.int8)
    out[targets == ENCODINGS[source][0]] = absent
    out[targets == ENCODINGS[source][2]] = present
    return out


class LabelCounts(NamedTuple):
    positive: Labels
    negative: Labels
    unknown: Labels


def label_counts(targets: Labels, dim: int | None = None, unknown: float = -1) -> LabelCounts:
    """How many labels are 1, 0 and unknown: in all (`dim=None`), per category (`dim=0`) or per sample (`dim=1`).

    Every label that is neither 1 nor 0 counts as unknown, so `unknown` need not be given.
    """
    if hasattr(targets, "counts"):  # sparse labels count without becoming a matrix
        return targets.counts(dim)
    present, absent = targets == 1, targets == 0
    masks = (present, absent, ~(present | absent))
    return LabelCounts(*(mask.sum() if dim is None else mask.sum(dim) for mask in masks))


def hide_labels(
    targets: Labels,
    known: float | int | tuple[int, int] | None = None,
    seed: int = 0,
    protocol: str = "uniform",
) -> Labels:
    """Make labels unknown (-1), to simulate a partially labeled data set.

    targets: [N, C] of 0 and 1; labels that are -1 or NaN already are -1 in the result.
    protocol:
        "uniform"          each label is kept with probability `known`.
        "hcp"              the same with the very mask of the SST, HST and SARB papers, so that runs compare label for
                           label: numpy's global generator seeded with 0, whatever `seed` says.
        "per-class"        `known` positives and as many negatives of each class, or `known=(positives, negatives)`; all
                           there are, where a class has fewer.
        "single-positive"  one positive label of each sample and nothing else; `known` is ignored.
    The result has the dtype of `targets`, or int8 where that cannot hold -1. It depends on the values and `seed` alone,
    not on the device or on numpy or torch.

    >>> labels = hide_labels(np.ones((1000, 4), dtype=np.int8), known=0.3, seed=0)
    >>> sorted(set(labels.ravel().tolist())), round(float((labels == 1).mean()), 1)
    ([-1, 1], 0.3)
    """
    if protocol not in PROTOCOLS:
        raise ValueError(f"protocol={protocol!r}: the protocols are {', '.join(PROTOCOLS)}")
    if targets.ndim != 2:
        raise ValueError(f"targets must be [samples, categories], not of shape {tuple(targets.shape)}")
    if hasattr(targets, "hide"):  # sparse labels hide the same ones without becoming a matrix
        return targets.hide(known, seed, protocol)
    check_labels(targets)
    labels = targets.cpu().numpy() if isinstance(targets, Tensor) else targets
    rng = np.random.default_rng(seed)

    if protocol in ("uniform", "hcp"):
        if not isinstance(known, Real) or not 0 <= known <= 1:
            raise ValueError(f"known={known!r}: with protocol={protocol!r} it is the share of labels kept, from 0 to 1")
        # RandomState(0) is what `numpy.random.seed(0); numpy.random.random(...)` draws from, without touching that.
        draw = rng.random(labels.shape) if protocol == "uniform" else np.random.RandomState(0).random(labels.shape)
        keep = draw < known
    elif protocol == "per-class":
        wanted = known if isinstance(known, tuple) else (known, known)
        if len(wanted) != 2 or not all(isinstance(n, Integral) and n >= 0 for n in wanted):
            raise ValueError(
                f"known={known!r}: with protocol='per-class' it is a number of labels, or (positive, negative)"
            )
        draw = rng.random(labels.shape)
        keep = _lowest(draw, labels == 1, wanted[0], axis=0) | _lowest(draw, labels == 0, wanted[1], axis=0)
    else:
        keep = _lowest(rng.random(labels.shape), labels == 1, 1, axis=1)

    keep &= labels == labels  # NaN is unknown
    if isinstance(targets, Tensor):
        signed = targets.dtype.is_floating_point or targets.dtype in (torch.int8, torch.int16, torch.int32, torch.int64)
        out = targets.to(targets.dtype if signed else torch.int8)
        return out.masked_fill(torch.from_numpy(~keep).to(targets.device), -1)
    out = labels.astype(labels.dtype if labels.dtype.kind in "if" else np.int8)
    out[~keep] = -1
    return out


def _lowest(draw: np.ndarray, eligible: np.ndarray, count: int, axis: int) -> np.ndarray:
    """True at the `count` eligible places with the lowest draw along `axis`: a random choice without replacement."""
    rank = np.where(eligible, draw, np.inf).argsort(axis).argsort(axis)
    return eligible & (rank < count)


def check_labels(targets: Labels, absent: float = 0, unknown: float = -1, present: float = 1) -> None:
    """Raise a ValueError that names the first label with another value. Waits for the device."""
    bad = (targets != absent) & (targets != present) & ~is_unknown(targets, unknown)
    if bad.any():
        place = np.argwhere(bad.cpu().numpy() if isinstance(bad, Tensor) else bad)[0].tolist()
        value = targets[tuple(place)].item()
        raise ValueError(f"targets{place or ''} is {value}: must be {present}, {absent} or {unknown} (unknown)")
