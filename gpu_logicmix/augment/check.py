"""Prove the augmentation on the device at hand: what runs there against the same on the CPU.

For the first person with a GPU: no machine of this project has one. On a CPU it runs what applies.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor

from gpu_logicmix.augment import MIXES, GPULogicMix
from gpu_logicmix.augment.apply import _triton
from gpu_logicmix.augment.plan import MixPlan
from gpu_logicmix.augment.randaugment import RandAugment, RandomHorizontalFlip

NORMALIZE = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
LAYOUTS = {"contiguous": torch.contiguous_format, "channels_last": torch.channels_last}
CLOSE = {torch.uint8: 0, torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
Result = tuple[str, str]  # "passed", "failed" or "skipped"; what was done, or what went wrong


def some_batch(batch: int, size: tuple[int, int], dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    images = torch.randint(0, 256, (batch, 3, *size), dtype=torch.uint8)
    images = images if dtype is torch.uint8 else (images / 255).to(dtype)
    return images.to(device), torch.randint(-1, 2, (batch, 80), dtype=torch.int8).to(device)


def check_mixes(device: torch.device) -> Result:
    """Every mix, dtype, layout and ending against the CPU."""
    cases = 0
    outs = (None, torch.float32, torch.float16, torch.bfloat16)
    kinds = [kind for kind in MIXES.values() if kind is not None]
    for kind, dtype, out, (name, layout), size in itertools.product(
        kinds, (torch.uint8, torch.float32, torch.bfloat16), outs, LAYOUTS.items(), ((37, 41), (64, 64))
    ):
        options = {} if out is None else {"normalize": NORMALIZE, "out_dtype": out}
        images, targets = some_batch(9, size, dtype, torch.device("cpu"))
        images = images.contiguous(memory_format=layout)
        plan = kind().plan(9)
        want = kind(**options)(images, targets, plan)
        there = MixPlan(*(None if part is None else part.to(device) for part in plan))
        got = kind(**options)(images.to(device), targets.to(device), there)
        words = f"{kind.__name__} {dtype} -> {out or dtype}, {name}, {size}"
        close = max(CLOSE[got[0].dtype], CLOSE[dtype])
        if dtype is torch.uint8 and out is None and plan.weight is not None:
            close = 1  # a share that is not a whole part rounds either way
        off = (got[0].cpu().double() - want[0].double()).abs().max().item()
        if got[0].dtype != want[0].dtype or off > close * 3:
            return "failed", f"{words}: images differ by {off:.3g}"
        if (got[1].cpu().double() - want[1].double()).abs().max() > 1e-6:
            return "failed", f"{words}: labels differ"
        cases += 1
    return "passed", f"{cases} cases"


def check_randaugment(device: torch.device) -> Result:
    augment, flip = RandAugment(), RandomHorizontalFlip()
    worst = 0.0
    for _ in range(8):
        images, _ = some_batch(32, (45, 50), torch.uint8, torch.device("cpu"))
        plan, mirror = augment.plan(32), flip.plan(32)
        want = augment(flip(images, mirror), plan).int()
        got = augment(flip(images.to(device), mirror.to(device)), plan).cpu().int()
        off = (got - want).abs()
        worst = max(worst, (off > 2).float().mean().item())
    done = f"{worst:.2%} of the pixels differ by more than two levels"
    return ("passed" if worst <= 0.01 else "failed"), done


def _step(device: torch.device, batch: int = 32, size: int = 64) -> Callable[[], tuple[Tensor, Tensor]]:
    images, targets = some_batch(batch, (size, size), torch.uint8, device)
    images = images.contiguous(memory_format=torch.channels_last)
    mix = GPULogicMix(normalize=NORMALIZE, out_dtype=torch.bfloat16)
    return lambda: mix(images, targets)


def check_no_sync(device: torch.device) -> Result:
    if device.type != "cuda":
        return "skipped", "needs CUDA"
    step = _step(device)
    step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return "passed", "a step under set_sync_debug_mode('error')"


def check_cuda_graph(device: torch.device) -> Result:
    if device.type != "cuda":
        return "skipped", "needs CUDA"
    step, graph = _step(device), torch.cuda.CUDAGraph()
    step()
    torch.cuda.synchronize(device)
    with torch.cuda.graph(graph):
        mixed, _ = step()
    graph.replay()
    first = mixed.clone()
    graph.replay()
    torch.cuda.synchronize(device)
    if torch.equal(first, mixed):
        return "failed", "a replay drew the same plan again"
    return "passed", "captured and replayed, each time with a new draw"


def check_compile(device: torch.device) -> Result:
    mix = GPULogicMix(normalize=NORMALIZE, out_dtype=torch.bfloat16)
    backend = "inductor" if device.type == "cuda" else "eager"  # on a CPU the tests compile for real
    compiled = torch.compile(mix, fullgraph=True, backend=backend)
    for batch in (8, 5, 3):
        images, targets = some_batch(batch, (32, 32), torch.uint8, device)
        plan = mix.plan(batch, device)
        off = (compiled(images, targets, plan)[0].float() - mix(images, targets, plan)[0].float()).abs().max().item()
        if off > 3e-2:
            return "failed", f"batch {batch}: images differ by {off:.3g}"
    return "passed", f"three batch sizes, one graph, {backend}"


def measure(device: torch.device, rounds: int = 11) -> dict[str, float]:
    """Median ms of one batch 32x3x448x448 uint8 -> bfloat16 (on a CPU 8x3x224x224), beside a copy of the result."""
    step = _step(device, 32, 448) if device.type == "cuda" else _step(device, 8, 224)
    result = step()[0]
    times: dict[str, list[float]] = {"GPULogicMix, one pass": [], "clone of the result": []}
    for _ in range(rounds + 1):
        for name, function in zip(times, (step, result.clone), strict=True):
            _wait(device)
            start = time.perf_counter()
            function()
            _wait(device)
            times[name].append((time.perf_counter() - start) * 1e3)
    return {name: sorted(found[1:])[rounds // 2] for name, found in times.items()}


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


CHECKS: dict[str, Callable[[torch.device], Result]] = {
    "mixes equal the CPU": check_mixes,
    "RandAugment and flip equal the CPU": check_randaugment,
    "no sync in a step": check_no_sync,
    "CUDA graph": check_cuda_graph,
    "torch.compile": check_compile,
}


def results(device: torch.device) -> Iterator[tuple[str, Result]]:
    """One after the other; an exception is a failure."""
    for name, check in CHECKS.items():
        try:
            yield name, check(device)
        except Exception as error:
            yield name, ("failed", f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}")


def run_checks(
    device: str | torch.device = "cpu", out: str | Path | None = None, say: Callable[[str], None] = lambda line: None
) -> bool:
    """Run all checks and measure; write check.json and check.md into the folder `out`. True if nothing failed."""
    device = torch.device(device)
    torch.manual_seed(0)
    on_gpu = device.type == "cuda"
    facts = {"device": torch.cuda.get_device_name(device) if on_gpu else str(device), "torch": torch.__version__}
    facts["triton"] = "no" if _triton() is None else __import__("triton").__version__
    lines = ["| check | result | |", "|---|---|---|"]
    found: dict[str, dict[str, str]] = {}
    for name, (state, words) in results(device):
        found[name] = {"result": state, "words": words}
        lines.append(f"| {name} | {state} | {words} |")
        say(f"{state:8s}{name}: {words}")
    times: dict[str, float] = {}
    with contextlib.suppress(RuntimeError):  # out of memory, or a failure that stands above
        times = measure(device)
    lines += ["", "| one batch | ms |", "|---|--:|", *(f"| {name} | {ms:.3f} |" for name, ms in times.items())]
    if out is not None:
        folder = Path(out)
        folder.mkdir(parents=True, exist_ok=True)
        data = {**facts, "checks": found, "ms": times}
        (folder / "check.json").write_text(json.dumps(data, indent=1) + "\n")
        head = ", ".join(f"{name} {value}" for name, value in facts.items())
        (folder / "check.md").write_text("\n".join([head, "", *lines, ""]))
    return all(row["result"] != "failed" for row in found.values())
