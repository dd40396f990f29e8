"""MS-COCO in its official layout, 2014 or 2017: annotations/instances_{train,val}YEAR.json, {train,val}YEAR/."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from gpu_logicmix.data.files import Listing, check_choice, check_paths
from gpu_logicmix.errors import DataError
from gpu_logicmix.files import read_json


def list_coco(root: Path, split: str, *, year: str | None = None, empty: str = "absent") -> Listing:
    """split: "train" or "val" ("test" means the same).
    year: "2014" or "2017"; needed only where a folder holds both.
    empty: what becomes of images without any object: all categories "absent", or "drop" to leave such images out.
    A category is present if at least one object of it is annotated, crowds included.
    Images stay in the order of the file and categories are sorted by id, as in the SST and SARB code, so that
    `hide_labels(protocol="hcp")` hides the same labels.
    """
    check_choice("empty", empty, ("absent", "drop"))
    part = "val" if split == "test" else split
    check_choice("split", part, ("train", "val"))
    file = _annotation_file(root, part, year)
    folder = root / f"{part}{file.stem[-4:]}"
    if not folder.is_dir() and (root / "images" / folder.name).is_dir():
        folder = root / "images" / folder.name

    images, categories, cells = read_instances(file, ("id", "file_name"))
    labels = np.zeros((len(images), len(categories)), dtype=np.int8)
    labels[cells[:, 0], cells[:, 1]] = 1
    if empty == "drop":
        kept = np.flatnonzero(labels.any(1))
        images, labels = [images[row] for row in kept], labels[kept]
        if not images:
            raise DataError(f"{file}: no image has an object, so empty='drop' leaves none")
    names = [image["file_name"] for image in images]
    missing = check_paths(folder, names, lambda i: f"{file}, image id {images[i]['id']}")
    return Listing(folder, names, [str(image["id"]) for image in images], labels, categories, missing)


def _annotation_file(root: Path, part: str, year: str | None) -> Path:
    years = ("2014", "2017") if year is None else (str(year),)
    files = [root / "annotations" / f"instances_{part}{y}.json" for y in years]
    found = [file for file in files if file.exists()]
    if not found:
        raise DataError(
            f"{root}: no {' or '.join(str(f.relative_to(root)) for f in files)}; is this the folder of COCO?"
        )
    if len(found) > 1:
        raise DataError(f"{root}: holds COCO 2014 and 2017; choose one with the option year=2014 or year=2017")
    return found[0]


def read_instances(
    file: Path, image_fields: tuple[str, ...], column: dict | None = None
) -> tuple[list[dict], list[str], np.ndarray]:
    """A file in COCO's form: its images, the names of its categories in the order of their ids, and for each annotation
    (row of the image, column of the category). `column`, if given, is filled with the column of each category id."""
    data = read_json(file)
    for key in ("images", "annotations", "categories"):
        if not isinstance(data, dict) or not isinstance(data.get(key), list):
            raise DataError(f"{file}: has no list {key!r}; this is not a COCO instances file")
    for key in ("images", "categories"):
        if not data[key]:
            raise DataError(f"{file}: lists no {key}")
    _check_fields(file, data)
    for key, field in [("images", field) for field in image_fields] + [("categories", "id"), ("categories", "name")]:
        _check_values(file, key, field, data[key])
    categories = sorted(data["categories"], key=lambda entry: entry["id"])
    column = {} if column is None else column
    column.update({entry["id"]: c for c, entry in enumerate(categories)})
    row = {entry["id"]: r for r, entry in enumerate(data["images"])}
    cells = np.empty((len(data["annotations"]), 2), dtype=np.int64)
    for number, entry in enumerate(data["annotations"]):
        image, category = entry["image_id"], entry["category_id"]
        if not _is_id(category) or category not in column:
            raise _unlisted(file, number, entry, f"has category_id {category!r}", "categories")
        if not _is_id(image) or image not in row:
            raise _unlisted(file, number, entry, f"is about image id {image!r}", "images")
        cells[number] = row[image], column[category]
    return data["images"], [entry["name"] for entry in categories], cells


def _unlisted(file: Path, number: int, entry: dict, what: str, where: str) -> DataError:
    return DataError(
        f"{file}: annotation id {entry.get('id', number)} {what}, which is not in the list of {where}; "
        "add it there, or remove the annotation"
    )


def _check_fields(file: Path, data: dict) -> None:
    fields = {"images": ("id",), "annotations": ("image_id", "category_id"), "categories": ("id", "name")}
    for key, needed in fields.items():
        for number, entry in enumerate(data[key]):
            for field in needed:
                if not isinstance(entry, dict) or field not in entry:
                    raise DataError(f"{file}: {key}[{number}] has no {field!r}; is the file damaged?")


def _is_id(value: Any) -> bool:
    return isinstance(value, (int, str)) and not isinstance(value, bool)


def _check_values(file: Path, key: str, field: str, entries: list[dict]) -> None:
    """Ids are numbers (or all are texts), names and file names are texts; none comes twice."""
    seen: dict = {}
    kind = type(entries[0].get(field)) if field == "id" else str
    for number, entry in enumerate(entries):
        value = entry.get(field)
        good = _is_id(value) and type(value) is kind and value != ""
        if not good:
            words = "all must be whole numbers, or all texts" if field == "id" else "must be a text"
            raise DataError(f"{file}: {key}[{number}] has the {field} {value!r}; {words}")
        first = seen.setdefault(value, number)
        if first != number:
            raise DataError(
                f"{file}: {key}[{number}] has the same {field} as {key}[{first}], {value!r}; remove one of them"
            )
