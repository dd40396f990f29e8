"""LogicMix beside what else one could put into a training step, on the same batch and taking turns.

For `bench/mix.py` and `gpu-logicmix check`. A peer that is not installed is left out.
"""

from __future__ import annotations

import importlib
import statistics
import time
from collections.abc import Callable
from types import ModuleType

import torch

from gpu_logicmix.augment.logicmix import GPULogicMix

OURS, COMPILED = "GPULogicMix", "GPULogicMix, compiled"
Call = Callable[[], object]


def contenders(
    shape: tuple[int, ...],
    dtype: torch.dtype,
    k: tuple[int, int],
    categories: int,
    device: torch.device,
    compiled: bool = False,
) -> dict[str, Call]:
    """Name -> a call without arguments that mixes one batch.

    `clone` copies images and targets: no method that returns a new batch can be faster. timm writes into the batch it
    is given and takes class numbers where the others take a label matrix; Kornia takes class numbers too. `compiled`:
    ours under `torch.compile` as well, with its draw.
    """
    images = torch.rand(shape, device=device)
    images = (images * 255).to(dtype) if dtype == torch.uint8 else images.to(dtype)
    targets = torch.randint(-1, 2, (shape[0], categories), device=device).float()
    with_nan = targets.masked_fill(targets < 0, torch.nan)
    classes = torch.randint(categories, (shape[0],), device=device)
    scratch = images.clone()  # timm writes into it
    ours = GPULogicMix(k_min=k[0], k_max=k[1])
    calls: dict[str, Call] = {
        "clone": lambda: (images.clone(), targets.clone()),
        OURS: lambda: ours(images, targets),
    }
    if compiled:
        torch.compiler.reset()  # torch stops at so many shapes of one function
        graph = torch.compile(GPULogicMix(k_min=k[0], k_max=k[1]), fullgraph=True, dynamic=False)
        calls[COMPILED] = lambda: graph(images, targets)
    if (timm := _module("timm.data.mixup")) is not None:
        batch, elem = (timm.Mixup(mixup_alpha=1.0, mode=mode, num_classes=categories) for mode in ("batch", "elem"))
        calls["timm batch"] = lambda: batch(scratch, classes)
        calls["timm elem"] = lambda: elem(scratch, classes)
    if (torchvision := _module("torchvision.transforms.v2")) is not None:
        mixup = torchvision.MixUp(num_classes=categories)
        calls["torchvision"] = lambda: mixup(images, targets)
    if (kornia := _module("kornia.augmentation")) is not None:
        mixup_v2 = kornia.RandomMixUpV2(p=1.0, data_keys=["input", "class"])
        calls["Kornia"] = lambda: mixup_v2(images, classes)
    if (mlcpl := _module("mlcpl.augs.logic_mix")) is not None:
        calls["mlcpl"] = lambda: mlcpl.logic_mix_with_batch(images, with_nan, 0.5, *k)
    return calls


def _module(name: str) -> ModuleType | None:
    try:
        return importlib.import_module(name)
    except ImportError:
        return None


def working(calls: dict[str, Call]) -> dict[str, Call]:
    """Those that take this type of image at all."""
    kept = {}
    for name, call in calls.items():
        try:
            call()
        except (RuntimeError, TypeError, ValueError):
            if name in ("clone", OURS):
                raise
        else:
            kept[name] = call
    return kept


def interleave(
    calls: dict[str, Call], rounds: int, device: torch.device, clock: Callable[[], float] = time.perf_counter
) -> dict[str, list[float]]:
    """Seconds of each call. All take turns, so that what slows the machine down slows all of them."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(rounds + 1):  # the first turn warms up
        for name, call in calls.items():
            synchronize(device)
            start = clock()
            result = call()
            synchronize(device)
            if turn:
                times[name].append(clock() - start)
            del result
    return times


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def median_ms(times: list[float]) -> float:
    return statistics.median(times) * 1e3
