"""Decode and resize once: all images of a dataset in one memory-mapped file, which later epochs read without decoding.

    DIR/coco-train-448/images.u8         uint8 [N, S, S, 3]
    DIR/coco-train-448/manifest.json     what it was made from; written last, and without it there is no cache

While it is built, the pixels are in images.u8.part, and progress.jsonl tells which chunks are safely on disk: a build
that was killed goes on from there. Labels are not in the cache, so hiding or correcting them leaves it valid.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import time
import zlib
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from gpu_logicmix.data.images import ImageDataset
from gpu_logicmix.errors import BadImage, DataError
from gpu_logicmix.files import waited_lock, write_whole
from gpu_logicmix.progress import progress_bar

VERSION = 1  # of the file format and of how images are decoded and resized
CHUNK_BYTES = 16 << 20
COMMIT_SECONDS = 2.0  # between two syncs to disk: at most this much work is done again after a kill


def cache_dataset(
    dataset: ImageDataset, directory: str | Path, *, threads: int | None = None, rebuild: bool = False
) -> ImageDataset:
    """The same dataset, read from a cache in `directory`, which is built (or finished) first if need be.

    threads: that decode at once; as many as there are cores unless given.
    rebuild: build anew also where there is a cache. Needed when images have changed since, which raises DataError.
    """
    folder = Path(directory).expanduser() / f"{dataset.name}-{dataset.split}-{dataset.size}"
    wanted = {
        "version": VERSION,
        "source": str(getattr(dataset.source, "root", dataset.name)),
        "size": dataset.size,
        "count": len(dataset),
        "fingerprint": dataset.source.fingerprint(),
    }
    manifest = None if rebuild else _read_manifest(folder)
    if manifest is None:
        with contextlib.suppress(FileExistsError):
            folder.mkdir(parents=True)
        with waited_lock(folder):
            manifest = None if rebuild else _read_manifest(folder)  # another process may have built it by now
            if manifest is None:
                manifest = _build(dataset, folder, wanted, threads or os.cpu_count() or 1)
    _check(folder, manifest, wanted)

    bad = {int(row): reason for row, reason in manifest["bad"].items()}
    if bad and dataset.on_bad_image == "raise":
        _raise_bad(folder, bad)
    source = CacheSource(folder / "images.u8", len(dataset), dataset.size, bad)
    cached = ImageDataset(
        dataset.name, dataset.split, source, dataset.labels, dataset.categories, dataset.ids, dataset.on_bad_image
    )
    cached.bad[list(bad)] = True
    return cached


def verify_cache(folder: str | Path) -> None:
    """Read the whole cache and compare it with the checksums of its manifest."""
    folder = Path(folder)
    manifest = _read_manifest(folder)
    if manifest is None:
        raise DataError(f"{folder}: no manifest.json, so no (finished) cache")
    step = manifest["chunk"] * manifest["size"] ** 2 * 3
    with open(folder / "images.u8", "rb") as file, progress_bar(manifest["count"], "checking") as advance:
        for number, expected in enumerate(manifest["crc32"]):
            if zlib.crc32(file.read(step)) != expected:
                first = number * manifest["chunk"]
                raise DataError(f"{folder}/images.u8: damaged from image {first} on; build it anew with --rebuild")
            advance(min(manifest["chunk"], manifest["count"] - number * manifest["chunk"]))


class CacheSource:
    """Images in a cache. `gather` copies a whole batch out of the mapped file."""

    def __init__(self, file: Path, count: int, size: int, bad: dict[int, str]) -> None:
        self.file, self.count, self.size, self.bad = file, count, size, bad
        self._images: np.ndarray | None = None

    @property
    def images(self) -> np.ndarray:
        if self._images is None:
            shape = (self.count, self.size, self.size, 3)
            self._images = np.memmap(self.file, dtype=np.uint8, mode="r", shape=shape)
        return self._images

    def __getstate__(self) -> dict:
        return {**self.__dict__, "_images": None}  # a worker process maps the file itself

    def read(self, index: int) -> Tensor:
        if index in self.bad:
            raise BadImage(self.bad[index])
        return torch.from_numpy(np.array(self.images[index]))

    def gather(self, rows: np.ndarray) -> Tensor:
        out = torch.empty(len(rows), self.size, self.size, 3, dtype=torch.uint8)
        np.take(self.images, rows, axis=0, out=out.numpy(), mode="clip")  # "raise" would copy twice
        return out

    def fingerprint(self) -> str:
        raise DataError("this dataset is read from a cache already")


def _build(dataset: ImageDataset, folder: Path, wanted: dict, threads: int) -> dict:
    """Fill images.u8.part chunk by chunk, several at once, then rename it and write the manifest."""
    part, log = folder / "images.u8.part", folder / "progress.jsonl"
    size, count = dataset.size, len(dataset)
    row_bytes = size * size * 3
    chunk = min(max(CHUNK_BYTES // row_bytes, 1), 256)
    for old in ("manifest.json", "images.u8"):  # the manifest first; a process that has the images mapped keeps them
        (folder / old).unlink(missing_ok=True)
    header = {**wanted, "chunk": chunk}
    done = _read_progress(log, header) if part.exists() and part.stat().st_size == count * row_bytes else {}
    _check_disk(folder, part, count * row_bytes, f"{count:,} images at {size} x {size}")
    if not done:
        part.unlink(missing_ok=True)
    lines = [json.dumps(header), *(json.dumps(entry) for entry in done.values())]
    write_whole(log, "\n".join(lines) + "\n")  # without the half line that a kill may have left

    def fill(number: int) -> dict:
        rows = range(number * chunk, min((number + 1) * chunk, count))
        pixels, bad = np.zeros((len(rows), size, size, 3), dtype=np.uint8), {}
        for place, row in enumerate(rows):
            try:
                pixels[place] = dataset.source.read(row).numpy()
            except BadImage as error:  # all are collected first: nobody wants to learn of them one by one
                bad[row] = str(error)
        data = memoryview(pixels).cast("B")
        written = 0
        while written < len(data):
            written += os.pwrite(file.fileno(), data[written:], number * chunk * row_bytes + written)
        return {"number": number, "crc32": zlib.crc32(data), "bad": bad}

    todo = [number for number in range(-(-count // chunk)) if number not in done]
    with open(part, "r+b" if done else "w+b") as file, open(log, "a", encoding="utf-8") as progress:
        try:
            os.posix_fallocate(file.fileno(), 0, count * row_bytes)  # take the place now, not when it is too late
        except AttributeError:  # not on macOS
            file.truncate(count * row_bytes)
        except OSError as error:
            raise DataError(f"{folder}: cannot take {_gb(count * row_bytes)} ({error.strerror})") from None

        def commit(entries: list[dict]) -> None:
            os.fsync(file.fileno())  # pixels first, then the line that says they are there
            progress.write("".join(json.dumps(entry) + "\n" for entry in entries))
            progress.flush()
            os.fsync(progress.fileno())
            done.update({entry["number"]: entry for entry in entries})

        with progress_bar(count, "decoding", done=sum(min(chunk, count - n * chunk) for n in done)) as advance:
            pool = ThreadPoolExecutor(threads)  # threads are enough: decoding and resizing release the GIL
            try:
                fresh, last = [], time.monotonic()
                for future in as_completed([pool.submit(fill, number) for number in todo]):
                    fresh.append(future.result())
                    advance(min(chunk, count - fresh[-1]["number"] * chunk))
                    if time.monotonic() - last > COMMIT_SECONDS:
                        commit(fresh)
                        fresh, last = [], time.monotonic()
                commit(fresh)
            finally:
                pool.shutdown(cancel_futures=True)

    entries = [done[number] for number in sorted(done)]
    bad = {row: reason for entry in entries for row, reason in entry["bad"].items()}
    if bad and dataset.on_bad_image == "raise":
        _raise_bad(folder, bad)
    os.replace(part, folder / "images.u8")
    manifest = {**header, "crc32": [entry["crc32"] for entry in entries], "bad": bad}
    write_whole(folder / "manifest.json", json.dumps(manifest, indent=1))
    log.unlink()
    return manifest


def _read_progress(log: Path, header: dict) -> dict[int, dict]:
    """The chunks that an earlier build of the very same cache has finished."""
    done: dict[int, dict] = {}
    try:
        lines = log.read_text(encoding="utf-8").splitlines()
        if json.loads(lines[0]) != header:
            return {}
        for line in lines[1:]:
            entry = json.loads(line)
            done[entry["number"]] = entry
    except (
        OSError,
        IndexError,
        ValueError,
    ):  # no file, or a line that was cut short by the kill: what came before counts
        pass
    return done


def _read_manifest(folder: Path) -> dict | None:
    try:
        return json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise DataError(
            f"{folder}/manifest.json: cannot be read ({error}); build the cache anew with --rebuild"
        ) from None


def _check(folder: Path, manifest: dict, wanted: dict) -> None:
    reasons = {
        "version": "was written by another version of this package",
        "count": "is of a dataset of {old:,} images, not {new:,}",
        "size": "is of images of size {old}, not {new}",
        "fingerprint": "is out of date: image files were added, removed or rewritten since (or are others: it was made "
        "from {source})",
    }
    for key, reason in reasons.items():
        if manifest.get(key) != wanted[key]:
            reason = reason.format(old=manifest.get(key), new=wanted[key], source=manifest.get("source"))
            raise DataError(f"{folder}: this cache {reason}; build it anew with --rebuild (rebuild=True)")
    file, length = folder / "images.u8", wanted["count"] * wanted["size"] ** 2 * 3
    if not file.exists() or file.stat().st_size != length:
        raise DataError(
            f"{file}: missing or not of {length:,} bytes; build the cache anew with --rebuild (rebuild=True)"
        )


def _raise_bad(folder: Path, bad: dict) -> None:
    first = next(iter(bad.values()))
    more = ""
    if len(bad) > 1:
        with contextlib.suppress(OSError):
            write_whole(folder / "bad.txt", "\n".join(bad.values()) + "\n")
        more = f" ({len(bad)} such images, listed in {folder / 'bad.txt'})"
    raise BadImage(first + more)


def _check_disk(folder: Path, part: Path, needed: int, what: str) -> None:
    taken = getattr(part.stat(), "st_blocks", 0) * 512 if part.exists() else 0
    free = shutil.disk_usage(folder).free + taken
    if needed > free:
        raise DataError(
            f"{folder}: the cache needs {_gb(needed)} for {what}, but only {_gb(free)} are free; choose another "
            "folder, a smaller size, or go without a cache"
        )


def _gb(count: int) -> str:
    return f"{count / 1e9:.1f} GB" if count >= 1e8 else f"{count / 1e6:.1f} MB"
