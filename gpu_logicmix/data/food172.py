"""VireoFood-172 with its 353 ingredients: SplitAndIngreLabel/{TR,VAL,TE}.txt (paths, as /1/1_10.jpg),
SplitAndIngreLabel/IngreLabel.txt (a path and 353 numbers a line: 1 present, 0 or -1 absent),
SplitAndIngreLabel/IngredientList.txt (353 names), ready_chinese_food/."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from gpu_logicmix.data.files import Listing, check_choice, check_paths, read_names
from gpu_logicmix.errors import DataError
from gpu_logicmix.files import read_text


def list_food172(root: Path, split: str) -> Listing:
    """split: "train", "val" or "test": TR, VAL and TE."""
    check_choice("split", split, ("train", "val", "test"))
    home = root / "SplitAndIngreLabel"
    ingredients = [line.strip() for line in read_text(home / "IngredientList.txt").splitlines() if line.strip()]
    file = home / {"train": "TR.txt", "val": "VAL.txt", "test": "TE.txt"}[split]
    lines = read_names(file)
    names = list(lines)
    row_of = {name: row for row, name in enumerate(names)}
    labels = np.full((len(names), len(ingredients)), -1, dtype=np.int8)
    seen = np.zeros(len(names), dtype=bool)
    label_file = home / "IngreLabel.txt"
    for number, line in enumerate(read_text(label_file).splitlines(), 1):
        name, *cells = line.split()
        row = row_of.get(name)
        if row is None:
            continue
        if len(cells) != len(ingredients):
            raise DataError(
                f"{label_file}, line {number}: {len(cells)} numbers, but there are {len(ingredients)} ingredients"
            )
        wrong = set(cells) - {"1", "0", "-1"}
        if wrong:
            raise DataError(f"{label_file}, line {number}: {min(wrong)[:40]!r} must be 1, 0 or -1")
        labels[row], seen[row] = [cell == "1" for cell in cells], True
    if not seen.all():
        name = names[int(np.argmin(seen))]
        raise DataError(f"{file}, line {lines[name]}: {name!r} has no labels in {label_file.name}")
    paths = [name.lstrip("/") for name in names]
    folder = root / "ready_chinese_food"
    missing = check_paths(folder, paths, lambda i: f"{file}, line {lines[names[i]]}")
    return Listing(folder, paths, names, labels, ingredients, missing)
