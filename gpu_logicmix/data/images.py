"""From a file to pixels, and the dataset that all formats become.

A sample is (image uint8 [3, S, S], targets int8 [C], index). Asked for a list of indices, a dataset gives a whole
batch, which is how `make_loader` reads: one allocation a batch, and one copy where the images are in a cache.

Images are decoded by Pillow, turned upright as their EXIF says, and resized to S x S (the aspect is not kept, as in the
paper) by torch: bilinear with antialiasing, the same as Pillow's but for rounding and three times as fast. Batches are
in channels_last order, the order of both the decoder and the convolutions, so nothing is ever transposed.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image, ImageOps
from torch import Tensor

from gpu_logicmix.data.files import BadImage, DataError, check_choice


def read_image(path: str | Path, size: int) -> Tensor:
    """Decode an image and resize it: uint8 [S, S, 3]. Raises BadImage."""
    way_out = "replace the file, or go on without it: on_bad_image='skip'"
    try:
        with Image.open(path) as image:  # reads the header only
            limit = Image.MAX_IMAGE_PIXELS
            if limit and image.width * image.height > limit:
                raise BadImage(
                    f"{path}: {image.width} x {image.height} pixels are over the limit of {limit:,}; make it smaller "
                    "(or raise PIL.Image.MAX_IMAGE_PIXELS, if you trust the file)"
                )
            # Large JPEGs can be decoded at 1/2, 1/4 or 1/8; never below twice the wanted size, where it would show.
            image.draft(None, (2 * size, 2 * size))
            image.load()
            pixels = torch.from_numpy(np.array(_to_rgb(_upright(image))))
    except BadImage:
        raise
    except Image.DecompressionBombError as error:
        raise BadImage(f"{path}: {str(error).rstrip('.')}; make it smaller") from None
    except FileNotFoundError:
        raise BadImage(f"{path}: no such file; {way_out}") from None
    except MemoryError:
        raise
    except Exception as error:  # Pillow's decoders raise OSError, SyntaxError, ValueError, struct.error, ...
        reason = "no image format that Pillow knows" if isinstance(error, Image.UnidentifiedImageError) else error
        raise BadImage(f"{path}: cannot be decoded ({reason}); {way_out}") from None
    if pixels.shape[:2] == (size, size):
        return pixels
    resized = F.interpolate(
        pixels.permute(2, 0, 1)[None], size=(size, size), mode="bilinear", antialias=True, align_corners=False
    )
    return resized[0].permute(1, 2, 0)


def _upright(image: Image.Image) -> Image.Image:
    with contextlib.suppress(Exception):  # damaged EXIF in a sound image is no reason to lose the image
        ImageOps.exif_transpose(image, in_place=True)
    return image


def _to_rgb(image: Image.Image) -> Image.Image:
    if image.mode == "RGB" and "transparency" not in image.info:
        return image
    if image.mode.startswith("I;16"):  # Pillow would clip 16 bits at 255
        return Image.fromarray((np.asarray(image) >> 8).astype(np.uint8)).convert("RGB")
    if image.has_transparency_data:  # on white, as a viewer shows it; the colour behind full transparency is arbitrary
        image = image.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", image.size, "white"), image).convert("RGB")
    return image.convert("RGB")


class FileSource:
    """Images in files."""

    def __init__(self, root: Path, paths: Sequence[str], size: int) -> None:
        self.root, self.paths, self.size = root, paths, size

    def read(self, index: int) -> Tensor:
        return read_image(os.path.join(self.root, self.paths[index]), self.size)

    def fingerprint(self) -> str:
        """A checksum of all paths, file sizes and dates: it changes when a file is added, removed or rewritten."""
        digest = hashlib.sha256()
        for path in self.paths:
            try:
                stat = os.stat(os.path.join(self.root, path))
                line = f"{path}\0{stat.st_size}\0{stat.st_mtime_ns}\n"
            except OSError:
                line = f"{path}\0missing\n"
            digest.update(line.encode("utf-8", "surrogateescape"))
        return digest.hexdigest()


class ImageDataset(torch.utils.data.Dataset):
    """Images with three-valued labels.

    name, split: what was opened.
    source: where pixels come from: `read(index)` gives uint8 [S, S, 3]; one with `gather(indices)` gives many at once.
    labels: int8 [N, C]: 1 present, 0 absent, -1 unknown. May be replaced by one of the same shape:
        `dataset.labels = hide_labels(dataset.labels, 0.1)`.
    ids: what the dataset itself calls the images.
    on_bad_image: "raise", or "skip": unreadable images are left out of their batches; `bad_images()` lists them.
    """

    def __init__(
        self,
        name: str,
        split: str,
        source,
        labels: np.ndarray,
        categories: Sequence[str],
        ids: Sequence[str],
        on_bad_image: str = "raise",
    ) -> None:
        check_choice("on_bad_image", on_bad_image, ("raise", "skip"))
        self.name, self.split, self.source, self.on_bad_image = name, split, source, on_bad_image
        self.categories, self.ids, self.size = list(categories), ids, source.size
        self._labels = np.ascontiguousarray(labels, dtype=np.int8)
        # In shared memory, so that what a worker process finds out is known here.
        self.bad = torch.zeros(len(labels), dtype=torch.bool).share_memory_()

    @property
    def labels(self) -> np.ndarray:
        return self._labels

    @labels.setter
    def labels(self, labels: np.ndarray) -> None:
        labels = np.asarray(labels)
        if labels.shape != self._labels.shape:
            raise DataError(f"labels of shape {labels.shape} do not fit this dataset, which has {self._labels.shape}")
        if not np.isin(labels, (-1, 0, 1)).all():
            raise DataError("labels must be 1 (present), 0 (absent) or -1 (unknown)")
        self._labels = np.ascontiguousarray(labels, dtype=np.int8)

    def __len__(self) -> int:
        return len(self._labels)

    def __repr__(self) -> str:
        n, c = self._labels.shape
        return f"<{self.name} {self.split}: {n:,} images of {self.size} x {self.size}, {c} categories>"

    def __getitem__(self, index: int | Sequence[int] | Tensor) -> tuple[Tensor, Tensor, int | Tensor]:
        """A sample, or the batch of several. A single bad image raises BadImage, whatever `on_bad_image` says."""
        if isinstance(index, (int, np.integer)):
            if not -len(self) <= index < len(self):
                raise IndexError(f"index {index} is out of range: there are {len(self):,} images")
            index = int(index) % len(self)
            return self.source.read(index).permute(2, 0, 1), torch.from_numpy(self._labels[index].copy()), index
        rows = np.asarray(index, dtype=np.int64)
        if len(rows) and not (rows.min() >= 0 and rows.max() < len(self)):
            raise IndexError(f"indices {rows.min()} to {rows.max()} are out of range: there are {len(self):,} images")
        if self.on_bad_image == "skip":
            rows = rows[~self.bad.numpy()[rows]]
        if hasattr(self.source, "gather"):
            images = self.source.gather(rows)
        else:
            images, rows = self._read_each(rows)
        return images.permute(0, 3, 1, 2), torch.from_numpy(self._labels[rows]), torch.from_numpy(rows)

    def _read_each(self, rows: np.ndarray) -> tuple[Tensor, np.ndarray]:
        images = torch.empty(len(rows), self.size, self.size, 3, dtype=torch.uint8)
        good = []
        for row in rows:
            try:
                images[len(good)] = self.source.read(int(row))
            except BadImage:
                if self.on_bad_image == "raise":
                    raise
                self.bad[row] = True
                continue
            good.append(row)
        return images[: len(good)], np.asarray(good, dtype=np.int64)

    def take(self, rows: Sequence[int] | np.ndarray) -> ImageDataset:
        """A dataset of these rows alone, numbered from 0."""
        rows = np.asarray(rows, dtype=np.int64)
        ids = [self.ids[row] for row in rows]
        source = (_GatheredRows if hasattr(self.source, "gather") else _Rows)(self.source, rows)
        part = ImageDataset(self.name, self.split, source, self._labels[rows], self.categories, ids, self.on_bad_image)
        part.bad[:] = self.bad[rows]
        return part

    def bad_images(self) -> list[str]:
        """One line for each image that was left out so far: which, and why."""
        lines = []
        for row in self.bad.nonzero().flatten().tolist():
            try:
                self.source.read(row)
                lines.append(f"{self.ids[row]}: could not be read, but can be now")
            except BadImage as error:
                lines.append(str(error))
        return lines


class _Rows:
    """Some rows of another source."""

    def __init__(self, source, rows: np.ndarray) -> None:
        self.source, self.rows, self.size = source, rows, source.size

    def read(self, index: int) -> Tensor:
        return self.source.read(int(self.rows[index]))


class _GatheredRows(_Rows):
    def gather(self, rows: np.ndarray) -> Tensor:
        return self.source.gather(self.rows[rows])
