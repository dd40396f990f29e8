"""tar:PATH, images and labels in WebDataset shards, read by random access: shuffled, resumed and divided among
processes as files are. PATH is a folder, or an address that fsspec can read ranges of (http://, s3://, ...).

    PATH/train-00000.tar      members 000000.jpg and 000000.json, ...; `gpu-logicmix pack` writes them
    PATH/train.json           {"shards": ["train-00000.tar", ...], "categories": [...]}; local folders can do without it

The JSON of a sample names categories (or gives their numbers in the list of categories):
    {"labels": ["cat", "dog"]}                         these are present, the others absent (option others=unknown)
    {"present": [...], "absent": [...]}                the others are unknown
    {"present": [...], "unknown": [...]}               the others are absent
An index (where each image is, its checksum, its labels) is made once, several shards at a time, and kept (see
`index.py`); an interrupted one goes on with the shards that are not done. Each image is compared with its checksum.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import tarfile
import zlib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from gpu_logicmix.data.files import Listing, check_choice, repeated
from gpu_logicmix.data.folder import SUFFIXES
from gpu_logicmix.data.images import decode_image
from gpu_logicmix.data.index import load_index, save_index
from gpu_logicmix.data.remote import identity, is_remote, joined, opened, read_range, read_whole, tar_names, tried
from gpu_logicmix.data.sparse import SparseLabels
from gpu_logicmix.data.table import check_categories
from gpu_logicmix.errors import BadImage, DataError
from gpu_logicmix.files import open_regular
from gpu_logicmix.progress import progress_bar

THREADS = 8  # shards indexed at a time
HELD = 200  # shards held open; the others are opened for each image, as a process may have only some 1,000 files open


class ShardSource:
    """Images in shards: of each, which shard, where in it, how long, and a checksum."""

    def __init__(self, home: str, shards: list[str], marks: list, places: np.ndarray, size: int) -> None:
        self.root, self.shards, self.marks, self.places, self.size = home, shards, marks, places, size
        self._open: dict[int, Any] = {}

    def __getstate__(self) -> dict:
        return {**self.__dict__, "_open": {}}

    def read(self, index: int) -> Tensor:
        data, name = self.bytes_of(index)
        return decode_image(io.BytesIO(data), name, self.size)

    def bytes_of(self, index: int) -> tuple[bytes, str]:
        """The image as it is in the shard, and words that say where."""
        shard, offset, length, crc = self.places[index].tolist()
        path = joined(self.root, self.shards[shard])
        name = f"{path}, bytes {offset} to {offset + length}"
        if is_remote(path):
            data = read_range(path, offset, length)
        else:
            try:
                held = self._open.get(shard)
                if held is None and len(self._open) < HELD:
                    held = self._open.setdefault(shard, open_regular(path))  # several threads may be here at once
                with contextlib.nullcontext(held) if held else open_regular(path) as file:
                    data = os.pread(file.fileno(), length, offset)
            except OSError as error:
                raise BadImage(f"{path}: cannot be read ({error.strerror}); copy the shard again") from None
        if len(data) != length or zlib.crc32(data) != crc:
            raise BadImage(f"{name}: not the image that was there when the index was made; copy the shard again")
        return data, name

    def parts(self, rows: Sequence[int] | np.ndarray | None = None) -> dict[str, str]:
        chosen = self.places if rows is None else self.places[np.asarray(rows, dtype=np.int64)]
        shards = np.unique(chosen[:, 0]).tolist()
        texts = {"files": str([self.shards[s] for s in shards]).encode() + np.ascontiguousarray(chosen).tobytes()}
        texts["file sizes"] = str([self.marks[s][0] for s in shards]).encode()
        texts["file dates"] = str([self.marks[s][1] for s in shards]).encode()
        return {name: hashlib.sha256(text).hexdigest() for name, text in texts.items()}


def list_tar(home: str, split: str, *, others: str = "absent") -> Listing:
    """others: with {"labels": [...]}, what the categories are that a sample does not name: "absent" or "unknown"."""
    check_choice("others", others, ("absent", "unknown"))
    home = str(home)
    shards, fixed = _shards(home, split)
    marks = [identity_of(joined(home, shard)) for shard in shards]
    with ThreadPoolExecutor(THREADS) as pool, progress_bar(len(shards), "indexing", unit="shards") as advance:
        jobs = [pool.submit(_indexed, joined(home, s), mark) for s, mark in zip(shards, marks, strict=True)]
        parts = []
        for job in jobs:
            parts.append(job.result())
            advance()
    places, ids, notes = [], [], []
    for number, (arrays, facts) in enumerate(parts):
        places.append(np.concatenate((np.full((len(arrays["places"]), 1), number), arrays["places"]), 1))
        ids += facts["ids"]
        notes += facts["labels"]
    if not ids:
        raise DataError(f"{home}: no images in the shards of {split!r}")
    if (twice := repeated(ids)) is not None:
        raise DataError(f"{home}: sample {twice!r} is in the shards of {split!r} twice; remove one of the two")
    named = (name for note in notes for names in note.values() for name in names)
    categories = fixed or sorted({name for name in named if isinstance(name, str)})
    if not fixed:
        check_categories(categories, Path(home))
    labels = _labels(notes, ids, categories, others, home)
    every = np.concatenate(places).astype(np.int64)
    source = lambda size: ShardSource(home, shards, marks, every, size)  # noqa: E731
    return Listing(Path(home), ids, ids, labels, categories, [], source=source)


def identity_of(path: str) -> tuple[int, str]:
    try:
        return identity(path)
    except OSError:
        raise DataError(f"{path}: no such file, but it is in the list of shards; copy it there") from None


def _shards(home: str, split: str) -> tuple[list[str], list[str]]:
    """Names of the shards, and of the categories if there is a list of them."""
    manifest = joined(home, f"{split}.json")
    if not is_remote(home) and not os.path.exists(manifest):
        shards = tar_names(home, split)
        if not shards:
            raise DataError(f"{home}: no {split}.json, {split}-*.tar or {split}/*.tar; gpu-logicmix pack writes some")
        return shards, []
    try:
        facts = json.loads(read_whole(manifest))
        shards, categories = facts["shards"], facts["categories"]
        good = all(isinstance(x, list) and all(isinstance(y, str) for y in x) for x in (shards, categories))
        if not good or not shards or len(set(categories)) != len(categories):
            raise ValueError
        if any(".." in name.split("/") or name.startswith("/") or "\\" in name or ":" in name for name in shards):
            raise ValueError
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        if isinstance(error, DataError):
            raise
        raise DataError(f"{manifest}: must be {{'shards': [names], 'categories': [different names]}}") from None
    return shards, categories


def _indexed(path: str, mark: tuple[int, str]) -> tuple[dict[str, np.ndarray], dict]:
    """The index of a shard, kept or made."""
    place = path if is_remote(path) else os.path.abspath(path)
    key = f"shard-{hashlib.sha256(json.dumps([3, place, mark]).encode()).hexdigest()[:16]}"
    found = load_index(key)
    if found is None:
        found = tried(path, lambda: _read_shard(path)) if is_remote(path) else _read_shard(path)
        save_index(key, *found)
    return found


def _read_shard(path: str) -> tuple[dict[str, np.ndarray], dict]:
    """Read all of a shard: place and checksum of each image, and what its JSON says."""
    images: dict[str, tuple[int, int, int]] = {}
    labels: dict[str, dict] = {}
    try:
        with opened(path) as file, tarfile.open(fileobj=file, mode="r|" if is_remote(path) else "r:") as shard:
            for member in shard:
                if not member.isfile():
                    continue
                folder, slash, leaf = member.name.removeprefix("./").rpartition("/")
                stem, _, suffix = leaf.partition(".")
                key = folder + slash + stem
                stream = shard.extractfile(member)
                if f".{suffix.lower()}" in SUFFIXES and stream is not None:
                    if key in images:
                        raise DataError(f"{path}: two images are called {key!r}; remove one of the two")
                    images[key] = member.offset_data, member.size, zlib.crc32(stream.read())
                elif suffix == "json" and stream is not None:
                    labels[key] = _note(stream.read(), f"{path}, {member.name}")
    except (tarfile.TarError, EOFError, UnicodeError) as error:
        raise DataError(f"{path}: not a whole tar file ({error}); copy it again") from None
    except OSError as error:
        if is_remote(path):
            raise
        raise DataError(f"{path}: cannot be read ({error.strerror or error}); copy it again") from None
    for key in images:
        if key not in labels:
            raise DataError(f"{path}: image {key!r} has no {key}.json with its labels")
    for key in labels:
        if key not in images:
            raise DataError(f"{path}: {key}.json has no image beside it (looked for {' '.join(sorted(SUFFIXES))})")
    places = np.array(list(images.values()), dtype=np.int64).reshape(-1, 3)
    ids = [labels[key].pop("id", key) for key in images]
    return {"places": places}, {"ids": ids, "labels": [labels[key] for key in images]}


def _note(text: bytes, where: str) -> dict:
    """The labels of a sample: lists of names or numbers."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        raise DataError(f"{where}: invalid JSON; write the shard again") from None
    fields = [name for name in ("labels", "present", "absent", "unknown") if isinstance(found, dict) and name in found]
    for name in fields:
        if not isinstance(found[name], list) or not all(type(x) in (str, int) for x in found[name]):
            raise DataError(f"{where}: {name!r} must be a list of names or numbers of categories")
    if fields not in (["labels"], ["present"], ["present", "absent"], ["present", "unknown"]):
        raise DataError(f"{where}: must have 'labels', or 'present' with 'absent' or 'unknown'")
    note = {name: found[name] for name in fields}
    return {**note, "id": found["id"]} if isinstance(found.get("id"), str) else note


def _labels(
    notes: list[dict], ids: list[str], categories: list[str], others: str, home: str
) -> np.ndarray | SparseLabels:
    column: dict[Any, int] = {name: c for c, name in enumerate(categories)} | dict(enumerate(range(len(categories))))
    closed = ["unknown" in note or ("labels" in note and others == "absent") for note in notes]  # all else is absent
    dense = np.full((len(notes), len(categories)), -1, dtype=np.int8) if any(closed) else None
    cells: list[tuple[int, int, int]] = []
    for row, note in enumerate(notes):
        for names in note.values():
            for name in names:
                if name not in column:
                    raise DataError(f"{home}, sample {ids[row]!r}: category {name!r} is not in the list of categories")
        at = {key: [column[name] for name in names] for key, names in note.items()}
        present = at.get("labels", at.get("present", []))
        if dense is None:
            cells += [(row, c, 1) for c in present] + [(row, c, 0) for c in at.get("absent", [])]
            continue
        dense[row] = 0 if closed[row] else -1
        dense[row, at.get("absent", [])] = 0
        dense[row, at.get("unknown", [])] = -1
        dense[row, present] = 1
    if dense is not None:
        return dense
    rows, columns, values = np.array(cells, dtype=np.int64).reshape(-1, 3).T
    return SparseLabels.of_cells(rows, columns, values, (len(notes), len(categories)), conflict="present")
