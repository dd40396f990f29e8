"""Files by path or by address (http://..., s3://..., whatever fsspec knows): whole, in order, or a range of bytes.

Local ones need nothing but the standard library. A connection that is lost is tried again, then named.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any, TypeVar

from gpu_logicmix.errors import DataError
from gpu_logicmix.files import open_regular

TRIES, WAIT = 5, 0.5  # seconds before the second try, twice as long before each further one
Result = TypeVar("Result")


def is_remote(path: str) -> bool:
    return "://" in path


def joined(home: str, name: str) -> str:
    return f"{home.rstrip('/')}/{name}" if is_remote(home) else os.path.join(home, name)


def _system(url: str) -> tuple[Any, str]:
    try:
        import fsspec
    except ImportError:
        raise DataError(f"{url}: fsspec is not installed: pip install fsspec aiohttp") from None
    try:
        return fsspec.core.url_to_fs(url)
    except (ImportError, ValueError) as error:  # a protocol it does not know, or that needs one more package
        raise DataError(f"{url}: {' '.join(str(error).split())}") from None


def tried(url: str, function: Callable[[], Result]) -> Result:
    """What a function gives, at the latest in the fifth attempt."""
    for attempt in range(TRIES):
        try:
            return function()
        except FileNotFoundError:
            raise DataError(f"{url}: no such file; is the address right?") from None
        except DataError:
            raise
        except Exception as error:  # each protocol has errors of its own
            if "support range requests" in str(error):  # fsspec's words, where it reads a shard piece by piece
                raise _no_ranges(url) from None
            if attempt == TRIES - 1:
                reason = " ".join(str(error).split()) or type(error).__name__
                raise DataError(
                    f"{url}: cannot be read, tried {TRIES} times ({reason}); try again later (fit: with --resume)"
                ) from None
            time.sleep(WAIT * 2**attempt)
    raise AssertionError


def _no_ranges(url: str) -> DataError:
    """To try again would fetch the whole shard again, for each image."""
    return DataError(f"{url}: the server does not answer range requests; use one that does, or copy the shards here")


def read_range(path: str, start: int, length: int) -> bytes:
    """Some bytes out of a remote file."""

    def fetch() -> bytes:
        system, name = _system(path)
        data = system.cat_file(name, start=start, end=start + length)
        if len(data) > length:
            raise _no_ranges(path)
        if len(data) < length:
            raise OSError(f"{len(data)} bytes instead of {length}")
        return data

    return tried(path, fetch)


def read_whole(path: str) -> bytes:
    if is_remote(path):
        return tried(path, lambda: _system(path)[0].cat_file(_system(path)[1]))
    try:
        with open_regular(path) as file:
            return file.read()
    except FileNotFoundError:
        raise DataError(f"{path}: no such file; is this the right folder, and is everything there?") from None
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror})") from None


@contextlib.contextmanager
def opened(path: str) -> Iterator[IO[bytes]]:
    """A file to be read from its beginning to its end."""
    if not is_remote(path):
        with open_regular(path) as file:
            yield file
        return
    system, name = _system(path)
    with system.open(name, "rb", block_size=8 << 20) as file:
        yield file


def identity(path: str) -> tuple[int, str]:
    """Size and date (or what stands for it) of a file: another one has others."""
    if not is_remote(path):
        stat = os.stat(path)
        return stat.st_size, str(stat.st_mtime_ns)

    def ask() -> tuple[int, str]:
        system, name = _system(path)
        facts = system.info(name)
        marks = (facts.get(key) for key in ("ETag", "etag", "LastModified", "mtime", "md5Hash"))
        return int(facts.get("size") or 0), str(next((mark for mark in marks if mark), ""))

    return tried(path, ask)


def tar_names(home: str, split: str) -> list[str]:
    """The shards of a split in a local folder: train-*.tar, or all of them in train/."""
    folder = Path(home)
    found = sorted(path.name for path in folder.glob(f"{split}-*.tar"))
    return found or sorted(f"{split}/{path.name}" for path in (folder / split).glob("*.tar"))
