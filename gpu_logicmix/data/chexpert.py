"""CheXpert: {train,valid,test}.csv and the X-rays they name.

An observation is 1.0 (present), 0.0 (absent), -1.0 (the report is uncertain) or blank (not mentioned: unknown). Paths
begin with the name of the archive, as CheXpert-v1.0-small/train/patient00001/study1/view1_frontal.jpg: it may be part
of PATH or a folder in it.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from gpu_logicmix.data.csvfile import bad_cells
from gpu_logicmix.data.files import Listing, check_choice, check_paths
from gpu_logicmix.data.table import check_unique
from gpu_logicmix.errors import DataError
from gpu_logicmix.files import csv_rows, read_text

OBSERVATIONS = ["No Finding", "Enlarged Cardiomediastinum", "Cardiomegaly", "Lung Opacity", "Lung Lesion", "Edema"]
OBSERVATIONS += ["Consolidation", "Pneumonia", "Atelectasis", "Pneumothorax", "Pleural Effusion", "Pleural Other"]
OBSERVATIONS += ["Fracture", "Support Devices"]
COMPETITION = ["Atelectasis", "Cardiomegaly", "Consolidation", "Edema", "Pleural Effusion"]


def list_chexpert(root: Path, split: str, *, observations: str | int = 14, uncertain: str = "unknown") -> Listing:
    """split: "train"; "val" is valid.csv, "test" is test.csv.
    observations: 14, or 5: those of the competition.
    uncertain: what -1 is: "unknown", "present" (U-Ones) or "absent" (U-Zeros).
    """
    check_choice("split", split, ("train", "val", "test"))
    check_choice("observations", str(observations), ("14", "5"))
    check_choice("uncertain", uncertain, ("unknown", "present", "absent"))
    file = root / f"{'valid' if split == 'val' else split}.csv"
    rows = csv_rows(file, read_text(file).splitlines())
    _, header = next(rows)
    categories = OBSERVATIONS if str(observations) == "14" else COMPETITION
    for name in ("Path", *categories):
        if name not in header:
            raise DataError(f"{file}, line 1: no column {name!r}; is this the file of CheXpert?")
    values = {"1.0": 1, "1": 1, "0.0": 0, "0": 0, "": -1, "nan": -1}
    values |= dict.fromkeys(("-1.0", "-1"), {"unknown": -1, "present": 1, "absent": 0}[uncertain])
    path_at, columns = header.index("Path"), [header.index(name) for name in categories]
    paths, lines, labels, bad, count = [], [], [], [], 0
    for line, cells in rows:
        if not any(cells):
            continue
        if len(cells) != len(header):
            raise DataError(f"{file}, line {line}: {len(cells)} cells, but the header has {len(header)}")
        wrong = [at for at in columns if cells[at].strip() not in values]
        bad += [(line, header[at], cells[at]) for at in wrong][: 20 - len(bad)]
        count += len(wrong)
        labels.append([values.get(cells[at].strip(), -1) for at in columns])
        paths.append(cells[path_at])
        lines.append(line)
    if bad:
        raise DataError(bad_cells(file, bad, count))
    if not paths:
        raise DataError(f"{file}: has a header but no rows")
    # The first part of a path is the name of the archive, unless that is a folder here.
    here = {first: (root / first).is_dir() for first in {path.split("/")[0] for path in paths} - {""}}
    paths = [path if here.get(path.split("/")[0], True) else path.partition("/")[2] for path in paths]
    check_unique(paths, lambda i: lines[i], file)
    missing = check_paths(root, paths, lambda i: f"{file}, line {lines[i]}")
    return Listing(root, paths, paths, np.array(labels, dtype=np.int8), categories, missing)
