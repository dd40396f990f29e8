"""From a file to pixels.

Images are decoded by Pillow, turned upright as their EXIF says, and resized to S x S (the aspect is not kept, as in the
paper) by torch: bilinear with antialiasing, the same as Pillow's but for rounding and three times as fast.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import IO

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image, ImageOps
from torch import Tensor

from gpu_logicmix.data.names import blocks_of
from gpu_logicmix.errors import BadImage
from gpu_logicmix.files import open_plain, open_regular

# Nothing else is opened: Pillow would start Ghostscript for an EPS file, whatever its name ends in.
FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "GIF", "TIFF", "PPM")
MOST_STATS = 500_000  # files whose size and date are asked for
WAY_OUT = "replace the file, or go on without it: on_bad_image='skip'"


Box = tuple[float, float, float, float]  # x, y, width, height


def read_image(path: str | Path, size: int, *, follow: bool = True, box: Box | None = None) -> Tensor:
    """Decode an image, or a box of it, and resize it: uint8 [S, S, 3]. Raises BadImage. A symbolic link is followed if
    `follow`."""
    try:
        file = open_regular(path) if follow else open_plain(Path(path), "rb")
    except FileNotFoundError:
        raise BadImage(f"{path}: no such file; {WAY_OUT}") from None
    except (OSError, ValueError) as error:  # no rights, a folder, a FIFO; a name with a zero byte
        raise BadImage(f"{path}: cannot be read ({getattr(error, 'strerror', None) or error}); {WAY_OUT}") from None
    with file:
        return decode_image(file, str(path), size, box)


def decode_image(file: IO[bytes], name: str, size: int, box: Box | None = None) -> Tensor:
    """As `read_image`, of a file that is open; `name` is for messages."""
    try:
        with Image.open(file, formats=FORMATS) as image:  # reads the header only
            limit = Image.MAX_IMAGE_PIXELS
            if limit and image.width * image.height > limit:
                raise BadImage(
                    f"{name}: {image.width} x {image.height} pixels are over the limit of {limit:,}; make it smaller "
                    "(or raise PIL.Image.MAX_IMAGE_PIXELS, if you trust the file)"
                )
            # Large JPEGs can be decoded at 1/2, 1/4 or 1/8; never below twice the wanted size, where it would show.
            if box is None:
                image.draft(None, (2 * size, 2 * size))
            image.load()
            pixels = torch.from_numpy(np.array(_to_rgb(_upright(image))))
            if box is not None:
                pixels = _cut(pixels, box, name)
    except BadImage:
        raise
    except Image.DecompressionBombError as error:
        raise BadImage(f"{name}: {str(error).rstrip('.')}; make it smaller") from None
    except MemoryError:
        raise
    except Exception as error:  # Pillow's decoders raise OSError, SyntaxError, ValueError, struct.error, ...
        reason = " ".join(str(error).split()) or type(error).__name__
        if isinstance(error, Image.UnidentifiedImageError):
            reason = f"not an image, or of none of the formats {', '.join(FORMATS)}"
        raise BadImage(f"{name}: cannot be decoded ({reason}); {WAY_OUT}") from None
    if pixels.shape[:2] == (size, size):
        return pixels
    resized = F.interpolate(
        pixels.permute(2, 0, 1)[None], size=(size, size), mode="bilinear", antialias=True, align_corners=False
    )
    return resized[0].permute(1, 2, 0)


def _cut(pixels: Tensor, box: Box, name: str) -> Tensor:
    """The part of the box that is in the image; a box beside the image is an error."""
    x, y, width, height = box
    left, top = max(0, int(x)), max(0, int(y))
    part = pixels[top : max(top + 1, round(y + height)), left : max(left + 1, round(x + width))]
    if not part.numel():
        raise BadImage(f"{name}: the box {box} is outside of the image; {WAY_OUT}")
    return part


def _upright(image: Image.Image) -> Image.Image:
    with contextlib.suppress(Exception):  # damaged EXIF in a sound image is no reason to lose the image
        ImageOps.exif_transpose(image, in_place=True)
    return image


def _to_rgb(image: Image.Image) -> Image.Image:
    if image.mode == "RGB" and "transparency" not in image.info:
        return image
    # Pillow would clip 16 bits at 255. In a PGM file they are of mode I, which elsewhere is of 32 bits.
    if image.mode.startswith("I;16") or (image.mode == "I" and image.format == "PPM"):
        return Image.fromarray((np.asarray(image) >> 8).astype(np.uint8)).convert("RGB")
    if image.has_transparency_data:  # on white, as a viewer shows it; the colour behind full transparency is arbitrary
        image = image.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", image.size, "white"), image).convert("RGB")
    return image.convert("RGB")


class FileSource:
    """Images in files.

    follow: whether symbolic links are followed. Only where the paths were checked to stay inside the dataset.
    """

    def __init__(self, root: Path, paths: Sequence[str], size: int, *, follow: bool = True) -> None:
        self.root, self.paths, self.size, self.follow = root, paths, size, follow

    def read(self, index: int) -> Tensor:
        return read_image(os.path.join(self.root, self.paths[index]), self.size, follow=self.follow)

    def parts(self, rows: Sequence[int] | np.ndarray | None = None) -> dict[str, str]:
        """Checksums of the names, sizes and dates of the files: they change when one is added, removed or rewritten. Of
        more than half a million files, sizes and dates of a part, evenly spaced."""
        names, sizes, dates = (hashlib.sha256() for _ in range(3))
        for block in blocks_of(self.paths, rows):
            names.update(block)
        every = range(len(self.paths)) if rows is None else rows
        for row in every[:: max(1, len(every) // MOST_STATS)]:
            try:
                stat = os.stat(os.path.join(self.root, self.paths[int(row)]))
                size, date = stat.st_size, stat.st_mtime_ns
            except (OSError, ValueError):
                size = date = -1  # missing
            sizes.update(b"%d\n" % size)
            dates.update(b"%d\n" % date)
        return {"files": names.hexdigest(), "file sizes": sizes.hexdigest(), "file dates": dates.hexdigest()}


def digest_of(parts: dict[str, str]) -> str:
    """One checksum of several."""
    return hashlib.sha256("\n".join(f"{name} {parts[name]}" for name in sorted(parts)).encode()).hexdigest()


def what_changed(before: dict[str, str], after: dict[str, str]) -> list[str]:
    """Which parts of two `dataset.fingerprint()` differ."""
    return [name for name in {**before, **after} if before.get(name) != after.get(name)]
