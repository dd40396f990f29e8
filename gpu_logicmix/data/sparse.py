"""Labels of sets where nearly everything is unknown: only the known ones are kept (CSR).

OpenImages has 9 million images and 9,605 categories: 86 GB as a matrix of bytes, 0.4 GB as its 60 million known labels.
`SparseLabels` stands where a matrix [N, C] stands: `labels[rows]` is int8 [B, C], and `hide_labels` and `label_counts`
take it. Hidden labels, counts and batches are those of the matrix, label for label: what is drawn for a cell is drawn
from its place in the matrix (`draws_at`), without drawing for the cells in between.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
from torch import Tensor, nn

from gpu_logicmix.errors import DataError
from gpu_logicmix.labels import LabelCounts, hide_labels
from gpu_logicmix.machine import sent

DENSE_CELLS = 1 << 28  # up to here labels are a matrix: simpler, and 268 MB are nothing
_BLOCK = 1 << 22  # known labels worked on at a time


class SparseLabels:
    """Known labels of [N, C]: those of row r are at pointers[r] : pointers[r + 1] of `columns` (ascending) and
    `values` (1 present, 0 absent). All else is unknown."""

    dtype, ndim = np.dtype(np.int8), 2

    def __init__(self, pointers: np.ndarray, columns: np.ndarray, values: np.ndarray, width: int) -> None:
        self.pointers = np.ascontiguousarray(pointers, dtype=np.int64)
        self.columns = np.ascontiguousarray(columns, dtype=np.int32)
        self.values = np.ascontiguousarray(values, dtype=np.int8)
        self.shape = (len(self.pointers) - 1, int(width))
        if len(self.columns) != self.pointers[-1] or len(self.values) != self.pointers[-1]:
            raise DataError(f"{len(self.columns):,} columns and {len(self.values):,} values, but {self.pointers[-1]:,}")

    @classmethod
    def of_dense(cls, labels: np.ndarray) -> SparseLabels:
        pointers, columns, values = [np.zeros(1, dtype=np.int64)], [], []
        for lengths, at, known in _dense_blocks(labels):
            pointers.append(pointers[-1][-1] + np.cumsum(lengths, dtype=np.int64))
            columns.append(at)
            values.append(known)
        join = lambda parts, kind: np.concatenate(parts) if parts else np.zeros(0, kind)  # noqa: E731
        return cls(np.concatenate(pointers), join(columns, np.int32), join(values, np.int8), labels.shape[1])

    @classmethod
    def of_cells(
        cls,
        rows: np.ndarray,
        columns: np.ndarray,
        values: np.ndarray,
        shape: tuple[int, int],
        *,
        conflict: str | Callable[[int, int], Exception] = "unknown",
    ) -> SparseLabels:
        """From cells in any order. One that is named several times with the same value counts once.

        conflict: what a cell is that is named both present and absent: "unknown", "present" or "absent"; or a function
            of (row, column) that gives the error to raise.
        """
        count, width = shape
        # One number a cell, with the value as its last bit: sorting puts equal cells side by side, absent first.
        keys = np.asarray(rows, dtype=np.int64) * (2 * width)
        keys += 2 * np.asarray(columns, dtype=np.int64)
        keys += np.asarray(values, dtype=np.int64)
        keys = resolved_keys(keys, width, conflict)
        cells = keys >> 1
        row = cells // max(width, 1)
        pointers = np.zeros(count + 1, dtype=np.int64)
        np.cumsum(np.bincount(row, minlength=count), out=pointers[1:])
        return cls(pointers, (cells - row * width).astype(np.int32), (keys & 1).astype(np.int8), width)

    # --------------------------------------------------------------------------------------------- as a matrix would be
    def __len__(self) -> int:
        return self.shape[0]

    @property
    def size(self) -> int:
        return self.shape[0] * self.shape[1]

    @property
    def known(self) -> int:
        """How many labels are known."""
        return len(self.columns)

    @property
    def nbytes(self) -> int:
        return self.pointers.nbytes + self.columns.nbytes + self.values.nbytes

    def __repr__(self) -> str:
        return (
            f"<sparse labels {self.shape[0]:,} x {self.shape[1]:,}: {self.known:,} known, {self.nbytes / 1e6:,.0f} MB>"
        )

    def __getitem__(self, rows: int | slice | Sequence[int] | np.ndarray) -> np.ndarray:
        """int8 [B, C], or [C] of one row: 1 present, 0 absent, -1 unknown."""
        if isinstance(rows, (int, np.integer)):
            return self[[int(rows)]][0]
        if isinstance(rows, tuple):
            raise IndexError("sparse labels take rows alone: labels[rows][:, columns]")
        rows = self._rows(rows)
        lengths, flat = self.places(rows)
        out = np.full((len(rows), self.shape[1]), -1, dtype=np.int8)
        out[np.repeat(np.arange(len(rows)), lengths), self.columns[flat]] = self.values[flat]
        return out

    def _rows(self, rows: slice | Sequence[int] | np.ndarray) -> np.ndarray:
        """As numbers from 0 on, of all that numpy takes: a slice, a mask, numbers that count from the end."""
        n = len(self)
        rows = np.arange(n)[rows] if isinstance(rows, slice) else np.asarray(rows)
        if rows.dtype == bool:
            if rows.shape != (n,):
                raise IndexError(f"a mask of shape {rows.shape} does not fit: there are {n:,} rows")
            return np.flatnonzero(rows)
        rows = rows.astype(np.int64)
        if rows.size and (rows.min() < -n or rows.max() >= n):
            raise IndexError(f"rows {rows.min()} to {rows.max()} are out of range: there are {n:,}")
        return np.where(rows < 0, rows + n, rows)

    def places(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """How many labels each of the rows has, and where they all are."""
        starts = self.pointers[rows]
        lengths = self.pointers[rows + 1] - starts
        ends = np.cumsum(lengths)
        return lengths, np.arange(ends[-1] if len(ends) else 0) + np.repeat(starts - (ends - lengths), lengths)

    def take(self, rows: Sequence[int] | np.ndarray) -> SparseLabels:
        """The labels of these rows alone, still sparse."""
        lengths, flat = self.places(self._rows(rows))
        pointers = np.concatenate(([0], np.cumsum(lengths)))
        return SparseLabels(pointers, self.columns[flat], self.values[flat], self.shape[1])

    def block(self, start: int, stop: int) -> np.ndarray:
        """int8 [N, stop - start]: some columns of all rows."""
        out = np.full((len(self), stop - start), -1, dtype=np.int8)
        for first, last in self._row_blocks():
            part = slice(int(self.pointers[first]), int(self.pointers[last]))
            inside = (self.columns[part] >= start) & (self.columns[part] < stop)
            rows = np.repeat(np.arange(first, last), np.diff(self.pointers[first : last + 1]))[inside]
            out[rows, self.columns[part][inside] - start] = self.values[part][inside]
        return out

    def dense(self) -> np.ndarray:
        return self[np.arange(len(self))]

    # ------------------------------------------------------------------------------------------------ counts and hiding
    def counts(self, dim: int | None = None) -> LabelCounts:
        """As `label_counts` of the matrix."""
        n, width = self.shape
        if dim is None:
            positive = np.int64(np.count_nonzero(self.values))
            return LabelCounts(positive, self.known - positive, np.int64(n * width - self.known))
        if dim == 0:  # block by block: bincount makes 8 bytes of each number
            known, positive = (np.zeros(width, dtype=np.int64) for _ in range(2))
            for start in range(0, self.known, _BLOCK):
                part = slice(start, start + _BLOCK)
                known += np.bincount(self.columns[part], minlength=width)
                positive += np.bincount(self.columns[part][self.values[part] == 1], minlength=width)
            return LabelCounts(positive, known - positive, n - known)
        known, positive = np.diff(self.pointers), self._per_row(self.values)
        return LabelCounts(positive, known - positive, width - known)

    def _per_row(self, numbers: np.ndarray) -> np.ndarray:
        """Sums over each row's labels."""
        out = np.zeros(len(self), dtype=np.int64)
        for first, last in self._row_blocks():
            start, end = self.pointers[first], self.pointers[last]
            sums = np.concatenate(([0], np.cumsum(numbers[start:end], dtype=np.int64)))
            out[first:last] = np.diff(sums[self.pointers[first : last + 1] - start])
        return out

    def hide(self, known: float, seed: int = 0, protocol: str = "uniform") -> SparseLabels:
        """As `hide_labels` of the matrix: the same labels are hidden."""
        hide_labels(np.zeros((0, self.shape[1]), dtype=np.int8), known, seed, protocol)  # checks the arguments
        keep = np.empty(self.known, dtype=bool)
        if protocol == "uniform":
            for part, _, cells in self._blocks():
                keep[part] = draws_at(seed, cells, self.size) < known
        elif protocol == "hcp":  # Mersenne Twister: all of the matrix has to be drawn
            draw, at = np.random.RandomState(0), 0
            for part, _, cells in self._blocks():
                end = int(cells[-1]) + 1 if len(cells) else at
                keep[part] = _picked(draw, at, end, cells) < known
                at = end
        elif protocol == "single-positive":
            for part, rows, cells in self._blocks():
                keep[part] = _first_of(rows, draws_at(seed, cells, self.size), self.values[part] == 1)
        else:
            keep[:] = self._per_class(known if isinstance(known, tuple) else (known, known), seed)
        pointers = np.concatenate(([0], np.cumsum(self._per_row(keep))))
        return SparseLabels(pointers, self.columns[keep], self.values[keep], self.shape[1])

    def _per_class(self, wanted: tuple[int, int], seed: int) -> np.ndarray:
        draw = np.empty(self.known)
        for part, _, cells in self._blocks():
            draw[part] = draws_at(seed, cells, self.size)
        keep = np.zeros(self.known, dtype=bool)
        for value, count in zip((1, 0), wanted, strict=True):
            at = np.flatnonzero(self.values == value)
            at = at[np.lexsort((draw[at], self.columns[at]))]
            columns = self.columns[at]
            rank = np.arange(len(at)) - np.searchsorted(columns, columns)  # within its category
            keep[at[rank < count]] = True
        return keep

    def _blocks(self) -> Iterator[tuple[slice, np.ndarray, np.ndarray]]:
        """Whole rows, some millions of labels at a time: where their labels are, the row of each, the cell of each."""
        for first, last in self._row_blocks():
            part = slice(int(self.pointers[first]), int(self.pointers[last]))
            rows = np.repeat(np.arange(first, last), np.diff(self.pointers[first : last + 1]))
            yield part, rows, rows * self.shape[1] + self.columns[part]

    def _row_blocks(self) -> Iterator[tuple[int, int]]:
        yield from row_blocks(self.pointers, _BLOCK)

    def table(self, device: torch.device | str | None = None) -> LabelTable:
        """The labels on a device, to look up without a sync."""
        return LabelTable(self).to(device)


def row_blocks(pointers: np.ndarray, size: int) -> Iterator[tuple[int, int]]:
    """First row, and the one after the last, of blocks of whole rows with about `size` labels each."""
    first = 0
    while first < len(pointers) - 1:
        last = int(np.searchsorted(pointers, pointers[first] + size, "right")) - 1
        last = min(max(last, first + 1), len(pointers) - 1)
        yield first, last
        first = last


def resolved_keys(keys: np.ndarray, width: int, conflict: str | Callable[[int, int], Exception]) -> np.ndarray:
    """Keys, 2 (row `width` + column) + value, in order and each once; of two that differ in the value alone, what
    `conflict` says (see `SparseLabels.of_cells`). `keys` is sorted in place."""
    keys.sort()
    keys = keys[np.concatenate(([True], keys[1:] != keys[:-1]))] if len(keys) else keys
    both = np.flatnonzero((keys[1:] ^ keys[:-1]) == 1) if len(keys) else np.zeros(0, dtype=np.int64)
    both = both[(keys[both] & 1) == 0]  # the absent one of each pair
    if not len(both):
        return keys
    if callable(conflict):
        cell = int(keys[both[0]] >> 1)
        raise conflict(cell // width, cell % width)
    drop = {"unknown": np.concatenate((both, both + 1)), "present": both, "absent": both + 1}[conflict]
    return np.delete(keys, drop)


class LabelTable(nn.Module):
    """`table(rows)`: int8 [B, C] on the device that `table` is on. No host sync, and shapes that depend on B alone."""

    pointers: Tensor
    columns: Tensor
    values: Tensor

    def __init__(self, labels: SparseLabels) -> None:
        super().__init__()
        self.register_buffer("pointers", torch.from_numpy(labels.pointers), persistent=False)
        # One more at the end, so that there is something to look at where a row has no labels.
        self.register_buffer("columns", torch.from_numpy(np.append(labels.columns, np.int32(0))), persistent=False)
        self.register_buffer("values", torch.from_numpy(np.append(labels.values, np.int8(0))), persistent=False)
        self.width = labels.shape[1]
        self.longest = int(np.diff(labels.pointers).max(initial=0))

    def forward(self, rows: Tensor) -> Tensor:
        rows = sent(rows, self.pointers.device)
        start, end = self.pointers[rows], self.pointers[rows + 1]
        place = start[:, None] + torch.arange(self.longest, device=rows.device)
        inside = place < end[:, None]
        place = place.clamp(max=len(self.columns) - 1)
        # What is beyond a row's last label goes to a column that is cut off.
        column = torch.where(inside, self.columns[place].long(), self.width)
        out = torch.full((len(rows), self.width + 1), -1, dtype=torch.int8, device=rows.device)
        return out.scatter_(1, column, self.values[place])[:, : self.width]


def fitting(labels: np.ndarray | SparseLabels, kind: str = "auto") -> np.ndarray | SparseLabels:
    """A matrix where that is small enough (or `kind` says so), else sparse. "auto" leaves a matrix as it is."""
    if kind not in ("auto", "dense", "sparse"):
        raise DataError(f"labels={kind!r}: must be auto, dense or sparse")
    if not isinstance(labels, SparseLabels):
        return SparseLabels.of_dense(labels) if kind == "sparse" else labels
    dense = labels.size <= DENSE_CELLS if kind == "auto" else kind == "dense"
    return labels.dense() if dense else labels


def labels_digest(labels: np.ndarray | SparseLabels) -> str:
    """A checksum of the known labels, the same for a matrix and for sparse labels."""
    lengths, columns, values = (hashlib.sha256() for _ in range(3))
    if isinstance(labels, SparseLabels):
        lengths.update(np.diff(labels.pointers))
        columns.update(labels.columns)
        values.update(labels.values)
    else:
        for count, at, known in _dense_blocks(labels):
            lengths.update(count)
            columns.update(at)
            values.update(known)
    whole = f"{labels.shape} {lengths.hexdigest()} {columns.hexdigest()} {values.hexdigest()}"
    return hashlib.sha256(whole.encode()).hexdigest()


def _dense_blocks(labels: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Some rows of a matrix at a time: how many labels of each are known, their columns, their values."""
    step = max(1, _BLOCK // max(labels.shape[1], 1))
    for start in range(0, len(labels), step):
        block = np.asarray(labels[start : start + step])
        known = block >= 0
        lengths = known.sum(1, dtype=np.int64)
        yield lengths, np.nonzero(known)[1].astype(np.int32), block[known].astype(np.int8)


def _first_of(rows: np.ndarray, draw: np.ndarray, eligible: np.ndarray) -> np.ndarray:
    """True at the eligible one with the lowest draw of each row; rows ascend."""
    keep = np.zeros(len(rows), dtype=bool)
    at = np.flatnonzero(eligible)
    if len(at):
        starts = np.flatnonzero(np.concatenate(([True], rows[at][1:] != rows[at][:-1])))
        lowest = np.minimum.reduceat(draw[at], starts)
        keep[at] = draw[at] == np.repeat(lowest, np.diff(np.append(starts, len(at))))
    return keep


def _picked(draw: np.random.RandomState, start: int, end: int, cells: np.ndarray) -> np.ndarray:
    """Of the numbers start to end of a stream, those at `cells` (ascending)."""
    out = np.empty(len(cells))
    for first in range(start, end, _BLOCK):
        last = min(first + _BLOCK, end)
        numbers = draw.random(last - first)
        part = slice(*np.searchsorted(cells, (first, last)))
        out[part] = numbers[cells[part] - first]
    return out


# ----------------------------------------------------------------------------------------- numbers of a stream by place
_MULTIPLIER = 0x2360ED051FC65DA44385DF649FCCF645  # of PCG64, numpy's default generator
_MASK = (1 << 128) - 1
_tables: dict[tuple[int, int], tuple] = {}  # of the last seed: a draw is made block by block


def draws_at(seed: int, places: np.ndarray, total: int) -> np.ndarray:
    """`np.random.default_rng(seed).random(total)[places]`, without drawing the others.

    PCG64 is a linear congruential generator, x -> a x + c modulo 2^128: the state after h L + j steps is that after j
    steps, multiplied by a^(h L) and shifted. Both factors come from tables of about sqrt(total) entries.
    """
    step, states, jumps = _stream_tables(seed, total)
    places = np.asarray(places, dtype=np.int64)
    out = np.empty(len(places))
    for start in range(0, len(places), 1 << 18):  # stays in the processor's cache
        part = places[start : start + (1 << 18)]
        far, near = part // step, part % step
        high, low = _times(jumps[0][far], jumps[1][far], states[0][near], states[1][near])
        sum_low = low + jumps[3][far]
        high = high + jumps[2][far] + (sum_low < low)
        # The output of PCG64: both halves xored, turned by the top 6 bits; 53 bits make a double.
        turn = high >> np.uint64(58)
        mixed = high ^ sum_low
        mixed = (mixed >> turn) | (mixed << ((np.uint64(64) - turn) & np.uint64(63)))
        out[start : start + (1 << 18)] = (mixed >> np.uint64(11)) * (1.0 / 9007199254740992.0)
    return out


def _stream_tables(seed: int, total: int) -> tuple:
    if (seed, total) not in _tables:
        state = np.random.PCG64(seed).state["state"]
        x, c = state["state"], state["inc"]
        step = 1 << max(1, (max(total, 1).bit_length() + 1) // 2)
        states, a_step, c_step = [], 1, 0
        for _ in range(step):
            x = (x * _MULTIPLIER + c) & _MASK  # numpy steps first and then reads
            states.append(x)
            a_step, c_step = a_step * _MULTIPLIER & _MASK, (c_step * _MULTIPLIER + c) & _MASK
        jumps, a, shift = [], 1, 0
        for _ in range(-(-max(total, 1) // step)):
            jumps.append((a, shift))
            a, shift = a * a_step & _MASK, (shift * a_step + c_step) & _MASK
        _tables.clear()
        factors = (*_halves([a for a, _ in jumps]), *_halves([s for _, s in jumps]))
        _tables[seed, total] = step, _halves(states), factors
    return _tables[seed, total]


def _halves(numbers: list[int]) -> tuple[np.ndarray, np.ndarray]:
    low = np.array([n & 0xFFFFFFFFFFFFFFFF for n in numbers], dtype=np.uint64)
    return np.array([n >> 64 for n in numbers], dtype=np.uint64), low


def _times(ah: np.ndarray, al: np.ndarray, bh: np.ndarray, bl: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Product modulo 2^128 of numbers in two halves of 64 bits."""
    mask, half = np.uint64(0xFFFFFFFF), np.uint64(32)
    a0, a1, b0, b1 = al & mask, al >> half, bl & mask, bl >> half
    p00, p01, p10 = a0 * b0, a0 * b1, a1 * b0
    middle = (p00 >> half) + (p01 & mask) + (p10 & mask)
    high = a1 * b1 + (p01 >> half) + (p10 >> half) + (middle >> half) + ah * bl + al * bh
    return high, (p00 & mask) | (middle << half)
