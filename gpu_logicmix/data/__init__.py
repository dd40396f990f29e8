"""From the benchmarks, or a folder of one's own, to batches.

dataset = open_dataset("coco:/data/coco", "train", size=448)
dataset.labels = hide_labels(dataset.labels, 0.1)
image, targets, index = dataset[0]          # uint8 [3, S, S], int8 [C], int
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gpu_logicmix.data.cache import cache_dataset
from gpu_logicmix.data.chexpert import list_chexpert
from gpu_logicmix.data.coco import list_coco
from gpu_logicmix.data.dataset import ImageDataset
from gpu_logicmix.data.folder import list_folder
from gpu_logicmix.data.food172 import list_food172
from gpu_logicmix.data.hf import list_hf
from gpu_logicmix.data.images import FileSource
from gpu_logicmix.data.loader import Batches, make_loader
from gpu_logicmix.data.lvis import list_lvis
from gpu_logicmix.data.nuswide import list_nuswide
from gpu_logicmix.data.openimages import list_openimages, list_openimages_v3
from gpu_logicmix.data.pack import pack_dataset
from gpu_logicmix.data.parquet import list_parquet
from gpu_logicmix.data.remote import is_remote
from gpu_logicmix.data.shapes import open_shapes
from gpu_logicmix.data.shards import list_tar
from gpu_logicmix.data.sparse import fitting
from gpu_logicmix.data.table import list_csv
from gpu_logicmix.data.vaw import list_vaw
from gpu_logicmix.data.vg import list_vg200, list_vg500
from gpu_logicmix.data.vispr import list_vispr
from gpu_logicmix.data.voc import list_voc2007, list_voc2012
from gpu_logicmix.errors import BadImage, DataError
from gpu_logicmix.files import at_home

__all__ = [
    "BadImage",
    "Batches",
    "DataError",
    "ImageDataset",
    "cache_dataset",
    "make_loader",
    "open_dataset",
    "pack_dataset",
]

FORMATS: dict[str, Callable[..., Any]] = {
    "coco": list_coco,
    "voc2007": list_voc2007,
    "voc2012": list_voc2012,
    "vg200": list_vg200,
    "vg500": list_vg500,
    "openimages": list_openimages,
    "openimages-v3": list_openimages_v3,
    "lvis": list_lvis,
    "chexpert": list_chexpert,
    "nuswide": list_nuswide,
    "vaw": list_vaw,
    "vispr": list_vispr,
    "food172": list_food172,
    "csv": list_csv,
    "parquet": list_parquet,
    "hf": list_hf,
    "tar": list_tar,
    "folder": list_folder,
}
LARGEST = 8192  # pixels a side: 200 MB an image


def open_dataset(
    spec: str | Path,
    split: str = "train",
    size: int | None = None,
    *,
    on_bad_image: str = "raise",
    labels: str = "auto",
    **options: Any,
) -> ImageDataset:
    """Open a dataset.

    spec: NAME:PATH, NAME one of `FORMATS` (coco, openimages, csv, ...; docs/data.md says what each expects), or
        shapes (drawn on the fly, nothing to download). folder:PATH has no labels and is for prediction.
    split: "train" or "val" ("test" is the same for the benchmarks). VOC 2007: trainval and test.
    size: images become size x size; 448 unless given (shapes: 64).
    on_bad_image: "raise", or "skip" to leave out images that are missing or cannot be read; `dataset.bad_images()`
        lists them.
    labels: "dense": a matrix int8 [N, C]; "sparse": only what is known, for sets that would not fit; "auto": sparse
        where the format knows only few labels and a matrix would take more than 268 MB.
    options: of the format, the keyword arguments of its function in `FORMATS`.

    Raises DataError, a ValueError, with one line that names file, row and way out.
    """
    spec = str(spec)
    if size is not None and not 1 <= size <= LARGEST:
        raise DataError(f"size={size}: must be from 1 to {LARGEST}")
    name, _, path = spec.partition(":")
    opener = _opener(spec, options)
    if name == "shapes":
        shapes = opener(split, 64 if size is None else size, **options)
        shapes.labels = fitting(shapes.labels, labels)
        return shapes

    root: Any = path if name == "tar" and is_remote(path) else at_home(path)
    if isinstance(root, Path) and not root.exists():
        raise DataError(f"{root}: no such file or folder")
    listing = opener(root, split, **options)
    size = 448 if size is None else size
    source: Any = FileSource(listing.root, listing.paths, size, follow=listing.follow)
    if listing.source is not None:
        source = listing.source(size)
    matrix = fitting(listing.labels, labels)
    dataset = ImageDataset(name, split, source, matrix, listing.categories, listing.ids, on_bad_image, listing.warnings)
    if listing.missing and on_bad_image == "raise":
        first = listing.root / listing.paths[listing.missing[0]]
        raise DataError(
            f"{first}: no such file ({len(listing.missing):,} of {len(dataset):,} images are missing); "
            "add them, or go on without them: on_bad_image='skip'"
        )
    dataset.bad[listing.missing] = True
    return dataset


def _opener(spec: str, options: dict[str, Any]) -> Callable[..., Any]:
    """The function that opens a dataset, if there is one and it takes these options."""
    name, _, path = spec.partition(":")
    opener: Callable[..., Any] | None = open_shapes if name == "shapes" else FORMATS.get(name)
    if opener is None or (name != "shapes" and not path):
        known = ", ".join(f"{n}:PATH" for n in FORMATS)
        raise DataError(f"{spec!r}: unknown dataset; write {known} or shapes")
    allowed = [p.name for p in inspect.signature(opener).parameters.values() if p.kind is p.KEYWORD_ONLY]
    for option in options:
        if option not in allowed:
            takes = f"has the options {', '.join(allowed)}" if allowed else "has no options"
            raise DataError(f"option {option!r}: {name} {takes}")
    return opener
