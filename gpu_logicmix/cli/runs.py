"""Commands on a finished run: evaluate, cft, decide, prior, report."""

from __future__ import annotations

import json
import os
import warnings
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.table import Table

from gpu_logicmix.cli import screen
from gpu_logicmix.cli.options import Device, RunFolder, Split, Threads, ends, given
from gpu_logicmix.errors import printable, shown
from gpu_logicmix.files import check_out

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
    option: Annotated[
        list[str] | None,
        typer.Option(
            "-o",
            "--option",
            metavar="NAME=VALUE",
            help="Dataset option, may be repeated; those of the run unless any is given.",
        ),
    ] = None,
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
    from gpu_logicmix.decisions import OtherWeights
    from gpu_logicmix.train import predict as predictions
    from gpu_logicmix.train.runlog import no_nan

    check_out(out)
    options = given(device=device, threads=threads, batch_size=batch_size, option=option)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", OtherWeights)  # said below, in a line
        result = predictions.evaluate_run(run, data, split, use, console=screen.console, **options)
    if int(os.environ.get("RANK", 0)):
        return
    metrics, categories = result.metrics, result.categories
    screen.say(f"{printable(result.weights)}: mAP {metrics.mAP:.2%} on {result.images:,} images")
    judged = [c for c in range(len(metrics.AP)) if c not in metrics.left_out]
    for table in _metric_tables(result, sorted(judged, key=lambda c: -metrics.AP[c]), show_all):
        screen.console.print(table)
    if metrics.left_out:
        names = ", ".join(categories[c] for c in metrics.left_out)
        screen.say(f"not in mAP, no known positive label: {printable(names)}")
    _say_outdated(run, result.weights.stem)
    if out is not None:
        ap = {categories[c]: metrics.AP[c] for c in judged}
        values = {"weights": str(result.weights), "images": result.images, **metrics.as_dict(), "AP": ap}
        if result.decided is not None:
            values["at_thresholds"] = result.decided._asdict()
        out.write_text(json.dumps(no_nan(values), indent=1) + "\n", encoding="utf-8")
        screen.say(f"wrote {printable(out)}")


def _say_outdated(run: Path, weights: str) -> None:
    from gpu_logicmix.decisions import outdated_words, read_decisions

    found = read_decisions(run)
    if found is not None and found.outdated and found.weights == weights:
        screen.say(printable(outdated_words(run, found)), "yellow")


def _metric_tables(result: Any, order: list[int], show_all: bool) -> tuple[Table, Table]:
    metrics, categories, overall = result.metrics, result.categories, Table()
    for heading in ("", "CP", "CR", "CF1", "OP", "OR", "OF1"):
        overall.add_column(heading, justify="right" if heading else "left")
    rows = {"probability above 0.5": metrics.threshold, "at the run's thresholds": result.decided}
    for name, row in {**rows, "top 3 per image": metrics.top3}.items():
        if row is not None:
            overall.add_row(name, *(f"{value:.2%}" for value in row))
    each = Table("category", "AP")
    for c in ends(order, show_all):
        if c is None:
            each.add_row(f"… {len(order) - 16} more (--all)", "")
        else:
            each.add_row(shown(categories[c]), f"{metrics.AP[c]:.2%}")
    return overall, each


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

    if lr is not None and not lr > 0:
        raise ValueError(f"--lr {lr:g}: must be above 0")
    options = given(cft_epochs=epochs, cft_lr=lr, cft_method=method)
    options |= given(device=device, threads=threads, batch_size=batch_size)
    finetune.fine_tune(run, console=screen.console, options=options)
    _say_without_thresholds(run)
    write_report(run)


def _say_without_thresholds(run: Path) -> None:
    """If a run has thresholds, but not of the weights that it keeps."""
    from gpu_logicmix.decisions import read_decisions
    from gpu_logicmix.train.predict import kept_weights

    found, kept = read_decisions(run), kept_weights(run)
    if found is None or int(os.environ.get("RANK", 0)) or (found.weights == kept and not found.outdated):
        return
    whose = f"earlier weights ({found.weights})" if found.outdated else f"the weights {found.weights}"
    line = (
        f"{run / 'decisions.json'}: has thresholds of {whose} and none of {kept}, which evaluate, predict and export "
        f"take unless told otherwise (--use); gpu-logicmix decide {run} fits these"
    )
    screen.say(printable(line), "yellow")


def decide(
    run: RunFolder,
    precision: Annotated[
        float | None,
        typer.Option(help="Least precision: thresholds with the highest recall that has it, in place of the best F1."),
    ] = None,
    min_labels: Annotated[
        int, typer.Option(min=1, help="Known labels of either kind that a category needs for its own threshold.")
    ] = 5,
    use: Use = None,
    device: Device = "auto",
    threads: Threads = None,
    batch_size: BatchSize = None,
) -> None:
    """Fit a threshold per category and a temperature on held-out known labels.

    fit does it at the end; this does it again, with another goal. The labels are those of --tune-images if the run has
    them, else training labels held out of fine-tuning; never those of the validation images. evaluate, predict and
    export use the result, decisions.json.

        gpu-logicmix decide runs/photos --precision 0.9
    """
    from gpu_logicmix.train import decide as decisions

    options = given(device=device, threads=threads, batch_size=batch_size)
    found = decisions.decide(run, use, precision=precision, min_labels=min_labels, console=screen.console, **options)
    if int(os.environ.get("RANK", 0)):
        return
    table = Table("category", "threshold", "precision", "recall", "F1", "F1 at 0.5", "labels")
    for entry in found.categories:
        numbers = (entry[name] for name in ("precision", "recall", "f1", "f1_at_half"))
        row = ["–" if number is None else f"{number:.1%}" for number in numbers]
        counts = f"{entry['positives']:,} + {entry['negatives']:,}"
        table.add_row(shown(entry["name"]), f"{entry['threshold']:.3f}" if entry["decided"] else "–", *row, counts)
    screen.console.print(table)
    decisions.say_decisions(found, lambda text: screen.say(printable(text)))
    if found.log_loss[0] is not None:
        (loss, loss_after), (ece, ece_after) = found.log_loss, found.ece
        screen.say(f"log loss {loss:.4f} → {loss_after:.4f}, calibration error {ece:.2%} → {ece_after:.2%}")
    _say_without_thresholds(run)
    write_report(run)


def prior(
    run: RunFolder,
    out: Annotated[Path, typer.Option(help="File to write: a row per category, Classes,avg_pred.")] = Path("prior.csv"),
    threshold: Annotated[
        float, typer.Option(min=0, max=1, help="Only for the table: the option threshold of the loss.")
    ] = 0.5,
    device: Device = "auto",
    threads: Threads = None,
    batch_size: BatchSize = None,
) -> None:
    """Estimate how often each category is present, for --loss csl.

    CSL takes an unknown label as a weak negative, but ignores those of categories whose prior is above its threshold.
    Known labels tell the prior only where labels are missing at random (then --loss-option prior=known will do). Else
    it comes from a short first run that ignores unknown labels: its mean probability over the training images,
    un-augmented and unmixed.

        gpu-logicmix fit coco:PATH --known 0.1 --loss csl --loss-option mode=ignore --epochs 5 --out runs/first

        gpu-logicmix prior runs/first --out prior.csv

        gpu-logicmix fit coco:PATH --known 0.1 --loss csl --loss-option prior=prior.csv --out runs/csl
    """
    from gpu_logicmix.train.prior import prior_of_run

    options = given(device=device, threads=threads, batch_size=batch_size)
    found = prior_of_run(run, out, console=screen.console, **options)
    if int(os.environ.get("RANK", 0)):
        return
    table = Table("category", "prior")
    order = found.prior.argsort(descending=True).tolist()
    for c in ends(order, False):
        row = (f"… {len(order) - 16} more", "") if c is None else (shown(found.categories[c]), f"{found.prior[c]:.2%}")
        table.add_row(*row)
    screen.console.print(table)
    screen.say(f"wrote {printable(out)}: {len(order)} categories, from {found.images:,} images")
    if threshold:
        above = int((found.prior > threshold).sum())
        screen.say(f"{above} of them are above {threshold:g}: --loss csl ignores unknown labels of these")
    else:
        screen.say("with a threshold of 0 --loss csl makes no use of it")
    screen.say(f"train with it: --loss csl --loss-option prior={printable(out)} --loss-option threshold={threshold:g}")


def report(run: RunFolder) -> None:
    """Write the report of a run again.

    fit writes report.html when it ends; this does it at any time.

        gpu-logicmix report runs/coco-10
    """
    write_report(run)
