"""What the dataset formats share: errors of one line, reading text, and paths that stay inside the dataset folder."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np


class DataError(ValueError):
    """Something is wrong with the data, or with how it was asked for: one line that names the place and the way out."""


class BadImage(DataError):
    """An image file that cannot be read."""


class Listing(NamedTuple):
    """What a format finds in a dataset folder."""

    root: Path
    paths: list[str]  # of the images, relative to `root`
    ids: list[str]  # what the dataset itself calls the images
    labels: np.ndarray  # int8 [N, C]
    categories: list[str]
    missing: list[int]  # images that are listed but not there


@contextlib.contextmanager
def written_whole(path: Path, mode: str = "w") -> Iterator[IO]:
    """A file to write into. Written aside, synced and renamed at the end: whoever opens `path` finds what was there
    before or all of the new, never a part; an error, such as a full disk, leaves the old one."""
    aside = path.with_name(path.name + ".tmp")
    try:
        with open(aside, mode, encoding=None if "b" in mode else "utf-8") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(aside, path)
    except BaseException:
        with contextlib.suppress(OSError):
            aside.unlink(missing_ok=True)
        raise
    if os.name == "posix":
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def write_whole(path: Path, text: str) -> None:
    with written_whole(path) as file:
        file.write(text)


@contextlib.contextmanager
def waited_lock(folder: Path) -> Iterator[None]:
    """One process at a time; the others wait. The system lets go of the lock when a process dies, however it dies."""
    try:
        import fcntl
    except ImportError:  # Windows: two at once are up to the user
        yield
        return
    with open(folder / "lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def read_text(path: Path) -> str:
    """The text of an annotation file, which must be there and not be empty."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise DataError(f"{path}: no such file; is this the right folder, and is everything unpacked?") from None
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: not UTF-8 text ({error.reason} at byte {error.start}); save it as UTF-8") from None
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror})") from None
    if not text.strip():
        raise DataError(f"{path}: the file is empty; was it downloaded or unpacked to the end?")
    return text


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
    finally:
        if collecting:
            gc.enable()


def read_names(path: Path) -> dict[str, int]:
    """The first word of each line, with the number of the line. Blank lines do not count; no name may come twice."""
    names: dict[str, int] = {}
    for number, line in enumerate(read_text(path).splitlines(), 1):
        if not line.strip():
            continue
        name = line.split()[0]
        if name in names:
            raise DataError(f"{path}, line {number}: {name!r} is in line {names[name]} already; remove one of the two")
        names[name] = number
    return names


def check_paths(folder: Path, names: Sequence[str], where: Callable[[int], str]) -> list[int]:
    """Refuse names that lead out of `folder`, also by a symbolic link. Returns which of the files are missing.

    `folder` is the user's choice and may itself be a link; `names` come from annotations, and nobody has read those.
    One listing of each folder instead of a question per file: 82,000 images take a fraction of a second.
    """
    home = os.path.realpath(folder)
    listings: dict[str, dict[str, bool]] = {}
    missing = []
    for i, name in enumerate(names):
        if not name:
            raise DataError(f"{where(i)}: the image has no file name")
        if (
            "\0" in name
            or os.path.isabs(name)
            or re.match(r"[\\/]|[A-Za-z]:", name)
            or ".." in re.split(r"[\\/]", name)
        ):
            raise DataError(
                f"{where(i)}: image path {name!r} leads out of the dataset; write it relative to {folder}, without '..'"
            )
        parent, leaf = os.path.split(name)
        if parent not in listings:
            listings[parent] = _links(os.path.join(folder, parent))
            _check_inside(home, os.path.join(folder, parent), where(i))
        is_link = listings[parent].get(leaf)
        if is_link:
            _check_inside(home, os.path.join(folder, name), where(i))
        if is_link is not False and not os.path.isfile(os.path.join(folder, name)):
            missing.append(i)
    return missing


def _links(folder: str) -> dict[str, bool]:
    """The names in a folder, and whether each is a symbolic link."""
    try:
        with os.scandir(folder) as entries:
            return {entry.name: entry.is_symlink() for entry in entries}
    except OSError:
        return {}


def _check_inside(home: str, path: str, where: str) -> None:
    real = os.path.realpath(path)
    if real != home and not real.startswith(home.rstrip(os.sep) + os.sep):
        raise DataError(
            f"{where}: {path} is a link that leads out of the dataset, to {real}; put the file itself there"
        )


def check_choice(name: str, value: str, choices: Sequence[str]) -> None:
    if value not in choices:
        raise DataError(f"{name}={value!r}: must be {' or '.join(choices)}")
