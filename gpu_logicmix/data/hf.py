"""A Hugging Face dataset on disk, as `save_to_disk` writes it: PATH/{train,validation,test}/ with dataset_info.json,
state.json and *.arrow; or PATH itself, of one split. Read with pyarrow alone: pip install "gpu-logicmix[tables]".

One column of type Image, and one that is a list of ClassLabel (or of texts); or, where no column is a list, one column
of type ClassLabel. Categories that a row does not name are absent.
"""

from __future__ import annotations

import hashlib
import io
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from gpu_logicmix.data.files import Listing, check_choice
from gpu_logicmix.data.images import decode_image, read_image
from gpu_logicmix.data.parquet import pyarrow
from gpu_logicmix.data.table import listed_labels
from gpu_logicmix.errors import BadImage, DataError
from gpu_logicmix.files import read_json

SPLITS = {"train": ("train",), "val": ("validation", "val", "valid", "test"), "test": ("test",)}


class ArrowSource:
    """Images inside of Arrow files, which are mapped: a row costs no more than its bytes."""

    def __init__(self, folder: Path, files: list[Path], column: str, size: int) -> None:
        self.root, self.files, self.column, self.size = folder, files, column, size
        self._images: Any = None

    def __getstate__(self) -> dict:
        return {**self.__dict__, "_images": None}

    def _cell(self, index: int) -> Any:
        if self._images is None:
            self._images = _table(self.files).column(self.column)
        return self._images[index].as_py()

    def read(self, index: int) -> Tensor:
        cell = self._cell(index)
        name = f"{self.root}, row {index}"
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


def list_hf(root: Path, split: str, *, others: str = "absent") -> Listing:
    """others: what the categories are that a row does not name: "absent" or "unknown"."""
    check_choice("split", split, tuple(SPLITS))
    check_choice("others", others, ("absent", "unknown"))
    folder = next((root / name for name in SPLITS[split] if (root / name).is_dir()), root)
    if folder == root and split != "train":
        raise DataError(f"{root}: no folder {' or '.join(SPLITS[split])}; hold some training images out: holdout=0.2")
    info = read_json(folder / "dataset_info.json")
    features = info.get("features") if isinstance(info, dict) else None
    if not isinstance(features, dict):
        raise DataError(f"{folder}/dataset_info.json: has no features; was it written by save_to_disk?")
    image, column, names = _columns(features, folder / "dataset_info.json")
    files = _files(folder)
    table = _table(files, [image, column])
    cells = table.column(column).to_pylist()
    if not cells:
        raise DataError(f"{folder}: has no rows")
    named = [_named(cell, names, folder, row) for row, cell in enumerate(cells)]
    categories = names or sorted({name for of_row in named for name in of_row})
    if not categories:
        raise DataError(f"{folder}: names no category at all")
    labels = listed_labels(named, categories, others, lambda i: f"{folder}, row {i}", "the features")
    ids = [str(row) for row in range(len(cells))]
    source = lambda size: ArrowSource(folder, files, image, size)  # noqa: E731
    return Listing(folder, ids, ids, labels, categories, [], source=source)


def _columns(features: dict, file: Path) -> tuple[str, str, list[str]]:
    """The columns of images and labels, and the names of the categories (none where labels are texts)."""
    kinds = {name: feature for name, feature in features.items() if isinstance(feature, dict)}
    images = [name for name, feature in kinds.items() if feature.get("_type") == "Image"]
    if len(images) != 1:
        raise DataError(f"{file}: {len(images)} columns of type Image; must be one")
    found = []
    for name, feature in kinds.items():
        inner = feature.get("feature") if feature.get("_type") in ("Sequence", "List", "LargeList") else None
        if isinstance(inner, dict) and (inner.get("_type") == "ClassLabel" or inner.get("dtype") == "string"):
            found.append((name, inner.get("names", [])))
    if not found:
        found = [(name, f.get("names", [])) for name, f in kinds.items() if f.get("_type") == "ClassLabel"]
    if len(found) != 1:
        raise DataError(f"{file}: {len(found)} columns could be the labels (lists of ClassLabel or text); must be one")
    column, names = found[0]
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names) or len(set(names)) != len(names):
        raise DataError(f"{file}: the names of {column!r} must be a list of different texts")
    return images[0], column, names


def _files(folder: Path) -> list[Path]:
    state = read_json(folder / "state.json")
    entries = state.get("_data_files") if isinstance(state, dict) else None
    names = [entry.get("filename") for entry in entries if isinstance(entry, dict)] if isinstance(entries, list) else []
    if not names or not all(isinstance(name, str) and name == Path(name).name for name in names):
        raise DataError(f"{folder}/state.json: must name the .arrow files in _data_files")
    return [folder / name for name in names]


def _table(files: list[Path], columns: list[str] | None = None) -> Any:
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


def _named(cell: Any, names: list[str], folder: Path, row: int) -> list[str]:
    listed = [] if cell is None else cell if isinstance(cell, list) else [cell]
    if not names and all(isinstance(name, str) for name in listed):
        return listed
    for number in listed:
        if type(number) is not int or not 0 <= number < len(names):
            raise DataError(f"{folder}, row {row}: label {number!r}; must be from 0 to {len(names) - 1}")
    return [names[number] for number in listed]
