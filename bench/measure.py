"""What the benchmarks share: interleaved timing, memory, the machine they ran on."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch
from rich.console import Console

from gpu_logicmix.augment.peers import interleave, median_ms
from gpu_logicmix.machine import machine as cpu_name
from gpu_logicmix.progress import progress_bar

__all__ = [
    "RESULTS",
    "cpu_name",
    "environment",
    "interleave",
    "median_ms",
    "peak_bytes",
    "save_json",
    "steps",
    "versions",
]

RESULTS = Path(__file__).parent / "results"


def environment(device: torch.device, packages: tuple[str, ...] = ("torch", "torchvision", "timm", "kornia", "mlcpl")):
    """Where figures were measured: they mean little without it."""
    return {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else cpu_name(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "packages": versions(packages),
    }


def versions(packages: tuple[str, ...]) -> dict[str, str | None]:
    """None for what is not installed."""
    found: dict[str, str | None] = {}
    for name in packages:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = None
    return found


def steps(cases: Sequence, what: str, console: Console) -> Iterator:
    """The cases, one after the other, with a progress bar."""
    with progress_bar(len(cases), what, unit=None, console=console) as advance:
        for case in cases:
            yield case
            advance()


def peak_bytes(function: Callable[[], object], device: torch.device) -> int:
    """The most memory that one call holds at a time above what was there before, its result included."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        function()
        return torch.cuda.max_memory_allocated(device) - before
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        result = function()
    del result
    events = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]
    held = most = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        held += event.nbytes()
        most = max(most, held)
    return most


def save_json(data: dict, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(data, indent=1) + "\n")
