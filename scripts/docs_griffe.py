"""For mkdocstrings: our docstrings as Markdown.

They describe arguments in lines such as `p: share of samples that are mixed.`; here these become a list. Examples
(`>>> ...`, which the tests run) become code.
"""

from __future__ import annotations

import inspect
import re

import griffe

_ARGUMENT = re.compile(r"([a-z_]\w*(?:, [a-z_]\w*)*)( \([^)]*\))?: (.*)")


def as_markdown(text: str) -> str:
    paragraphs = inspect.cleandoc(text).split("\n\n")
    return "\n\n".join(f"```pycon\n{p}\n```" if p.startswith(">>>") else _with_list(p) for p in paragraphs)


def _with_list(paragraph: str) -> str:
    out: list[str] = []
    for line in paragraph.splitlines():
        found = _ARGUMENT.fullmatch(line)
        if found and (not out or not out[-1] or out[-1].startswith(("- ", "    "))):
            names = ", ".join(f"`{name}`" for name in found[1].split(", "))
            out.append(f"- {names}{found[2] or ''}: {found[3]}")
        else:
            out.append(line)
    return "\n".join(out)


class Docstrings(griffe.Extension):
    def on_instance(self, *, obj, **_):
        if obj.docstring is not None:
            obj.docstring.value = as_markdown(obj.docstring.value)
