"""OpenImages: image-level labels that people have verified, present (Confidence 1) or absent (0); all else is unknown.

openimages:PATH, V5 to V7, the files as they are downloaded:
    PATH/oidv6-train-annotations-human-imagelabels.csv    ImageID,Source,LabelName,Confidence; any prefix (oidv7-, none)
    PATH/validation-annotations-human-imagelabels.csv     also val-..., and test-...
    PATH/oidv6-classes-trainable.txt                      the 9,605 trainable classes, one a line; any prefix
    PATH/class-descriptions.csv                           LabelName,DisplayName; any prefix, optional
    PATH/train/0a1b....jpg, PATH/validation/, PATH/test/  or PATH/images/train/ and so on
or, as the authors of CSL packed it, PATH/data.csv (filepath, label, label_neg, split_name).

openimages-v3:PATH, V1 to V3: PATH/{train,validation,test}/annotations-human.csv, PATH/classes-trainable.txt, images in
PATH/{train,validation,test}/.
"""

from __future__ import annotations

import re
from itertools import zip_longest
from pathlib import Path

import numpy as np

from gpu_logicmix.data.files import Listing, check_choice, check_paths
from gpu_logicmix.data.index import index_key, made_once
from gpu_logicmix.data.names import HexNames
from gpu_logicmix.data.oidcells import read_cells
from gpu_logicmix.data.sparse import SparseLabels
from gpu_logicmix.data.spill import CellSpill
from gpu_logicmix.errors import DataError
from gpu_logicmix.files import csv_rows, open_regular, read_text

PARTS = {"train": ("train",), "val": ("validation", "val"), "test": ("test",)}
CHECKED = 1_000_000  # up to here every image file is looked for when the set is opened; beyond, when it is read


def list_openimages(root: Path, split: str, *, conflict: str = "unknown", machine: str = "ignore") -> Listing:
    """conflict: what a label is that one row says is present and another says is absent: "unknown", "present" or
        "absent".
    machine: "ignore" labels that no person has verified (Source "machine"), or "keep" them.
    """
    check_choice("split", split, tuple(PARTS))
    if (root / "data.csv").exists():
        return _list_csl(root, split, conflict)
    names = [f"{part}-annotations-human-imagelabels" for part in PARTS[split]]
    file = _one_of(root, [f"*{name}*.csv" for name in names], f"{names[0]}.csv")
    trainable = _one_of(root, ["*classes-trainable*.txt"], "classes-trainable.txt")
    return _list_cells(root, split, file, trainable, conflict, machine)


def list_openimages_v3(root: Path, split: str, *, conflict: str = "unknown", machine: str = "ignore") -> Listing:
    """As for openimages."""
    check_choice("split", split, tuple(PARTS))
    file = root / PARTS[split][0] / "annotations-human.csv"
    return _list_cells(root, split, file, root / "classes-trainable.txt", conflict, machine)


def _one_of(root: Path, patterns: list[str], wanted: str) -> Path:
    found = [file for pattern in patterns for file in sorted(root.glob(pattern))]
    if not found:
        raise DataError(f"{root}: no {wanted} (any prefix, as oidv6-); is this the folder of OpenImages?")
    if len(found) > 1 and len({file.name for file in found}) > 1:
        names = ", ".join(file.name for file in found)
        raise DataError(f"{root}: {names} are all there; leave one of them, of one version")
    return found[0]


def _list_cells(root: Path, split: str, file: Path, trainable: Path, conflict: str, machine: str) -> Listing:
    check_choice("conflict", conflict, ("unknown", "present", "absent"))
    check_choice("machine", machine, ("ignore", "keep"))
    mids = _trainable(trainable)
    categories = _display_names(root, mids)
    if not file.exists():
        raise DataError(f"{file}: no such file; is this the right folder, and is everything unpacked?")
    key = index_key("openimages", [file, trainable], {"conflict": conflict, "machine": machine})
    arrays, facts = made_once(key, lambda: _build(file, mids, conflict, machine))
    labels = SparseLabels(arrays["pointers"], arrays["columns"], arrays["values"], len(mids))
    ids = HexNames(arrays["ids"])
    part = next((p for p in PARTS[split] if (root / p).is_dir() or (root / "images" / p).is_dir()), PARTS[split][0])
    folder = root / "images" / part if (root / "images" / part).is_dir() else root / part
    paths = HexNames(ids.numbers, after=".jpg")
    checked = len(ids) <= CHECKED
    missing = check_paths(folder, paths, lambda i: f"{file}, ImageID {ids[i]}") if checked else []
    return Listing(folder, paths, ids, labels, categories, missing, facts["warnings"], follow=checked)


def _build(file: Path, mids: list[str], conflict: str, machine: str) -> tuple[dict[str, np.ndarray], dict]:
    """Read all rows. Images are sorted by id; those without a label of a trainable class are left out."""
    with CellSpill() as cells:
        counts = read_cells(file, {mid: c for c, mid in enumerate(mids)}, machine == "keep", cells)
        if not cells.count:
            raise DataError(f"{file}: no row is about one of the {len(mids):,} trainable classes")
        arrays = cells.csr(len(mids), conflict)
    warnings = [f"{file}: {count:,} rows {what} were left out" for what, count in counts.items() if count]
    return arrays, {"warnings": warnings}


def _trainable(file: Path) -> list[str]:
    mids = [line.strip().split(",")[0] for line in read_text(file).splitlines() if line.strip()]
    for number, mid in enumerate(mids, 1):
        if not re.fullmatch(r"/[a-z]/[\w-]+", mid):
            raise DataError(f"{file}, line {number}: {mid!r} is not the id of a class, as /m/01g317")
    if len(set(mids)) != len(mids):
        twice = next(mid for mid in mids if mids.count(mid) > 1)
        raise DataError(f"{file}: {twice!r} is there twice; remove one of the two")
    return mids


def _display_names(root: Path, mids: list[str]) -> list[str]:
    """The names of the classes, where there is a list of them. Two classes of one name keep their ids in it."""
    files = sorted(root.glob("*class-descriptions*.csv"), key=lambda file: ("boxable" in file.name, file.name))
    if not files:
        return mids
    names = {}
    for number, row in csv_rows(files[0], read_text(files[0]).splitlines()):
        if len(row) < 2:
            raise DataError(f"{files[0]}, line {number}: must be LabelName,DisplayName")
        names[row[0].strip()] = row[1].strip()
    shown = [names.get(mid) or mid for mid in mids]
    count: dict[str, int] = {}
    for name in shown:
        count[name] = count.get(name, 0) + 1
    return [f"{name} ({mid})" if count[name] > 1 else name for name, mid in zip(shown, mids, strict=True)]


# ------------------------------------------------------------------------------------------------------- CSL's data.csv
def _list_csl(root: Path, split: str, conflict: str) -> Listing:
    """All classes named in the file, sorted, as mlcpl takes them; rows that are not "train" are to validate on."""
    check_choice("conflict", conflict, ("unknown", "present", "absent"))
    file = root / "data.csv"
    paths, cells, lines, mids = [], [], [], {}
    with open_regular(file) as raw:
        text = (line.decode("utf-8-sig", "replace") for line in raw)
        rows = csv_rows(file, text)
        _, header = next(rows, (1, []))
        needed = {"filepath", "label", "label_neg", "split_name"}
        if not needed <= set(header):
            raise DataError(f"{file}, line 1: the columns must be {', '.join(sorted(needed))}")
        for line, given in rows:
            row = dict(zip_longest(header, given[: len(header)]))
            present, absent = (_listed(row[key], file, line) for key in ("label", "label_neg"))
            for mid in (*present, *absent):
                mids.setdefault(mid, len(mids))
            if (row["split_name"] == "train") == (split == "train"):
                cells += [(len(paths), mids[mid], 1) for mid in present]
                cells += [(len(paths), mids[mid], 0) for mid in absent]
                paths.append(row["filepath"] or "")
                lines.append(line)
    if not paths or not mids:
        raise DataError(f"{file}: no row of the split {split!r}, or no labels at all")
    order = sorted(mids)
    column = np.empty(len(mids), dtype=np.int64)
    column[[mids[mid] for mid in order]] = np.arange(len(order))
    rows, columns, values = np.array(cells, dtype=np.int64).reshape(-1, 3).T
    labels = SparseLabels.of_cells(rows, column[columns], values, (len(paths), len(mids)), conflict=conflict)
    missing = check_paths(root, paths, lambda i: f"{file}, line {lines[i]}")
    return Listing(root, paths, paths, labels, _display_names(root, order), missing)


def _listed(cell: str | None, file: Path, line: int) -> list[str]:
    """['/m/01', '/m/02'] as Python writes it."""
    if not re.fullmatch(r"\s*\[\s*(?:(['\"])[^'\"]*\1\s*(?:,\s*(['\"])[^'\"]*\2\s*)*)?\]\s*", cell or ""):
        raise DataError(f"{file}, line {line}: {str(cell)[:60]!r} is not a list of classes, as ['/m/01g317']")
    return re.findall(r"['\"]([^'\"]*)['\"]", cell or "")
