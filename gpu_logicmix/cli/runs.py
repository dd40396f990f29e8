"""Commands on a finished run: evaluate, predict, cft, report."""

from __future__ import annotations

import csv
import json
import os
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.table import Table

from gpu_logicmix.cli import screen
from gpu_logicmix.cli.options import Device, RunFolder, Split, Threads, ends, given
from gpu_logicmix.errors import printable, shown

Use = Annotated[
    Literal["model", "cft"] | None,
    typer.Option(
        help="Weights: model, as trained, or cft, fine-tuned; cft by default if its gain on held-out labels is certain."
    ),
]
BatchSize = Annotated[int | None, typer.Option(min=1, help="Images per forward pass; that of the run unless given.")]


def write_report(folder: Path) -> None:
    if int(os.environ.get("RANK", 0)) == 0:
        from gpu_logicmix.report.run_page import report_run

        screen.say(f"report: {printable(report_run(folder))}")


def evaluate(
    run: RunFolder,
    data: Annotated[
        str | None, typer.Option(help="DATA to evaluate on; the validation images of the run unless given.")
    ] = None,
    split: Split = "val",
    use: Use = None,
    out: Annotated[Path | None, typer.Option(help="Also write everything as JSON.")] = None,
    show_all: Annotated[bool, typer.Option("--all", help="Print the AP of all categories.")] = False,
    device: Device = "auto",
    threads: Threads = None,
    batch_size: BatchSize = None,
) -> None:
    """Evaluate a finished run: mAP, AP per category, precision, recall, F1.

    Unknown labels are ignored.

        gpu-logicmix evaluate runs/coco-10 --all

        gpu-logicmix evaluate runs/photos --data csv:more/labels.csv --split train
    """
    from gpu_logicmix.train import predict as predictions

    options = given(device=device, threads=threads, batch_size=batch_size)
    result = predictions.evaluate_run(run, data, split, use, console=screen.console, **options)
    if int(os.environ.get("RANK", 0)):
        return
    metrics, categories = result.metrics, result.categories
    screen.say(f"{printable(result.weights)}: mAP {metrics.mAP:.2%} on {result.images:,} images")
    judged = [c for c in range(len(metrics.AP)) if c not in metrics.left_out]
    for table in _metric_tables(metrics, categories, sorted(judged, key=lambda c: -metrics.AP[c]), show_all):
        screen.console.print(table)
    if metrics.left_out:
        names = ", ".join(categories[c] for c in metrics.left_out)
        screen.say(f"not in mAP, no known positive label: {printable(names)}")
    if out is not None:
        ap = {categories[c]: metrics.AP[c] for c in judged}
        values = {"weights": str(result.weights), "images": result.images, **metrics.as_dict(), "AP": ap}
        out.write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")
        screen.say(f"wrote {printable(out)}")


def _metric_tables(metrics: Any, categories: list[str], order: list[int], show_all: bool) -> tuple[Table, Table]:
    overall = Table()
    for heading in ("", "CP", "CR", "CF1", "OP", "OR", "OF1"):
        overall.add_column(heading, justify="right" if heading else "left")
    for name, row in (("probability above 0.5", metrics.threshold), ("top 3 per image", metrics.top3)):
        overall.add_row(name, *(f"{value:.2%}" for value in row))
    each = Table("category", "AP")
    for c in ends(order, show_all):
        if c is None:
            each.add_row(f"… {len(order) - 16} more (--all)", "")
        else:
            each.add_row(shown(categories[c]), f"{metrics.AP[c]:.2%}")
    return overall, each


def predict(
    run: RunFolder,
    images: Annotated[list[Path], typer.Argument(help="Image files, or folders of images.", show_default=False)],
    out: Annotated[Path | None, typer.Option(help="Write all probabilities to this file, .csv or .json.")] = None,
    top: Annotated[int, typer.Option(min=1, help="Categories to print per image.")] = 5,
    use: Use = None,
    device: Device = "auto",
    threads: Threads = None,
    batch_size: BatchSize = None,
) -> None:
    """Predict the categories of images with a finished run.

    Prints the most likely categories, and writes all probabilities to a file.

        gpu-logicmix predict runs/photos holiday/ --out holiday.csv
    """
    from gpu_logicmix.train import predict as predictions

    if out is not None and out.suffix not in (".csv", ".json"):
        raise ValueError(f"--out {out}: must end in .csv or .json")
    options = given(device=device, threads=threads, batch_size=batch_size)
    names, categories, probabilities, bad = predictions.predict(run, images, use, console=screen.console, **options)
    table = Table("image", "most likely categories")
    best = probabilities.sort(dim=1, descending=True, stable=True).indices[:, :top]
    for name, row, chosen in list(zip(names, probabilities, best.tolist(), strict=True))[:20]:
        table.add_row(shown(name), ", ".join(f"{shown(categories[c])} {row[c]:.0%}" for c in chosen))
    screen.console.print(table)
    if len(names) > 20:
        screen.say(f"… and {len(names) - 20:,} more{'' if out else '; --out FILE.csv writes all'}")
    for line in bad:
        screen.say(f"skipped: {printable(line)}", "yellow")
    if out is not None:
        _write_predictions(out, names, categories, probabilities)
        screen.say(f"wrote {printable(out)}: {len(names):,} images, {len(categories)} categories")


def _write_predictions(out: Path, names: list[str], categories: list[str], probabilities: Any) -> None:
    rows = [[round(value, 6) for value in row] for row in probabilities.tolist()]
    # File names need not be UTF-8: their bytes pass through as they are.
    with open(out, "w", newline="", encoding="utf-8", errors="surrogateescape") as file:
        if out.suffix == ".csv":
            writer = csv.writer(file)
            writer.writerow(["image", *categories])
            writer.writerows([name, *row] for name, row in zip(names, rows, strict=True))
        else:
            by_name = {name: dict(zip(categories, row, strict=True)) for name, row in zip(names, rows, strict=True)}
            json.dump(by_name, file, indent=1)


def cft(
    run: RunFolder,
    epochs: Annotated[int | None, typer.Option(min=1, help="Maximum number of epochs.")] = None,
    lr: Annotated[float | None, typer.Option(help="Adam learning rate.")] = None,
    method: Annotated[
        Literal["adam", "ga"] | None, typer.Option(help="adam, or ga: a genetic algorithm that optimizes AP.")
    ] = None,
    device: Device = "auto",
    threads: Threads = None,
    batch_size: BatchSize = None,
) -> None:
    """Category-wise fine-tuning of a finished run.

    Tunes the classifier of each category on its known labels. What is not given is taken from the options of the run.
    The trained weights stay as they are; the new ones are written beside them (cft.safetensors).

        gpu-logicmix cft runs/coco-10 --epochs 200
    """
    from gpu_logicmix.train import finetune

    options = given(cft_epochs=epochs, cft_lr=lr, cft_method=method)
    options |= given(device=device, threads=threads, batch_size=batch_size)
    finetune.fine_tune(run, console=screen.console, options=options)
    write_report(run)


def report(run: RunFolder) -> None:
    """Write the report of a run again.

    fit writes report.html when it ends; this does it at any time.

        gpu-logicmix report runs/coco-10
    """
    write_report(run)
