"""Millions of names in a few bytes each, where a list of texts would take a gigabyte."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, overload

import numpy as np

_DIGITS = np.full(256, 255, dtype=np.uint8)
_DIGITS[[ord(c) for c in "0123456789abcdef"]] = np.arange(16)


class HexNames(Sequence[str]):
    """Names of 16 hex digits, as OpenImages has them, 8 bytes each; with something before and after."""

    def __init__(self, numbers: np.ndarray, before: str = "", after: str = "") -> None:
        self.numbers, self.before, self.after = np.asarray(numbers, dtype=np.uint64), before, after

    def __len__(self) -> int:
        return len(self.numbers)

    @overload
    def __getitem__(self, at: int) -> str: ...
    @overload
    def __getitem__(self, at: slice) -> list[str]: ...
    def __getitem__(self, at: Any) -> Any:
        if isinstance(at, slice):
            before, after = self.before, self.after
            return [f"{before}{number:016x}{after}" for number in self.numbers[at].tolist()]
        return f"{self.before}{int(self.numbers[at]):016x}{self.after}"

    def __iter__(self) -> Iterator[str]:
        for start in range(0, len(self), 65536):
            yield from self[start : start + 65536]

    def take(self, rows: np.ndarray) -> HexNames:
        return HexNames(self.numbers[rows], self.before, self.after)


def hex_numbers(text: np.ndarray) -> np.ndarray | None:
    """uint8 [N, 16] of ASCII to uint64 [N]; None if something in it is not a hex digit."""
    digits = _DIGITS[text]
    if (digits == 255).any():
        return None
    pairs = (digits[:, 0::2] << 4) | digits[:, 1::2]
    return np.ascontiguousarray(pairs).view(">u8")[:, 0].astype(np.uint64)


def blocks_of(names: Sequence[str], rows: Sequence[int] | np.ndarray | None = None) -> Iterator[bytes]:
    """The names one after the other, some ten thousand at a time, each ended by a zero: for checksums."""
    if rows is not None:
        names = names.take(np.asarray(rows)) if isinstance(names, HexNames) else [names[int(row)] for row in rows]
    for start in range(0, len(names), 65536):
        part = names[start : start + 65536]
        yield ("\0".join(part) + "\0").encode("utf-8", "surrogatepass")
