"""From cells in any order to CSR, in bounded memory: cells go to a temporary file as they are read, and a counting sort
puts them in place in two passes over it. 60 million labels of 9 million images take 0.6 GB while it is going on."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from typing import Any

import numpy as np

from gpu_logicmix.data.index import index_home
from gpu_logicmix.data.sparse import resolved_keys, row_blocks
from gpu_logicmix.errors import DataError

_CELL = np.dtype([("id", "<u8"), ("cell", "<i4")])  # image; twice the column, plus the value
_BLOCK = 1 << 21  # cells at a time
_IN_MEMORY = 1 << 26  # bytes of cells that need no file


class CellSpill:
    """Known labels, added block by block, of images that have numbers for names."""

    def __init__(self) -> None:
        self._file: Any = None
        self.clear()

    def clear(self) -> None:
        if self._file is not None:
            self._file.close()
        self.count = 0
        self._ids = np.zeros(0, dtype=np.uint64)  # sorted, each once
        self._new: list[np.ndarray] = []
        self._pending = 0
        self._file = tempfile.SpooledTemporaryFile(_IN_MEMORY, dir=_folder())  # noqa: SIM115  # closed by __exit__

    def __enter__(self) -> CellSpill:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def add(self, ids: np.ndarray, columns: np.ndarray, values: np.ndarray) -> None:
        cells = np.empty(len(ids), dtype=_CELL)
        cells["id"] = ids
        cells["cell"] = 2 * columns.astype(np.int32) + values
        try:
            self._file.write(cells.data)
        except OSError as error:
            place = _folder() or tempfile.gettempdir()
            raise DataError(
                f"{place}: cannot be written to ({error.strerror}); free some disk, or set $GPU_LOGICMIX_INDEX to a "
                "folder on another one"
            ) from None
        self.count += len(ids)
        self._new.append(np.unique(ids))
        self._pending += len(self._new[-1])
        if self._pending > max(_BLOCK, len(self._ids) // 4):
            self._merge()

    def _merge(self) -> None:
        self._ids = np.unique(np.concatenate((self._ids, *self._new)))
        self._new, self._pending = [], 0

    def csr(self, width: int, conflict: str) -> dict[str, np.ndarray]:
        """`ids` (sorted), and `pointers`, `columns`, `values` as in `SparseLabels`."""
        self._merge()
        ends = np.zeros(len(self._ids) + 1, dtype=np.int64)
        for rows, _ in self._blocks():
            first = int(rows.min())
            counts = np.bincount(rows - first)
            ends[first + 1 : first + 1 + len(counts)] += counts
        np.cumsum(ends, out=ends)
        cells = np.empty(self.count, dtype=np.int32)
        place = ends[:-1].copy()
        for rows, block in self._blocks():
            order = np.argsort(rows, kind="stable")
            rows = rows[order]
            starts = np.flatnonzero(np.concatenate(([True], rows[1:] != rows[:-1])))
            lengths = np.diff(np.append(starts, len(rows)))
            cells[np.repeat(place[rows[starts]] - starts, lengths) + np.arange(len(rows))] = block[order]
            place[rows[starts]] += lengths
        del place
        pointers, cells = _in_order(ends, cells, width, conflict)
        values = np.bitwise_and(cells, 1, out=np.empty(len(cells), dtype=np.int8), casting="unsafe")
        cells >>= 1
        return {"ids": self._ids, "pointers": pointers, "columns": cells, "values": values}

    def _blocks(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """The row and the cell of each label, as they were added."""
        self._file.seek(0)
        while data := self._file.read(_BLOCK * _CELL.itemsize):
            block = np.frombuffer(data, dtype=_CELL)
            # An image's labels mostly follow each other: one look at the list of ids for each run of them.
            ids = np.ascontiguousarray(block["id"])
            starts = np.flatnonzero(np.concatenate(([True], ids[1:] != ids[:-1])))
            rows = np.searchsorted(self._ids, ids[starts])
            yield np.repeat(rows, np.diff(np.append(starts, len(ids)))), block["cell"]


def _in_order(ends: np.ndarray, cells: np.ndarray, width: int, conflict: str) -> tuple[np.ndarray, np.ndarray]:
    """Cells sorted within their rows, each once, contradictions resolved; in the place of the old ones."""
    pointers, filled = np.zeros(len(ends), dtype=np.int64), 0
    for first, last in row_blocks(ends, _BLOCK):
        rows = np.repeat(np.arange(last - first), np.diff(ends[first : last + 1]))
        keys = resolved_keys(rows * (2 * width) + cells[ends[first] : ends[last]], width, conflict)
        rows = keys // (2 * width)
        cells[filled : filled + len(keys)] = keys - rows * (2 * width)
        pointers[first + 1 : last + 1] = filled + np.cumsum(np.bincount(rows, minlength=last - first))
        filled += len(keys)
    return pointers, cells[:filled]


def _folder() -> str | None:
    """Where there is room: /tmp may be in memory. None: wherever the system likes."""
    with contextlib.suppress(OSError):
        index_home().mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=index_home()):
            return str(index_home())
    return None
