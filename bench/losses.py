"""What each loss costs, forward and backward, as a multiple of binary cross-entropy on the known labels.

    python bench/losses.py                        # bench/results/losses.json and a table, some minutes
    python bench/losses.py --only 128x80          # one size; the others stay in the file

All losses take turns in one process on the same logits, half of the labels known and a tenth of these present; half of
the samples count as mixed. Figures are medians. `mlcpl` is the package of the LogicMix authors, with NaN for unknown
labels; a dash where it has no such loss. Ours get int8 labels, as a training run has them.
"""

from __future__ import annotations

import argparse
import json
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
from measure import RESULTS, environment, interleave, median_ms, save_json
from rich.console import Console
from rich.table import Table
from torch import Tensor

from gpu_logicmix.losses import LOSSES

SIZES = ["128x80", "128x9605"]
BASE = "bce"
EPOCH = 20
REPEATS = 5  # in a turn, so that what ran before has left the caches
OPTIONS = {name: ["delta=1"] for name in ("ll-r", "ll-ct", "ll-cp")}


def theirs() -> dict[str, Callable[[Tensor, Tensor], Tensor]]:
    """mlcpl's losses under our names."""
    from mlcpl import losses

    rejection, correction = losses.LargeLossRejection(delta_rel=1), losses.LargeLossCorrectionTemporary(delta_rel=1)
    return {
        "bce": losses.PartialBCEWithLogitLoss(),
        "focal": losses.PartialFocalWithLogitLoss(2),
        "asl": losses.PartialAsymmetricWithLogitLoss(clip=0.05, gamma_pos=0, gamma_neg=4),
        "csl": losses.PartialSelectiveAsymmetricWithLogitLoss(clip=0, gamma_pos=0, gamma_neg=1, likelihood_topk=5),
        "ll-r": lambda logits, targets: rejection(logits, targets, EPOCH),
        "ll-ct": lambda logits, targets: correction(logits, targets, EPOCH),
    }


def calls(batch: int, categories: int, device: torch.device) -> dict[str, Callable[[], object]]:
    """Name -> forward and backward of one batch; ours, and theirs as "mlcpl NAME"."""
    generator = torch.Generator().manual_seed(0)
    logits = (torch.randn(batch, categories, generator=generator) * 2).to(device)
    full = torch.rand(batch, categories, generator=generator) < 0.1
    targets = full.to(torch.int8).masked_fill(torch.rand(batch, categories, generator=generator) < 0.5, -1).to(device)
    mixed = (torch.arange(batch) % 2 == 0).to(device)
    with_nan = targets.float().masked_fill(targets == -1, torch.nan)

    def step(loss: Callable, *inputs: Tensor) -> Callable[[], object]:
        def call() -> None:
            for _ in range(REPEATS):
                loss(logits.detach().requires_grad_(), *inputs).backward()

        return call

    out = {}
    for name in LOSSES.names():
        loss = LOSSES.make(name, OPTIONS.get(name)).to(device)
        loss.set_epoch(EPOCH, 60)
        out[name] = step(loss, targets, mixed)
    return out | {f"mlcpl {name}": step(loss, with_nan) for name, loss in theirs().items()}


def measure(size: str, rounds: int, device: torch.device) -> dict[str, dict[str, float | None]]:
    batch, categories = map(int, size.split("x"))
    times = interleave(calls(batch, categories, device), rounds, device)
    ms = {name: median_ms(seconds) / REPEATS for name, seconds in times.items()}
    rows = {}
    for name in LOSSES.names():
        other = ms.get(f"mlcpl {name}")
        rows[name] = {
            "ms": ms[name],
            "of_bce": ms[name] / ms[BASE],
            "mlcpl_ms": other,
            "mlcpl_of_ours": None if other is None else other / ms[name],
        }
    return rows


def show(sizes: dict[str, dict], console: Console) -> None:
    for size, entry in sizes.items():
        table = Table(title=f"{size}, {entry['environment']['threads']} threads", title_justify="left")
        for column in ("loss", "ms", "x bce", "mlcpl ms", "mlcpl / ours"):
            table.add_column(column, justify="left" if column == "loss" else "right")
        for name, row in sorted(entry["losses"].items(), key=lambda item: item[1]["ms"]):
            other = ("-", "-") if row["mlcpl_ms"] is None else (f"{row['mlcpl_ms']:.2f}", f"{row['mlcpl_of_ours']:.2f}")
            table.add_row(name, f"{row['ms']:.2f}", f"{row['of_bce']:.2f}", *other)
        console.print(table)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=50, help="turns of each loss (default 50)")
    parser.add_argument("--size", action="append", help="BATCHxCATEGORIES (default 128x80 and 128x9605)")
    parser.add_argument("--only", default="", help="only sizes that have this in their name")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads (default 1)")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path, default=RESULTS / "losses.json")
    options = parser.parse_args(arguments)
    warnings.filterwarnings("ignore")
    torch.set_num_threads(options.threads)
    device, console = torch.device(options.device), Console()
    sizes = json.loads(options.out.read_text())["sizes"] if options.out.exists() else {}
    chosen = [size for size in options.size or SIZES if options.only in size]
    for size in chosen:
        with console.status(size):
            found = measure(size, options.rounds, device)
        sizes[size] = {"environment": environment(device), "rounds": options.rounds, "losses": found}
    save_json({"sizes": sizes}, options.out)
    show({size: sizes[size] for size in chosen}, console)
    console.print(f"written: {options.out}")


if __name__ == "__main__":
    main()
