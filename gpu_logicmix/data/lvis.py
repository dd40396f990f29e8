"""LVIS v1: annotations/lvis_v1_{train,val}.json (or beside the image folders), images in COCO's train2017/, val2017/.

Of an image, the categories of its objects are present, those in `neg_category_ids` were looked for and are absent, and
nothing is known of the others. Categories in `not_exhaustive_category_ids` are present: some of their objects are not
outlined, but not all.
"""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np

from gpu_logicmix.data.coco import read_instances
from gpu_logicmix.data.files import Listing, check_choice, check_paths
from gpu_logicmix.data.sparse import SparseLabels
from gpu_logicmix.errors import DataError


def list_lvis(root: Path, split: str, *, conflict: str = "present") -> Listing:
    """conflict: what a category is that has an object and is in the list of absent ones: "present", "unknown" or
        "absent".
    Categories are sorted by id, images stay in the order of the file.
    """
    part = "val" if split == "test" else split
    check_choice("split", part, ("train", "val"))
    check_choice("conflict", conflict, ("unknown", "present", "absent"))
    name = f"lvis_v1_{part}.json"
    file = next((f for f in (root / "annotations" / name, root / name) if f.exists()), root / "annotations" / name)
    category_ids: dict = {}
    images, categories, cells = read_instances(file, ("id",), category_ids)
    rows, columns, values = [cells[:, 0]], [cells[:, 1]], [np.ones(len(cells), dtype=np.int64)]
    for key, value in (("not_exhaustive_category_ids", 1), ("neg_category_ids", 0)):
        listed = [_column(file, row, image, key, category_ids) for row, image in enumerate(images)]
        lengths = [len(columns) for columns in listed]
        rows.append(np.repeat(np.arange(len(images)), lengths))
        columns.append(np.array([c for of_image in listed for c in of_image], dtype=np.int64))
        values.append(np.full(sum(lengths), value))
    shape = (len(images), len(categories))
    labels = SparseLabels.of_cells(
        np.concatenate(rows), np.concatenate(columns), np.concatenate(values), shape, conflict=conflict
    )
    paths = [_path(file, image) for image in images]
    folder = root / "images" if (root / "images").is_dir() and not (root / paths[0]).parent.is_dir() else root
    missing = check_paths(folder, paths, lambda i: f"{file}, image id {images[i]['id']}")
    return Listing(folder, paths, [str(image["id"]) for image in images], labels, categories, missing)


def _column(file: Path, row: int, image: dict, key: str, column: dict) -> list[int]:
    listed = image.get(key, [])
    if not isinstance(listed, list):
        raise DataError(f"{file}: images[{row}] has the {key} {listed!r}; must be a list of category ids")
    for number in listed:
        if type(number) is not int or number not in column:
            raise DataError(
                f"{file}: images[{row}] has {number!r} in {key}, which is not in the list of categories; correct it"
            )
    return [column[number] for number in listed]


def _path(file: Path, image: dict) -> str:
    """train2017/000000391895.jpg, from the address of the image at COCO."""
    url = image.get("coco_url", image.get("file_name"))
    found = re.search(r"(?:^|/)((?:train|val|test)20\d\d/[^/\\]+)$", url) if isinstance(url, str) else None
    if found is None:
        raise DataError(f"{file}: image id {image['id']} has the coco_url {url!r}; must end as train2017/0000.jpg does")
    return found.group(1)
