"""The errors that end in one line on the command line, and text from data made safe to show."""

from __future__ import annotations

import re


class DataError(ValueError):
    """Something is wrong with the data, or with how it was asked for: one line with the place and the way out."""


class BadImage(DataError):
    """An image file that cannot be read."""


class RunError(ValueError):
    """A run that cannot start or go on: one line that says why and what to do."""


# Control characters (a terminal obeys them), marks that turn the direction of writing, and halves of surrogate pairs
# (names of files that are not UTF-8), which cannot be printed at all.
_UNPRINTABLE = re.compile("[\x00-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff\ufeff]")
_TAG = re.compile(r"(\\*)(\[[a-z#/@][^\[]*?\]|\[)")


def printable(text: object) -> str:
    """Text from data as one line that does nothing to a terminal: what is not printable becomes \\x1b or \\u202e."""

    def code(match: re.Match) -> str:
        number = ord(match.group())
        return f"\\x{number:02x}" if number < 256 else f"\\u{number:04x}"

    return _UNPRINTABLE.sub(code, str(text).expandtabs(1).replace("\n", "\\n"))


def shown(text: object) -> str:
    """Text from data (names of categories, files, runs; messages that hold them) as it may stand in Rich markup:
    printable, and with no tag in it, whatever comes before or after."""

    def escaped(match: re.Match) -> str:
        slashes, bracket = match.groups()
        return f"{slashes}{slashes}\\{bracket}"

    text = _TAG.sub(escaped, printable(text))
    trailing = len(text) - len(text.rstrip("\\"))
    return text + "\\" * (trailing % 2)
