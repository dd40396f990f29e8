"""The command that proves the augmentation on a device: check."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gpu_logicmix.cli import screen
from gpu_logicmix.cli.options import Device
from gpu_logicmix.errors import printable

if TYPE_CHECKING:
    import torch


def check(
    device: Device = "auto",
    out: Annotated[Path, typer.Option(help="Folder for check.json and check.md.")] = Path("check"),
) -> None:
    """Check the kernels and the mixes on a device against the CPU, and time them.

    Takes about a minute. The tables in check.md are made to be pasted into an issue.

        gpu-logicmix check --device cuda
    """
    import torch

    from gpu_logicmix.augment.check import CHECKS
    from gpu_logicmix.progress import progress_bar
    from gpu_logicmix.train.distributed import usable_device

    where = usable_device(device)
    if where.type == "cuda":
        torch.cuda.set_device(where)  # what is captured in a graph runs on the current device
    cases = mix_cases(where)
    total = len(CHECKS) + len(cases) + step_count(where)
    with progress_bar(total, "checking", unit=None, console=screen.console) as bar:

        def tick(words: str) -> None:
            bar.set(words)
            bar()

        data = run_check(where, screen.say, tick)
    out.mkdir(parents=True, exist_ok=True)
    (out / "check.json").write_text(json.dumps(data, indent=1) + "\n")
    (out / "check.md").write_text(as_markdown(data))
    screen.say(f"wrote {printable(out / 'check.json')} and {printable(out / 'check.md')}")
    if any(row["result"] == "failed" for row in data["checks"].values()):
        raise typer.Exit(1)


def mix_cases(device: torch.device) -> list[tuple]:
    """Shape, dtype, K and categories of the batches to time: the usual two on a GPU, a small one on a CPU."""
    import torch

    on_gpu = device.type == "cuda"
    shapes = [(32, 3, 448, 448), (128, 3, 224, 224)] if on_gpu else [(8, 3, 224, 224)]
    dtypes = (torch.float32, torch.bfloat16, torch.uint8) if on_gpu else (torch.float32, torch.uint8)
    return [(shape, dtype, (2, 3), 80) for shape in shapes for dtype in dtypes]


def step_options(device: torch.device) -> dict[str, Any]:
    """The network whose step is timed: without weights from anywhere, small on a CPU."""
    if device.type == "cuda":
        return {"model": "resnet50", "size": 224, "batch_size": 64, "weights": "none", "option": ["count=64"]}
    return {"model": "test_resnet", "size": 64, "batch_size": 16, "weights": "none", "option": ["count=16"]}


ROUNDS = 5


def step_count(device: torch.device) -> int:
    from gpu_logicmix.train.stepbench import VARIANTS

    return len(VARIANTS) * (ROUNDS + 1)


def triton_version() -> str:
    try:
        from triton import __version__
    except ImportError:
        return "not installed"
    return __version__


def run_check(
    device: torch.device, say: Callable[[str], None], tick: Callable[[str], None] = lambda words: None
) -> dict[str, Any]:
    """What was checked and measured. `tick` is told what was just done."""
    import torch

    from gpu_logicmix.augment.check import results
    from gpu_logicmix.augment.peers import contenders, interleave, median_ms, working
    from gpu_logicmix.machine import machine, versions
    from gpu_logicmix.train.stepbench import measure_step, step_config

    torch.manual_seed(0)
    on_gpu = device.type == "cuda"
    data: dict[str, Any] = {"device": torch.cuda.get_device_name(device) if on_gpu else machine()}
    data |= {"versions": {**versions(), "triton": triton_version()}, "checks": {}, "mix": {}, "step": {}}
    for name, (state, words) in results(device):
        data["checks"][name] = {"result": state, "words": words}
        say(f"{state:8s}{name}: {words}")
        tick("checking")
    for shape, dtype, k, categories in mix_cases(device):
        calls = contenders(shape, dtype, k, categories, device)
        times = interleave(working(calls), ROUNDS, device)
        name = f"{'x'.join(map(str, shape))} {str(dtype)[6:]}"
        data["mix"][name] = {peer: median_ms(times[peer]) if peer in times else None for peer in calls}
        tick("mixing")
    config = step_config(device=str(device), **step_options(device))
    step = measure_step(config, ROUNDS, lambda: tick("training"))
    data["step"] = {key: step[key] for key in ("model", "size", "batch_size", "threads")}
    data["step"]["ms"] = {name: row["ms"] for name, row in step["variants"].items()}
    return data


def as_markdown(data: dict[str, Any]) -> str:
    """The tables for an issue."""
    versions = ", ".join(f"{name} {value}" for name, value in data["versions"].items())
    lines = [f"{data['device']}; {versions}", "", "| check | result | |", "|---|---|---|"]
    lines += [f"| {name} | {row['result']} | {row['words']} |" for name, row in data["checks"].items()]
    peers = list(dict.fromkeys(peer for row in data["mix"].values() for peer in row))
    lines += ["", f"| mixing, ms | {' | '.join(peers)} |", f"|---|{'--:|' * len(peers)}"]
    for name, row in data["mix"].items():
        cells = ["-" if row.get(peer) is None else f"{row[peer]:.3f}" for peer in peers]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    step = data["step"]
    lines += ["", f"| a step of {step['model']}, {step['size']} px, batch {step['batch_size']} | ms |", "|---|--:|"]
    lines += [f"| {name} | {ms:.2f} |" for name, ms in step["ms"].items()]
    return "\n".join([*lines, ""])
