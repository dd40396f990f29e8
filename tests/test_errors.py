"""errors.py: whatever comes from data can be printed, and does nothing but stand there."""

import io

from cases import examples
from hypothesis import example, given, settings
from hypothesis import strategies as st
from rich.console import Console

from gpu_logicmix.errors import BadImage, DataError, RunError, printable, shown

PIECES = st.lists(st.sampled_from(["[", "]", "\\", "/", "red", "bold", "a", " ", "[/]", "\x1b[2J", "#"]), max_size=8)


def printed(markup: str) -> str:
    out = io.StringIO()
    Console(file=out, width=500, emoji=False).print(markup, highlight=False, end="", soft_wrap=True)
    return out.getvalue()


def test_classes():
    assert issubclass(BadImage, DataError)
    assert issubclass(DataError, ValueError)
    assert issubclass(RunError, ValueError)


def test_terminals_get_nothing_to_obey():
    assert printable("a\x1b[31mb\x07\x9b") == "a\\x1b[31mb\\x07\\x9b"
    assert printable("one\ntwo\r\tthree") == "one\\ntwo\\x0d three"
    assert printable("\u202egnp.exe \u2066") == "\\u202egnp.exe \\u2066"
    assert printable("caf\udce9") == "caf\\udce9"  # a file name that is not UTF-8
    assert printable("Käse 猫 🐈") == "Käse 猫 🐈"
    assert printable(7) == "7"


def test_markup_is_shown_as_it_is():
    for text in (
        "[red]x[/red]",
        "[/]",
        "[bold",
        "C:\\[data]\\x",
        "\\[a]",
        "[link=http://x]y",
        "[0]",
        "a[b",
        "[@click=x]",
    ):
        assert printed(shown(text)) == text, text


@settings(max_examples=examples(300), deadline=None)
@given(PIECES.map("".join) | st.text(max_size=12))
@example("[/red")
@example("\\[/red")
@example("a\\")
def test_no_text_is_ever_markup(text):
    """Before, between and after tags and brackets of ours: no error, no style of its own, every letter still there."""
    for before, after in (("", ""), ("[bold]", "[/]"), ("", "]"), ("[green]x[/] ", " [green]y[/]")):
        plain = printed(f"{before}{shown(text)}{after}")
        letters = [c for c in printable(text) if c not in "\\"]
        found = iter(plain)
        assert all(c in found for c in letters)  # in this order
        assert "\x1b" not in plain
