"""Files that are whole or not there, locks, and text, CSV and JSON whose mistakes end in one line.

Run folders, caches and datasets may come from somebody else. So nothing here follows a link that was put where a file
of ours goes: temporary files are created anew under names nobody can guess, and locks and logs must be plain files.
"""

from __future__ import annotations

import contextlib
import csv
import errno
import gc
import json
import os
import secrets
import stat
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, Any

from gpu_logicmix.errors import DataError

try:
    import fcntl
except ImportError:  # Windows: two processes at once are up to the user
    fcntl = None  # type: ignore[assignment]

_STALE_SECONDS = 60.0  # a temporary file of this age that no process holds was left by a kill


def _flags(*names: str) -> int:
    """Of `os.open`, where the system has them."""
    return sum(getattr(os, name, 0) for name in (*names, "O_CLOEXEC", "O_BINARY"))


# -------------------------------------------------------------------------------------------------------------- writing
@contextlib.contextmanager
def written_whole(path: Path, mode: str = "w") -> Iterator[IO]:
    """A file to write into. Written aside, synced and renamed at the end: whoever opens `path` finds what was there
    before or all of the new, never a part; an error, such as a full disk, leaves the old one."""
    path = Path(path)
    _remove_stale(path)
    aside = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")
    handle = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _flags("O_NOFOLLOW"), 0o666)
    try:
        with open(handle, mode, encoding=None if "b" in mode else "utf-8") as file:
            if fcntl is not None:
                with contextlib.suppress(OSError):  # held as long as this process lives
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(aside, path)
    except BaseException:
        with contextlib.suppress(OSError):
            aside.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def write_whole(path: Path, text: str) -> None:
    with written_whole(path) as file:
        file.write(text)


def check_out(path: Path | None, option: str = "--out") -> None:
    """Whether a file can be written there: asked before the work, not after it."""
    if path is not None and path.is_dir():
        raise ValueError(f"{option} {path}: is a folder; name a file in it")
    if path is not None and not path.parent.is_dir():
        raise ValueError(f"{option} {path}: there is no folder {path.parent}; create it first")


def sync_folder(folder: Path) -> None:
    """What was created, renamed or removed in a folder stays so, also after a power cut."""
    if os.name == "posix":
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def _remove_stale(path: Path) -> None:
    """Remove temporary files for `path` that a killed process has left."""
    now = time.time()
    for old in path.parent.glob(f".{glob_escaped(path.name)}.*.tmp"):
        with contextlib.suppress(OSError):
            if now - old.lstat().st_mtime < _STALE_SECONDS:
                continue
            if fcntl is not None and stat.S_ISREG(old.lstat().st_mode):
                with open_plain(old, "r+b") as file:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            old.unlink()


def glob_escaped(name: str) -> str:
    return "".join(f"[{c}]" if c in "*?[" else c for c in name)


def open_plain(path: Path, mode: str = "a") -> IO:
    """Open a file of ours ("a", "r", "r+", "a+", with "b" for bytes): a link in its place is not followed, and what is
    not a plain file (a FIFO, a device) is refused instead of waited for."""
    kinds = {"r": os.O_RDONLY, "r+": os.O_RDWR, "a": os.O_WRONLY | os.O_APPEND | os.O_CREAT}
    kinds["a+"] = os.O_RDWR | os.O_APPEND | os.O_CREAT
    flags = kinds[mode.replace("b", "")] | _flags("O_NOFOLLOW", "O_NONBLOCK")
    try:
        handle = os.open(path, flags, 0o666)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.EMLINK):
            raise OSError(error.errno, "is a symbolic link, which is not followed; remove it", str(path)) from None
        raise
    return _plain(handle, path, mode)


def open_regular(path: str | Path) -> IO[bytes]:
    """Open a file of somebody else's for reading. Links are followed; what is not a plain file is refused."""
    return _plain(os.open(path, os.O_RDONLY | _flags("O_NONBLOCK")), path, "rb")


def _plain(handle: int, path: str | Path, mode: str) -> IO:
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise OSError(errno.EINVAL, "not a plain file", str(path))
    return open(handle, mode, encoding=None if "b" in mode else "utf-8")


@contextlib.contextmanager
def waited_lock(folder: Path, name: str = "lock") -> Iterator[None]:
    """One process at a time; the others wait. The system lets go of the lock when a process dies, however it dies."""
    if fcntl is None:
        yield
        return
    with open_plain(Path(folder) / name, "a+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


# -------------------------------------------------------------------------------------------------------------- reading
def at_home(path: str | Path) -> Path:
    """A path with `~` and `~user` replaced."""
    try:
        return Path(path).expanduser()
    except RuntimeError:
        raise DataError(f"{path}: there is no such user; write the whole path") from None


def read_text(path: Path) -> str:
    """The text of an annotation file, which must be there and not be empty."""
    try:
        with open_regular(path) as file:
            text = file.read().decode("utf-8-sig")
    except FileNotFoundError:
        raise DataError(f"{path}: no such file; is this the right folder, and is everything unpacked?") from None
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: not UTF-8 text ({error.reason} at byte {error.start}); save it as UTF-8") from None
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror})") from None
    if not text.strip():
        raise DataError(f"{path}: the file is empty; was it downloaded or unpacked to the end?")
    return text


def csv_rows(file: str | Path, lines: Iterable[str], **options: Any) -> Iterator[tuple[int, list[str]]]:
    """Of each row of a CSV file that is not blank, the number of its last line, and its cells. What `csv` refuses, such
    as a cell of more than 131,072 characters, or in Python 3.10 a NUL, is a DataError."""
    reader = csv.reader(lines, **options)
    try:
        for cells in reader:
            if cells:
                yield reader.line_num, cells
    except csv.Error as error:
        raise DataError(f"{file}, line {reader.line_num}: not a CSV row ({error})") from None


def read_json(path: Path) -> Any:
    text = read_text(path)
    collecting = gc.isenabled()
    gc.disable()  # JSON holds no cycles, and looking for them takes half the time of COCO's 300 MB
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise DataError(
            f"{path}: invalid JSON in line {error.lineno}, column {error.colno} ({error.msg}); "
            "was it downloaded to the end?"
        ) from None
    except RecursionError:
        raise DataError(f"{path}: invalid JSON (lists or objects nested too deeply); is this the right file?") from None
    except ValueError as error:  # a number of thousands of digits
        raise DataError(f"{path}: invalid JSON ({str(error).partition(';')[0]}); is this the right file?") from None
    finally:
        if collecting:
            gc.enable()
