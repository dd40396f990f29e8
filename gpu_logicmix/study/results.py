"""What the runs of a study gave: results.csv, a line for each run, and everything that is made from it.

Folders of runs are large and are not kept for ever; results.csv is. So a line stays when its run's folder is gone.
"""

from __future__ import annotations

import contextlib
import csv
import io
import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from gpu_logicmix.errors import RunError
from gpu_logicmix.files import csv_rows, read_text, waited_lock, write_whole
from gpu_logicmix.report.words import finite
from gpu_logicmix.train.config import read_toml
from gpu_logicmix.train.runlog import read_log

if TYPE_CHECKING:
    from gpu_logicmix.study.plan import Planned


class Row(NamedTuple):
    """A line of results.csv. mAP and F1 are in percent; None where a run has no such value."""

    table: str
    method: str
    known: float  # as the study's file has it
    seed: int
    mAP: float | None  # what counts
    mAP_before_cft: float | None  # None where it was not fine-tuned; in older lines the same as `mAP`
    mAP_best: float | None  # of the best epoch, chosen on the validation set: for information
    CF1: float | None
    OF1: float | None
    epochs: int
    minutes: float
    run: str
    mAP_tuned: float | None = None  # of the epoch that held-out training images like best (`tune_images`)
    known_measured: float | None = None  # the share of labels that were known
    images: int | None = None  # trained on
    positives: float | None = None  # known ones per category: the median
    weights: str | None = None  # what it started from: none, hub, or the name of a file or a run


def result(folder: Path, fine_tuned: bool = False) -> dict[str, Any] | None:
    """The last line of a finished run's log, and of its last epoch. None if it has not ended, or lacks fine-tuning."""
    lines = [line for line in read_log(folder) if isinstance(line, dict)]
    if not lines or lines[-1].get("kind") != "end":
        return None
    if fine_tuned and "mAP_cft" not in lines[-1]:
        if not (lines[-1].get("options") or {}).get("cft"):
            return None
        lines[-1]["mAP_cft"] = lines[-1].get("mAP")  # it was asked for, and the head has nothing to tune
    epochs = [line for line in lines if line.get("kind") == "epoch"]
    starts = [line for line in lines if line.get("kind") == "start"]
    tuned = [e for e in epochs if finite(e.get("tune_mAP")) is not None and finite(e.get("mAP")) is not None]
    best = [value for e in epochs if (value := finite(e.get("mAP"))) is not None]
    return {
        **(epochs[-1] if epochs else {}),
        **lines[-1],
        "mAP_best": max(best) if best else lines[-1].get("mAP_best"),
        "mAP_tuned": max(tuned, key=lambda e: e["tune_mAP"])["mAP"] if tuned else None,
        "known_measured": starts[-1].get("known") if starts else None,
        "images": starts[-1].get("images") if starts else None,
        "positives": median(starts[-1].get("category_positives")) if starts else None,
        "weights": _start_of(folder),
    }


def _start_of(folder: Path) -> str | None:
    with contextlib.suppress(ValueError, OSError):
        return start_words(read_toml(folder / "config.toml"))
    return None


def start_words(options: Mapping[str, Any]) -> str:
    """What a run starts from, wherever that lies."""
    return Path(str(options.get("init") or options.get("weights", "hub"))).name


def median(counts: Any) -> float | None:
    """Half of the categories have fewer known positives. mAP counts each category once, so a mean, which a few frequent
    ones make large, would say too much."""
    return float(statistics.median(counts)) if isinstance(counts, list) and counts else None


def row_for(plan: Planned, out: Path, rows: Sequence[Row] = ()) -> Row | None:
    """The line of a planned run: from its folder if it has ended, else from lines that are there already."""
    found = result(out / "runs" / plan.folder, plan.config.cft)
    if found is not None:
        return _row(plan, found)
    cell = (plan.table, plan.method, plan.known, plan.seed)
    for row in sorted((row for row in rows if row.run == plan.folder), key=lambda row: row[:4] != cell):
        if not plan.config.cft:
            return Row(*cell, row.mAP if row.mAP_before_cft is None else row.mAP_before_cft, None, *row[6:])
        untuned = row.mAP_before_cft is None and row.mAP is not None
        # In an older line equal values say so; but one of this very method is taken at its word.
        if not untuned and (row[:4] == cell or row.mAP != row.mAP_before_cft):
            return Row(*cell, *row[4:])
    return None


def _row(plan: Planned, found: dict[str, Any]) -> Row:
    def percent(name: str) -> float | None:
        value = finite(found.get(name))
        return None if value is None else round(100 * value, 4)

    share = finite(found["known_measured"])
    return Row(
        plan.table,
        plan.method,
        plan.known,
        plan.seed,
        percent("mAP_cft" if plan.config.cft else "mAP"),
        percent("mAP") if plan.config.cft else None,
        *(percent(name) for name in ("mAP_best", "CF1", "OF1")),
        plan.config.epochs,
        round(found["elapsed"] / 60, 2),
        plan.folder,
        percent("mAP_tuned"),
        None if share is None else round(share, 5),
        found["images"],
        found["positives"],
        found["weights"],
    )


def known_rows(out: Path) -> list[Row]:
    """The lines of results.csv, if there is one."""
    return read_results(out / "results.csv") if (out / "results.csv").exists() else []


def usable_rows(planned: Sequence[Planned], out: Path) -> list[Row]:
    """Those, and the lines of the studies beside OUT whose runs this one may use."""
    names = dict.fromkeys(name for plan in planned for name in plan.uses)
    rows = known_rows(out)
    _check_same_options(planned, out, rows)
    return rows + [row for name in names for row in known_rows(out.parent / name)]


def _check_same_options(planned: Sequence[Planned], out: Path, rows: Sequence[Row]) -> None:
    """Lines of other runs stay. But a table must not mix runs of a method from before its options were changed with
    those from after it."""
    cells = {(p.table, p.method, p.known, p.seed): p for p in planned}
    others = [row for row in rows if (plan := cells.get(row[:4])) and not _is_of(row, plan, out)]
    if others:
        row = others[0]
        raise RunError(
            f"{out / 'results.csv'}: {len(others)} lines are of runs with other options than the study has now, such "
            f"as {row.method!r}, known {row.known:g}, seed {row.seed} ({row.run}); choose another --out, or remove "
            "these lines to do their runs again"
        )


def _is_of(row: Row, plan: Planned, out: Path) -> bool:
    """A run that is still to be fine-tuned is, where its folder is there to resume."""
    return row.run == plan.folder and (row_for(plan, out, [row]) is not None or (out / "runs" / row.run).exists())


def read_results(file: str | Path) -> list[Row]:
    """results.csv again; also one from before a column was added."""
    kinds: dict[str, Any] = {"seed": int, "epochs": int, "images": int}
    kinds |= dict.fromkeys(("table", "method", "run", "weights"), str)
    rows = []
    lines = csv_rows(file, io.StringIO(read_text(Path(file)), newline=""))
    _, header = next(lines, (1, []))
    for number, cells in lines:
        try:
            line = dict(zip(header, cells, strict=False))
            values = {name: line.get(name) or None for name in Row._fields}
            rows.append(Row(**{k: None if v is None else kinds.get(k, finite_number)(v) for k, v in values.items()}))
            if None in (rows[-1].table, rows[-1].method, rows[-1].known, rows[-1].seed, rows[-1].run):
                raise ValueError("a name, known, seed or run is missing")
        except ValueError as error:
            raise ValueError(f"{file}, line {number}: {error}; remove the line to do its run again") from None
    return rows


def finite_number(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text} is not a finite number")
    return value


def collect(planned: Sequence[Planned], out: str | Path, *, pictures: bool = True) -> list[Row]:
    """Write results.csv anew from the runs that have ended and from the lines it has already, then tables and, with
    `pictures`, plots and the page. Lines of runs that the study no longer has stay, at the end."""
    from gpu_logicmix.study.curves import write_curves

    out = Path(out)
    out.mkdir(parents=True, exist_ok=True)
    with waited_lock(out):  # another shard may have got here too
        before = known_rows(out)
        usable = usable_rows(planned, out)
        found = [row_for(plan, out, usable) for plan in planned]
        rows = [row for row in found if row is not None]
        runs, cells = {row.run for row in rows}, {(p.table, p.method, p.known, p.seed) for p in planned}
        rows += [row for row in before if row.run not in runs and row[:4] not in cells]
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(Row._fields)
        writer.writerows(rows)
        write_whole(out / "results.csv", text.getvalue())
        write_curves(planned, out, {row.run for row in rows})
        if rows:
            write_results(out, pictures=pictures, title=planned[0].study if planned else "Study")
    return rows


def write_results(folder: str | Path, *, pictures: bool = True, title: str = "Study") -> None:
    """Tables, plots and page from results.csv alone; links to the reports of runs whose folders are there."""
    from gpu_logicmix.study.curves import curve_plot, read_curves
    from gpu_logicmix.study.page import page
    from gpu_logicmix.study.pays import gain_line, gain_plot, gain_points
    from gpu_logicmix.study.plots import standalone_plot
    from gpu_logicmix.study.tables import by, markdown

    folder = Path(folder)
    rows = read_results(folder / "results.csv")
    write_whole(folder / "results.md", markdown(rows))
    if not pictures:
        return
    for number, part in enumerate(by(rows, "table").values(), 1):
        write_whole(folder / f"table{number}.svg", standalone_plot(part))
        if curves := curve_plot(part, read_curves(folder)):
            write_whole(folder / f"curves{number}.svg", curves)
    points = gain_points([(title, rows)])
    if gain_line(points) is not None:
        write_whole(folder / "gain.svg", gain_plot(points))
    write_whole(folder / "index.html", page(rows, title, folder))
