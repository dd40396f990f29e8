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

import os
import posixpath
import re
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from gpu_logicmix.data.csvfile import CsvTable, read_csv, read_header
from gpu_logicmix.data.files import Listing, check_choice, check_paths
from gpu_logicmix.data.sparse import SparseLabels
from gpu_logicmix.errors import DataError
from gpu_logicmix.files import at_home, read_text

SPLITS = {"training": "train", "validation": "val", "valid": "val", "dev": "val", "testing": "test"}


def list_csv(path: Path, split: str, *, others: str = "absent", root: str | None = None) -> Listing:
    """others: with a column `labels`, what the categories are that an image does not name: "absent" or "unknown".
    root: the folder that image paths are relative to, or, if they are absolute, inside of; that of the file unless
        given.
    """
    check_choice("others", others, ("absent", "unknown"))
    file = path / f"{split}.csv" if path.is_dir() else path
    if path.is_dir() and split == "val" and not file.exists() and (path / "test.csv").exists():
        file = path / "test.csv"
    table = read_csv(file)
    rows = split_rows(table.texts.get("split"), split, len(table), file, alone=path.is_file())
    folder = file.parent if root is None else image_root(root)
    images = table.texts["image"]
    chosen = images if len(rows) == len(images) else [images[row] for row in rows]
    names = image_names(chosen, folder, root is not None)
    where = lambda i: table.where(int(rows[i]))  # noqa: E731
    check_unique(names, lambda i: table.line(int(rows[i])), file)
    missing = check_paths(folder, names, where)

    train = path / "train.csv" if path.is_dir() else file
    labels: np.ndarray | SparseLabels
    if "labels" in table.texts:
        _same_form(train, file, listed=True)
        categories, source = _categories(file, train, table)
        named = [split_names(table.texts["labels"][row]) for row in rows]
        labels = listed_labels(named, categories, others, where, source.name)
    else:
        _same_form(train, file, listed=False)
        categories = table.categories
        labels = table.labels if len(rows) == len(table) else table.labels[rows]
        of_train = (
            [name for name in read_header(train) if name not in ("image", "split")] if train.exists() else categories
        )
        if categories != of_train:
            raise DataError(f"{file}: its columns are not those of train.csv; give both the same in the same order")
    warnings = _in_both(table, names, train, file, split, lambda images: image_names(images, folder, root is not None))
    return Listing(folder, names, names, labels, categories, missing, warnings)


# ------------------------------------------------------------------------------------------------ shared with parquet
def split_rows(splits: Sequence[str] | None, split: str, count: int, file: Path, *, alone: bool) -> np.ndarray:
    """The rows of a split, by the column of that name (None: there is none). "val" is "test" where there is no val."""
    if splits is None:
        if alone and split != "train":
            raise DataError(
                f"{file}: has no column 'split', so all of it is 'train' and nothing is {split!r}; add that column, "
                "give a folder with train.csv and val.csv, or hold some training images out: holdout=0.2"
            )
        return np.arange(count)
    known = {text: SPLITS.get(text.lower(), text.lower()) for text in set(splits)}
    wanted = SPLITS.get(split.lower(), split.lower())
    if wanted == "val" and wanted not in known.values():
        wanted = "test"
    chosen = {text for text, name in known.items() if name == wanted}
    rows = np.flatnonzero([text in chosen for text in splits])
    if not len(rows):
        found = ", ".join(map(repr, sorted(known)[:10]))
        raise DataError(f"{file}: no row has the split {split!r}; there are {found}")
    return rows


def image_root(root: str) -> Path:
    folder = at_home(root)
    if not folder.is_dir():
        raise DataError(f"root={root!r}: no such folder")
    return folder


def image_names(names: list[str], folder: Path, absolute: bool) -> list[str]:
    """Paths as they are in the table, made plain: forward slashes, no ./ and, if `absolute` ones are allowed, relative
    to the folder. What leads out of it is left as it is, for `check_paths` to refuse."""
    homes = [os.path.abspath(folder), os.path.realpath(folder)]

    def plain(name: str) -> str:
        name = name.replace("\\", "/")
        if absolute and name.startswith("/"):
            for home in homes:
                if name.startswith(home.rstrip("/") + "/"):
                    name = name[len(home.rstrip("/")) + 1 :]
                    break
        if ".." not in name and ("./" in name or "//" in name) and not name.startswith("/"):
            name = posixpath.normpath(name)
        return name

    odd = re.compile(r"\\|\./|//|^/").search
    return [plain(name) if odd(name) else name for name in names] if any(map(odd, names)) else names


def check_unique(names: list[str], line: Callable[[int], int], file: Path, unit: str = "line") -> None:
    if len(set(names)) == len(names):
        return
    seen: dict[str, int] = {}
    for row, name in enumerate(names):
        first = seen.setdefault(name, row)
        if first != row:
            raise DataError(
                f"{file}, {unit} {line(row)}: {name!r} is in {unit} {line(first)} already; remove one of the two"
            )


def split_names(cell: str) -> list[str]:
    return [name.strip() for name in re.split(r"[;|,]", cell) if name.strip()] if cell else []


def check_categories(categories: Sequence[str], file: Path) -> None:
    if not categories:
        raise DataError(f"{file}: names no category at all")
    if set(categories) <= {"0", "1", "-1", "0.0", "1.0"}:
        found = " and ".join(map(repr, sorted(categories)))
        raise DataError(
            f"{file}: the column 'labels' holds {found}, not names of categories; call the column after its category, "
            "or list names"
        )


def listed_labels(
    named: list[list[str]], categories: Sequence[str], others: str, where: Callable[[int], str], source: str
) -> np.ndarray | SparseLabels:
    """Labels of images of which the present categories are named."""
    column = {name: c for c, name in enumerate(categories)}
    lengths = np.fromiter((len(names) for names in named), np.int64, len(named))
    columns = np.empty(int(lengths.sum()), dtype=np.int64)
    at = 0
    for row, names in enumerate(named):
        for name in names:
            c = column.get(name)
            if c is None:
                raise DataError(
                    f"{where(row)}: category {name!r} is not in the list of {source}; add it there, or correct the row"
                )
            columns[at] = c
            at += 1
    rows = np.repeat(np.arange(len(named)), lengths)
    if others == "unknown":
        return SparseLabels.of_cells(rows, columns, np.ones(len(rows), dtype=np.int8), (len(named), len(categories)))
    labels = np.zeros((len(named), len(categories)), dtype=np.int8)
    labels[rows, columns] = 1
    return labels


# ---------------------------------------------------------------------------------------------------- train.csv and co.
def _same_form(train: Path, file: Path, *, listed: bool) -> None:
    if train == file or not train.exists():
        return
    other = set(read_header(train)) - {"split"} == {"image", "labels"}
    if other != listed:
        words = ("lists labels", "has a column for each category")
        this, that = (words[0], words[1]) if listed else (words[1], words[0])
        raise DataError(f"{file}: {this}, but {train.name} {that}; write both in the same form")


def _categories(file: Path, train: Path, table: CsvTable) -> tuple[list[str], Path]:
    """The list of categories, and the file that it is from."""
    fixed = file.parent / "categories.txt"
    if fixed.exists():
        lines = (line.strip() for line in read_text(fixed).splitlines())
        return list(dict.fromkeys(line for line in lines if line)), fixed
    # All rows of the file, whatever their split, so that train and val have the same categories.
    source = train if train.exists() else file
    cells = table.texts["labels"] if source == file else read_csv(source).texts["labels"]
    categories = sorted({name for cell in set(cells) for name in split_names(cell)})
    check_categories(categories, source)
    return categories, source


def _in_both(
    table: CsvTable, names: list[str], train: Path, file: Path, split: str, plain: Callable[[list[str]], list[str]]
) -> list[str]:
    """A warning about images to validate on that are also trained on."""
    if split == "train":
        return []
    splits = table.texts.get("split")
    if splits is not None:
        kinds = (SPLITS.get(text.lower(), text.lower()) for text in splits)
        trained = [name for name, kind in zip(table.texts["image"], kinds, strict=True) if kind == "train"]
    elif train != file and train.exists():
        trained = read_csv(train).texts["image"]
    else:
        return []
    return both_warning(set(plain(trained)).intersection(names), file, split)


def both_warning(both: set[str], file: Path, split: str) -> list[str]:
    if not both:
        return []
    return [
        f"{file}: {len(both):,} images are in {split} and in train as well, as {min(both)!r}; what is measured on "
        "them is too good"
    ]
