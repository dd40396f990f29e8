"""Fill a cache. While it is built, the pixels are in images.u8.part, and progress.jsonl tells which chunks are safely
on disk, with their checksums: a build that was killed goes on from there, and what was damaged is decoded again.
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
from typing import IO

import numpy as np

from gpu_logicmix.data.dataset import ImageDataset
from gpu_logicmix.errors import BadImage, DataError
from gpu_logicmix.files import open_plain, read_text, write_whole, written_whole
from gpu_logicmix.progress import progress_bar

CHUNK_BYTES = 16 << 20
COMMIT_SECONDS = 2.0  # between two syncs to disk: at most this much work is done again after a kill


def build_cache(dataset: ImageDataset, folder: Path, wanted: dict, threads: int) -> None:
    """Fill images.u8.part chunk by chunk, several at once, then rename it and write the manifest."""
    part, log = folder / "images.u8.part", folder / "progress.jsonl"
    size, count = dataset.size, len(dataset)
    row_bytes = size * size * 3
    chunk = min(max(CHUNK_BYTES // row_bytes, 1), 256)
    for old in ("manifest.json", "images.u8", "crc32.u4"):  # the manifest first; who reads the images has them open
        (folder / old).unlink(missing_ok=True)
    header = {**wanted, "chunk": chunk}
    _check_disk(folder, part, count * row_bytes, f"{count:,} images at {size} x {size}")
    done = _finished_chunks(part, log, header, row_bytes)
    if not done:
        part.unlink(missing_ok=True)
    lines = [json.dumps(header), *(json.dumps(entry) for entry in done.values())]
    write_whole(log, "\n".join(lines) + "\n")  # without the half line that a kill may have left

    with open_plain(part, "r+b") if done else _created(part) as file, open_plain(log, "a") as progress:
        _reserve(file, folder, count * row_bytes)
        _decode(dataset, file, progress, chunk, done, threads)

    entries = [done[number] for number in sorted(done)]
    bad = {row: reason for entry in entries for row, reason in entry["bad"].items()}
    if bad and dataset.on_bad_image == "raise":
        raise_bad(folder, bad)
    crc = np.array([crc for entry in entries for crc in entry["crc32"]], dtype="<u4")
    with written_whole(folder / "crc32.u4", "wb") as file:
        file.write(crc.tobytes())
    os.replace(part, folder / "images.u8")
    write_whole(folder / "manifest.json", json.dumps({**header, "crc32": zlib.crc32(crc), "bad": bad}, indent=1))
    log.unlink()


def raise_bad(folder: Path, bad: dict[int, str]) -> None:
    first = next(iter(bad.values()))
    more = ""
    if len(bad) > 1:
        with contextlib.suppress(OSError):
            write_whole(folder / "bad.txt", "\n".join(bad.values()) + "\n")
        more = f" ({len(bad)} such images, listed in {folder / 'bad.txt'})"
    raise BadImage(first + more)


def _created(path: Path) -> IO[bytes]:
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_CLOEXEC", 0)
    return open(os.open(path, flags, 0o666), "r+b")


def _reserve(file: IO[bytes], folder: Path, length: int) -> None:
    """Take the room on disk now, not when it is too late."""
    try:
        os.posix_fallocate(file.fileno(), 0, length)
    except AttributeError:  # not on macOS
        file.truncate(length)
    except OSError as error:
        raise DataError(f"{folder}: cannot take {_gb(length)} ({error.strerror}); choose another folder") from None


def _decode(dataset: ImageDataset, file: IO, progress: IO, chunk: int, done: dict[int, dict], threads: int) -> None:
    """Decode the chunks that are not done yet, and note each when it is on disk."""
    size, count = dataset.size, len(dataset)
    row_bytes = size * size * 3

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
        return {"number": number, "crc32": [zlib.crc32(image) for image in pixels], "bad": bad}

    def commit(entries: list[dict]) -> None:
        os.fsync(file.fileno())  # pixels first, then the line that says they are there
        progress.write("".join(json.dumps(entry) + "\n" for entry in entries))
        progress.flush()
        os.fsync(progress.fileno())
        done.update({entry["number"]: entry for entry in entries})

    todo = [number for number in range(-(-count // chunk)) if number not in done]
    with progress_bar(count, "decoding", done=sum(len(entry["crc32"]) for entry in done.values())) as advance:
        pool = ThreadPoolExecutor(threads)  # threads are enough: decoding and resizing release the GIL
        try:
            fresh, last = [], time.monotonic()
            for future in as_completed([pool.submit(fill, number) for number in todo]):
                fresh.append(future.result())
                advance(len(fresh[-1]["crc32"]))
                if time.monotonic() - last > COMMIT_SECONDS:
                    commit(fresh)
                    fresh, last = [], time.monotonic()
            commit(fresh)
        finally:
            pool.shutdown(cancel_futures=True)


def _finished_chunks(part: Path, log: Path, header: dict, row_bytes: int) -> dict[int, dict]:
    """The chunks that an earlier build of the very same cache has finished, and that are still as they were."""
    count, chunk = header["count"], header["chunk"]
    done: dict[int, dict] = {}
    try:
        lines = read_text(log).splitlines()
        if json.loads(lines[0]) != header or part.is_symlink() or part.stat().st_size != count * row_bytes:
            return {}
        with open_plain(part, "rb") as file:
            for line in lines[1:]:
                entry = json.loads(line)
                number = entry["number"]
                length = min(chunk, count - number * chunk)
                file.seek(number * chunk * row_bytes)
                crc = [zlib.crc32(file.read(row_bytes)) for _ in range(length)]
                if length > 0 and crc == entry["crc32"] and isinstance(entry["bad"], dict):
                    done[number] = entry
    except (OSError, ValueError, TypeError, KeyError, IndexError, OverflowError):
        pass  # no file, or a line that was cut short by the kill: what came before counts
    return done


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
