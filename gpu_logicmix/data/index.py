"""What took long to find out about a large dataset, kept on disk: arrays with checksums, named by what they came from.

They are in $GPU_LOGICMIX_INDEX, or ~/.cache/gpu-logicmix/index. Any of it may be removed at any time.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import threading
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from gpu_logicmix.files import read_text, waited_lock, write_whole, written_whole

VERSION = 1

# np.load parses the head of a file as Python does its source, which in Python 3.11 is not safe in several threads at
# once: "SystemError: AST constructor recursion depth mismatch" (CPython issue 106905).
_PARSING = threading.Lock()


def index_home() -> Path:
    home = os.environ.get("GPU_LOGICMIX_INDEX")
    if home:
        return Path(home).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "gpu-logicmix" / "index"


def index_key(name: str, files: Sequence[Path], options: dict[str, Any]) -> str:
    """Of what is made from these files with these options: it changes when one of them is rewritten."""
    stats = [(str(file.resolve()), file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    text = json.dumps([VERSION, name, stats, sorted(options.items())])
    return f"{name}-{hashlib.sha256(text.encode()).hexdigest()[:16]}"


def load_index(key: str) -> tuple[dict[str, np.ndarray], dict] | None:
    """The arrays and the facts kept under a key; None if there are none, or they are damaged."""
    folder = index_home() / key
    try:
        facts = json.loads(read_text(folder / "facts.json"))
        arrays = {}
        for name, crc in facts["crc32"].items():
            with _PARSING:
                arrays[name] = np.load(folder / f"{name}.npy", allow_pickle=False)
            if zlib.crc32(np.ascontiguousarray(arrays[name])) != crc:
                return None
        return arrays, facts["facts"]
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None


def made_once(key: str, make: Callable[[], tuple[dict[str, np.ndarray], dict]]) -> tuple[dict[str, np.ndarray], dict]:
    """What is kept under a key, or is made and kept: by one process, while the others wait for it."""
    found = load_index(key)
    if found is not None:
        return found
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):  # where nothing can be written, everyone makes it
            (index_home() / key).mkdir(parents=True, exist_ok=True)
            stack.enter_context(waited_lock(index_home() / key, "building"))
        found = load_index(key)
        if found is None:
            found = make()
            save_index(key, *found)
        return found


def save_index(key: str, arrays: dict[str, np.ndarray], facts: dict) -> None:
    """Keep it; where nothing can be written, it has to be found out again the next time."""
    folder = index_home() / key
    with contextlib.suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        with waited_lock(folder):
            crc = {}
            for name, array in arrays.items():
                array = np.ascontiguousarray(array)
                crc[name] = zlib.crc32(array)
                with written_whole(folder / f"{name}.npy", "wb") as file:
                    np.save(file, array, allow_pickle=False)
            write_whole(folder / "facts.json", json.dumps({"crc32": crc, "facts": facts}))
