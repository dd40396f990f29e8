"""Write a dataset as WebDataset shards, which `tar:` reads. Image files go in as they are, or resized once."""

from __future__ import annotations

import io
import json
import os
import tarfile
from pathlib import Path

import numpy as np
from PIL import Image

from gpu_logicmix.data.dataset import ImageDataset
from gpu_logicmix.data.images import FORMATS, FileSource, read_image
from gpu_logicmix.data.remote import tar_names
from gpu_logicmix.errors import BadImage, DataError
from gpu_logicmix.files import at_home, open_regular, read_json, waited_lock, write_whole, written_whole
from gpu_logicmix.progress import progress_bar

# What the name of a member ends in; JPEGs, also those with several pictures (MPO), in .jpg.
ENDS = {"PNG": ".png", "WEBP": ".webp", "BMP": ".bmp", "GIF": ".gif", "TIFF": ".tif", "PPM": ".ppm"}


def pack_dataset(
    dataset: ImageDataset, out: str | Path, *, per_shard: int = 1000, resize: int | None = None, quality: int = 95
) -> Path:
    """Write the shards OUT/SPLIT-00000.tar ... and OUT/SPLIT.json; returns the latter. What a killed call has finished
    is kept, if the dataset is still the same; shards of anything else are an error, and stay. The same dataset gives
    the same bytes.

    per_shard: images in a shard.
    resize: images become JPEGs of resize x resize (of this `quality`). Unless given, files are copied as they are; what
        is not in files (drawn, cut out or cached images) is written as PNG at the size of the dataset.
    """
    if per_shard < 1 or (resize is not None and not 1 <= resize <= 8192):
        raise DataError(f"per_shard={per_shard}, resize={resize}: must be at least 1, resize at most 8192")
    out, split = at_home(out), dataset.split
    out.mkdir(parents=True, exist_ok=True)
    shards = [f"{split}-{number:05d}.tar" for number in range(-(-len(dataset) // per_shard))]
    recipe = {"fingerprint": dataset.fingerprint(), "per_shard": per_shard, "resize": resize, "quality": quality}
    recipe["size"] = dataset.size
    with waited_lock(out), progress_bar(len(dataset), "packing") as advance:
        begun = out / f"{split}.part.json"
        if not begun.exists() or read_json(begun) != recipe:
            there = [f"{split}.json"] if (out / f"{split}.json").exists() else tar_names(str(out), split)
            if there:
                raise DataError(
                    f"{out / there[0]}: shards of {split!r} are there already, of other images or made with other "
                    "options; choose another folder, or remove them"
                )
            write_whole(begun, json.dumps(recipe))
        for number, name in enumerate(shards):
            rows = range(number * per_shard, min((number + 1) * per_shard, len(dataset)))
            if not (out / name).exists():  # written whole, or not there
                _write_shard(dataset, out / name, rows, resize, quality)
            advance(len(rows))
        whole = {"shards": shards, "categories": dataset.categories, "count": len(dataset)}
        write_whole(out / f"{split}.json", json.dumps(whole, indent=1))
    return out / f"{split}.json"


def _write_shard(dataset: ImageDataset, path: Path, rows: range, resize: int | None, quality: int) -> None:
    with written_whole(path, "wb") as file, tarfile.open(fileobj=file, mode="w", format=tarfile.PAX_FORMAT) as shard:
        for row in rows:
            try:
                data, suffix = _image(dataset, row, resize, quality)
            except BadImage:
                if dataset.on_bad_image == "raise":
                    raise
                dataset.bad[row] = True
                continue
            note = json.dumps({"id": str(dataset.ids[row]), **_labels(dataset.labels_of([row])[0])}).encode()
            for content, end in ((data, suffix), (note, ".json")):
                member = tarfile.TarInfo(f"{row:08d}{end}")  # date, owner and rights are the same everywhere
                member.size = len(content)
                shard.addfile(member, io.BytesIO(content))


def _image(dataset: ImageDataset, row: int, resize: int | None, quality: int) -> tuple[bytes, str]:
    source, out = dataset.source, io.BytesIO()
    if type(source) is FileSource:
        path = os.path.join(source.root, source.paths[row])
        if resize is not None:
            Image.fromarray(read_image(path, resize).numpy()).save(out, "JPEG", quality=quality, subsampling=0)
            return out.getvalue(), ".jpg"
        read_image(path, 8)  # whether it is an image that can be read
        with open_regular(path) as file:
            content = file.read()
        with Image.open(io.BytesIO(content), formats=FORMATS) as image:  # its name may end in anything
            return content, ENDS.get(image.format or "", ".jpg")
    pixels = source.read(row).numpy()
    if resize is not None:
        Image.fromarray(pixels).resize((resize, resize), Image.Resampling.BILINEAR).save(
            out, "JPEG", quality=quality, subsampling=0
        )
        return out.getvalue(), ".jpg"
    Image.fromarray(pixels).save(out, "PNG")
    return out.getvalue(), ".png"


def _labels(labels: np.ndarray) -> dict[str, list[int]]:
    """The shorter way to write them."""
    present, absent, unknown = (np.flatnonzero(labels == value).tolist() for value in (1, 0, -1))
    return {"present": present, **({"absent": absent} if len(absent) <= len(unknown) else {"unknown": unknown})}
