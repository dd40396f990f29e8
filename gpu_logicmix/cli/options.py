"""Options that several commands share."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from gpu_logicmix.cli import screen
from gpu_logicmix.data import ImageDataset, open_dataset
from gpu_logicmix.errors import printable, shown
from gpu_logicmix.labels import PROTOCOLS
from gpu_logicmix.train.config import dataset_options

MAX_SEED = 2**63 - 1
MAX_SIZE = 8192

Data = Annotated[
    str,
    typer.Argument(metavar="DATA", help="csv:PATH, coco:PATH, voc2007:PATH, vg200:PATH or shapes", show_default=False),
]
Split = Annotated[str, typer.Option(help="Split of the dataset: train or val.")]
Options = Annotated[
    list[str] | None,
    typer.Option(
        "-o",
        "--option",
        metavar="NAME=VALUE",
        help="Dataset option, may be repeated. coco: year=2017, empty=drop. voc2007: difficult=ignore. "
        "csv: others=unknown. shapes: count=1000, seed=1.",
    ),
]
Known = Annotated[
    float | None,
    typer.Option(
        help="Hide labels first, to simulate partial labeling: the share to keep, as 0.1; with --protocol "
        "per-class the number of labels per category, as 50."
    ),
]
Protocol = Annotated[
    Literal[PROTOCOLS],  # type: ignore[valid-type]
    typer.Option(help="Which labels to hide. hcp: the exact mask of the SST, HST and SARB papers."),
]
Seed = Annotated[int, typer.Option(min=0, max=MAX_SEED, metavar="INT", help="Random seed.")]
P = Annotated[float, typer.Option("--p", help="LogicMix: probability that a sample is mixed.")]
KMin = Annotated[int, typer.Option(help="LogicMix: minimum number of samples per mixture.")]
KMax = Annotated[int, typer.Option(help="LogicMix: maximum number of samples per mixture.")]
BadImages = Annotated[
    Literal["raise", "skip"], typer.Option(help="Stop at an image that cannot be read, or continue without it.")
]
RunFolder = Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a run: --out of fit.", show_default=False)]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1 ...")]
Threads = Annotated[int | None, typer.Option(min=1, help="CPU threads; torch's default unless given.")]


def given(**values: Any) -> dict[str, Any]:
    """The options that were given: the others must not override those of a run or a file."""
    return {name: value for name, value in values.items() if value is not None}


def opened(data: str, split: str, size: int | None, options: list[str] | None, on_bad_image: str) -> ImageDataset:
    chosen = dataset_options(options)
    with screen.console.status(f"opening {shown(data)} {shown(split)} …"):
        return open_dataset(data, split, size, on_bad_image=on_bad_image, **chosen)


def list_bad_images(dataset: ImageDataset) -> None:
    lines = dataset.bad_images()
    if lines:
        screen.say(f"skipped {len(lines):,} of {len(dataset):,} images that cannot be read:", "yellow")
        for line in lines[:20]:
            screen.say(f"  {printable(line)}")
        if len(lines) > 20:
            screen.say(f"  … and {len(lines) - 20:,} more")


def ends(order: Sequence[int], show_all: bool, rows: int = 8) -> list[int | None]:
    """A long list as its first and last rows, with None between them."""
    if show_all or len(order) <= 2 * rows + 4:
        return list(order)
    return [*order[:rows], None, *order[-rows:]]
