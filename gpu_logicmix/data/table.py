"""A CSV file of one's own. Two forms:

    image,cat,dog,bird              one column a category: 1 present, 0 absent; -1, ? or nothing: unknown
    photos/1.jpg,1,0,?

    image,labels                    the categories that are present, separated by ; or | (or , in quotes)
    photos/1.jpg,cat;dog

Paths are relative to the folder of the file. A column `split` (train, val) divides the rows; or give a folder that
holds train.csv and val.csv. In the second form, categories.txt beside the file (one name a line) fixes the list of
categories; without it, they are all those named in the file, or in train.csv.
"""

from __future__ import annotations

import csv
import re
from pathlib import Path

import numpy as np

from gpu_logicmix.data.files import DataError, Listing, check_choice, check_paths, read_text

CELLS = {"1": 1, "0": 0, "-1": -1, "": -1, "?": -1, "1.0": 1, "0.0": 0, "-1.0": -1, "nan": -1, "NaN": -1}


def list_csv(path: Path, split: str, *, others: str = "absent") -> Listing:
    """others: with a column `labels`, what the categories are that an image does not name: "absent" or "unknown"."""
    check_choice("others", others, ("absent", "unknown"))
    file = path / f"{split}.csv" if path.is_dir() else path
    header, rows = _read(file)
    if "split" in header:
        at = header.index("split")
        found = sorted({cells[at] for _, cells in rows})
        rows = [(line, cells) for line, cells in rows if cells[at] == split]
        if not rows:
            raise DataError(f"{file}: no row has the split {split!r}; there are {', '.join(map(repr, found))}")
    elif path.is_file() and split != "train":
        raise DataError(
            f"{file}: has no column 'split', so all of it is 'train' and nothing is {split!r}; "
            "add that column, or give a folder with train.csv and val.csv"
        )

    image_at = header.index("image")
    names = [cells[image_at].replace("\\", "/") for _, cells in rows]
    lines: dict[str, int] = {}
    for name, (line, _) in zip(names, rows, strict=True):
        if name in lines:
            raise DataError(f"{file}, line {line}: {name!r} is in line {lines[name]} already; remove one of the two")
        lines[name] = line
    missing = check_paths(file.parent, names, lambda i: f"{file}, line {rows[i][0]}")

    if set(header) - {"split"} == {"image", "labels"}:
        categories, labels = _labels_listed(path, file, header, rows, -1 if others == "unknown" else 0)
    else:
        categories, labels = _labels_in_columns(file, header, rows)
        if path.is_dir() and split != "train" and (path / "train.csv").exists():
            of_train = [name for name in _read(path / "train.csv")[0] if name not in ("image", "split")]
            if categories != of_train:
                raise DataError(f"{file}: its columns are not those of train.csv; give both the same in the same order")
    return Listing(file.parent, names, names, labels, categories, missing)


def _read(file: Path) -> tuple[list[str], list[tuple[int, list[str]]]]:
    """The header, and each row with its line number. Cells are stripped."""
    text = read_text(file).splitlines(keepends=True)
    delimiter = max(",;\t", key=text[0].count)
    reader = csv.reader(text, delimiter=delimiter, skipinitialspace=True, strict=True)
    header, rows = [], []
    try:
        for cells in reader:
            cells = [cell.strip() for cell in cells]
            if not any(cells):
                continue
            if not header:
                header = cells
                _check_header(file, header)
            elif len(cells) != len(header):
                raise DataError(
                    f"{file}, line {reader.line_num}: {len(cells)} cells, but the header has {len(header)}; "
                    "put names that hold a comma in quotes"
                )
            else:
                rows.append((reader.line_num, cells))
    except csv.Error as error:
        raise DataError(f"{file}, line {reader.line_num}: not a CSV row ({error})") from None
    if not rows:
        raise DataError(f"{file}: has a header but no rows")
    return header, rows


def _check_header(file: Path, header: list[str]) -> None:
    if "image" not in header:
        raise DataError(f"{file}, line 1: no column 'image'; the columns are {', '.join(map(repr, header))}")
    for at, name in enumerate(header):
        if not name:
            raise DataError(f"{file}, line 1: column {at + 1} has no name")
        if header.index(name) != at:
            raise DataError(f"{file}, line 1: two columns are called {name!r}; rename one")
    if len(set(header) - {"image", "split"}) == 0:
        raise DataError(f"{file}, line 1: no categories; add a column for each, or one column 'labels'")


def _labels_in_columns(file: Path, header: list[str], rows: list) -> tuple[list[str], np.ndarray]:
    columns = [at for at, name in enumerate(header) if name not in ("image", "split")]
    labels = np.empty((len(rows), len(columns)), dtype=np.int8)
    for row, (line, cells) in enumerate(rows):
        try:
            labels[row] = [CELLS[cells[at]] for at in columns]
        except KeyError:
            at = next(at for at in columns if cells[at] not in CELLS)
            raise DataError(
                f"{file}, line {line}, column {header[at]!r}: {cells[at]!r} is no label; "
                "write 1 (present), 0 (absent), or -1, ? or nothing (unknown)"
            ) from None
    return [header[at] for at in columns], labels


def _labels_listed(path: Path, file: Path, header: list[str], rows: list, other: int) -> tuple[list[str], np.ndarray]:
    at = header.index("labels")
    named = [_split_labels(cells[at]) for _, cells in rows]
    list_file = file.parent / "categories.txt"
    if list_file.exists():
        source = list_file
        categories = list(dict.fromkeys(line.strip() for line in read_text(list_file).splitlines() if line.strip()))
    else:
        # All rows of the file, whatever their split, so that train and val have the same categories.
        source = path / "train.csv" if path.is_dir() else path
        header, rows_of_all = _read(source)
        at = header.index("labels") if "labels" in header else header.index("image")
        categories = sorted({name for _, cells in rows_of_all for name in _split_labels(cells[at])})
    if not categories:
        raise DataError(f"{source}: names no category at all")
    column = {name: c for c, name in enumerate(categories)}
    labels = np.full((len(rows), len(categories)), other, dtype=np.int8)
    for row, names in enumerate(named):
        for name in names:
            if name not in column:
                raise DataError(
                    f"{file}, line {rows[row][0]}: category {name!r} is not in the list of {source.name}; "
                    "add it there, or correct the row"
                )
            labels[row, column[name]] = 1
    return categories, labels


def _split_labels(cell: str) -> list[str]:
    return [name.strip() for name in re.split(r"[;|,]", cell) if name.strip()]
