"""Word vectors of category names from a file, for heads that use them.

Pennington et al., "GloVe: Global Vectors for Word Representation", EMNLP 2014, https://nlp.stanford.edu/projects/glove
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from gpu_logicmix.errors import DataError, printable


def read_word_vectors(path: str | os.PathLike, categories: Sequence[str]) -> Tensor:
    """[C, E] float32, in the order of `categories`.

    path: a .npy file with a row for each category in their order, or a text file as GloVe's: a word and its numbers in
        each line. There a category is looked up by its name, exactly and in lower case; else by the words it consists
        of, whose vectors are averaged.

    Raises DataError, a ValueError, that lists all names that are not in the file.
    """
    path = Path(path)
    if not path.is_file():
        raise DataError(f"word_vectors={printable(path)!r}: no such file")
    vectors = _from_npy(path, len(categories)) if path.suffix == ".npy" else _from_text(path, categories)
    if not np.isfinite(vectors).all():
        raise DataError(f"{printable(path)}: a word vector is non-finite")
    return torch.from_numpy(vectors.astype(np.float32))


def _from_npy(path: Path, categories: int) -> np.ndarray:
    try:
        vectors = np.load(path, allow_pickle=False)
    except (ValueError, OSError, EOFError) as error:
        raise DataError(f"{printable(path)}: not a .npy file of numbers ({printable(error)})") from None
    if vectors.ndim != 2 or len(vectors) != categories or not np.issubdtype(vectors.dtype, np.floating):
        raise DataError(
            f"{printable(path)}: {vectors.dtype} {list(vectors.shape)}, not floating-point numbers "
            f"[{categories}, E], a row for each category"
        )
    return vectors


def _from_text(path: Path, categories: Sequence[str]) -> np.ndarray:
    wanted = {form for name in categories for word in (name, *_words(name)) for form in (word, word.lower())}
    found = _look_up(path, wanted)

    def vector(name: str) -> np.ndarray | None:
        return found.get(name, found.get(name.lower()))

    rows: list[np.ndarray] = []
    missing: list[str] = []
    for name in categories:
        whole = vector(name)
        parts = [whole] if whole is not None else [vector(word) for word in _words(name)]
        there = [part for part in parts if part is not None]
        if there and len(there) == len(parts):
            rows.append(np.mean(there, axis=0))
        else:
            missing.append(printable(name))
    if missing:
        raise DataError(
            f"{printable(path)}: {len(missing)} of {len(categories)} category names are not in it: "
            f"{', '.join(missing)}; give their vectors as a .npy file in the order of the categories"
        )
    return np.stack(rows)


def _words(name: str) -> list[str]:
    return [word for word in re.split(r"[\W_]+", name) if word]


def _look_up(path: Path, wanted: set[str]) -> dict[str, np.ndarray]:
    """Vectors of these words. The file may have millions of lines: only those that are wanted are taken apart."""
    names = {word.encode() for word in wanted}
    found: dict[str, np.ndarray] = {}
    length = None
    with open(path, "rb") as lines:
        for number, line in enumerate(lines, 1):
            word, _, rest = line.partition(b" ")
            if number == 1 and len(line.split()) == 2:  # word2vec's text format: how many, how long
                continue
            if word not in names:
                continue
            try:
                vector = np.array(rest.split(), dtype=np.float64)
            except ValueError:
                continue  # a token with spaces, of which this is the first part
            if length is None:
                length = len(vector)
            if len(vector) != length or not length:
                raise DataError(f"{printable(path)}, line {number}: {len(vector)} numbers, not {length} as before")
            found.setdefault(word.decode(), vector)
    return found
