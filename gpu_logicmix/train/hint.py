"""Is mixing likely to help? What the studies say of data with so many known labels.

`pays.json` is made from the committed results (`make study-docs`): below `low` known positives per category the 95 %
interval of LogicMix's gain lies under 0, above `high` over it. Both are null where the studies do not tell.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any


@cache
def evidence() -> dict[str, Any]:
    return json.loads((Path(__file__).parent / "pays.json").read_text(encoding="utf-8"))


def mixing_hint(positives: Sequence[int]) -> str:
    """positives: known ones of each category."""
    median = statistics.median(int(count) for count in positives)
    found = evidence()
    low, high = found["low"], found["high"]
    if low is None:
        words = "the studies do not tell whether mixing helps"
    elif median < low:
        words = f"mixing is unlikely to help (in the studies it lost below about {low:.0f})"
    elif median <= high:
        words = f"mixing may help or not (in the studies it lost below about {low:.0f}, gained above {high:.0f})"
    else:
        words = f"enough for mixing to help where plain training overfits (in the studies: above about {high:.0f})"
    return f"{median:,g} known positives per category (median): {words}; see docs/study.md"
