"""MS-COCO in its official layout, 2014 or 2017: annotations/instances_{train,val}YEAR.json, {train,val}YEAR/."""

from __future__ import annotations

import contextlib
import io
from pathlib import Path

import numpy as np

from gpu_logicmix.data.files import DataError, Listing, check_choice, check_paths, read_json


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

    coco = _index(file)
    image_ids, category_ids = coco.getImgIds(), sorted(coco.getCatIds())
    if empty == "drop":
        image_ids = [i for i in image_ids if coco.imgToAnns[i]]
    column = {category: c for c, category in enumerate(category_ids)}
    labels = np.zeros((len(image_ids), len(category_ids)), dtype=np.int8)
    for row, image_id in enumerate(image_ids):
        for annotation in coco.imgToAnns[image_id]:
            labels[row, column[annotation["category_id"]]] = 1

    names = [coco.imgs[i]["file_name"] for i in image_ids]
    missing = check_paths(folder, names, lambda i: f"{file}, image id {image_ids[i]}")
    categories = [coco.cats[i]["name"] for i in category_ids]
    return Listing(folder, names, [str(i) for i in image_ids], labels, categories, missing)


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


def _index(file: Path):
    """pycocotools' index of the file, after a look at everything it would stumble over."""
    from pycocotools.coco import COCO

    data = read_json(file)
    for key in ("images", "annotations", "categories"):
        if not isinstance(data, dict) or not isinstance(data.get(key), list):
            raise DataError(f"{file}: has no list {key!r}; this is not a COCO instances file")
    if not data["images"]:
        raise DataError(f"{file}: lists no images")
    if not data["categories"]:
        raise DataError(f"{file}: lists no categories")
    for key, fields in (
        ("images", ("id", "file_name")),
        ("annotations", ("image_id", "category_id")),
        ("categories", ("id", "name")),
    ):
        for number, entry in enumerate(data[key]):
            for field in fields:
                if not isinstance(entry, dict) or field not in entry:
                    raise DataError(f"{file}: {key}[{number}] has no {field!r}; is the file damaged?")
        for field in ("id", "file_name") if key == "images" else ("id",) if key == "categories" else ():
            _check_unique(file, key, field, data[key])
    images, categories = {e["id"] for e in data["images"]}, {e["id"] for e in data["categories"]}
    for number, entry in enumerate(data["annotations"]):
        entry.setdefault("id", number)
        if entry["category_id"] not in categories:
            raise DataError(
                f"{file}: annotation id {entry['id']} has category_id {entry['category_id']}, which is not in the list "
                "of categories; add it there, or remove the annotation"
            )
        if entry["image_id"] not in images:
            raise DataError(
                f"{file}: annotation id {entry['id']} is about image id {entry['image_id']}, which is not in the list "
                "of images; add it there, or remove the annotation"
            )
    with contextlib.redirect_stdout(io.StringIO()):  # pycocotools prints as it goes
        coco = COCO()
        coco.dataset = data
        coco.createIndex()
    return coco


def _check_unique(file: Path, key: str, field: str, entries: list[dict]) -> None:
    seen: dict = {}
    for number, entry in enumerate(entries):
        first = seen.setdefault(entry[field], number)
        if first != number:
            raise DataError(
                f"{file}: {key}[{number}] has the same {field} as {key}[{first}], {entry[field]!r}; remove one of them"
            )
