"""Pages from Jinja2 templates: one HTML file that needs no other, with its style, pictures and one small script inside.

    render("run.html", title="coco", ...) -> str

Autoescape is on, so what comes from data or files stays text. The Content-Security-Policy of a page allows no network
and no script but our own, named by its hash: even if a name got through, the browser would not run it.
"""

from __future__ import annotations

import base64
import hashlib
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from gpu_logicmix.report import words

HERE = Path(__file__).parent


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=FileSystemLoader(HERE / "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    for function in (words.percent, words.thousands, words.two_digits, words.points, words.duration):
        environment.filters[function.__name__] = function
    script = (HERE / "tables.js").read_text(encoding="utf-8")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    environment.globals |= {
        "style": chart_style() + (HERE / "style.css").read_text(encoding="utf-8"),
        "script": script,
        "script_hash": f"sha256-{digest}",
    }
    return environment


@cache
def chart_style() -> str:
    """The colours of charts, light and dark."""
    return (HERE / "charts.css").read_text(encoding="utf-8")


def render(template: str, **values: Any) -> str:
    """A page as text. Characters that are not valid Unicode, as in some file names, are replaced."""
    page = _environment().get_template(template).render(**values)
    return page.encode(errors="replace").decode()
