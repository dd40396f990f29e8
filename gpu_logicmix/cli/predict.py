"""The command that looks at new images: predict. What it writes streams: 100,000 images take the memory of a batch."""

from __future__ import annotations

import base64
import contextlib
import csv
import html
import io
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Annotated, Any

import typer
from rich.table import Column, Table

from gpu_logicmix.cli import screen
from gpu_logicmix.cli.options import Device, RunFolder, Threads, given
from gpu_logicmix.cli.runs import BatchSize, Use
from gpu_logicmix.errors import printable, shown
from gpu_logicmix.files import check_out, written_whole
from gpu_logicmix.progress import progress_bar

SUFFIXES = (".csv", ".jsonl", ".parquet", ".json")
SHOWN = 20  # images on the screen
Write = Callable[[Any], None]  # of a `Predicted`


def predict(
    run: RunFolder,
    images: Annotated[list[Path], typer.Argument(help="Image files, or folders of images.", show_default=False)],
    out: Annotated[
        Path | None, typer.Option(help="Write to this file: .csv, .jsonl (a line per image), .parquet or .json.")
    ] = None,
    topk: Annotated[
        int | None, typer.Option(min=1, help="Write the most likely categories of each image alone.")
    ] = None,
    sheet: Annotated[Path | None, typer.Option(help="Also write a page to look at: a contact sheet, .html.")] = None,
    sheet_images: Annotated[int, typer.Option(min=1, help="Images on the contact sheet.")] = 200,
    top: Annotated[int, typer.Option(min=1, help="Categories to print per image.")] = 5,
    use: Use = None,
    device: Device = "auto",
    threads: Threads = None,
    batch_size: BatchSize = None,
) -> None:
    """Predict the categories of images with a finished run.

    Prints the most likely categories, and writes probabilities and decisions to a file. If the run has thresholds and
    a temperature (decisions.json), probabilities are calibrated and a category counts as predicted above its threshold;
    else above 0.5.

        gpu-logicmix predict runs/photos holiday/ --out holiday.csv --sheet holiday.html
    """
    from gpu_logicmix.decisions import OtherWeights
    from gpu_logicmix.train.predict import Predictions

    check_out(out)
    check_out(sheet, "--sheet")
    if out is not None and out.suffix not in SUFFIXES:
        raise ValueError(f"--out {out}: must end in {', '.join(SUFFIXES)}")
    with screen.warnings_as_lines(OtherWeights):
        found = Predictions(run, images, use, **given(device=device, threads=threads, batch_size=batch_size))
    names = Column("image", overflow="fold")  # they often differ at the end alone
    table, count = Table(names, "most likely categories"), 0
    with contextlib.ExitStack() as stack:
        writers: list[Write] = []
        if out is not None:
            writers.append(stack.enter_context(_writer(out, found, topk)))
        if sheet is not None:
            writers.append(stack.enter_context(_sheet(sheet, found, topk or top, sheet_images)))
        bar = stack.enter_context(progress_bar(len(found.files), console=screen.console))
        for part in found:
            for write in writers:
                write(part)
            for i in range(max(0, min(len(part.names), SHOWN - count))):
                table.add_row(shown(part.names[i]), _line(part, i, found.categories, top))
            count += len(part.names)
            bar(len(part.names))
    screen.console.print(table)
    if count > SHOWN:
        screen.say(f"… and {count - SHOWN:,} more{'' if out else '; --out FILE.csv writes all'}")
    for line in found.bad_images():
        screen.say(f"skipped: {printable(line)}", "yellow")
    if found.decisions is not None:
        screen.say(f"bold: above the threshold of the category; fitted on {printable(found.decisions.fitted_on)}")
    for path in (out, sheet):
        if path is not None:
            screen.say(f"wrote {printable(path)}: {count:,} images, {len(found.categories)} categories")


def _best(part: Any, i: int, top: int | None) -> list[int]:
    """Categories of an image, the likeliest first; all of them in their order if `top` is None."""
    row = part.probabilities[i]
    return list(range(len(row))) if top is None else row.sort(descending=True, stable=True).indices[:top].tolist()


def _line(part: Any, i: int, categories: list[str], top: int) -> str:
    words = []
    for c in _best(part, i, top):
        text = f"{shown(categories[c])} {part.probabilities[i, c]:.0%}"
        words.append(f"[bold]{text}[/]" if part.decided[i, c] else text)
    return ", ".join(words)


# -------------------------------------------------------------------------------------------------------------- files
@contextlib.contextmanager
def _writer(path: Path, found: Any, topk: int | None) -> Iterator[Write]:
    """The file is there when all of it is: until then an earlier one stays."""
    if path.suffix == ".parquet":
        with written_whole(path, "wb") as file, _parquet(path, file, found, topk) as write:
            yield write
        return
    # File names need not be UTF-8: their bytes pass through as they are.
    with written_text(path, errors="surrogateescape") as file:
        make = {".csv": _wide_csv if topk is None else _long_csv, ".jsonl": _json_lines, ".json": _json}[path.suffix]
        write = make(file, found, topk)
        yield write
        if path.suffix == ".json":
            file.write("\n}\n")


@contextlib.contextmanager
def written_text(path: Path, errors: str) -> Iterator[IO[str]]:
    with written_whole(path, "wb") as file:
        text = io.TextIOWrapper(file, encoding="utf-8", errors=errors, newline="")
        yield text
        text.detach()  # the file stays open: it is synced and renamed


def _names(part: Any, i: int, categories: list[str]) -> list[str]:
    return [categories[c] for c in part.decided[i].nonzero()[:, 0].tolist()]


def _wide_csv(file: Any, found: Any, topk: None) -> Write:
    """A column for each category, and the names of those that are predicted."""
    writer = csv.writer(file)
    writer.writerow(["image", *found.categories, "predicted"])

    def write(part: Any) -> None:
        for i, (name, row) in enumerate(zip(part.names, part.probabilities.tolist(), strict=True)):
            predicted = json.dumps(_names(part, i, found.categories), ensure_ascii=False)
            writer.writerow([name, *(round(value, 6) for value in row), predicted])

    return write


def _entries(part: Any, i: int, found: Any, topk: int | None) -> Iterator[tuple[str, float, float, bool]]:
    """Category, probability, threshold, whether it is predicted."""
    for c in _best(part, i, topk):
        probability = round(part.probabilities[i, c].item(), 6)
        yield found.categories[c], probability, round(found.thresholds[c], 6), bool(part.decided[i, c])


def _long_csv(file: Any, found: Any, topk: int | None) -> Write:
    """A row for each of the most likely categories of an image."""
    writer = csv.writer(file)
    writer.writerow(["image", "category", "probability", "threshold", "predicted"])

    def write(part: Any) -> None:
        for i, name in enumerate(part.names):
            writer.writerows([name, c, p, t, int(d)] for c, p, t, d in _entries(part, i, found, topk))

    return write


def _json_lines(file: Any, found: Any, topk: int | None) -> Write:
    keys = ("category", "probability", "threshold", "predicted")

    def write(part: Any) -> None:
        for i, name in enumerate(part.names):
            each = [dict(zip(keys, entry, strict=True)) for entry in _entries(part, i, found, topk)]
            line = {"image": name, "predicted": _names(part, i, found.categories), "categories": each}
            file.write(json.dumps(line) + "\n")

    return write


def _json(file: Any, found: Any, topk: int | None) -> Write:
    """One object: image -> category -> probability."""
    begun = False

    def write(part: Any) -> None:
        nonlocal begun
        for i, name in enumerate(part.names):
            scores = {category: p for category, p, _, _ in _entries(part, i, found, topk)}
            file.write(f"{',' if begun else '{'}\n {json.dumps(name)}: {json.dumps(scores)}")
            begun = True

    return write


@contextlib.contextmanager
def _parquet(path: Path, file: IO[bytes], found: Any, topk: int | None) -> Iterator[Write]:
    """A row for each image and category, a row group for each batch."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise ValueError(f"--out {path}: pyarrow is not installed: pip install pyarrow") from None
    text = pyarrow.dictionary(pyarrow.int32(), pyarrow.string())
    kinds = {"image": text, "category": text, "probability": pyarrow.float32(), "threshold": pyarrow.float32()}
    schema = pyarrow.schema({**kinds, "predicted": pyarrow.bool_()})
    with pyarrow.parquet.ParquetWriter(file, schema) as writer:

        def write(part: Any) -> None:
            rows = []
            for i, name in enumerate(part.names):
                name = name.encode("utf-8", "backslashreplace").decode()  # Parquet's text is UTF-8
                rows += [(name, *entry) for entry in _entries(part, i, found, topk)]
            columns = [list(column) for column in zip(*rows, strict=True)]
            arrays = [pyarrow.array(c, f.type) for c, f in zip(columns, schema, strict=True)]
            writer.write_table(pyarrow.Table.from_arrays(arrays, schema=schema))

        yield write


# -------------------------------------------------------------------------------------------------------- contact sheet
STYLE = """body{font:14px system-ui,sans-serif;margin:1.5rem;color-scheme:light dark}
main{display:grid;grid-template-columns:repeat(auto-fill,minmax(180px,1fr));gap:1rem}
figure{margin:0}img{width:100%;aspect-ratio:1;object-fit:contain;background:#8882}
figcaption{overflow-wrap:anywhere;font-size:12px}li{display:flex;justify-content:space-between}
ul{list-style:none;margin:.3rem 0;padding:0}li.no{opacity:.55}"""


@contextlib.contextmanager
def _sheet(path: Path, found: Any, top: int, limit: int) -> Iterator[Write]:
    """One HTML file that needs no other: the images small, with what is predicted. All names are escaped, and the page
    may load nothing."""
    left = limit
    with written_text(path, errors="replace") as file:
        most = f"; these are the first {limit:,}" if len(found.files) > limit else ""
        policy = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"
        file.write(
            f'<!doctype html><html lang="en"><meta charset="utf-8"><title>Predictions</title>'
            f'<meta http-equiv="Content-Security-Policy" content="{policy}"><style>{STYLE}</style>'
            f"<h1>Predictions</h1><p>{len(found.files):,} images{most}. "
            f"Faint: below the threshold of the category.</p><main>"
        )

        def write(part: Any) -> None:
            nonlocal left
            for i, name in enumerate(part.names[: max(0, left)]):
                items = "".join(
                    f"<li{'' if part.decided[i, c] else ' class=no'}><span>{html.escape(found.categories[c])}</span>"
                    f"<span>{part.probabilities[i, c]:.0%}</span></li>"
                    for c in _best(part, i, top)
                )
                file.write(
                    f'<figure><img alt="" src="data:image/jpeg;base64,{_thumbnail(name)}">'
                    f"<figcaption>{html.escape(printable(name))}<ul>{items}</ul></figcaption></figure>\n"
                )
            left -= len(part.names)

        yield write
        file.write("</main></html>\n")


def _thumbnail(name: str, side: int = 240) -> str:
    from PIL import Image, ImageOps

    with Image.open(name) as image:
        image.draft("RGB", (2 * side, 2 * side))
        small = ImageOps.exif_transpose(image).convert("RGB")
        small.thumbnail((side, side))
    data = io.BytesIO()
    small.save(data, "JPEG", quality=80)
    return base64.b64encode(data.getvalue()).decode()
