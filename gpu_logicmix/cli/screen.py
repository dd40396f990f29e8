"""What reaches the terminal, through a console that cannot stop a run."""

from __future__ import annotations

import contextlib
import os
import sys
import warnings
from collections.abc import Iterator
from typing import Any

from rich.console import Console

from gpu_logicmix.errors import printable, shown


class Output:
    """sys.stdout (or sys.stderr), whatever it is at the moment, without its errors.

    The terminal may be closed and the reader of a pipe may go away (`fit | head`) while a run trains. The rest of the
    output is then dropped and the run continues.
    """

    def __init__(self, name: str = "stdout") -> None:
        self._name, self._lost = name, False

    @property
    def _stream(self) -> Any:
        stream = getattr(sys, self._name)
        # While a bar is shown, rich puts a proxy there that prints through its console: through this file, endlessly.
        return getattr(stream, "rich_proxied_file", stream)

    def write(self, text: str) -> int:
        if not self._lost and self._stream is not None:
            try:
                self._stream.write(text)
            except UnicodeEncodeError:  # a terminal that is not UTF-8
                encoding = self._stream.encoding or "ascii"
                self._stream.write(text.encode(encoding, "replace").decode(encoding))
            except (OSError, ValueError):  # ValueError: the file was closed
                self._lost = True
        return len(text)

    def flush(self) -> None:
        if not self._lost and self._stream is not None:
            try:
                self._stream.flush()
            except (OSError, ValueError):
                self._lost = True

    def isatty(self) -> bool:
        with contextlib.suppress(OSError, ValueError, AttributeError):
            return self._stream.isatty()
        return False

    def fileno(self) -> int:
        return self._stream.fileno()

    @property
    def encoding(self) -> str:
        return getattr(self._stream, "encoding", None) or "utf-8"


def make_console(**options: Any) -> Console:
    """A console on standard output that never raises."""
    return Console(file=Output(), **options)


console = make_console()


def say(text: str, style: str | None = None) -> None:
    """A line as it is, not wrapped; from data only through `printable`."""
    console.print(text, style=style, markup=False, highlight=False, soft_wrap=True)


@contextlib.contextmanager
def warnings_as_lines(kind: type[Warning]) -> Iterator[None]:
    """Warnings of a kind, as lines without the place in the code."""
    with warnings.catch_warnings():
        warnings.simplefilter("always", kind)
        before = warnings.showwarning

        def show(message: Any, category: type[Warning], *place: Any, **rest: Any) -> None:
            if issubclass(category, kind):
                say(printable(message), "yellow")
            else:
                before(message, category, *place, **rest)

        warnings.showwarning = show
        yield


def settle_output() -> None:
    """Before the process ends: what cannot be written any more must not become an error of the interpreter."""
    for stream in (sys.stdout, sys.stderr):
        try:
            if stream is not None:
                stream.flush()
        except (OSError, ValueError):
            with contextlib.suppress(OSError, ValueError):
                nowhere = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nowhere, stream.fileno())
                os.close(nowhere)


def error(text: str) -> None:
    """A line on standard error."""
    Console(file=Output("stderr"), soft_wrap=True).print(f"[bold red]error:[/] {shown(text)}", highlight=False)
