"""Time of a training step with each method's head, as a multiple of the linear head's: same backbone, same batch.

    python bench/methods.py                                    # bench/results/methods.json
    python bench/methods.py --model resnet101 --size 448 --batch 8 --only sst sarb

A step is forward, loss (partial BCE), the losses of the method's own, and backward; no optimiser, no augmentation. The
epoch is one in which SST and its successors carry labels over, with prototypes at random. Methods take turns in one
process, so that what slows the machine down slows all of them: the ratios mean more than the times.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from pathlib import Path

import torch
from measure import RESULTS, environment, interleave, save_json
from rich.console import Console
from rich.table import Table

from gpu_logicmix import PartialBCELoss, build_model
from gpu_logicmix.losses.base import Batch

METHODS = ("linear", "mlp", "gcn-ml", "p-gcn", "ssgrl", "kggr", "sst", "hst", "sarb", "dsrb")
EPOCH = 9


def make_step(
    name: str, model_name: str, options: list[str], images: torch.Tensor, batch: Batch
) -> Callable[[], object]:
    torch.manual_seed(0)
    categories = batch.targets.shape[1]
    model = build_model(model_name, categories, name, image_size=images.shape[2], head_options=options)
    model.head.prepare(batch.targets.cpu(), [str(i) for i in range(categories)])
    if hasattr(model.head, "prototypes"):
        model.head.prototypes.normal_()
        model.head.found.fill_(True)
    model.to(images.device)
    loss = PartialBCELoss()

    def step() -> object:
        total, count = model.head.training_step(model, [images], batch, loss)
        value = total / count.clamp(min=1)
        value.backward()
        model.zero_grad()
        return value.detach()

    return step


def main(arguments: list[str] | None = None) -> dict:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="resnet18")
    parser.add_argument("--size", type=int, default=128)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--categories", type=int, default=80)
    parser.add_argument("--only", nargs="+", choices=METHODS[1:], default=METHODS[1:], metavar="METHOD")
    parser.add_argument("--semantic-option", nargs="+", default=[], metavar="NAME=VALUE", help="of ssgrl ... dsrb")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, default=RESULTS / "methods.json")
    chosen = parser.parse_args(arguments)
    torch.set_num_threads(chosen.threads)
    device = torch.device(chosen.device)
    torch.manual_seed(0)
    images = torch.rand(chosen.batch, 3, chosen.size, chosen.size, device=device)
    targets = torch.randint(-1, 2, (chosen.batch, chosen.categories), device=device)
    batch = Batch(targets, torch.arange(chosen.batch, device=device), None, EPOCH)
    steps = {
        name: make_step(name, chosen.model, chosen.semantic_option if name in METHODS[4:] else [], images, batch)
        for name in ("linear", *chosen.only)
    }
    times = interleave(steps, chosen.rounds, device)
    rows = {}
    for name, seconds in times.items():
        ratios = [a / b for a, b in zip(seconds, times["linear"], strict=True)]
        rows[name] = {"ms": round(statistics.median(seconds) * 1e3, 2), "ratio": round(statistics.median(ratios), 2)}
    settings = {k: v for k, v in vars(chosen).items() if k not in ("out", "only", "device")}
    result = {"settings": settings, "environment": environment(device), "steps": rows}
    save_json(result, chosen.out)
    table = Table("method", "ms a step", "times the linear head", title=f"{chosen.model}, {chosen.size} px")
    for name, row in rows.items():
        table.add_row(name, f"{row['ms']:.1f}", f"{row['ratio']:.2f}")
    Console().print(table)
    return result


if __name__ == "__main__":
    main()
