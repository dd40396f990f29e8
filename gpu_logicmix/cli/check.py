"""The command that proves the augmentation on a device: check."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from gpu_logicmix.cli import screen
from gpu_logicmix.cli.options import Device
from gpu_logicmix.errors import printable


def check(
    device: Device = "auto",
    out: Annotated[Path, typer.Option(help="Folder for check.json and check.md.")] = Path("check"),
) -> None:
    """Check the kernels and the mixes on a device against the CPU, and time them.

    Takes about a minute. The table in check.md is made to be pasted into an issue.

        gpu-logicmix check --device cuda
    """
    import torch

    from gpu_logicmix.augment.check import run_checks

    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    passed = run_checks(device, out, screen.say)
    screen.say(f"wrote {printable(out / 'check.json')} and {printable(out / 'check.md')}")
    if not passed:
        raise typer.Exit(1)
