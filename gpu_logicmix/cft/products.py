"""Products of features and heads: in pieces, and only where labels are known."""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import torch
from torch import Tensor

# Features are read in pieces of this many bytes. On a CPU a piece should still be in the cache when the gradient needs
# it again; elsewhere it should be worth the launch.
PIECE_CPU, PIECE_ELSEWHERE = 5 << 20, 1 << 28
# On a CPU, with a smaller share of known labels than this, the unknown ones are left out of the products.
SPARSE = 0.25


def pieces(features: Tensor, rows: Tensor, like: Tensor) -> Iterator[Tensor]:
    """The rows of `features`, some at a time, where `like` is and of its type. A piece is overwritten by the next."""
    piece = PIECE_CPU if like.device.type == "cpu" else PIECE_ELSEWHERE
    length = max(1, piece // (features.shape[1] * like.element_size()))
    buffer = features.new_empty(min(length, len(rows)), features.shape[1])
    for part in rows.to(features.device).split(length):
        yield torch.index_select(features, 0, part, out=buffer[: len(part)]).to(like.device, like.dtype)


def finite_rows(features: Tensor, like: Tensor) -> Tensor:
    """[N] bool on the device of `like`: rows that are finite in its type."""
    rows = torch.arange(len(features))
    found = [x.isfinite().all(1) for x in pieces(features, rows, like)]
    return torch.cat(found) if found else torch.ones(0, dtype=torch.bool, device=like.device)


# With a tenth of the labels known, nine tenths of the products would be for nothing. Two kernels of torch compute the
# rest alone, straight from the features: `sampled_addmm` some entries of a matrix product, `embedding_bag` weighted
# sums of rows. A label costs them several times what it costs the product of whole matrices, hence SPARSE.
def leave_out_unknown(features: Tensor, labels: Tensor, like: Tensor) -> bool:
    """Whether that is possible, and faster."""
    ready = features.is_contiguous() and features.dtype == like.dtype and like.dtype in (torch.float32, torch.float64)
    on_cpu = features.device.type == like.device.type == "cpu"  # a GPU would have to wait for the number of labels
    return ready and on_cpu and 0 < int((labels != -1).sum()) < SPARSE * labels.numel()


def starts_of(index: Tensor, length: int) -> Tensor:
    """Where 0, 1, ... `length` would start in `index` if it were sorted."""
    return torch.cat([index.new_zeros(1), index.bincount(minlength=length).cumsum(0)])


def inverse(order: Tensor) -> Tensor:
    """Where each number is in a permutation."""
    return torch.empty_like(order).scatter_(0, order, torch.arange(len(order)))


def sparse_pattern(samples: Tensor, heads: Tensor, shape: tuple[int, int], like: Tensor) -> Tensor:
    """Sparse matrix of zeros at (sample, head), which are sorted."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # that such matrices are in beta
        return torch.sparse_csr_tensor(starts_of(samples, shape[0]), heads, like.new_zeros(len(heads)), shape)


def logits_at(pattern: Tensor, features: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """[K], one for each entry of the pattern."""
    logits = torch.sparse.sampled_addmm(pattern, features, weight.t(), beta=0).values()
    return logits.add_(bias[:, 0].index_select(0, pattern.col_indices()))
