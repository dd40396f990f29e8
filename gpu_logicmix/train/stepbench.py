"""What augmentation on the device costs: the training step with and without it, on the same model.

    gpu-logicmix bench --model resnet101 --size 224 --batch-size 32

The step is the one that trains (`loop.Training.batch`): labels looked up, augmentation, forward, backward, update,
moving average of the weights. All variants are one run that is given another augmentation in each turn: same weights,
same batch, one process, so that whatever slows the machine down slows all of them. What counts is the ratio. On a CPU
that others use as well, that of the CPU time is the steadier one: it does not count the time in which they had the
cores.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.table import Table
from torch import Tensor

from gpu_logicmix.machine import machine, versions
from gpu_logicmix.train.batch import moved
from gpu_logicmix.train.build import make_augment
from gpu_logicmix.train.config import Config
from gpu_logicmix.train.distributed import World, joined_world
from gpu_logicmix.train.loop import Training

BARE = {"flip": False, "randaugment": False, "mix": "none"}
# Each alone on top of the bare step, then all of them.
VARIANTS: dict[str, dict[str, Any]] = {
    "bare step": {},
    "+ flip": {"flip": True},
    "+ RandAugment": {"randaugment": True},
    "+ LogicMix": {"mix": "logicmix"},
    "all three": {"flip": True, "randaugment": True, "mix": "logicmix"},
}


def step_config(**options: Any) -> Config:
    """Of a run on the shapes, whose every step updates the weights. They are drawn once, for one batch."""
    return Config(data="shapes", known=0.1, workers=0, accumulate=1, cft=False, **options)


def open_run(config: Config, world: World) -> tuple[Training, tuple[Tensor, Tensor, Tensor]]:
    """A run that is ready to train, and a batch. Nothing is written: the folder is never used."""
    run = Training(config, Path(), world, lambda words: None)
    run.model.train()
    return run, next(moved(run.loader, world.device))


def measure_step(
    config: Config,
    rounds: int,
    tick: Callable[[], None] = lambda: None,
    variants: dict[str, dict[str, Any]] = VARIANTS,
) -> dict[str, Any]:
    """Median times of the step in all variants, and of their augmentation alone.

    rounds: turns of each variant; one more, that does not count, warms up.
    tick: is called after each step.
    variants: name -> what it has switched on; the first is the one that the others are compared with.
    """
    with joined_world(config.device, config.threads) as world:
        run, batch = open_run(config, world)
        augments = {
            name: make_augment(replace(config, **BARE | on), run.model, world.device) for name, on in variants.items()
        }
        steps: dict[str, list[Seconds]] = {name: [] for name in variants}
        alone: dict[str, list[Seconds]] = {name: [] for name in variants}
        for turn in range(rounds + 1):
            # There and back: no variant always follows the same other one.
            for name in list(augments)[:: 1 if turn % 2 else -1]:
                run.augment = augment = augments[name]
                step = _seconds(lambda: run.batch(*batch, update=True), world.device)
                own = _seconds(lambda augment=augment: augment(*batch[:2]), world.device)
                if turn:
                    steps[name].append(step)
                    alone[name].append(own)
                tick()
        threads, device = torch.get_num_threads(), world.device
        images = len(batch[0])  # fewer than asked for if the dataset is smaller
    bare = _median(steps[next(iter(variants))])
    rows = {}
    for name in variants:
        step = _median(steps[name])
        rows[name] = {
            "ms": step.wall * 1e3,
            "images_per_second": images / step.wall,
            "times_bare": step.wall / bare.wall,
            "cpu_ms": step.cpu * 1e3,
            "cpu_times_bare": step.cpu / bare.cpu,
            "augmentation_ms": _median(alone[name]).wall * 1e3,
            "augmentation_cpu_ms": _median(alone[name]).cpu * 1e3,
            "all_ms": [took.wall * 1e3 for took in steps[name]],
            "all_cpu_ms": [took.cpu * 1e3 for took in steps[name]],
        }
    return {
        "model": config.model,
        "parameters": sum(p.numel() for p in run.model.parameters()),
        "size": config.size,
        "batch_size": images,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "machine": machine(),
        "threads": threads,
        "versions": versions(),
        "rounds": rounds,
        "variants": rows,
    }


class Seconds(NamedTuple):
    wall: float
    cpu: float  # of all threads of this process


def _seconds(function: Callable[[], object], device: torch.device) -> Seconds:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    began = time.perf_counter(), time.process_time()
    function()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return Seconds(time.perf_counter() - began[0], time.process_time() - began[1])


def _median(times: list[Seconds]) -> Seconds:
    return Seconds(*(statistics.median(column) for column in zip(*times, strict=True)))


def step_table(result: dict[str, Any]) -> Table:
    title = f"{result['model']}, {result['size']} px, batch {result['batch_size']}, {result['device']}"
    title += f", {result['threads']} threads" if result["device"] == "cpu" else ""
    caption = f"medians of {result['rounds']} turns; {result['machine']}"
    table = Table(title=title, title_justify="left", caption=caption, caption_justify="left")
    on_cpu = result["device"] == "cpu"
    headings = ["", "ms\na step", "images/s", "x bare"] + ["CPU ms\na step", "x bare"] * on_cpu
    headings += ["augmenting\nalone"]
    for heading in headings:
        table.add_column(heading, justify="right" if heading else "left", no_wrap=True)
    kind = "cpu_ms" if on_cpu else "ms"
    for name, row in result["variants"].items():
        cells = [f"{row['ms']:,.1f}", f"{row['images_per_second']:,.1f}", f"{row['times_bare']:.3f}"]
        cells += [f"{row['cpu_ms']:,.1f}", f"{row['cpu_times_bare']:.3f}"] * on_cpu
        # Timed alone: steadier than the difference of two long times.
        table.add_row(name, *cells, f"{row[f'augmentation_{kind}']:,.1f}")
    return table
