"""VG-200 and VG-500: image lists and label indices published with the SST, SARB and SSGRL code, and the images of
Visual Genome.

PATH/train_list_500.txt, PATH/test_list_500.txt        one image name a line
PATH/vg_category_200_labels_index.json                 {"2360596.jpg": [3, 17, 64], ...}; or ..._500_...
PATH/VG_100K/, PATH/VG_100K_2/                         the images, as Visual Genome is unpacked
PATH/vg_category_200.txt                               the names of the categories, if you have them; one a line
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from gpu_logicmix.data.files import Listing, check_choice, check_paths, read_names
from gpu_logicmix.data.table import both_warning
from gpu_logicmix.errors import DataError
from gpu_logicmix.files import read_json, read_text


def list_vg200(root: Path, split: str) -> Listing:
    """split: "train", or "val" (or "test") for the 10,000 test images."""
    return _list(root, split, 200)


def list_vg500(root: Path, split: str) -> Listing:
    """split: "train", or "val" (or "test") for the test images."""
    return _list(root, split, 500)


def _list(root: Path, split: str, count: int) -> Listing:
    check_choice("split", split, ("train", "val", "test"))
    list_file = root / f"{'train' if split == 'train' else 'test'}_list_500.txt"
    lines = read_names(list_file)
    names = list(lines)
    label_file = root / f"vg_category_{count}_labels_index.json"
    index = read_json(label_file)
    if not isinstance(index, dict):
        raise DataError(f"{label_file}: must be a dict from image name to a list of category numbers")
    labels = np.zeros((len(names), count), dtype=np.int8)
    for row, name in enumerate(names):
        if name not in index:
            raise DataError(f"{list_file}, line {lines[name]}: {name!r} has no labels in {label_file.name}")
        numbers = index[name]
        for number in numbers if isinstance(numbers, list) else [numbers]:
            if type(number) is not int or not 0 <= number < count:
                raise DataError(f"{label_file}: {name!r} has category {number!r}; categories are 0 to {count - 1}")
            labels[row, number] = 1
    paths, missing = genome_paths(root, names, lambda i: f"{list_file}, line {lines[names[i]]}")
    warnings = []
    if split != "train" and (root / "train_list_500.txt").exists():
        warnings = both_warning(read_names(root / "train_list_500.txt").keys() & lines.keys(), list_file, split)
    return Listing(root, paths, names, labels, _categories(root, count), missing, warnings)


def genome_paths(root: Path, names: Sequence[str], where: Callable[[int], str]) -> tuple[list[str], list[int]]:
    """Where the images of Visual Genome are, in VG_100K or VG_100K_2, and which are in neither."""

    def missing_in(folder: str, rows: list[int]) -> set[int]:
        found = check_paths(root / folder, [names[row] for row in rows], lambda i: where(rows[i]))
        return {rows[i] for i in found}

    not_in_first = missing_in("VG_100K", list(range(len(names))))
    nowhere = missing_in("VG_100K_2", sorted(not_in_first))
    second = not_in_first - nowhere
    paths = [f"VG_100K_2/{name}" if row in second else f"VG_100K/{name}" for row, name in enumerate(names)]
    return paths, sorted(nowhere)


def _categories(root: Path, count: int) -> list[str]:
    file = root / f"vg_category_{count}.txt"
    if not file.exists():
        return [f"category {c}" for c in range(count)]
    names = [line.strip() for line in read_text(file).splitlines() if line.strip()]
    if len(names) != count:
        raise DataError(f"{file}: has {len(names)} names; must be {count}, one a line")
    return names
