"""What finished runs see in mixtures of validation images: mAP on means of K images, labels by logical OR.

    python studies/mixed_images.py results/coco-mini/runs/none-* results/coco-mini/runs/logicmix-* --json mixed.json

A run that was trained with LogicMix should be better here than one without, whatever it is on single images: this
tells a training that learns nothing from mixtures (a bug) from one whose lesson does not help on single images.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.table import Table

from gpu_logicmix import GPULogicMix, mean_average_precision
from gpu_logicmix.data import make_loader
from gpu_logicmix.progress import progress_bar
from gpu_logicmix.train.batch import moved
from gpu_logicmix.train.distributed import joined_world
from gpu_logicmix.train.inputs import open_val
from gpu_logicmix.train.predict import load_run

SIZES = (1, 2, 3)  # images in a mixture


@torch.inference_mode()
def main(
    runs: Annotated[list[Path], typer.Argument(help="Folders of finished runs.")],
    cache: Annotated[str | None, typer.Option(help="Folder of decoded images, if not the run's own.")] = None,
    threads: Annotated[int, typer.Option(help="Of the CPU.")] = 1,
    out: Annotated[Path | None, typer.Option("--json", help="Write the figures here.")] = None,
) -> None:
    """mAP of finished runs on means of 1, 2 and 3 validation images; the same mixtures for all of them."""
    console, rows = Console(), []
    for folder in runs:
        config, model, _, _ = load_run(folder, "model", threads=threads, **({"cache": cache} if cache else {}))
        val = open_val(config)
        with (
            joined_world(config.device, threads) as world,
            progress_bar(len(SIZES) * len(val), console=console) as tick,
        ):
            model = model.to(world.device, memory_format=torch.channels_last)
            found = {"run": folder.name, "mix": config.mix, "known": config.known, "seed": config.seed}
            for size in SIZES:
                generator = torch.Generator(world.device).manual_seed(0)
                mix, logits, labels = GPULogicMix(1.0, size, size, generator=generator), [], []
                for images, targets, _ in moved(make_loader(val, 100), world.device):
                    images, targets = mix(images.float().div_(255), targets)
                    logits.append(model(images))
                    labels.append(targets)
                    tick(len(images))
                found[f"mAP{size}"] = round(100 * mean_average_precision(torch.cat(logits), torch.cat(labels)), 2)
        rows.append(found)
    table = Table("run", *(f"mAP (%), K = {size}" for size in SIZES))
    for row in rows:
        table.add_row(row["run"], *(f"{row[f'mAP{size}']:.1f}" for size in SIZES))
    console.print(table)
    if out is not None:
        out.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)
