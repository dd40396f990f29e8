"""One training step of each preset at its full size, on random images: how long it takes, and the most memory it holds.

    python bench/presets.py                                    # bench/results/presets.json and a table
    python bench/presets.py --only sst-coco --categories 200   # one of them; the others stay in the file

A step is forward, loss, the losses of the method's own, backward and the update of the weights, in an epoch in which
SST and its successors carry labels over, with prototypes at random. Weights are random. Each preset has a process of
its own; on a CPU its memory is what the process holds at most, less what it held before there was a model. A batch that
does not fit into `--memory` is halved until it does.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import resource
import sys
import time
from pathlib import Path

import torch
from measure import RESULTS, environment, save_json
from rich.console import Console
from rich.table import Table
from tables import PRESETS as PRESET_COLUMNS
from tables import preset_cells

from gpu_logicmix.losses.base import Batch
from gpu_logicmix.train.build import make_loss, make_model, make_optimizer
from gpu_logicmix.train.config import PRESETS, make_config

NAMES = [name for name in PRESETS if name.endswith(("-coco", "-tresnet", "-swin"))]


def held(device: torch.device) -> int:
    """The most bytes so far."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def one_step(name: str, given: dict, categories: int, threads: int, where: str) -> dict[str, float]:
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    device, config = torch.device(where), make_config({"weights": "none", **given}, name)
    before = held(device)
    model = make_model(config, categories)
    targets = torch.randint(-1, 2, (config.batch_size, categories), device=device)
    model.head.prepare(targets.cpu(), [str(i) for i in range(categories)])
    model = model.to(device, memory_format=torch.channels_last)
    if hasattr(model.head, "prototypes"):
        model.head.prototypes.normal_()
        model.head.found.fill_(True)
    loss, optimizer = make_loss(config), make_optimizer(config, model, device)
    images = torch.rand(config.batch_size, 3, config.size, config.size, device=device)
    start = time.perf_counter()
    total, count = model.head.training_step(model, [images], Batch(targets, None, None, config.epochs - 1), loss)
    (total / count.clamp(min=1)).backward()
    optimizer.step()
    value = total.item()
    seconds = time.perf_counter() - start
    parameters = sum(p.numel() for p in model.parameters())
    return {
        "batch": config.batch_size,
        "size": config.size,
        "model": config.model,
        "categories": categories,
        "parameters": parameters,
        "seconds": round(seconds, 1),
        "gigabytes": round((held(device) - before) / 2**30, 2),
        "finite": value == value and abs(value) != float("inf"),
    }


def _in_process(connection, memory: float, *arguments) -> None:
    resource.setrlimit(resource.RLIMIT_DATA, (int(memory * 2**30), resource.RLIM_INFINITY))
    try:
        connection.send(one_step(*arguments))
    except (MemoryError, RuntimeError) as error:
        if "memory" not in str(error):
            raise
        connection.send(None)


def measured(*arguments) -> dict | None:
    """None if it does not fit."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_in_process, args=(theirs, *arguments))
    process.start()
    theirs.close()
    try:
        return ours.recv()
    except EOFError:
        return None
    finally:
        process.join()


def main(arguments: list[str] | None = None) -> dict:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=NAMES, default=NAMES, metavar="PRESET")
    parser.add_argument("--categories", type=int, default=80)
    parser.add_argument("--batch-size", type=int)
    parser.add_argument("--size", type=int)
    parser.add_argument("--memory", type=float, default=12, metavar="GB", help="of a process on a CPU (default 12)")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, default=RESULTS / "presets.json")
    chosen = parser.parse_args(arguments)
    torch.set_num_threads(chosen.threads)  # for the file; each process sets its own
    given = {k: v for k, v in (("batch_size", chosen.batch_size), ("size", chosen.size)) if v is not None}
    steps = json.loads(chosen.out.read_text())["steps"] if chosen.out.exists() else {}
    for name in chosen.only:
        key = " ".join([name, *(f"{k}={v}" for k, v in given.items())])
        key += f" categories={chosen.categories}" if chosen.categories != 80 else ""
        batch, found = make_config(given, name).batch_size, None
        wanted = batch
        while found is None and batch:
            asked = {**given, "batch_size": batch}
            found = measured(chosen.memory, name, asked, chosen.categories, chosen.threads, chosen.device)
            batch //= 2
        steps[key] = {"batch_wanted": wanted, **(found or {"failed": f"more than {chosen.memory:g} GB"})}
        save_json({"environment": environment(torch.device(chosen.device)), "steps": steps}, chosen.out)
    table = Table(*PRESET_COLUMNS)
    for key, row in steps.items():
        table.add_row(*preset_cells(key, row))
    Console().print(table)
    return steps


if __name__ == "__main__":
    main()
