"""Numbers as the words a page or a terminal shows. A value that is missing or not finite becomes a dash."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any


def finite(value: Any) -> float | None:
    """A finite number, or None: logs have null where something was NaN."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        return None
    return value


def percent(value: Any, digits: int = 1) -> str:
    return "–" if finite(value) is None else f"{100 * value:.{digits}f}\u00a0%"


def thousands(value: Any) -> str:
    return "–" if finite(value) is None else f"{value:,.0f}"


def two_digits(value: Any) -> str:
    return "–" if finite(value) is None else f"{value:.2f}"


def points(value: Any) -> str:
    """A difference of two shares, in points: +1.2."""
    return "–" if finite(value) is None else f"{100 * value:+.1f}"


def duration(seconds: Any) -> str:
    if finite(seconds) is None:
        return "–"
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


def gigabytes(value: Any) -> str:
    return f"{value / 1e9:.2f} GB" if finite(value) else "–"


def option_text(value: Any) -> str:
    """An option's value as a person would write it."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list):
        return ", ".join(map(str, value)) or "none"
    return str(value)


def first_of(words: Sequence[str], most: int) -> str:
    more = f" +{len(words) - most}" if len(words) > most else ""
    return ", ".join(words[:most]) + more


def probability(logit: float) -> str:
    """The probability of a logit, in percent; ends are cut so that nothing looks certain."""
    value = 1 / (1 + math.exp(-min(max(logit, -50.0), 50.0)))
    if not 0.001 <= value <= 0.999:
        return f"{'<' if value < 0.5 else '>'}{percent(0.001 if value < 0.5 else 0.999)}"
    return percent(value, digits=0 if 0.01 <= value <= 0.99 else 1)
