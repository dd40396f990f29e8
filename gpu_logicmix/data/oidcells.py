"""The rows of OpenImages' label files (ImageID,Source,LabelName,Confidence), 60 million of them: with pyarrow where it
is there and nothing is odd, else row by row, with the line number of whatever is wrong."""

from __future__ import annotations

import contextlib
import io
from pathlib import Path
from typing import Any

import numpy as np

from gpu_logicmix.data.names import hex_numbers
from gpu_logicmix.data.spill import CellSpill
from gpu_logicmix.errors import DataError
from gpu_logicmix.files import csv_rows, open_regular, read_text
from gpu_logicmix.progress import progress_bar

NEEDED = ("ImageID", "LabelName", "Confidence")
NOT_TRAINABLE, MACHINE = "about classes that are not trainable", "of machines, which no person has verified,"


def read_cells(file: Path, column: dict[str, int], machine: bool, cells: CellSpill) -> dict[str, int]:
    """Add all rows to `cells`. Returns how many were left out, and why."""
    header = _header(file)
    counts = _fast(file, header, column, machine, cells)
    if counts is None:
        cells.clear()
        counts = _exactly(file, header, column, machine, cells)
    return counts


def _header(file: Path) -> list[str]:
    try:
        with open_regular(file) as raw:
            _, header = next(csv_rows(file, [raw.readline().decode("utf-8-sig")]), (1, []))
    except (OSError, UnicodeDecodeError):
        read_text(file)  # says what is wrong
        raise
    missing = [name for name in NEEDED if name not in header]
    if missing:
        raise DataError(f"{file}, line 1: no column {missing[0]!r}; must be ImageID,Source,LabelName,Confidence")
    return header


def _exactly(file: Path, header: list[str], column: dict[str, int], machine: bool, cells: CellSpill) -> dict[str, int]:
    found: tuple[list, list, list] = [], [], []
    counts = {NOT_TRAINABLE: 0, MACHINE: 0}
    at = {name: header.index(name) for name in header}
    source = at.get("Source")
    try:
        with open_regular(file) as raw, io.TextIOWrapper(raw, encoding="utf-8-sig", newline="") as text:
            rows = csv_rows(file, text)
            next(rows)
            for line, row in rows:
                if len(row) != len(header):
                    raise DataError(f"{file}, line {line}: {len(row)} cells, but the header has {len(header)}")
                if source is not None and row[source] == "machine" and not machine:
                    counts[MACHINE] += 1
                    continue
                image, c = row[at["ImageID"]], column.get(row[at["LabelName"]])
                if len(image) != 16 or image.strip("0123456789abcdef"):
                    raise DataError(f"{file}, line {line}: ImageID {image!r} is not of 16 hex digits")
                value = {"1": 1, "0": 0, "1.0": 1, "0.0": 0}.get(row[at["Confidence"]])
                if value is None:
                    raise DataError(f"{file}, line {line}: Confidence {row[at['Confidence']]!r} must be 1 or 0")
                if c is None:
                    counts[NOT_TRAINABLE] += 1
                    continue
                for into, number in zip(found, (int(image, 16), c, value), strict=True):
                    into.append(number)
                if len(found[0]) == 1 << 18:
                    _add(cells, found)
    except UnicodeDecodeError:
        read_text(file)
        raise
    _add(cells, found)
    return counts


def _add(cells: CellSpill, found: tuple[list, list, list]) -> None:
    if found[0]:
        cells.add(*(np.array(part, dtype=kind) for part, kind in zip(found, ("u8", "i4", "i1"), strict=True)))
    for part in found:
        part.clear()


def _fast(
    file: Path, header: list[str], column: dict[str, int], machine: bool, cells: CellSpill
) -> dict[str, int] | None:
    try:
        import pyarrow as pa
        from pyarrow import csv as arrow
    except ImportError:
        return None
    counts = {NOT_TRAINABLE: 0, MACHINE: 0}
    kinds = {name: pa.dictionary(pa.int32(), pa.string()) for name in ("LabelName", "Source", "Confidence")}
    wanted = [name for name in ("ImageID", "Source", "LabelName", "Confidence") if name in header]
    convert = arrow.ConvertOptions(
        column_types={"ImageID": pa.string(), **kinds},
        include_columns=wanted,
        null_values=[],
        strings_can_be_null=False,
    )
    with contextlib.suppress(pa.ArrowException, OSError):
        options = arrow.ReadOptions(block_size=1 << 24)
        with progress_bar(file.stat().st_size, f"reading {file.name}", unit="bytes") as advance:
            pool = pa.system_memory_pool()  # gives back what it no longer needs
            for batch in arrow.open_csv(file, read_options=options, convert_options=convert, memory_pool=pool):
                block = _block(batch, column, machine, counts)
                if block is None:
                    return None
                cells.add(*block)
                advance(batch.nbytes)
        return counts
    return None


def _block(batch: Any, column: dict[str, int], machine: bool, counts: dict[str, int]) -> tuple | None:
    """Ids, columns and values of a block of rows; None if anything is odd."""

    def looked_up(name: str, table: dict[str, int], other: int) -> np.ndarray:
        cells = batch.column(name)
        values = np.array([table.get(text, other) for text in cells.dictionary.to_pylist()], dtype=np.int32)
        return values[cells.indices.to_numpy()] if len(values) else np.zeros(0, dtype=np.int32)

    keep = np.ones(batch.num_rows, dtype=bool)
    if "Source" in batch.schema.names and not machine:
        keep = looked_up("Source", {"machine": 0}, 1) == 1
        counts[MACHINE] += int((~keep).sum())
    at = looked_up("LabelName", column, -1)
    value = looked_up("Confidence", {"1": 1, "0": 0, "1.0": 1, "0.0": 0}, -1)
    images = batch.column("ImageID").dictionary_encode()
    numbers = _numbers(images.dictionary)
    if numbers is None or (value[keep] < 0).any():
        return None
    counts[NOT_TRAINABLE] += int((keep & (at < 0)).sum())
    keep &= at >= 0
    return numbers[images.indices.to_numpy()[keep]], at[keep], value[keep]


def _numbers(texts: Any) -> np.ndarray | None:
    """Ids of 16 hex digits as numbers; None if one is something else."""
    _, offsets, data = texts.buffers()
    ends = np.frombuffer(offsets, dtype=np.int32)[texts.offset : texts.offset + len(texts) + 1]
    if (np.diff(ends) != 16).any():
        return None
    return hex_numbers(np.frombuffer(data, dtype=np.uint8)[ends[0] : ends[-1]].reshape(-1, 16))
