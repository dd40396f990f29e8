"""A Hugging Face dataset on disk, as `save_to_disk` writes it: PATH/{train,validation,test}/ with dataset_info.json,
state.json and *.arrow; or PATH itself, of one split. Read with pyarrow alone: pip install pyarrow.

One column of type Image, and one that is a list of ClassLabel (or of texts); or, where no column is a list, one column
of type ClassLabel. Categories that a row does not name are absent.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from gpu_logicmix.data.arrow import ArrowSource, read_arrow
from gpu_logicmix.data.files import Listing, check_choice
from gpu_logicmix.data.table import listed_labels
from gpu_logicmix.errors import DataError
from gpu_logicmix.files import read_json

SPLITS = {"train": ("train",), "val": ("validation", "val", "valid", "test"), "test": ("test",)}


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
    table = read_arrow(files, [image, column])
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


def _named(cell: Any, names: list[str], folder: Path, row: int) -> list[str]:
    listed = [] if cell is None else cell if isinstance(cell, list) else [cell]
    if not names and all(isinstance(name, str) for name in listed):
        return listed
    for number in listed:
        if type(number) is not int or not 0 <= number < len(names):
            raise DataError(f"{folder}, row {row}: label {number!r}; must be from 0 to {len(names) - 1}")
    return [names[number] for number in listed]
