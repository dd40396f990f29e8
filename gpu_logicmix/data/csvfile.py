"""A CSV file as texts and labels. Three readers: that of the standard library, which names file, line and column of
whatever is wrong; one for files without quotes and blank lines whose cells are 1, 0, -1, ? or nothing, block by block
with numpy; and pyarrow's for the others. The result of the fast ones counts only where nothing at all is odd. So all
give the same tables and the same errors, and pyarrow is needed for speed alone.
"""

from __future__ import annotations

import contextlib
import io
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import numpy as np

from gpu_logicmix.errors import DataError
from gpu_logicmix.files import csv_rows, open_regular, read_text

CELLS = {"1": 1, "1.0": 1, "true": 1, "0": 0, "0.0": 0, "false": 0, "-1": -1, "-1.0": -1, "": -1, "?": -1}
CELLS |= dict.fromkeys(("nan", "na", "n/a", "none", "null"), -1)
CELLS = {form: value for text, value in CELLS.items() for form in (text, text.capitalize(), text.upper())} | {"NaN": -1}
WHAT_IS_A_LABEL = "write 1 (present), 0 (absent), or -1, ? or nothing (unknown)"
TEXTS = ("image", "split", "labels")  # columns that hold no cells of labels
_SHOWN = 20  # bad cells in a message


class CsvTable:
    """A table: the texts of the columns that have them, and the labels of the others, int8 [rows, categories]."""

    def __init__(self, file: Path, header: list[str]) -> None:
        self.file, self.header = file, header
        listed = set(header) - {"split"} == {"image", "labels"}
        self.names = [name for name in TEXTS if name in header and (name != "labels" or listed)]
        self.categories = [] if listed else [name for name in header if name not in self.names]
        self.texts: dict[str, list[str]] = {name: [] for name in self.names}
        self.labels = np.zeros((0, len(self.categories)), dtype=np.int8)
        self._lines: array | None = None

    def __len__(self) -> int:
        return len(self.texts["image"])

    def line(self, row: int) -> int:
        """The number of a row's line in the file."""
        if self._lines is None:
            self._lines = array("q")
            for number, _ in _rows(self.file, self.header):
                self._lines.append(number)
        return self._lines[row]

    def where(self, row: int) -> str:
        return f"{self.file}, line {self.line(row)}"


def read_csv(file: Path) -> CsvTable:
    """The table in a file. Cells are stripped, and rows without any content do not count."""
    header = read_header(file)
    for reader in (_read_plain, _read_fast):
        table = reader(file, header)
        if table is not None:
            return table
    return _read_exactly(file, header)


def read_header(file: Path) -> list[str]:
    """The names of the columns, which must make sense."""
    header: list[str] = []
    for _, cells in _rows(file, None):
        header = cells
        break
    if not header:
        read_text(file)  # says so if the file is empty
        raise DataError(f"{file}: has no header; write one, as: image,cat,dog")
    if "image" not in header:
        raise DataError(f"{file}, line 1: no column 'image'; the columns are {', '.join(map(repr, header[:20]))}")
    seen: dict[str, int] = {}
    for at, name in enumerate(header):
        if not name:
            raise DataError(f"{file}, line 1: column {at + 1} has no name")
        if seen.setdefault(name, at) != at:
            raise DataError(f"{file}, line 1: two columns are called {name!r}; rename one")
    if not set(header) - {"image", "split"}:
        raise DataError(f"{file}, line 1: no categories; add a column for each, or one column 'labels'")
    return header


@contextlib.contextmanager
def _opened(file: Path) -> Iterator[IO[str]]:
    try:
        with open_regular(file) as raw, io.TextIOWrapper(raw, encoding="utf-8-sig", newline="") as text:
            yield text
    except (OSError, UnicodeDecodeError):
        read_text(file)  # says what is wrong and where
        raise


def _delimiter(file: Path) -> str:
    with _opened(file) as text:
        first = next((line for line in text if line.strip()), "")
    return max(",;\t", key=first.count)


def _rows(file: Path, header: list[str] | None) -> Iterator[tuple[int, list[str]]]:
    """Line number and cells of each row; without the header, if one is given."""
    delimiter = _delimiter(file)
    with _opened(file) as text:
        first = header is not None
        for line, cells in csv_rows(file, text, delimiter=delimiter, skipinitialspace=True, strict=True):
            cells = [cell.strip() for cell in cells]
            if not any(cells):
                continue
            if first:
                first = False
                continue
            if header is not None and len(cells) != len(header):
                raise DataError(
                    f"{file}, line {line}: {len(cells)} cells, but the header has {len(header)}; "
                    "put names that hold a comma in quotes"
                )
            yield line, cells


def _read_exactly(file: Path, header: list[str]) -> CsvTable:
    table = CsvTable(file, header)
    texts = [(table.texts[name], header.index(name)) for name in table.names]
    columns = [header.index(name) for name in table.categories]
    labels, lines, bad, count = array("b"), array("q"), [], 0
    for line, cells in _rows(file, header):
        lines.append(line)
        for text, at in texts:
            text.append(cells[at])
        try:
            labels.extend([CELLS[cells[at]] for at in columns])
        except KeyError:
            wrong = [at for at in columns if cells[at] not in CELLS]
            bad += [(line, header[at], cells[at]) for at in wrong][: _SHOWN - len(bad)]
            count += len(wrong)
    if not lines:
        raise DataError(f"{file}: has a header but no rows")
    if bad:
        raise DataError(bad_cells(file, bad, count))
    table.labels = np.frombuffer(labels, dtype=np.int8).reshape(len(lines), len(columns)).copy()
    table._lines = lines
    return table


def bad_cells(file: Path, bad: list[tuple[int, str, str]], count: int, unit: str = "line") -> str:
    """One line for all of them: the first as it is, up to 20, and how many there are."""
    line, column, cell = bad[0]
    text = f"{file}, {unit} {line}, column {column!r}: {cell!r} is not a label; {WHAT_IS_A_LABEL}"
    if count == 1:
        return text
    rest = ", ".join(f"{unit} {line} column {column!r} {cell!r}" for line, column, cell in bad[1:])
    more = f" and {count - len(bad):,} more" if count > len(bad) else ""
    return f"{text}. {count:,} such cells: also {rest}{more}"


# ----------------------------------------------------------------------------------------------------------- with numpy
_PLAIN = np.full(256, 2, dtype=np.int8)  # what a cell of one byte says; 2: not a label
_PLAIN[[ord("0"), ord("1"), ord("?")]] = 0, 1, -1
_BLOCK = 1 << 20  # bytes at a time
_LONGEST = 131_072  # a cell that the standard library refuses is longer


def _read_plain(file: Path, header: list[str]) -> CsvTable | None:
    """The table; None if anything in it is other than plain."""
    delimiter = _delimiter(file)
    table, rest, columns = CsvTable(file, header), b"", _Columns(len(header))
    texts: dict[bytes, str] = {}  # of splits and lists of labels, which come again and again
    with open_regular(file) as raw:
        line = raw.readline().removeprefix(b"\xef\xbb\xbf").decode("utf-8", "replace")
        if [cell.strip() for cell in line.split(delimiter)] != header:
            return None
        while block := raw.read(_BLOCK):
            block, _, rest = (rest + block).rpartition(b"\n")
            if block and not _plain_block(table, block, columns, delimiter, texts):
                return None
            if len(rest) > _LONGEST * len(header):
                return None
    if rest and not _plain_block(table, rest, columns, delimiter, texts):
        return None
    if not len(table):
        return None
    table.labels = columns.done()
    return table


class _Columns:
    """Labels, row by row, in one array that grows in place."""

    def __init__(self, width: int) -> None:
        self.count, self.width = 0, width
        self.labels: np.ndarray | None = None

    def more(self, rows: int, width: int) -> np.ndarray:
        if self.labels is None:
            self.labels = np.empty((rows, width), dtype=np.int8)
        if self.count + rows > len(self.labels):
            self.labels.resize((max(self.count + rows, len(self.labels) * 9 // 8), width), refcheck=False)
        self.count += rows
        return self.labels[self.count - rows : self.count]

    def done(self) -> np.ndarray:
        assert self.labels is not None
        self.labels.resize((self.count, self.labels.shape[1]), refcheck=False)
        return self.labels


def _plain_block(table: CsvTable, block: bytes, columns: _Columns, delimiter: str, texts: dict[bytes, str]) -> bool:
    """Add whole lines to the table; False if anything is odd."""
    if b'"' in block or b"\0" in block:
        return False
    block += b"\n"
    data, width = np.frombuffer(block, dtype=np.uint8), columns.width
    ends = np.flatnonzero((data == ord(delimiter)) | (data == ord("\n")))
    if len(ends) % width:
        return False
    ends = ends.reshape(-1, width)
    if (data[ends[:, -1]] != ord("\n")).any() or block.count(b"\n") != len(ends):
        return False
    starts = np.concatenate(([0], ends.ravel()[:-1] + 1)).reshape(ends.shape)
    returns = data[ends[:, -1] - 1] == ord("\r")
    if returns.any():
        ends[:, -1] -= returns
    if block.count(b"\r") != returns.sum() or (ends - starts).max() > _LONGEST:
        return False
    if not _plain_texts(table, block, starts, ends, texts):
        return False
    at = [table.header.index(name) for name in table.categories]
    labels = columns.more(len(ends), len(at))
    if not at:
        return True
    part = slice(at[0], at[-1] + 1) if at[-1] - at[0] + 1 == len(at) else at
    starts, lengths = starts[:, part], (ends - starts)[:, part]
    labels[:] = _PLAIN[data[starts]]
    labels[lengths == 0] = -1
    longer = np.nonzero(lengths > 1)
    if len(longer[0]):
        first = starts[longer]
        if (lengths[longer] > 2).any() or (data[first] != ord("-")).any() or (data[first + 1] != ord("1")).any():
            return False
        labels[longer] = -1
    return int(labels.max(initial=0)) < 2


def _plain_texts(table: CsvTable, block: bytes, starts: np.ndarray, ends: np.ndarray, known: dict[bytes, str]) -> bool:
    for name in table.names:
        at = table.header.index(name)
        cells = [block[a:b] for a, b in zip(starts[:, at].tolist(), ends[:, at].tolist(), strict=True)]
        try:
            if name == "image":
                found = [cell.decode().strip() for cell in cells]
                if not all(found):
                    return False  # a row without content, or one without a name
            else:
                for cell in set(cells) - known.keys():
                    known[cell] = cell.decode().strip()
                found = [known[cell] for cell in cells]
        except UnicodeDecodeError:
            return False
        table.texts[name] += found
    return True


# --------------------------------------------------------------------------------------------------------- with pyarrow
def _read_fast(file: Path, header: list[str]) -> CsvTable | None:
    """The table, block by block; None if pyarrow is not there or anything is odd: then the other reader has a look."""
    try:
        import pyarrow as pa
        from pyarrow import csv as arrow
    except ImportError:
        return None
    table = CsvTable(file, header)
    names = [f"f{at}" for at in range(len(header))]
    blocks: list[np.ndarray] = []
    try:
        reader = arrow.open_csv(
            file,
            # The header is a row like any other, so that what pyarrow makes of its names plays no role.
            read_options=arrow.ReadOptions(autogenerate_column_names=True, block_size=1 << 21),
            parse_options=arrow.ParseOptions(delimiter=_delimiter(file), newlines_in_values=True),
            convert_options=arrow.ConvertOptions(column_types=dict.fromkeys(names, pa.string()), null_values=[]),
        )
        first = True
        for batch in reader:
            if first:
                if [str(column[0]).strip() for column in batch.columns] != header:
                    return None
                batch, first = batch.slice(1), False
            block = _block(table, batch)
            if block is None:
                return None
            blocks.append(block)
    except (pa.ArrowException, OSError, UnicodeDecodeError):
        return None
    if not len(table):
        return None
    table.labels = np.concatenate(blocks)
    return table


def _block(table: CsvTable, batch: Any) -> np.ndarray | None:
    """Add the texts of a block of rows to the table and return their labels; None if anything is odd."""
    import pyarrow.compute as pc

    place = {name: at for at, name in enumerate(table.header)}
    for name in table.names:
        texts = pc.utf8_trim_whitespace(batch.column(place[name])).to_pylist()
        # An empty row, or quotes that pyarrow reads in its own way.
        if (name == "image" and not all(texts)) or any('"' in text for text in texts):
            return None
        table.texts[name] += texts
    labels = np.empty((batch.num_rows, len(table.categories)), dtype=np.int8)
    for c, name in enumerate(table.categories):
        cells = batch.column(place[name]).dictionary_encode()
        values = [CELLS.get(cell.strip()) for cell in cells.dictionary.to_pylist()]
        if None in values:
            return None
        labels[:, c] = np.array(values or [-1], dtype=np.int8)[cells.indices.to_numpy()]
    return labels
