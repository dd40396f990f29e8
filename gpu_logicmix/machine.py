"""What a run stood on: the processor, the versions, and whether the test suite has passed with them.

`constraints.txt` beside this file is the lock that `make test` installs; scripts/lock.py writes it. Importing this
module needs the standard library alone, so that it can speak when something else fails to load.
"""

from __future__ import annotations

import contextlib
import ctypes
import platform
import re
import warnings
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

LOCK = Path(__file__).with_name("constraints.txt")
NAMED = ("torch", "timm", "kornia")  # in the version line; the log has numpy as well
TESTED_PYTHONS = ("3.11",)  # those that the suite has passed on; the lock is resolved for more
_LINE = re.compile(r"(?P<name>[\w.-]+)==(?P<version>[^\s;]+)(?:\s*;(?P<marker>.*))?")


def machine() -> str:
    """The name of the processor."""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def versions() -> dict[str, str]:
    """Installed versions: ours, Python's, and those of the packages whose changes we feel. Absent ones are left out."""
    from gpu_logicmix import __version__

    found = {"gpu_logicmix": __version__, "python": platform.python_version()}
    for name in (*NAMED, "numpy"):
        with contextlib.suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


def lock_for(python: str | None = None) -> dict[str, str]:
    """The locked versions for a Python version, as 3.11 (of the running one by default); empty: not a tested Python."""
    python = ".".join((python or platform.python_version()).split(".")[:2])
    lock = {}
    for line in LOCK.read_text(encoding="utf-8").splitlines():
        found = _LINE.fullmatch(line.strip())
        if found and python in _pythons(found["marker"]):
            lock[found["name"].lower().replace("_", "-")] = found["version"]
    return lock


def _pythons(marker: str | None) -> list[str]:
    """The Python versions that a line of the lock is for: those its marker names, or all in the file's first line."""
    if marker is None:
        with LOCK.open(encoding="utf-8") as file:
            marker = file.readline()
    return re.findall(r"\d+\.\d+", marker)


def untested(found: dict[str, str]) -> str:
    """What differs from the lock, in a few words; "" if nothing does."""
    python = found.get("python") or platform.python_version()
    lock = lock_for(python)
    if not lock:
        return f"Python {python}"
    other = [] if ".".join(python.split(".")[:2]) in TESTED_PYTHONS else [f"Python {python}"]
    for name in NAMED:
        if name in found and found[name].split("+")[0] != lock.get(name):
            other.append(f"{name} {found[name]} (tested: {lock.get(name, 'none')})")
    return ", ".join(other)


def version_line(found: dict[str, str] | None = None) -> str:
    """One line for reports and bug messages: the versions, and whether the test suite has passed with them.

    found: as `versions` returns it, from a log for one; by default what is installed.
    """
    found = versions() if found is None else found
    names = [f"{name} {found.get(name, 'not installed')}" for name in NAMED]
    line = ", ".join([f"gpu-logicmix {found.get('gpu_logicmix')}", *names, f"Python {found.get('python')}"])
    other = untested(found)
    return f"{line}; " + (f"not tested with {other}" if other else "tested with these versions")


def keep_memory() -> None:
    """Let glibc keep the memory of large tensors that are freed, for the next ones. By default it goes back to the
    system, which hands it out again page by page: a fifth to a third of a training step on a CPU. For the whole
    process, so it is for commands to call, not for functions."""
    with contextlib.suppress(OSError, AttributeError):  # not glibc
        libc = ctypes.CDLL("libc.so.6")
        trim_threshold, mmap_max = -1, -4  # from malloc.h
        libc.mallopt(mmap_max, 0)
        libc.mallopt(trim_threshold, 2**31 - 1)


def sent(tensor: Any, device: Any) -> Any:
    """On `device`, without waiting where the other side can do without: what arrives on the host is read at once."""
    return tensor.to(device, non_blocking=not str(device).startswith("cpu"))


@cache
def triton_works() -> bool:
    """Whether Triton can launch kernels on the GPU: for the first one it builds a C extension, which takes a compiler
    and a folder to write to. Without a GPU nothing is asked: there is nothing to launch on."""
    import torch

    if not torch.cuda.is_available():
        return True
    try:
        from triton.runtime import driver

        driver.active.get_current_target()
    except Exception as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        words = "Augmentation runs in plain torch, which is slower. It needs a C compiler and Python's headers."
        warnings.warn(f"Triton cannot be used here ({reason}). {words}", stacklevel=2)
        return False
    return True
