"""VAW, attributes of objects: data/{train_part1,train_part2,val,test}.json, data/attribute_index.json, and the images
of Visual Genome in VG_100K/ and VG_100K_2/ (here, or in the folder that the option `genome` names).

A sample is an object: its box is cut out of the image. Attributes are present, absent, or unknown.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from torch import Tensor

from gpu_logicmix.data.files import Listing, check_choice, repeated
from gpu_logicmix.data.images import FileSource, read_image
from gpu_logicmix.data.sparse import SparseLabels
from gpu_logicmix.data.table import image_root
from gpu_logicmix.data.vg import genome_paths
from gpu_logicmix.errors import DataError
from gpu_logicmix.files import read_json

FILES = {"train": ("train_part1", "train_part2"), "val": ("val",), "test": ("test",)}


class CropSource(FileSource):
    """Boxes (x, y, width, height) cut out of images in files."""

    def __init__(self, root: Path, paths: list[str], size: int, boxes: np.ndarray) -> None:
        super().__init__(root, paths, size)
        self.boxes = boxes

    def read(self, index: int) -> Tensor:
        return read_image(self.root / self.paths[index], self.size, box=tuple(self.boxes[index].tolist()))

    def parts(self, rows: Sequence[int] | np.ndarray | None = None) -> dict[str, str]:
        boxes = self.boxes if rows is None else self.boxes[np.asarray(rows, dtype=np.int64)]
        parts = super().parts(rows)
        return {**parts, "files": hashlib.sha256(parts["files"].encode() + boxes.tobytes()).hexdigest()}


def list_vaw(root: Path, split: str, *, genome: str | None = None, conflict: str = "unknown") -> Listing:
    """genome: folder with the images of Visual Genome, VG_100K and VG_100K_2; PATH unless given.
    conflict: what an attribute is that is listed as present and as absent: "unknown", "present" or "absent".
    """
    check_choice("split", split, tuple(FILES))
    check_choice("conflict", conflict, ("unknown", "present", "absent"))
    index_file = root / "data" / "attribute_index.json"
    index = read_json(index_file)
    if not isinstance(index, dict) or not index:
        raise DataError(f"{index_file}: must be a dict from attribute to its number")
    categories = list(index)
    column = {name: c for c, name in enumerate(categories)}
    cells, ids, names, boxes, places = [], [], [], [], []
    for part in FILES[split]:
        file = root / "data" / f"{part}.json"
        samples = read_json(file)
        if not isinstance(samples, list):
            raise DataError(f"{file}: must be a list of objects")
        for number, sample in enumerate(samples):
            where = f"{file}: [{number}]"
            name, instance, box = _checked(sample, where)
            for key, value in (("positive_attributes", 1), ("negative_attributes", 0)):
                cells += [
                    (len(ids), _column(attribute, key, column, where), value) for attribute in _list(sample, key, where)
                ]
            ids.append(instance)
            names.append(name)
            boxes.append(box)
            places.append(where)
    if (twice := repeated(ids)) is not None:
        raise DataError(f"{root}/data: instance {twice!r} is there twice")
    if not ids:
        raise DataError(f"{root}/data: lists no objects for {split!r}")
    home = root if genome is None else image_root(genome)
    paths, missing = genome_paths(home, names, places.__getitem__)
    rows, columns, values = np.array(cells, dtype=np.int64).reshape(-1, 3).T
    labels = SparseLabels.of_cells(rows, columns, values, (len(ids), len(categories)), conflict=conflict)
    corners = np.array(boxes, dtype=np.float64)
    source = lambda size: CropSource(home, paths, size, corners)  # noqa: E731
    return Listing(home, paths, ids, labels, categories, missing, source=source)


def _checked(sample: object, where: str) -> tuple[str, str, list[float]]:
    if not isinstance(sample, dict) or not {"image_id", "instance_id", "instance_bbox"} <= sample.keys():
        raise DataError(f"{where}: must have image_id, instance_id and instance_bbox")
    image, box = str(sample["image_id"]), sample["instance_bbox"]
    if not (image.isascii() and image.isdecimal()):
        raise DataError(f"{where}: image_id {image[:40]!r} must be a number")
    numbers = isinstance(box, list) and len(box) == 4 and all(type(x) in (int, float) and abs(x) < 1e6 for x in box)
    if not numbers or box[2] <= 0 or box[3] <= 0:
        raise DataError(f"{where}: instance_bbox {box!r} must be x, y, width, height")
    return f"{image}.jpg", str(sample["instance_id"]), box


def _list(sample: dict, key: str, where: str) -> list:
    found = sample.get(key, [])
    if not isinstance(found, list):
        raise DataError(f"{where}: {key} must be a list")
    return found


def _column(attribute: object, key: str, column: dict[str, int], where: str) -> int:
    if not isinstance(attribute, str) or attribute not in column:
        raise DataError(f"{where}: {attribute!r} in {key} is not in attribute_index.json; add it there, or correct it")
    return column[attribute]
