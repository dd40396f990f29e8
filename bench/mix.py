"""LogicMix against what else one could put into a training step.

    python bench/mix.py                          # everything: bench/results/mix.json and mix.png, some minutes
    python bench/mix.py --rounds 5 --only 224    # only the rows that have "224" in their name
    python bench/mix.py --memory default         # with the memory allocator as it is: mix-default.json and .png
    python bench/mix.py --compile                # ours under torch.compile too, fewer rows: mix-compiled.json

Every method gets the same batch in the same process, taking turns; figures are medians. `clone` copies images and
targets: no method that returns a new batch can be faster. timm writes into the batch it is given and takes class
numbers where the others take a label matrix; Kornia takes class numbers too. A dash: the method refuses the type.

On a CPU it matters where the memory of the result comes from. By default glibc asks the system for every tensor above
32 MB, and the system hands it out page by page, which takes several times as long as the copy itself; unless a hole of
that size happens to be left over. `--memory recycled` (the default here) takes that out of the comparison: all memory
is what the process has already, as with the caching allocator of a GPU. `--memory default` leaves it to glibc.

Where others use the machine as well, `--clock cpu --threads 1` counts the time that the process had a core, and not
that in which it waited for one.
"""

from __future__ import annotations

import argparse
import itertools
import os
import sys
import time
import warnings
from pathlib import Path

import torch
from measure import RESULTS, environment, interleave, median_ms, peak_bytes, save_json, steps
from rich.console import Console
from rich.table import Table

from gpu_logicmix import GPULogicMix
from gpu_logicmix.augment.peers import COMPILED, OURS, contenders, working

SHAPES = [(32, 3, 448, 448), (128, 3, 224, 224), (1024, 3, 64, 64), (8, 3, 448, 448)]
DTYPES = [torch.float32, torch.bfloat16, torch.uint8]
GROUPS = [(2, 3), (2, 8)]
CATEGORIES = [80, 9605]
CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}
MALLOC = {"recycled": {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(2**40)}, "default": {}}


def measure_rows(options: argparse.Namespace, device: torch.device, console: Console) -> list[dict]:
    """`--compile` takes a while for each row: only the usual K and number of categories then."""
    usual = slice(0, 1 if options.compile else None)
    grid = list(itertools.product(SHAPES, DTYPES, GROUPS[usual], CATEGORIES[usual]))
    named = [(f"{'x'.join(map(str, s))} {str(d)[6:]} K {k[0]}-{k[1]} C {c}", s, d, k, c) for s, d, k, c in grid]
    named = [row for row in named if options.only in row[0]]
    rows = []
    for name, *case in steps(named, "methods", console):
        functions = contenders(*case, device, options.compile)
        kept = working(functions)
        times = interleave(kept, options.rounds, device, CLOCKS[options.clock])
        clone = median_ms(times["clone"])
        row = {"name": name, "shape": case[0], "dtype": str(case[1])[6:], "k": case[2], "categories": case[3]}
        row["methods"] = {
            method: {
                "ms": median_ms(times[method]),
                "images_per_s": case[0][0] / median_ms(times[method]) * 1e3,
                "times_clone": median_ms(times[method]) / clone,
                "peak_bytes": peak_bytes(kept[method], device),
            }
            if method in kept
            else None
            for method in functions
        }
        rows.append(row)
    return rows


def measure_growth(
    options: argparse.Namespace, device: torch.device, console: Console
) -> dict[str, dict[int, dict[str, float]]]:
    """ms of ours and of clone over the batch size (K 2-3) and over k_max (batch 256), at 3x64x64 and 80 categories."""
    growth: dict[str, dict[int, dict[str, float]]] = {"batch": {}, "k_max": {}}
    cases = [("batch", b, b, 3) for b in (64, 128, 256, 512, 1024, 2048, 4096)]
    cases += [("k_max", k, 256, k) for k in (2, 3, 4, 6, 8, 12, 16)]
    for over, x, batch, k_max in steps(cases, "growth", console):
        images, targets = torch.rand(batch, 3, 64, 64, device=device), torch.randint(-1, 2, (batch, 80), device=device)
        mix = GPULogicMix(k_max=k_max)
        calls = {
            "clone": lambda images=images, targets=targets: (images.clone(), targets.clone()),
            OURS: lambda mix=mix, images=images, targets=targets: mix(images, targets),
        }
        times = interleave(calls, 2 * options.rounds, device, CLOCKS[options.clock])
        growth[over][x] = {name: median_ms(seconds) for name, seconds in times.items()}
    return growth


def show(rows: list[dict], console: Console) -> None:
    for row in rows:
        table = Table(title=row["name"], title_justify="left")
        for column in ("method", "ms", "images/s", "x clone", "peak MB"):
            table.add_column(column, justify="left" if column == "method" else "right")
        for name, figures in row["methods"].items():
            if figures is None:
                table.add_row(name, *"----")
                continue
            table.add_row(
                f"[bold]{name}[/]" if name == OURS else name,
                f"{figures['ms']:.2f}",
                f"{figures['images_per_s']:,.0f}",
                f"{figures['times_clone']:.2f}",
                f"{figures['peak_bytes'] / 1e6:.1f}",
            )
        console.print(table)


def verdict(rows: list[dict], console: Console) -> None:
    """The rows in which a peer was faster, said aloud."""
    slower = []
    for row in rows:
        ours = row["methods"][OURS]["ms"]
        for name, figures in row["methods"].items():
            if name not in ("clone", OURS, COMPILED) and figures and figures["ms"] <= ours:
                slower.append(f"{row['name']}: {name} {figures['ms']:.2f} ms, {OURS} {ours:.2f} ms")
    console.print(f"{OURS} was the fastest in {len(rows)} of {len(rows)} rows." if not slower else "Faster than ours:")
    for line in slower:
        console.print("  " + line)


def plot(data: dict, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    rows = [r for r in data["rows"] if r["dtype"] == "float32" and r["categories"] == 80 and tuple(r["k"]) == (2, 3)]
    figure, (bars, batch, k_max) = plt.subplots(1, 3, figsize=(15, 4.5), width_ratios=[2, 1, 1], layout="constrained")
    shades = ["#999999", "#d55e00", *plt.cm.Blues([0.35, 0.5, 0.65, 0.8, 0.95])]
    colours = dict(zip(data["rows"][0]["methods"], shades, strict=True))
    for offset, (name, colour) in enumerate(colours.items()):
        x = [i + (offset - 3) * 0.12 for i in range(len(rows))]
        y = [row["methods"][name]["times_clone"] for row in rows]
        drawn = bars.bar(x, y, 0.12, label=name, color=colour)
        bars.bar_label(drawn, fmt="%.1f", fontsize=7)
    bars.set_xticks(range(len(rows)), ["x".join(map(str, row["shape"])) for row in rows])
    bars.axhline(1, color="#999999", linewidth=0.8)
    bars.set_title("Time of one batch, as a multiple of copying it (float32, K 2-3, 80 categories)", fontsize=10)
    bars.legend(fontsize=8, ncols=2)
    for axes, over, label in ((batch, "batch", "batch size"), (k_max, "k_max", "k_max (batch 256)")):
        x = [int(v) for v in data["growth"][over]]
        for name in ("clone", OURS):
            axes.plot(x, [v[name] for v in data["growth"][over].values()], "o-", label=name, color=colours[name])
        axes.set_xlabel(label)
        axes.set_ylabel("ms, 3x64x64")
        axes.set_ylim(bottom=0)
        axes.legend(fontsize=8)
    on = data["environment"]
    words = f"{on['device']}, {on['threads']} threads, torch {on['packages']['torch']}, {data['memory']} memory"
    words += ", CPU time" if data["clock"] == "cpu" else ""
    figure.suptitle(words, fontsize=9)
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=11, help="turns of each method in each row (default 11)")
    parser.add_argument("--only", default="", help="only rows whose name has this in it; no growth curves then")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads (default 2)")
    parser.add_argument(
        "--memory", choices=MALLOC, default="recycled", help="where a CPU gets it from (default recycled)"
    )
    parser.add_argument("--clock", choices=CLOCKS, default="wall", help="what to count (default wall)")
    parser.add_argument("--compile", action="store_true", help="ours under torch.compile too; K 2-3 and 80 categories")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for mix.json and mix.png")
    options = parser.parse_args()
    if any(os.environ.get(name) != value for name, value in MALLOC[options.memory].items()):
        os.environ.update(MALLOC[options.memory])
        os.execv(sys.executable, [sys.executable, *sys.argv])  # glibc reads them when a process starts
    warnings.filterwarnings("ignore")
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    console = Console()
    rows = measure_rows(options, device, console)
    growth = {} if options.only or options.compile else measure_growth(options, device, console)
    show(rows, console)
    verdict(rows, console)
    if not options.only:
        data = {"environment": environment(device), "memory": options.memory, "rounds": options.rounds}
        data["clock"] = options.clock
        data |= {"rows": rows, "growth": growth}
        name = "mix-compiled" if options.compile else "mix" if options.memory == "recycled" else "mix-default"
        save_json(data, options.out / f"{name}.json")
        if growth:
            plot(data, options.out / f"{name}.png")
        console.print(f"written: {options.out / name}.json")


if __name__ == "__main__":
    main()
