"""Write the tables of docs/benchmarks.md from the files in bench/results, each after its mark.

    python bench/tables.py            # rewrites the page
    python bench/tables.py --check    # only says whether it is up to date

A mark is `<!-- table NAME -->`; the table goes on until `<!-- end -->`.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable, Iterable
from pathlib import Path

RESULTS = Path(__file__).parent / "results"
PAGE = Path(__file__).parent.parent / "docs" / "benchmarks.md"
OURS = "GPULogicMix"


def read(name: str) -> dict:
    return json.loads((RESULTS / f"{name}.json").read_text())


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    head = list(head)
    lines = [f"| {' | '.join(head)} |", f"|---|{'--:|' * (len(head) - 1)}"]
    return "\n".join(lines + [f"| {' | '.join(row)} |" for row in rows])


def methods(name: str, cell: str, digits: int, only: Callable[[dict], bool] = lambda row: True) -> str:
    """One figure of every method of bench/mix.py: rows are batches."""
    rows = [row for row in read(name)["rows"] if only(row)]

    def cells(row: dict) -> Iterable[str]:
        yield row["name"]
        for method, figures in row["methods"].items():
            text = "-" if figures is None else f"{figures[cell] / (1e6 if cell == 'peak_bytes' else 1):,.{digits}f}"
            yield f"**{text}**" if method.startswith(OURS) else text

    return table(["batch", *rows[0]["methods"]], map(cells, rows))


def usual(row: dict) -> bool:
    return row["categories"] == 80 and list(row["k"]) == [2, 3]


def growth(over: str) -> str:
    found = read("mix")["growth"][over]
    rows = [[f"{name}, ms", *(f"{times[name]:.2f}" for times in found.values())] for name in ("clone", OURS)]
    return table([over, *found], rows)


def kernels() -> str:
    shapes = read("bytes")["shapes"]
    parts = list(next(iter(shapes.values()))["parts"])
    rows = [[part, *(_counted(shape["parts"][part]) for shape in shapes.values())] for part in parts]
    sums = [
        {key: sum(p[key] for p in shape["parts"].values()) for key in ("kernels", "MB")} for shape in shapes.values()
    ]
    rows.append(["**all**", *(f"**{_counted(total)}**" for total in sums)])
    limits = (f"{shape['limit MB']:.1f} MB" for shape in shapes.values())
    rows.append(["limit: each byte read once, one bfloat16 batch written", *limits])
    return table(["part", *(f"{name}: kernels / MB" for name in shapes)], rows)


def _counted(row: dict) -> str:
    return f"{row['kernels']:.0f} / {row['MB']:,.1f}"


def code() -> str:
    rows = []
    for name, row in read("aot")["kernels"].items():
        widths = ", ".join(f"{count} x {width}" for width, count in row["accesses by width in bits"].items())
        rows.append([name, str(row["registers"]), str(row["spilled bytes"]), widths, ", ".join(row["rounding"]) or "-"])
    return table(["kernel", "registers", "bytes spilled", "accesses by width in bits", "rounding"], rows)


def step() -> str:
    rows = []
    for result in read("step")["rows"]:
        name = f"{result['model']}, {result['size']} px, batch {result['batch_size']}, {result['threads']} thread"
        for variant, row in result["variants"].items():
            cells = (f"{row['cpu_ms']:,.1f}", f"{row['cpu_times_bare']:.3f}", f"{row['augmentation_cpu_ms']:.1f}")
            rows.append([f"{name}: {variant}", *cells])
    return table(["", "CPU ms a step", "x bare", "augmentation alone, CPU ms"], rows)


def share() -> str:
    part = read("step")["share of LogicMix in the demo's step"]
    return f"LogicMix's share of a step of the demo's small network: **{part:.1%}** of its CPU time."


PRESETS = ["preset", "model with its head, parameters", "images", "seconds", "GB"]


def preset_cells(name: str, row: dict) -> list[str]:
    """A step of bench/presets.py, as it is printed and as the page has it."""
    if "failed" in row:
        return [name, "", "", "", row["failed"]]
    images = f"{row['batch']} x {row['size']} px"
    images += f" ({row['batch_wanted']} do not fit)" if row["batch"] < row["batch_wanted"] else ""
    model = f"{row['model']}, {row['parameters'] / 1e6:.0f} M"
    return [name, model, images, f"{row['seconds']:.0f}", f"{row['gigabytes']:.1f}"]


def presets() -> str:
    return table(PRESETS, (preset_cells(name, row) for name, row in read("presets")["steps"].items()))


def environment() -> str:
    on = read("mix")["environment"]
    packages = ", ".join(f"{name} {version}" for name, version in on["packages"].items())
    return (
        f"Measured on {on['device']}, {on['cores']} cores, {on['threads']} threads, Python {on['python']}, {packages}."
    )


TABLES: dict[str, Callable[[], str]] = {
    "environment": environment,
    "mix": lambda: methods("mix", "ms", 1, lambda row: usual(row) and row["dtype"] in ("float32", "uint8")),
    "mix-clone": lambda: methods("mix", "times_clone", 2, lambda r: usual(r) and r["dtype"] in ("float32", "uint8")),
    "mix-all": lambda: methods("mix", "ms", 1),
    "mix-memory": lambda: methods("mix", "peak_bytes", 0, lambda row: usual(row) and row["shape"][0] == 32),
    "compiled": lambda: methods("mix-compiled", "times_clone", 2),
    "growth-batch": lambda: growth("batch"),
    "growth-k": lambda: growth("k_max"),
    "kernels": kernels,
    "aot": code,
    "step": step,
    "share": share,
    "presets": presets,
}


def filled(page: str) -> str:
    """The page with every table as the results have it."""

    def replace(found: re.Match) -> str:
        return f"<!-- table {found[1]} -->\n\n{TABLES[found[1]]()}\n\n<!-- end -->"

    return re.sub(r"<!-- table ([\w-]+) -->.*?<!-- end -->", replace, page, flags=re.DOTALL)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit code 1 if the page is not up to date")
    options = parser.parse_args()
    page = PAGE.read_text()
    new = filled(page)
    if options.check:
        raise SystemExit(0 if new == page else f"{PAGE.name} is not what bench/results says: python bench/tables.py")
    PAGE.write_text(new)


if __name__ == "__main__":
    main()
