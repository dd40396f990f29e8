"""What the dataset formats share: what one finds, lists of names, and paths that stay inside the dataset folder."""

from __future__ import annotations

import os
import re
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from gpu_logicmix.data.sparse import SparseLabels
from gpu_logicmix.errors import BadImage, DataError
from gpu_logicmix.files import read_json, read_text

__all__ = [
    "BadImage",
    "DataError",
    "Listing",
    "any_folder",
    "check_choice",
    "check_paths",
    "read_json",
    "read_names",
    "read_text",
    "repeated",
]


IGNORES_CASE = sys.platform in ("darwin", "win32")  # there, a name that is not listed may be a file all the same


class Listing(NamedTuple):
    """What a format finds in a dataset folder."""

    root: Path
    paths: Sequence[str]  # of the images, relative to `root`
    ids: Sequence[str]  # what the dataset itself calls the images
    labels: np.ndarray | SparseLabels  # int8 [N, C]
    categories: list[str]
    missing: list[int]  # images that are listed but not there
    warnings: list[str] = []  # noqa: RUF012  # what is odd but does not stop anything
    follow: bool = True  # False: paths were not checked, so symbolic links are not followed
    source: Callable[[int], Any] | None = None  # of images that are not in files: from size to source


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
    odd = re.compile(r"^$|\.\.|[\0\\:]|^/").search
    listings: dict[str, dict[str, bool] | None] = {}
    missing = []
    for i, name in enumerate(names):
        if odd(name):
            _check_name(folder, name, where(i))
        parent, _, leaf = name.rpartition("/")
        if parent not in listings:
            listings[parent] = _links(os.path.join(folder, parent))
            _check_inside(home, os.path.join(folder, parent), where, i)
        listing = listings[parent]
        is_link = listing.get(leaf) if listing is not None else None
        if is_link is False:
            continue
        if is_link is None and listing is not None and not IGNORES_CASE:
            missing.append(i)
            continue
        if is_link:
            _check_inside(home, os.path.join(folder, name), where, i)
        if not os.path.isfile(os.path.join(folder, name)):
            missing.append(i)
    return missing


def _check_name(folder: Path, name: str, where: str) -> None:
    if not name:
        raise DataError(f"{where}: the image has no file name")
    if "\0" in name or re.match(r"[\\/]|[A-Za-z]:", name) or ".." in re.split(r"[\\/]", name):
        raise DataError(
            f"{where}: image path {name!r} leads out of the dataset; write it relative to {folder}, without '..' "
            "(csv: or give the folder of the images as the option root=DIR)"
        )


def _links(folder: str) -> dict[str, bool] | None:
    """The names in a folder, and whether each is a symbolic link; None if it cannot be listed."""
    try:
        with os.scandir(folder) as entries:
            return {entry.name: entry.is_symlink() for entry in entries}
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except OSError:
        return None


def _check_inside(home: str, path: str, where: Callable[[int], str], i: int) -> None:
    real = os.path.realpath(path)
    if real != home and not real.startswith(home.rstrip(os.sep) + os.sep):
        raise DataError(
            f"{where(i)}: {path} is a link that leads out of the dataset, to {real}; put the file itself there"
        )


def check_choice(name: str, value: str, choices: Sequence[str]) -> None:
    if value not in choices:
        raise DataError(f"{name}={value!r}: must be {' or '.join(choices)}")


def any_folder(root: Path, names: Sequence[str]) -> bool:
    """Whether a folder of any of these files is there. A single file says less: it may be missing."""
    return any((root / home).is_dir() for home in {name.rpartition("/")[0] for name in names})


def repeated(names: Sequence[str]) -> str | None:
    """The first name that is there more than once, also among millions; None if there is none."""
    if len(set(names)) == len(names):  # the common case, in half the time
        return None
    return next(name for name, count in Counter(names).items() if count > 1)
