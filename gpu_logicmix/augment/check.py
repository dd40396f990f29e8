"""Prove the augmentation on the device at hand: what runs there against the same on the CPU.

For the first person with a GPU: no machine of this project has one. On a CPU it runs what applies.
"""

from __future__ import annotations

import itertools
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor

from gpu_logicmix.augment import MIXES, GPULogicMix
from gpu_logicmix.augment.plan import MixPlan
from gpu_logicmix.augment.randaugment import AugmentPlan, RandAugment, RandomHorizontalFlip

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
    """All operations both ways, mirrored and not, both layouts, odd sizes; then two rounds as they are drawn."""
    apart, many, cases = 0.0, 0.0, 0
    for (layout, size), rounds in itertools.product(zip(LAYOUTS.values(), ((45, 50), (64, 64)), strict=True), (1, 2)):
        augment, flip = RandAugment(rounds), RandomHorizontalFlip()
        images, _ = some_batch(56, size, torch.uint8, torch.device("cpu"))
        images = images.contiguous(memory_format=layout)
        number = torch.arange(56)[:, None]
        plan = AugmentPlan(number % 14, 1 - 2 * (number // 14 % 2)) if rounds == 1 else augment.plan(56)
        mirror = flip.plan(56)
        want = augment(images, plan, mirror).int()
        got = augment(images.to(device), AugmentPlan(*(part.to(device) for part in plan)), mirror.to(device))
        if not got.is_contiguous(memory_format=layout):
            return "failed", f"{size}: another memory format came out"
        off = (got.cpu().int() - want).abs()
        if rounds == 1:
            apart = max(apart, off.max().item())
        many = max(many, (off > 1).float().mean().item())
        cases += len(images)
    done = (
        f"{cases} images: {apart:.0f} levels apart after a round; {many:.2%} of the pixels by more than one after two"
    )
    # What differs by one level in the first round, the second may stretch.
    return ("passed" if apart <= 1 and many <= 0.02 else "failed"), done


def _step(device: torch.device, batch: int = 32, size: int = 64) -> Callable[[], tuple[Tensor, Tensor]]:
    images, targets = some_batch(batch, (size, size), torch.uint8, device)
    images = images.contiguous(memory_format=torch.channels_last)
    flip, augment = RandomHorizontalFlip(), RandAugment()
    mix = GPULogicMix(normalize=NORMALIZE, out_dtype=torch.bfloat16)
    return lambda: mix(augment(images, mirror=flip.plan(batch, device)), targets)


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
    return "passed", "flip, RandAugment and mix under set_sync_debug_mode('error')"


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
    return "passed", "flip, RandAugment and mix captured and replayed, each time with a new draw"


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


def check_two_ranks(device: torch.device) -> Result:
    """A step in two processes, each with its own batch: the gradient is the mean of both."""
    if device.type == "cuda" and torch.cuda.device_count() < 2:
        return "skipped", "needs two GPUs"
    backend = "nccl" if device.type == "cuda" else "gloo"
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.start_processes(_rank, (device.type, backend, folder), nprocs=2, start_method="spawn")
        offs = [float((Path(folder) / f"{rank}.txt").read_text()) for rank in range(2)]
    done = f"{backend}: gradients differ by {max(offs):.1e} of their size from the mean of both batches"
    return ("passed" if max(offs) < 1e-5 else "failed"), done


def _rank(rank: int, kind: str, backend: str, folder: str) -> None:
    device = torch.device(kind, rank) if kind == "cuda" else torch.device(kind)
    store = torch.distributed.FileStore(str(Path(folder) / "store"), 2)
    torch.distributed.init_process_group(backend, store=store, rank=rank, world_size=2)
    torch.manual_seed(0)
    torch.backends.cudnn.deterministic = True
    net = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.LazyLinear(80))
    net = net.to(device)
    net(torch.zeros(1, 3, 16, 16, device=device))

    def backward(model: torch.nn.Module, seed: int) -> list[Tensor]:
        """The gradient of one batch, mixed."""
        torch.manual_seed(seed)
        images, targets = some_batch(8, (16, 16), torch.uint8, device)
        mixed, labels = GPULogicMix(p=1.0, normalize=NORMALIZE)(images, targets)
        net.zero_grad()
        (model(mixed).sigmoid() - labels).square().sum().backward()
        return [parameter.grad.clone() for parameter in net.parameters()]

    alone = [sum(pair) / 2 for pair in zip(backward(net, 0), backward(net, 1), strict=True)]
    together = backward(torch.nn.parallel.DistributedDataParallel(net), rank)
    off = max(((a - b).abs().max() / a.abs().max()).item() for a, b in zip(alone, together, strict=True))
    (Path(folder) / f"{rank}.txt").write_text(str(off))
    store.set(f"done {rank}", "1")
    store.wait(["done 0", "done 1"])
    os._exit(0)  # the answer is there: no thread of gloo or NCCL is to crash in what an interpreter does when it ends


CHECKS: dict[str, Callable[[torch.device], Result]] = {
    "mixes equal the CPU": check_mixes,
    "RandAugment and flip equal the CPU": check_randaugment,
    "no sync in a step": check_no_sync,
    "CUDA graph": check_cuda_graph,
    "torch.compile": check_compile,
    "two ranks": check_two_ranks,
}


def results(device: torch.device) -> Iterator[tuple[str, Result]]:
    """One after the other; an exception is a failure."""
    for name, check in CHECKS.items():
        try:
            yield name, check(device)
        except Exception as error:
            yield name, ("failed", f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}")
