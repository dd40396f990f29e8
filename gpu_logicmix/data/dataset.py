"""The dataset that all formats become.

A sample is (image uint8 [3, S, S], targets int8 [C], index). Asked for a list of indices, a dataset gives a whole
batch, which is how `make_loader` reads: one allocation a batch, and one copy where the images are in a cache. Batches
are in channels_last order, the order of both the decoder and the convolutions, so nothing is ever transposed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gpu_logicmix.data.files import check_choice
from gpu_logicmix.data.names import blocks_of
from gpu_logicmix.data.sparse import SparseLabels, fitting, labels_digest
from gpu_logicmix.errors import BadImage, DataError

Labels = np.ndarray | SparseLabels


class ImageDataset(torch.utils.data.Dataset):
    """Images with three-valued labels.

    name, split: what was opened.
    source: where pixels come from: `read(index)` gives uint8 [S, S, 3]; one with `gather(indices)` gives many at once.
    labels: int8 [N, C]: 1 present, 0 absent, -1 unknown; or `SparseLabels`, where that would be too large. May be
        replaced by others of the same shape: `dataset.labels = hide_labels(dataset.labels, 0.1)`.
    ids: what the dataset itself calls the images.
    on_bad_image: "raise", or "skip": unreadable images are left out of their batches; `bad_images()` lists them.
    warnings: what is odd about the data but does not stop anything, one line each.
    """

    def __init__(
        self,
        name: str,
        split: str,
        source: Any,
        labels: Labels,
        categories: Sequence[str],
        ids: Sequence[str],
        on_bad_image: str = "raise",
        warnings: Sequence[str] = (),
    ) -> None:
        check_choice("on_bad_image", on_bad_image, ("raise", "skip"))
        self.name, self.split, self.source, self.on_bad_image = name, split, source, on_bad_image
        self.categories, self.ids, self.size = list(categories), ids, source.size
        self.warnings = list(warnings)
        self._labels: Labels = _stored(labels)
        # In shared memory, so that what a worker process finds out is known here.
        self.bad = torch.zeros(len(labels), dtype=torch.bool).share_memory_()

    @property
    def labels(self) -> Labels:
        return self._labels

    @labels.setter
    def labels(self, labels: Labels) -> None:
        if not isinstance(labels, SparseLabels):
            labels = np.asarray(labels)
        if labels.shape != self._labels.shape:
            raise DataError(f"labels of shape {labels.shape} do not fit this dataset, which has {self._labels.shape}")
        if not isinstance(labels, SparseLabels) and not np.isin(labels, (-1, 0, 1)).all():
            raise DataError("labels must be 1 (present), 0 (absent) or -1 (unknown)")
        self._labels = _stored(labels)

    def labels_of(self, rows: Sequence[int] | np.ndarray | Tensor) -> np.ndarray:
        """int8 [B, C]: labels of some rows, however they are stored."""
        return self._labels[np.asarray(rows, dtype=np.int64)]

    def __len__(self) -> int:
        return len(self._labels)

    def __repr__(self) -> str:
        n, c = self._labels.shape
        kind = ", sparse labels" if isinstance(self._labels, SparseLabels) else ""
        return f"<{self.name} {self.split}: {n:,} images of {self.size} x {self.size}, {c:,} categories{kind}>"

    def __getitem__(self, index: Any) -> tuple[Tensor, Tensor, int | Tensor]:
        """A sample (of a whole number), or the batch of several (of a list, an array, a tensor, a slice, or a mask of
        N bools). A single bad image raises BadImage, whatever `on_bad_image` says."""
        rows = self._rows(index)
        if isinstance(rows, int):
            return self.source.read(rows).permute(2, 0, 1), torch.from_numpy(self._labels[rows].copy()), rows
        if self.on_bad_image == "skip":
            rows = rows[~self.bad.numpy()[rows]]
        if hasattr(self.source, "gather"):
            images = self.source.gather(rows)
        else:
            images, rows = self._read_each(rows)
        return images.permute(0, 3, 1, 2), torch.from_numpy(self._labels[rows]), torch.from_numpy(rows)

    def _rows(self, index: Any) -> int | np.ndarray:
        """What was asked for, as one row or as many."""
        n = len(self)
        if isinstance(index, slice):
            return np.arange(n, dtype=np.int64)[index]
        rows = np.asarray(index)
        if rows.dtype == bool:
            if rows.shape != (n,):
                raise IndexError(f"a mask of shape {rows.shape} does not fit: there are {n:,} images")
            return np.flatnonzero(rows)
        if rows.ndim > 1 or (rows.size and rows.dtype.kind not in "iu"):
            raise IndexError(f"index of type {rows.dtype} and shape {rows.shape}: must be whole numbers, or a mask")
        if rows.ndim == 0:
            row = int(rows)
            if not -n <= row < n:
                raise IndexError(f"index {row} is out of range: there are {n:,} images")
            return row % n
        rows = rows.astype(np.int64)
        if len(rows) and not (rows.min() >= 0 and rows.max() < n):
            raise IndexError(f"indices {rows.min()} to {rows.max()} are out of range: there are {n:,} images")
        return rows

    def _read_each(self, rows: np.ndarray) -> tuple[Tensor, np.ndarray]:
        images = torch.empty(len(rows), self.size, self.size, 3, dtype=torch.uint8)
        good: list[int] = []
        for row in rows:
            try:
                images[len(good)] = self.source.read(int(row))
            except BadImage:
                if self.on_bad_image == "raise":
                    raise
                self.bad[row] = True
                continue
            good.append(row)
        return images[: len(good)], np.asarray(good, dtype=np.int64)

    def take(self, rows: Sequence[int] | np.ndarray) -> ImageDataset:
        """A dataset of these rows alone (or of those of a mask of N bools), numbered from 0."""
        rows = np.asarray(rows)
        rows = self._rows(rows) if rows.dtype == bool else rows.astype(np.int64)
        ids = self.ids.take(rows) if hasattr(self.ids, "take") else [self.ids[row] for row in rows]
        labels = fitting(self._labels.take(rows)) if isinstance(self._labels, SparseLabels) else self._labels[rows]
        source = (_GatheredRows if hasattr(self.source, "gather") else _Rows)(self.source, rows)
        part = ImageDataset(
            self.name, self.split, source, labels, self.categories, ids, self.on_bad_image, self.warnings
        )
        part.bad[:] = self.bad[rows]
        return part

    def fingerprint(self) -> dict[str, str]:
        """Checksums of what a run learns from, part by part: `categories`, `images` (their ids), `labels` (the known
        ones), and of the source: `files`, `file sizes`, `file dates`. The same with and without a cache, and however
        the labels are stored. `what_changed` compares two of them."""
        ids = hashlib.sha256()
        for block in blocks_of(self.ids):
            ids.update(block)
        names = hashlib.sha256("\0".join(self.categories).encode("utf-8", "surrogatepass"))
        parts = {"categories": names.hexdigest(), "images": ids.hexdigest(), "labels": labels_digest(self._labels)}
        return {**parts, **self.source.parts()}

    def bad_images(self) -> list[str]:
        """One line for each image that was left out so far: which, and why."""
        lines = []
        for row in self.bad.nonzero().flatten().tolist():
            try:
                self.source.read(row)
                lines.append(f"{self.ids[row]}: could not be read, but can be now")
            except BadImage as error:
                lines.append(str(error))
        return lines


def _stored(labels: Labels) -> Labels:
    return labels if isinstance(labels, SparseLabels) else np.ascontiguousarray(labels, dtype=np.int8)


class _Rows:
    """Some rows of another source."""

    def __init__(self, source: Any, rows: np.ndarray) -> None:
        self.source, self.rows, self.size = source, rows, source.size

    def read(self, index: int) -> Tensor:
        return self.source.read(int(self.rows[index]))

    def parts(self, rows: Sequence[int] | np.ndarray | None = None) -> dict[str, str]:
        return self.source.parts(self.rows if rows is None else self.rows[np.asarray(rows)])


class _GatheredRows(_Rows):
    def gather(self, rows: np.ndarray) -> Tensor:
        return self.source.gather(self.rows[rows])
