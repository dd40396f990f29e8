"""What reaches a run from outside: signals, and a terminal that goes away."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from rich.console import Console

SIGNALS = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)]


class Interrupted(BaseException):
    """The run was asked to stop. Not an Exception, as KeyboardInterrupt is not one: it may come anywhere."""

    def __init__(self, signum: int, words: str, saved: bool = False) -> None:
        super().__init__(words)
        self.signum, self.saved = signum, saved


class StopSignals:
    """SIGTERM, Ctrl-C, and SIGHUP of a terminal that closes. While `patient` they are noted, and acted upon when there
    is something to save; a second one is acted upon at once. At other times they end the run at once: what there is to
    save has been saved."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.signum, self.patient = folder, 0, False

    def __enter__(self) -> StopSignals:
        self.before = {}
        if threading.current_thread() is threading.main_thread():
            for signum in SIGNALS:
                # Started with nohup: the user wants the run to survive the terminal.
                if signum == getattr(signal, "SIGHUP", None) and signal.getsignal(signum) == signal.SIG_IGN:
                    continue
                self.before[signum] = signal.signal(signum, self._note)
        return self

    def __exit__(self, *_: Any) -> None:
        for signum, handler in self.before.items():
            signal.signal(signum, handler)

    def _note(self, signum: int, frame: Any) -> None:
        if self.signum or not self.patient:
            self.stop(signum, "stopped")
        self.signum = signum

    def stop(self, signum: int, words: str, saved: bool = False) -> None:
        """saved: just now, perhaps by another process, whose file need not be there yet."""
        saved = saved or (self.folder / "last.pt").exists()
        resume = f"; resume with: gpu-logicmix fit --out {self.folder} --resume"
        raise Interrupted(signum, words + (resume if saved else " before the first checkpoint"), saved)


class _Quiet:
    """A file that is written to as long as it takes it."""

    def __init__(self, file: Any) -> None:
        self._file, self._lost = file, False

    def write(self, text: str) -> int:
        return self._try(lambda: self._file.write(text)) or 0

    def flush(self) -> None:
        self._try(self._file.flush)

    def _try(self, call: Callable[[], Any]) -> Any:
        if self._lost:
            return None
        try:
            return call()
        except (OSError, ValueError):  # a closed pipe or terminal; a closed file
            self._lost = True
            with contextlib.suppress(OSError, ValueError, AttributeError):
                # What is still in the buffer must not raise when the process ends.
                os.dup2(os.open(os.devnull, os.O_WRONLY), self._file.fileno())
        return None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


@contextlib.contextmanager
def unbreakable(console: Console) -> Iterator[Console]:
    """Printing can never stop a run: `fit | head`, a terminal that is closed, a full disk under `fit > file`."""
    if isinstance(console.file, _Quiet):
        yield console
        return
    before = console._file  # None: whatever sys.stdout is at the time
    console.file = _Quiet(console.file)
    try:
        yield console
    finally:
        console._file = before
