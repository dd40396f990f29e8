"""The command that measures the training step: bench."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Literal

import typer

from gpu_logicmix.cli import screen
from gpu_logicmix.cli.options import MAX_SIZE, Device, Threads
from gpu_logicmix.errors import printable
from gpu_logicmix.files import check_out
from gpu_logicmix.progress import progress_bar


def bench(
    model: Annotated[str, typer.Option(help="Any timm model.")] = "resnet50",
    weights: Annotated[str, typer.Option(help="hub, none or a file; they do not change the time.")] = "none",
    size: Annotated[int, typer.Option(min=16, max=MAX_SIZE, help="Images are SIZE x SIZE.")] = 224,
    batch_size: Annotated[int, typer.Option(min=1, help="Images per step.")] = 32,
    device: Device = "auto",
    threads: Threads = None,
    amp: Annotated[
        Literal["auto", "bf16", "fp16", "off"], typer.Option(help="Mixed precision; auto: bfloat16 on CUDA.")
    ] = "auto",
    compile: Annotated[bool, typer.Option("--compile", help="torch.compile the model.")] = False,
    rounds: Annotated[int, typer.Option(min=1, help="Repetitions of each variant.")] = 7,
    out: Annotated[Path | None, typer.Option(help="Also write everything as JSON.")] = None,
) -> None:
    """Measure what augmentation and mixing add to the training step of a model.

    Runs the step with and without flip, RandAugment and LogicMix, in turns in one process, and prints medians.

        gpu-logicmix bench --model resnet101 --size 448 --batch-size 32
    """
    check_out(out)
    from gpu_logicmix.train.stepbench import VARIANTS, measure_step, step_config, step_table

    options = {"model": model, "weights": weights, "size": size, "batch_size": batch_size, "compile": compile}
    config = step_config(**options, device=device, threads=threads, amp=amp)
    with progress_bar((rounds + 1) * len(VARIANTS), "steps", unit="steps", console=screen.console) as bar:
        result = measure_step(config, rounds, bar)
    screen.console.print(step_table(result))
    if out is not None:
        out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
        screen.say(f"wrote {printable(out)}")
