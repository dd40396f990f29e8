"""VG-200: the image lists and the label index published with the SST and SARB code, the images of Visual Genome.

PATH/train_list_500.txt, PATH/test_list_500.txt        one image name a line
PATH/vg_category_200_labels_index.json                 {"2360596.jpg": [3, 17, 64], ...}
PATH/VG_100K/, PATH/VG_100K_2/                         the images, as Visual Genome is unpacked
PATH/vg_category_200.txt                               the names of the categories, if you have them; one a line
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from gpu_logicmix.data.files import DataError, Listing, check_choice, check_paths, read_json, read_names, read_text

COUNT = 200


def list_vg200(root: Path, split: str) -> Listing:
    """split: "train", or "val" (or "test") for the 10,000 test images."""
    check_choice("split", split, ("train", "val", "test"))
    list_file = root / f"{'train' if split == 'train' else 'test'}_list_500.txt"
    lines = read_names(list_file)
    names = list(lines)

    label_file = root / "vg_category_200_labels_index.json"
    index = read_json(label_file)
    if not isinstance(index, dict):
        raise DataError(f"{label_file}: must be a dict from image name to a list of category numbers")
    labels = np.zeros((len(names), COUNT), dtype=np.int8)
    for row, name in enumerate(names):
        if name not in index:
            raise DataError(f"{list_file}, line {lines[name]}: {name!r} has no labels in {label_file.name}")
        numbers = index[name]
        for number in numbers if isinstance(numbers, list) else [numbers]:
            if type(number) is not int or not 0 <= number < COUNT:
                raise DataError(f"{label_file}: {name!r} has category {number!r}; categories are 0 to {COUNT - 1}")
            labels[row, number] = 1

    def missing_in(folder: str, rows: list[int]) -> set[int]:
        where = lambda i: f"{list_file}, line {lines[names[rows[i]]]}"  # noqa: E731
        return {rows[i] for i in check_paths(root / folder, [names[row] for row in rows], where)}

    not_in_first = missing_in("VG_100K", list(range(len(names))))
    nowhere = missing_in("VG_100K_2", sorted(not_in_first))
    second = not_in_first - nowhere
    paths = [f"VG_100K_2/{name}" if row in second else f"VG_100K/{name}" for row, name in enumerate(names)]
    return Listing(root, paths, names, labels, _categories(root), sorted(nowhere))


def _categories(root: Path) -> list[str]:
    file = root / "vg_category_200.txt"
    if not file.exists():
        return [f"category {c}" for c in range(COUNT)]
    names = [line.strip() for line in read_text(file).splitlines() if line.strip()]
    if len(names) != COUNT:
        raise DataError(f"{file}: has {len(names)} names; must be {COUNT}, one a line")
    return names
