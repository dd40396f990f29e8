"""NUS-WIDE with its 81 concepts: Concepts81.txt, ImageList/{Train,Test}Imagelist.txt,
GroundTruth/TrainTestLabels/Labels_{concept}_{Train,Test}.txt (or those files in TrainTestLabels/), and the images as
Flickr/{folder}/{name}, images/{folder}/{name} or images/{name}."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from gpu_logicmix.data.files import Listing, any_folder, check_choice, check_paths
from gpu_logicmix.data.table import check_unique
from gpu_logicmix.errors import DataError
from gpu_logicmix.files import read_text


def list_nuswide(root: Path, split: str, *, empty: str = "absent") -> Listing:
    """split: "train", or "val" (or "test") for the test list.
    empty: what becomes of images without any concept: all "absent", or "drop" to leave them out, as many papers do.
    """
    check_choice("split", split, ("train", "val", "test"))
    check_choice("empty", empty, ("absent", "drop"))
    part = "Train" if split == "train" else "Test"
    concepts = [line.strip() for line in read_text(root / "Concepts81.txt").splitlines() if line.strip()]
    if len(set(concepts)) != len(concepts) or any("/" in name or "\\" in name for name in concepts):
        raise DataError(f"{root}/Concepts81.txt: the names must differ and be names of files")
    file = root / "ImageList" / f"{part}Imagelist.txt"
    lines = [line.strip().replace("\\", "/") for line in read_text(file).splitlines()]
    rows = [row for row, line in enumerate(lines) if line]
    names = [lines[row] for row in rows]
    truth = root / "GroundTruth" / "TrainTestLabels"
    truth = truth if truth.is_dir() else root / "TrainTestLabels"
    labels = np.zeros((len(names), len(concepts)), dtype=np.int8)
    for c, concept in enumerate(concepts):
        labels[:, c] = _column(truth / f"Labels_{concept}_{part}.txt", len(names))
    folder, flat = root / "images", False
    if (root / "Flickr").is_dir():
        folder = root / "Flickr"
    elif not any_folder(folder, names):
        flat = True
    paths = [name.rpartition("/")[2] for name in names] if flat else names
    if empty == "drop":
        kept = np.flatnonzero(labels.any(1))
        labels, paths, rows = labels[kept], [paths[i] for i in kept], [rows[i] for i in kept]
    check_unique(paths, lambda i: rows[i] + 1, file)
    missing = check_paths(folder, paths, lambda i: f"{file}, line {rows[i] + 1}")
    return Listing(folder, paths, paths, labels, concepts, missing)


def _column(file: Path, count: int) -> np.ndarray:
    words = read_text(file).split()
    if len(words) != count:
        raise DataError(f"{file}: {len(words):,} lines, but the list has {count:,} images")
    for number, word in enumerate(words, 1):
        if word not in ("0", "1"):
            raise DataError(f"{file}, line {number}: {word[:40]!r} must be 0 or 1")
    return np.array(words) == "1"
