"""Category-wise fine-tuning: all heads at once, against one after the other and against mlcpl's CFT.

    python bench/cft.py                    # everything: bench/results/cft.json, some minutes
    python bench/cft.py --only "10 %"      # only the rows that have this in their name; the others stay in the file

Same features, known labels, held-out labels, epochs, loss (asymmetric), optimiser (Adam) and batch size; no early
stopping, so that all of them do all the work. Methods take turns in one process; figures are medians of whole calls.

- `mlcpl`: the CFT of the paper's authors, its printing sent to nowhere.
- `one by one`: the loop one would write in plain PyTorch: gather the category's samples, autograd, torch.optim.Adam.
  Where a row says so, these two fit only the first few heads, and their time is what all heads take at this rate.
- `ours`: category_wise_fine_tune.

The mAP on the held-out labels, of the heads that all of them fit, stands beside the time: it must be the same. With
mini-batches the shuffles differ, and mlcpl passes over batches that have no positive label.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import statistics
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from measure import RESULTS, environment, interleave, save_json
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from gpu_logicmix import average_precision, category_wise_fine_tune, hide_labels
from gpu_logicmix.cft.heldout import split_known

EPOCHS, LR, HOLDOUT, SEED = 10, 1e-3, 0.2, 0
OURS = "ours"
# name: samples, features, categories, share known, batch size, heads that the others fit (0: no others)
ROWS = {
    "20,000 x 1,280, 80 heads, 10 % known, full batch": (20_000, 1_280, 80, 0.1, None, 80),
    "20,000 x 1,280, 80 heads, 10 % known, batches of 512": (20_000, 1_280, 80, 0.1, 512, 80),
    "20,000 x 1,280, 80 heads, 90 % known, full batch": (20_000, 1_280, 80, 0.9, None, 8),
    "20,000 x 1,280, 80 heads, 90 % known, batches of 512": (20_000, 1_280, 80, 0.9, 512, 8),
    "82,783 x 2,048, 80 heads, 10 % known, full batch": (82_783, 2_048, 80, 0.1, None, 0),
    "82,783 x 2,048, 80 heads, 10 % known, batches of 512": (82_783, 2_048, 80, 0.1, 512, 0),
}


def make(samples: int, dimensions: int, categories: int, known: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Features, partial labels with a tenth positive, and heads that have seen something, but not quite that."""
    generator = torch.Generator().manual_seed(SEED)
    features = torch.randn(samples, dimensions, generator=generator)
    true = torch.randn(categories, dimensions, generator=generator) / dimensions**0.5
    full = (features @ true.t() + 0.5 * torch.randn(samples, categories, generator=generator) > 1.4).to(torch.int8)
    bent = true + torch.randn(categories, dimensions, generator=generator) / dimensions**0.5
    return features, hide_labels(full, known, seed=SEED), bent, torch.full((categories,), -1.4)


def split(targets: Tensor) -> tuple[Tensor, Tensor]:
    """Labels [N, C] to fit and to judge by: the ones that ours takes."""
    fit, held, _ = split_known(targets.t().contiguous(), HOLDOUT, 5, torch.Generator().manual_seed(SEED))
    return fit.t().contiguous(), held.t().contiguous()


def with_mlcpl(features: Tensor, targets: Tensor, weight: Tensor, bias: Tensor, batch_size: int | None, heads: int):
    from mlcpl.cft import BP, CFT
    from mlcpl.losses import PartialAsymmetricWithLogitLoss
    from torchmetrics.functional.classification import binary_average_precision

    fit, held = (labels[:, :heads].float().masked_fill(labels[:, :heads] == -1, torch.nan) for labels in split(targets))
    linear = [nn.Linear(features.shape[1], 1) for _ in range(heads)]
    for c, head in enumerate(linear):
        head.weight.data, head.bias.data = weight[c : c + 1].clone(), bias[c : c + 1].clone()
    optimiser = BP(
        device="cpu",
        loss_fn=PartialAsymmetricWithLogitLoss(gamma_neg=4, gamma_pos=0, clip=0.05),
        optimizer_class=torch.optim.Adam,
        optimizer_kwargs={"lr": LR},
    )
    with contextlib.redirect_stdout(io.StringIO()):
        new, _ = CFT(
            linear,
            (features, fit),
            (features, held),
            optimiser,
            batch_size=batch_size,
            epochs=EPOCHS,
            validation_metric=lambda logits, y: binary_average_precision(logits, y.long()),
            device="cpu",
        )
    return torch.cat([head.weight.data for head in new]), torch.cat([head.bias.data for head in new])


def one_by_one(features: Tensor, targets: Tensor, weight: Tensor, bias: Tensor, batch_size: int | None, heads: int):
    fit, held = split(targets)
    new = []
    for c in range(heads):
        mine, judged = (labels[:, c] != -1 for labels in (fit, held))
        x, y = features[mine], fit[mine, c].float()
        x_held, y_held = features[judged], held[judged, c]
        w, b = weight[c].clone().requires_grad_(), bias[c].clone().requires_grad_()
        optimiser = torch.optim.Adam([w, b], lr=LR)
        with torch.no_grad():
            best_ap, best = (
                average_precision((x_held @ w + b)[:, None], y_held[:, None]),
                (w.detach().clone(), b.detach().clone()),
            )
        for _ in range(EPOCHS):
            batches = [slice(None)] if batch_size is None else torch.randperm(len(x)).split(batch_size)
            for batch in batches:
                p = (x[batch] @ w + b).sigmoid()
                shifted = (1 - p + 0.05).clamp(max=1)
                loss = -y[batch] * p.log() - (1 - y[batch]) * (1 - shifted.detach()) ** 4 * shifted.log()
                optimiser.zero_grad()
                loss.mean().backward()
                optimiser.step()
            with torch.no_grad():
                ap = average_precision((x_held @ w + b)[:, None], y_held[:, None])
                if ap > best_ap:
                    best_ap, best = ap, (w.detach().clone(), b.detach().clone())
        new.append(best)
    return torch.stack([w for w, _ in new]), torch.stack([b for _, b in new])


def measure(name: str, rounds: int, folder: Path, device: torch.device) -> dict:
    samples, dimensions, categories, known, batch_size, few = ROWS[name]
    features, targets, weight, bias = make(samples, dimensions, categories, known)
    results: dict[str, tuple[Tensor, Tensor]] = {}

    def ours(given):
        options = {
            "epochs": EPOCHS,
            "patience": None,
            "batch_size": batch_size,
            "lr": LR,
            "holdout": HOLDOUT,
            "seed": SEED,
        }
        return category_wise_fine_tune(given, targets, weight, bias, **options)[:2]

    functions: dict[str, Callable] = {}
    if few:
        functions["mlcpl"] = lambda: with_mlcpl(features, targets, weight, bias, batch_size, few)
        functions["one by one"] = lambda: one_by_one(features, targets, weight, bias, batch_size, few)
        functions[OURS] = lambda: ours(features)
    else:
        np.save(folder / "features.npy", features.numpy())
        functions[OURS] = lambda: ours(features)
        functions["ours, features mapped from a file"] = lambda: ours(np.load(folder / "features.npy", mmap_mode="r"))

    def keep(method: str) -> Callable:
        def call():
            results[method] = functions[method]()

        return call

    times = interleave({method: keep(method) for method in functions}, rounds, device)
    compared = few or categories  # the heads that all methods fit
    held = split(targets)[1][:, :compared]

    def held_out_map(new_weight: Tensor, new_bias: Tensor) -> float:
        return average_precision(features @ new_weight[:compared].t() + new_bias[:compared], held).mean().item()

    methods = {}
    for method, seconds in times.items():
        heads = len(results[method][0])
        methods[method] = {
            "seconds": statistics.median(seconds) * categories / heads,
            "heads_timed": heads,
            "all_seconds": seconds,
            "map": held_out_map(*results[method]),
        }
    before = held_out_map(weight, bias)
    for figures in methods.values():
        figures["speed_up"] = figures["seconds"] / methods[OURS]["seconds"]
    return {
        "categories": categories,
        "known": known,
        "batch_size": batch_size,
        "epochs": EPOCHS,
        "map_before": before,
        "methods": methods,
    }


def show(rows: dict[str, dict], console: Console) -> None:
    for name, row in rows.items():
        table = Table(
            title=f"{name}, {row['epochs']} epochs, {row['environment']['threads']} threads", title_justify="left"
        )
        for column in ("method", "s", "x ours", "held-out mAP"):
            table.add_column(column, justify="left" if column == "method" else "right")
        table.add_row("(before)", "", "", f"{row['map_before']:.4f}")
        for method, figures in row["methods"].items():
            part = "" if figures["heads_timed"] == row["categories"] else f" ({figures['heads_timed']} heads timed)"
            table.add_row(
                f"[bold]{method}[/]" if method == OURS else method + part,
                f"{figures['seconds']:.2f}",
                f"{figures['speed_up']:.1f}",
                f"{figures['map']:.4f}",
            )
        console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3, help="turns of each method in each row (default 3)")
    parser.add_argument("--only", default="", help="only rows whose name has this in it")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads (default 2)")
    parser.add_argument("--out", type=Path, default=RESULTS / "cft.json")
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    torch.set_num_threads(options.threads)
    torch.manual_seed(SEED)
    device = torch.device("cpu")  # mlcpl's DataLoader holds the features of one head at a time, on the CPU here
    console = Console()
    rows = json.loads(options.out.read_text())["rows"] if options.out.exists() else {}
    with tempfile.TemporaryDirectory() as folder:
        for name in ROWS:
            if options.only in name:
                with console.status(name):
                    rows[name] = {"environment": environment(device), "rounds": options.rounds}
                    rows[name] |= measure(name, options.rounds, Path(folder), device)
    rows = {name: rows[name] for name in ROWS if name in rows}
    save_json({"rows": rows}, options.out)
    show({name: row for name, row in rows.items() if options.only in name}, console)
    console.print(f"written: {options.out}")


if __name__ == "__main__":
    main()
