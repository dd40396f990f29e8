"""VISPR, visual privacy: {train,val,test}2017/*.json, each {"id": ..., "image_path": "images/train2017/1.jpg",
"labels": ["a0_safe", ...]}. The images are where `image_path` says, with or without images/. Attributes that a file
does not name are absent. The list of attributes is attributes.tsv (idx, attribute_id, ...), or all that are named."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from gpu_logicmix.data.files import Listing, any_folder, check_choice, check_paths
from gpu_logicmix.data.table import check_unique, listed_labels
from gpu_logicmix.errors import DataError
from gpu_logicmix.files import read_json, read_text

PARTS = ("train", "val", "test")


def list_vispr(root: Path, split: str) -> Listing:
    """split: "train", "val" or "test"."""
    check_choice("split", split, PARTS)
    entries = _entries(root, split)
    attributes = root / "attributes.tsv"
    if attributes.exists():
        source = attributes.name
        rows = [line.split("\t") for line in read_text(attributes).splitlines() if line.strip()]
        at = next((rows[0].index(name) for name in ("attribute_id", "label_id") if name in rows[0]), 0)
        categories = list(dict.fromkeys(row[at] for row in rows[1:] if len(row) > at and row[at]))
    else:
        source = "the annotations"
        parts = [
            entries if part == split else _entries(root, part) for part in PARTS if (root / f"{part}2017").is_dir()
        ]
        categories = sorted({label for part in parts for _, entry in part for label in entry["labels"]})
    if not categories:
        raise DataError(f"{root}: no attribute is named at all")
    where = lambda i: str(entries[i][0])  # noqa: E731
    labels = listed_labels([entry["labels"] for _, entry in entries], categories, "absent", where, source)
    paths = [entry["image_path"] for _, entry in entries]
    if not any_folder(root, paths):
        paths = [path.removeprefix("images/") for path in paths]
    check_unique(paths, lambda i: i, root / f"{split}2017", "file")
    missing = check_paths(root, paths, where)
    assert isinstance(labels, np.ndarray)
    return Listing(root, paths, [str(entry["id"]) for _, entry in entries], labels, categories, missing)


def _entries(root: Path, part: str) -> list[tuple[Path, dict]]:
    files = sorted((root / f"{part}2017").glob("*.json"))
    if not files:
        raise DataError(f"{root}/{part}2017: no .json files in it; is this the folder of VISPR?")
    entries = []
    for file in files:
        entry = read_json(file)
        labels = entry.get("labels") if isinstance(entry, dict) else None
        good = isinstance(labels, list) and all(isinstance(label, str) for label in labels)
        if not good or not isinstance(entry.get("image_path"), str) or "id" not in entry:
            raise DataError(f"{file}: must have an id, an image_path and a list of labels; correct or remove it")
        entries.append((file, entry))
    return entries
