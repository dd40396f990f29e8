"""Images inside of Arrow and Parquet files, read with pyarrow: pip install pyarrow."""

from __future__ import annotations

import hashlib
import io
import os
import threading
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from gpu_logicmix.data.images import decode_image, read_image
from gpu_logicmix.errors import BadImage, DataError

_GROUPS, _BYTES = 4, 1 << 28  # row groups of Parquet files kept in memory: four, or more if they are small
_KEEPING = threading.Lock()  # a cache is built by several threads


def pyarrow() -> Any:
    try:
        import pyarrow
    except ImportError:
        raise DataError("pyarrow is not installed: pip install pyarrow") from None
    return pyarrow


class ArrowSource:
    """Images inside of Arrow files, which are mapped: a row costs no more than its bytes."""

    def __init__(self, folder: Path, files: list[Path], column: str, size: int) -> None:
        self.root, self.files, self.column, self.size = folder, files, column, size
        self._images: Any = None

    def __getstate__(self) -> dict:
        return {**self.__dict__, "_images": None}

    def _row(self, index: int) -> int:
        """Of the table, for messages."""
        return index

    def _cell(self, index: int) -> Any:
        if self._images is None:
            self._images = read_arrow(self.files).column(self.column)
        return self._images[index].as_py()

    def read(self, index: int) -> Tensor:
        cell = self._cell(index)
        name = f"{self.root}, row {self._row(index)}"
        data, path = (cell.get("bytes"), cell.get("path")) if isinstance(cell, dict) else (cell, None)
        if isinstance(data, bytes):
            return decode_image(io.BytesIO(data), name, self.size)
        if not isinstance(path, str) or os.path.isabs(path) or ".." in Path(path).parts:
            raise BadImage(f"{name}: has no image in it, nor a path inside of the folder; save it with its images")
        return read_image(self.root / path, self.size, follow=False)

    def parts(self, rows: Sequence[int] | np.ndarray | None = None) -> dict[str, str]:
        chosen = b"all" if rows is None else np.asarray(rows, dtype=np.int64).tobytes()
        stats = [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in self.files]
        texts = {"files": f"{[s[0] for s in stats]}{hashlib.sha256(chosen).hexdigest()}"}
        texts |= {"file sizes": str([s[1] for s in stats]), "file dates": str([s[2] for s in stats])}
        return {name: hashlib.sha256(text.encode()).hexdigest() for name, text in texts.items()}


class ParquetSource(ArrowSource):
    """Images inside of Parquet files. What can be read of these are whole row groups: some are kept."""

    def __init__(self, folder: Path, files: list[Path], column: str, size: int, rows: np.ndarray) -> None:
        super().__init__(folder, files, column, size)
        from pyarrow import parquet

        self.rows, self._kept = np.asarray(rows, dtype=np.int64), OrderedDict[int, Any]()
        self.groups: list[tuple[int, int]] = []  # of which file, and which one of it
        lengths = []
        for number, file in enumerate(files):
            facts = parquet.read_metadata(file)
            for group in range(facts.num_row_groups):
                self.groups.append((number, group))
                lengths.append(facts.row_group(group).num_rows)
        self.starts = np.concatenate(([0], np.cumsum(lengths)))

    def __getstate__(self) -> dict:
        return {**super().__getstate__(), "_kept": OrderedDict()}

    def _row(self, index: int) -> int:
        return int(self.rows[index])

    def _cell(self, index: int) -> Any:
        row = self._row(index)
        at = int(np.searchsorted(self.starts, row, "right")) - 1
        with _KEEPING:
            if at not in self._kept:
                self._kept[at] = self._read_group(*self.groups[at])
                while len(self._kept) > _GROUPS and sum(kept.nbytes for kept in self._kept.values()) > _BYTES:
                    self._kept.popitem(last=False)
            self._kept.move_to_end(at)
            column = self._kept[at]
        return column[row - int(self.starts[at])].as_py()

    def _read_group(self, number: int, group: int) -> Any:
        from pyarrow import parquet

        file = self.files[number]
        try:
            with parquet.ParquetFile(file) as whole:
                column = whole.read_row_group(group, columns=[self.column]).column(self.column)
            column.validate(full=True)
        except (pyarrow().ArrowException, OSError) as error:
            raise BadImage(f"{file}: cannot be read ({str(error).splitlines()[0][:120]}); copy it again") from None
        return column

    def parts(self, rows: Sequence[int] | np.ndarray | None = None) -> dict[str, str]:
        return super().parts(self.rows if rows is None else self.rows[np.asarray(rows, dtype=np.int64)])


def holds_images(kind: Any) -> bool:
    """Whether a column of this type holds images: bytes, or {bytes, path}."""
    types = pyarrow().types
    binary = lambda each: types.is_binary(each) or types.is_large_binary(each)  # noqa: E731
    if types.is_struct(kind):
        return any(kind.field(at).name == "bytes" and binary(kind.field(at).type) for at in range(kind.num_fields))
    return binary(kind)


def read_arrow(files: list[Path], columns: list[str] | None = None) -> Any:
    pa = pyarrow()
    tables = []
    for file in files:
        try:
            with pa.memory_map(str(file)) as source:
                tables.append(pa.ipc.open_stream(source).read_all())
            tables[-1].validate(full=columns is not None)  # when it is opened
        except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
            raise DataError(f"{file}: cannot be read ({str(error).splitlines()[0][:120]}); copy it again") from None
        for column in columns or ():
            if column not in tables[-1].column_names:
                raise DataError(f"{file}: has no column {column!r}, which dataset_info.json names")
    return pa.concat_tables(tables)
