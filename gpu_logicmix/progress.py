"""The one progress bar: what is going on, how far it is, how fast, and the time left."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, Task, TextColumn, TimeRemainingColumn
from rich.text import Text

from gpu_logicmix.errors import printable


class Speed(ProgressColumn):
    def __init__(self, unit: str = "images") -> None:
        super().__init__()
        self.unit = unit

    def render(self, task: Task) -> Text:
        speed = task.finished_speed or task.speed or 0
        return Text(f"{speed:,.0f} {self.unit}/s" if speed >= 10 or not speed else f"{speed:.2g} {self.unit}/s")


class Bar:
    """Call it with the number of things done: `bar(32)`."""

    def __init__(self, progress: Progress, total: float, what: str, done: float) -> None:
        self.progress = progress
        self.task = progress.add_task(printable(what), total=total, completed=done)

    def __call__(self, count: float = 1) -> None:
        self.progress.advance(self.task, count)

    def beside(self, total: float, what: str) -> Bar:
        """Another bar, below this one."""
        return Bar(self.progress, total, what, 0)

    def set(self, what: str | None = None, done: float | None = None, total: float | None = None) -> None:
        """Other words beside the bar, or another place on it."""
        words = {} if what is None else {"description": printable(what)}
        self.progress.update(self.task, completed=done, total=total, **words)


@contextlib.contextmanager
def progress_bar(
    total: float,
    what: str = "images",
    *,
    done: float = 0,
    unit: str | None = "images",
    console: Console | None = None,
    transient: bool = True,
    period: float = 60.0,
) -> Iterator[Bar]:
    """A bar that yields `bar(count)`. Where there is no terminal it prints nothing, and a terminal that goes away in
    the middle does not stop the work.

    unit: of the speed shown; None for no speed.
    period: seconds over which the speed is averaged.
    """
    console = console or Console()
    columns = [TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn()]
    columns += [Speed(unit)] if unit else [TextColumn("{task.percentage:>3.0f} %")]
    columns += [TimeRemainingColumn(), TextColumn("left")]
    progress = Progress(
        *columns,
        console=console,
        transient=transient,
        speed_estimate_period=period,
        disable=not console.is_terminal,
    )
    bar = Bar(progress, total, what, done)
    if progress.disable:  # `stop` of older versions of rich prints an empty line all the same
        yield bar
        return
    with contextlib.suppress(OSError, ValueError):  # the terminal is gone, or its file closed
        progress.start()
    try:
        yield bar
    finally:
        with contextlib.suppress(OSError, ValueError):
            progress.stop()
