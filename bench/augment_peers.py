"""What `fit --augment` can choose, on the batch alone and in the training step: one table.

    python bench/augment_peers.py          # the table, and bench/results/augment.json
    python bench/augment_peers.py --sizes 256x96 --rounds 5

Each takes the uint8 batch of the loader, as in a run: what needs floats pays for the conversion. All take turns in one
process, with fresh draws in each call. Figures are medians: on a GPU of the time, on a CPU of the CPU time of a thread,
which other programs hardly change. "none" is the conversion that every step has. In the step (`--model`, `--step-size`,
batch 32) only the augmentation differs; the flip and LogicMix are off.
"""

from __future__ import annotations

import argparse
import statistics
import time
from dataclasses import replace
from pathlib import Path

import torch
from measure import RESULTS, environment, save_json
from randaugment import photo_like
from rich.console import Console
from rich.table import Table

from gpu_logicmix.machine import keep_memory
from gpu_logicmix.train.batch import Augment
from gpu_logicmix.train.stepbench import BARE, measure_step, step_config

# Choice -> what is drawn how often.
DRAWN = {
    "none": "",
    "randaugment": "per sample",
    "kornia-randaugment": "operations per batch",
    "kornia-trivialaugment": "operations per batch",
    "kornia-autoaugment": "operations per batch",
}


def measure_alone(batch: int, size: int, rounds: int, device: torch.device) -> dict[str, float]:
    """ms of each choice on a batch."""
    images = photo_like(batch, size).to(device).to(memory_format=torch.channels_last)
    targets = torch.zeros(batch, 80, dtype=torch.int8, device=device)
    config = replace(step_config(size=size), **BARE)
    calls = {}
    for name in DRAWN:
        augment = Augment(replace(config, augment=name)).to(device)
        calls[name] = lambda augment=augment: augment(images, targets)
    times: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(rounds + 1):  # the first turn warms up
        for name, call in calls.items():
            began = clock(device)
            call()
            if turn:
                times[name].append(1e3 * (clock(device) - began))
    return {name: statistics.median(each) for name, each in times.items()}


def clock(device: torch.device) -> float:
    if device.type != "cuda":
        return time.process_time()
    torch.cuda.synchronize(device)
    return time.perf_counter()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", default=["32x448", "128x224", "256x96"], help="batch x image side")
    parser.add_argument("--rounds", type=int, default=15, help="turns of each choice (default 15)")
    parser.add_argument("--model", default="tf_efficientnet_lite0", help="of timm, for the step")
    parser.add_argument("--step-size", type=int, default=96, help="image side in the step (default 96)")
    parser.add_argument("--out", type=Path, default=RESULTS / "augment.json")
    options = parser.parse_args()
    torch.set_num_threads(1)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    alone = {s: measure_alone(*map(int, s.split("x")), options.rounds, device) for s in options.sizes}
    config = step_config(model=options.model, weights="none", size=options.step_size, batch_size=32, threads=1)
    variants = {name: {"augment": name} for name in DRAWN}
    step = measure_step(config, options.rounds, variants=variants)

    kind = "" if device.type == "cuda" else "cpu_"
    title = f"--augment, {'' if kind == '' else 'CPU '}ms: medians of {options.rounds} turns"
    table = Table(title=title, title_justify="left")
    heads = ["", "drawn", *options.sizes, f"step, 32x{options.step_size}", "x none"]
    for head in heads:
        table.add_column(head, justify="left" if head in ("", "drawn") else "right")
    for name, drawn in DRAWN.items():
        row = step["variants"][name]
        cells = [f"{alone[size][name]:.1f}" for size in options.sizes]
        table.add_row(name, drawn, *cells, f"{row[f'{kind}ms']:.0f}", f"{row[f'{kind}times_bare']:.2f}")
    Console(width=110).print(table)
    where = environment(device)
    save_json({"environment": where, "rounds": options.rounds, "alone_ms": alone, "step": step}, options.out)


if __name__ == "__main__":
    keep_memory()  # as the commands do
    main()
