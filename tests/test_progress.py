"""progress.py: the bar moves, says nothing where nobody looks, and never stops the work."""

import io

from rich.console import Console

from gpu_logicmix.progress import progress_bar


def test_bar_on_a_terminal():
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=120)
    with progress_bar(10, "decoding [x] \x1b[2J", done=4, console=console, transient=False) as bar:
        bar()
        bar(5)
        assert bar.progress.tasks[0].completed == 10
        bar.set("done", 3, total=20)
        assert (bar.progress.tasks[0].completed, bar.progress.tasks[0].total) == (3, 20)
        bar.set("[now] \x1b[2J")
    text = out.getvalue()
    assert "[now] \\x1b[2J" in text
    assert "3/20" in text
    assert "images/s" in text


def test_nothing_without_a_terminal():
    out = io.StringIO()
    with progress_bar(3, console=Console(file=out)) as bar:
        bar(3)
    assert out.getvalue() == ""


def test_a_terminal_that_goes_away_stops_nothing():
    class Gone(io.StringIO):
        def write(self, text):
            raise OSError(5, "Input/output error")

    done = []
    with progress_bar(3, console=Console(file=Gone(), force_terminal=True)) as bar:
        for i in range(3):
            bar()
            done.append(i)
    assert done == [0, 1, 2]
