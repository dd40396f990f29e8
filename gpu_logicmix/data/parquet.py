"""A table of one's own in Parquet: the same columns as in CSV.

    image (text), split (text, optional), a column for each category (numbers or booleans; -1 or null: unknown)
    image (text), split (text, optional), labels (a list of texts, or a text as in CSV)

The column image may also hold the images themselves: their bytes, or {bytes, path} as Hugging Face writes them. They
are read a row group at a time: for a shuffled run, `gpu-logicmix pack` or --cache comes first.

PATH is a file, or a folder with train.parquet and val.parquet (or train-00000-of-00004.parquet and so on). Paths are
relative to the folder. Needs pyarrow: pip install pyarrow.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from gpu_logicmix.data.arrow import ParquetSource, holds_images, pyarrow
from gpu_logicmix.data.csvfile import bad_cells
from gpu_logicmix.data.files import Listing, check_choice, check_paths
from gpu_logicmix.data.sparse import SparseLabels
from gpu_logicmix.data.table import (
    check_categories,
    check_unique,
    image_names,
    image_root,
    listed_labels,
    split_names,
    split_rows,
)
from gpu_logicmix.errors import DataError


def list_parquet(path: Path, split: str, *, others: str = "absent", root: str | None = None) -> Listing:
    """others: with a column `labels`, what the categories are that an image does not name: "absent" or "unknown".
    root: the folder that image paths are relative to, or, if they are absolute, inside of; that of the file unless
        given.
    """
    check_choice("others", others, ("absent", "unknown"))
    files = _files(path, split)
    table = _read(files)
    file, names_of = files[0], table.column_names
    splits = _texts(table, "split", file) if "split" in names_of else None
    rows = split_rows(splits, split, table.num_rows, file, alone=path.is_file())
    folder = file.parent if root is None else image_root(root)
    where = lambda i: f"{file}, row {int(rows[i])}"  # noqa: E731
    source, missing = None, []
    if "image" in names_of:
        images = _texts(table, "image", file)
        names = image_names([images[row] for row in rows], folder, root is not None)
        check_unique(names, lambda i: int(rows[i]), file, "row")
        missing = check_paths(folder, names, where)
    else:  # inside of the table
        names = [str(row) for row in rows]
        source = lambda size: ParquetSource(folder, files, "image", size, rows)  # noqa: E731
    labels: np.ndarray | SparseLabels
    if set(names_of) - {"split", "image"} == {"labels"}:
        named = _lists(table, file)
        train = _read(_files(path, "train")) if path.is_dir() and split != "train" else table
        every = named if train is table else _lists(train, file)
        categories = sorted({name for of_row in every for name in of_row})
        check_categories(categories, file)
        labels = listed_labels([named[row] for row in rows], categories, others, where, "the training table")
    else:
        categories = [name for name in names_of if name not in ("image", "split")]
        if not categories:
            raise DataError(f"{file}: no categories; add a column for each, or one column 'labels'")
        labels = np.stack([_labels(table, name, file) for name in categories], 1)[rows]
    return Listing(folder, names, names, labels, categories, missing, source=source)


def _files(path: Path, split: str) -> list[Path]:
    if path.is_file():
        return [path]
    wanted = {"val": ("val", "validation", "valid", "test")}.get(split, (split,))
    for name in wanted:
        files = sorted([*path.glob(f"{name}.parquet"), *path.glob(f"{name}-*.parquet")])
        if files:
            return files
    raise DataError(f"{path}: no {split}.parquet or {split}-*.parquet; give a file, or a folder with these")


def _read(files: list[Path]) -> Any:
    """The table; without the column image, if that holds the images themselves."""
    pa = pyarrow()
    from pyarrow import parquet

    tables = []
    for file in files:
        try:
            schema = parquet.read_schema(file)
            inside = "image" in schema.names and holds_images(schema.field("image").type)
            columns = [name for name in schema.names if name != "image" or not inside]
            tables.append(parquet.read_table(file, columns=columns))
            tables[-1].validate(full=True)  # texts are UTF-8, lists end within
        except (pa.ArrowException, OSError, UnicodeDecodeError, KeyError) as error:
            raise DataError(f"{file}: cannot be read as Parquet ({str(error).splitlines()[0][:120]})") from None
        if "image" not in schema.names:
            found = ", ".join(map(repr, schema.names[:20]))
            raise DataError(f"{file}: no column 'image'; the columns are {found}")
    try:
        table = pa.concat_tables(tables)
    except pa.ArrowException:
        raise DataError(f"{files[0].parent}: the columns of {files[0].name} are not those of all others") from None
    if not table.num_rows:
        raise DataError(f"{files[0]}: has no rows")
    if len(set(table.column_names)) != len(table.column_names):
        raise DataError(f"{files[0]}: two columns have the same name; rename one")
    return table


def _texts(table: Any, name: str, file: Path) -> list[str]:
    texts = table.column(name).to_pylist()
    for row, text in enumerate(texts):
        if not isinstance(text, str):
            raise DataError(f"{file}, row {row}, column {name!r}: {str(text)[:40]!r} is not a text")
    return texts


def _lists(table: Any, file: Path) -> list[list[str]]:
    """The names in the column `labels`, of each row."""
    found = []
    for row, cell in enumerate(table.column("labels").to_pylist()):
        names = split_names(cell) if isinstance(cell, str) else [] if cell is None else cell
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise DataError(f"{file}, row {row}, column 'labels': {str(cell)[:60]!r} is not a list of texts")
        found.append([name.strip() for name in names if name.strip()])
    return found


def _labels(table: Any, name: str, file: Path) -> np.ndarray:
    pa, column = pyarrow(), table.column(name)
    kind, types = column.type, pa.types
    if not any(test(kind) for test in (types.is_integer, types.is_floating, types.is_boolean, types.is_null)):
        raise DataError(f"{file}, column {name!r}: is of type {kind}, must be numbers or booleans")
    values = np.array([-1.0 if cell is None else float(cell) for cell in column.to_pylist()])
    values = np.where(np.isnan(values), -1, values)
    wrong = np.flatnonzero(~np.isin(values, (-1, 0, 1)))
    if len(wrong):
        bad = [(int(row), name, f"{values[row]:g}") for row in wrong[:20]]
        raise DataError(bad_cells(file, bad, len(wrong), "row"))
    return values.astype(np.int8)
