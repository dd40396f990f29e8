"""Decode and resize once: all images of a dataset in one file, which later epochs read without decoding.

    DIR/coco-train-448-1f0c4e8a90b2/images.u8         uint8 [N, S, S, 3]
    DIR/coco-train-448-1f0c4e8a90b2/crc32.u4          a checksum for each image
    DIR/coco-train-448-1f0c4e8a90b2/manifest.json     what it was made from; written last: without it there is no cache

The last part of the name is a checksum of what the cache was made from (files, their sizes and dates): other images
have another cache, so datasets can share DIR, and a run never meets other pixels than it was started with. Each image
is compared with its checksum when a process first reads it. Labels are not in the cache: hide or correct them freely.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import time
import zlib
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from gpu_logicmix.data.cache_build import build_cache, raise_bad
from gpu_logicmix.data.dataset import ImageDataset
from gpu_logicmix.data.images import digest_of
from gpu_logicmix.errors import BadImage, DataError
from gpu_logicmix.files import at_home, fcntl, open_plain, read_text, sync_folder, waited_lock
from gpu_logicmix.progress import progress_bar

VERSION = 2  # of the file format and of how images are decoded and resized


def cache_dataset(
    dataset: ImageDataset, directory: str | Path, *, threads: int | None = None, rebuild: bool = False
) -> ImageDataset:
    """The same dataset, read from a cache in `directory`, which is built (or finished) first if need be.

    threads: that decode at once; as many as there are cores unless given.
    rebuild: build again also where there is a cache. A process that reads the old one keeps it.
    """
    origin = dataset.source
    if isinstance(origin, CacheSource):
        raise DataError("this dataset is read from a cache already")
    directory = at_home(directory)
    parts = origin.parts()
    fingerprint = digest_of({**parts, "version": str(VERSION)})
    name = re.sub(r"[^\w.-]", "_", f"{dataset.name}-{dataset.split}")
    folder = directory / f"{name}-{dataset.size}-{fingerprint[:12]}"
    wanted = {
        "version": VERSION,
        "source": str(getattr(origin, "root", dataset.name)),
        "size": dataset.size,
        "count": len(dataset),
        "files": parts["files"],
        "fingerprint": fingerprint,
    }
    source = None if rebuild else _opened(folder, wanted, origin)
    warnings = list(dataset.warnings)
    if source is None:
        warnings += _outdated(directory, folder, wanted)
        with contextlib.suppress(FileExistsError):
            folder.mkdir(parents=True)
        with waited_lock(folder):
            source = None if rebuild else _opened(folder, wanted, origin)  # another process may have built it by now
            if source is None:
                build_cache(dataset, folder, wanted, threads or os.cpu_count() or 1)
                source = _opened(folder, wanted, origin)
    if source.bad and dataset.on_bad_image == "raise":
        raise_bad(folder, source.bad)
    with contextlib.suppress(OSError):  # when it was last used, for --prune
        os.utime(folder)
    cached = ImageDataset(
        dataset.name,
        dataset.split,
        source,
        dataset.labels,
        dataset.categories,
        dataset.ids,
        dataset.on_bad_image,
        warnings,
    )
    cached.bad[list(source.bad)] = True
    return cached


def verify_cache(folder: str | Path) -> None:
    """Read the whole cache and compare it with its checksums."""
    folder = Path(folder)
    manifest = read_manifest(folder)
    if manifest is None:
        raise DataError(f"{folder}: no manifest.json, so no (finished) cache")
    source = CacheSource(folder, manifest, None)
    with progress_bar(source.count, "checking") as advance:
        for start in range(0, source.count, 64):
            rows = np.arange(start, min(start + 64, source.count))
            source.gather(rows)
            advance(len(rows))


class CacheSource:
    """Images in a cache. The file is opened here and held: whoever builds the cache again writes another file.

    Read, not mapped: a file that is cut short under a mapping kills the process without a message.
    """

    def __init__(self, folder: Path, manifest: dict, origin: Any) -> None:
        self.folder, self.origin = folder, origin
        self.count, self.size = manifest["count"], manifest["size"]
        self.bad = {int(row): str(reason) for row, reason in manifest["bad"].items()}
        self._open()
        crc = np.fromfile(folder / "crc32.u4", dtype="<u4") if (folder / "crc32.u4").exists() else np.zeros(0, "<u4")
        if len(crc) != self.count or zlib.crc32(crc) != manifest["crc32"]:
            raise DataError(f"{folder}/crc32.u4: missing or damaged; {_again(folder)}")
        self.crc32, self.checked = crc, np.zeros(self.count, dtype=bool)

    def _open(self) -> None:
        try:
            self._file = open_plain(self.file, "rb")
        except OSError as error:
            raise DataError(f"{self.file}: cannot be read ({error.strerror}); {_again(self.folder)}") from None
        if fcntl is not None:
            with contextlib.suppress(OSError):  # shared: it tells --prune that somebody is reading
                fcntl.flock(self._file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        status, length = os.fstat(self._file.fileno()), self.count * self.size**2 * 3
        if status.st_size != length:
            raise DataError(f"{self.file}: {status.st_size:,} bytes, must be {length:,}; {_again(self.folder)}")
        identity = status.st_dev, status.st_ino, status.st_mtime_ns
        if getattr(self, "identity", identity) != identity:
            raise DataError(f"{self.file}: was built again while it was in use; start the run again (--resume)")
        self.identity = identity

    @property
    def file(self) -> Path:
        return self.folder / "images.u8"

    def __getstate__(self) -> dict:
        return {**self.__dict__, "_file": None}  # another process opens the file itself, and sees that it is the same

    def read(self, index: int) -> Tensor:
        if index in self.bad:
            raise BadImage(self.bad[index])
        return self.gather(np.array([index]))[0]

    def gather(self, rows: np.ndarray) -> Tensor:
        if self._file is None:
            self._open()
        out = torch.empty(len(rows), self.size, self.size, 3, dtype=torch.uint8)
        length, handle = self.size * self.size * 3, self._file.fileno()
        places = memoryview(out.numpy()).cast("B") if len(rows) else memoryview(b"")
        for place, row in enumerate(rows.tolist()):
            view = places[place * length : (place + 1) * length]
            if _read_at(handle, view, row * length) != length:
                raise DataError(f"{self.file}: cut short at image {row}; {_again(self.folder)}")
            if not self.checked[row]:
                if zlib.crc32(view) != self.crc32[row]:
                    raise DataError(f"{self.file}: image {row} is damaged; {_again(self.folder)}")
                self.checked[row] = True
        return out

    def parts(self, rows: Any = None) -> dict[str, str]:
        return self.origin.parts(rows)


def _read_at(handle: int, view: memoryview, offset: int) -> int:
    done = 0
    while done < len(view):
        if hasattr(os, "preadv"):
            count = os.preadv(handle, [view[done:]], offset + done)
        else:  # macOS before 11, Windows
            os.lseek(handle, offset + done, os.SEEK_SET)
            piece = os.read(handle, len(view) - done)
            count = len(piece)
            view[done : done + count] = piece
        if count == 0:
            break
        done += count
    return done


def _again(folder: Path) -> str:
    return f"remove the folder {folder}, or build it again: gpu-logicmix cache ... --rebuild (rebuild=True)"


def _opened(folder: Path, wanted: dict, origin: Any) -> CacheSource | None:
    manifest = read_manifest(folder)
    if manifest is None:
        return None
    for key in ("version", "count", "size", "fingerprint"):  # the name says so too, but folders can be renamed
        if manifest[key] != wanted[key]:
            raise DataError(
                f"{folder}/manifest.json: {key} is {manifest[key]!r}, not {wanted[key]!r}; {_again(folder)}"
            )
    return CacheSource(folder, manifest, origin)


def read_manifest(folder: Path) -> dict | None:
    """None if there is none."""
    file = folder / "manifest.json"
    if not file.exists():
        return None
    try:
        manifest = json.loads(read_text(file))
        kinds = {
            "version": int,
            "size": int,
            "count": int,
            "crc32": int,
            "source": str,
            "files": str,
            "fingerprint": str,
            "bad": dict,
        }
        for key, kind in kinds.items():
            if not isinstance(manifest, dict) or type(manifest.get(key)) is not kind:
                raise ValueError(f"no {key}, or not of type {kind.__name__}")
        if manifest["count"] < 0 or manifest["size"] < 1:
            raise ValueError("count or size out of range")
        if not all(row.isdecimal() and int(row) < manifest["count"] for row in manifest["bad"]):
            raise ValueError("bad: not all of them are numbers of images")
    except (ValueError, RecursionError) as error:
        reason = str(error).removeprefix(f"{file}: ") or "nested too deeply"
        raise DataError(f"{file}: cannot be used ({reason}); {_again(folder)}") from None
    return manifest


# ------------------------------------------------------------------------------------------------ what lies in a folder
# What a cache consists of, and how its folder is called: DATASET-SPLIT-SIZE-CHECKSUM.
_FILES = ("manifest.json", "images.u8", "images.u8.part", "crc32.u4", "progress.jsonl", "bad.txt", "lock")
_NAME = re.compile(r"-\d+-[0-9a-f]{12}\Z")


class CacheInfo(NamedTuple):
    folder: Path
    state: str  # finished, unfinished, damaged
    source: str
    files: str  # checksum of their names
    count: int
    size: int
    bytes: int
    used: float  # seconds since 1970
    in_use: bool
    outdated: bool  # there is a newer one of the same files, which were rewritten since


def list_caches(directory: str | Path) -> list[CacheInfo]:
    """The caches in a folder, and those that were begun, the last used first."""
    found = []
    directory = at_home(directory)
    if not directory.is_dir():
        raise DataError(f"{directory}: no such folder")
    for folder in sorted(directory.iterdir()):
        ours = _NAME.search(folder.name) and not folder.is_symlink() and folder.is_dir()
        if not ours or not any((folder / name).exists() for name in _FILES):
            continue
        manifest: dict = {}
        try:
            manifest = read_manifest(folder) or {}
            state = "finished" if manifest else "unfinished"
        except DataError:
            state = "damaged"
        if manifest and not (folder / "images.u8").exists():
            state = "damaged"
        length = sum(p.stat().st_blocks * 512 for p in folder.iterdir() if p.is_file() and not p.is_symlink())
        found.append(
            CacheInfo(
                folder,
                state,
                manifest.get("source", ""),
                manifest.get("files", ""),
                manifest.get("count", 0),
                manifest.get("size", 0),
                length,
                folder.stat().st_mtime,
                _in_use(folder),
                False,
            )
        )
    found.sort(key=lambda info: -info.used)
    newest: dict[tuple, Path] = {}
    for info in found:
        if info.state == "finished":
            newest.setdefault(_kind(info), info.folder)
    return [info._replace(outdated=newest.get(_kind(info), info.folder) != info.folder) for info in found]


def prune(directory: str | Path, *, days: float | None = None) -> list[CacheInfo]:
    """Remove what is of no use: builds that were not finished, damaged caches, and those of image files that were
    rewritten since and have a newer cache; with `days`, also what was not used for so long. What some process reads or
    builds right now stays. Returns what was removed."""
    removed = []
    for info in list_caches(directory):
        old = days is not None and time.time() - info.used > days * 86400
        if info.in_use or not (info.state != "finished" or info.outdated or old):
            continue
        for name in _FILES:  # the manifest first: from then on it is no cache
            (info.folder / name).unlink(missing_ok=True)
        for left in info.folder.glob(".*.tmp"):  # by a build that was killed
            left.unlink()
        with contextlib.suppress(OSError):  # somebody else's files are in it
            info.folder.rmdir()
        removed.append(info)
    if removed:
        sync_folder(at_home(directory))
    return removed


def _kind(info: CacheInfo) -> tuple:
    return info.folder.name.rpartition("-")[0], info.source, info.files


def _in_use(folder: Path) -> bool:
    """Whether a process reads the cache, or builds it."""
    for name in ("images.u8", "lock"):
        if fcntl is None or not (folder / name).exists():
            continue
        try:
            with open_plain(folder / name, "r" if name == "images.u8" else "a+") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return True
    return False


def _outdated(directory: Path, folder: Path, wanted: dict) -> list[str]:
    """A warning if there is a cache of the same source that no longer fits."""
    old = []
    with contextlib.suppress(DataError, OSError):
        for info in list_caches(directory):
            same = _kind(info) == (folder.name.rpartition("-")[0], wanted["source"], wanted["files"])
            if same and info.folder != folder and info.state == "finished":
                old.append(info.folder.name)
    if not old:
        return []
    return [
        f"{directory}: image files were rewritten since {old[0]} was built: a new cache is built. "
        f"Remove what is out of date: gpu-logicmix cache --to {directory} --prune"
    ]
