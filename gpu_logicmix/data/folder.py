"""A folder of images without labels, for prediction."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np

from gpu_logicmix.data.files import DataError, Listing

SUFFIXES = {".jpg", ".jpeg", ".jpe", ".jfif", ".mpo", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm", ".pgm"}


def list_folder(root: Path, split: str) -> Listing:
    """All images below `root`, sorted by path. `split` is ignored: there are no labels."""
    if not root.is_dir():
        raise DataError(f"{root}: no such folder")
    paths = sorted(
        os.path.relpath(os.path.join(folder, name), root)
        for folder, _, names in os.walk(root)
        for name in names
        if os.path.splitext(name)[1].lower() in SUFFIXES
    )
    if not paths:
        raise DataError(f"{root}: no images in it or below it (looked for {' '.join(sorted(SUFFIXES))})")
    return Listing(root, paths, paths, np.zeros((len(paths), 0), dtype=np.int8), [], [])
