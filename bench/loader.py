"""What LogicMix costs the data loader: the table of the paper's appendix, on this machine.

    python bench/loader.py                                  # makes JPEGs of COCO's size; about 4 minutes on 2 cores
    python bench/loader.py --data coco:/data/coco --size 448 --count 2000
    python bench/loader.py --shards                         # files, shards and cache compared, without mixing

Images a second, from files to a float batch on the device (CUDA, where there is one), over whole epochs:

    a  no augmentation          decode and resize in the loader; copy to the device and divide by 255 there
    b  LogicMix in the dataset  as the paper and mlcpl do it: K images decoded for each mixed sample
    c  GPULogicMix              a, and the batch mixed on the device
    d  GPULogicMix with cache   c, but images come from the cache instead of from JPEG files

All mix half of the samples (p = 0.5, the paper's setting), K_min = K_max = K. There is no model: a training step
would only hide the differences. Methods take turns, epoch by epoch; medians over the rounds count, and c / a and d / a
are medians of the ratios of neighbours in time. Worker processes live through all epochs; the first round is not
counted. Where the device is the CPU, it works on the cores that the workers leave free (at least one thread); in d,
where a thread reads ahead instead of workers, on all of them. Runs with other --workers are kept in the results if all
else is the same.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from measure import cpu_name
from PIL import Image
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from gpu_logicmix import GPULogicMix, __version__, logic_or
from gpu_logicmix.data import ImageDataset, cache_dataset, make_loader, open_dataset, pack_dataset
from gpu_logicmix.machine import keep_memory
from gpu_logicmix.progress import progress_bar

RESULTS = Path(__file__).parent / "results"
P = 0.5


class CPULogicMix(Dataset):
    """LogicMix as `mlcpl.augs.LogicMix` does it, in the dataset: the same draws from numpy, the same result."""

    def __init__(self, dataset: ImageDataset, probability: float, k_min: int, k_max: int) -> None:
        self.dataset, self.probability, self.k_min, self.k_max = dataset, probability, k_min, k_max

    def __len__(self) -> int:
        return len(self.dataset)

    def sample(self, index: int) -> tuple[Tensor, Tensor]:
        """A float image in [0, 1], and labels in which NaN is unknown, as an MLCPLDataset gives them."""
        image, targets, _ = self.dataset[int(index)]
        return image.float().div(255), targets.float().masked_fill(targets == -1, float("nan"))

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if np.random.rand() > self.probability:
            return self.sample(index)
        k = np.random.randint(self.k_min, self.k_max + 1)
        group = np.random.randint(len(self), size=k)
        group[0] = index
        images, targets = zip(*(self.sample(i) for i in group), strict=True)
        return torch.stack(images).mean(0), logic_or(torch.stack(targets), dim=0, unknown=float("nan"))


def make_photos(folder: Path, count: int) -> str:
    """JPEGs of 640 x 480 with about as many bytes as COCO's (160 kB). Returns the spec of the dataset."""
    shapes = open_dataset("shapes", size=320, count=count)
    with progress_bar(count, "making JPEGs") as advance:
        for row in range(count):
            pixels = shapes[row][0].permute(1, 2, 0).numpy()[40:280]
            large = np.asarray(Image.fromarray(pixels).resize((640, 480), Image.Resampling.BICUBIC))
            grain = np.random.default_rng(row).integers(-15, 16, large.shape)
            Image.fromarray((large + grain).clip(0, 255).astype(np.uint8)).save(folder / f"{row}.jpg", quality=95)
            advance()
    lines = [",".join(map(str, [f"{row}.jpg", *shapes.labels[row]])) for row in range(count)]
    (folder / "train.csv").write_text("\n".join([",".join(["image", *shapes.categories]), *lines]))
    return f"csv:{folder}"


def first_images(dataset: ImageDataset, count: int) -> ImageDataset:
    dataset.source.paths = dataset.source.paths[:count]
    return ImageDataset(
        dataset.name, dataset.split, dataset.source, dataset.labels[:count], dataset.categories, dataset.ids[:count]
    )


def run_epoch(loader: DataLoader, mix: GPULogicMix | None, device: torch.device) -> float:
    """Seconds for an epoch."""
    start = time.perf_counter()
    for batch in loader:
        images, targets = (part.to(device, non_blocking=True) for part in batch[:2])
        if images.dtype == torch.uint8:
            images = images.float().div_(255)
        if mix is not None:
            images, targets = mix(images, targets)
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def measure(dataset: ImageDataset, cached: ImageDataset, workers: int, options, device: torch.device) -> dict:
    """Images a second of each method, all rounds."""
    # The device's threads and the workers share the cores, where the device is the CPU. d has no workers.
    cores = os.cpu_count() or 1
    threads = max(1, cores - workers)
    settings = {"shuffle": True, "drop_last": True, "workers": workers}
    files, cache = (make_loader(source, options.batch_size, **settings) for source in (dataset, cached))
    images = len(dataset) // options.batch_size * options.batch_size
    rates: dict[str, list[float]] = {}
    steps = [(number, k) for number in range(options.rounds + 1) for k in options.k]
    in_dataset = {k: dataset_loader(dataset, k, workers, options, device) for k in options.k}
    mixes = {k: GPULogicMix(P, k, k) for k in options.k}

    def take(name: str, loader: DataLoader, mix: GPULogicMix | None, epochs: int = 1) -> None:
        torch.set_num_threads(cores if name[0] == "d" else threads)
        seconds = sum(run_epoch(loader, mix, device) for _ in range(epochs)) / epochs
        if number:  # the first round warms up
            rates.setdefault(name, []).append(images / seconds)

    with progress_bar(len(steps) * images, f"{workers} workers") as advance:
        for number, k in steps:
            # a and c side by side, now this one first and now that one: they are compared in pairs.
            pair = [(f"a{k}", files, None), (f"c{k}", files, mixes[k])]
            for method in pair if number % 2 else pair[::-1]:
                take(*method)
            take(f"d{k}", cache, mixes[k], epochs=8)  # one is too short to time
            if number % 4 == 1 or not number:  # slow, and far from the others
                take(f"b{k}", in_dataset[k], None)
            advance(images)
    return {"workers": workers, "threads": threads, "rates": rates}


def compare_shards(dataset: ImageDataset, cached: ImageDataset, packed: ImageDataset, options) -> dict:
    """Images a second from files, from shards and from the cache, in turns, without workers and without mixing."""
    loaders = {
        name: make_loader(source, options.batch_size, shuffle=True, drop_last=True)
        for name, source in (("files", dataset), ("shards", packed), ("cache", cached))
    }
    images = len(dataset) // options.batch_size * options.batch_size
    rates: dict[str, list[float]] = {name: [] for name in loaders}
    for number in range(options.rounds + 1):
        for name, loader in loaders.items():
            rate = images / run_epoch(loader, None, torch.device(options.device))
            if number:  # the first round warms up
                rates[name].append(rate)
    return {"rates": rates, "median": {name: round(statistics.median(values), 1) for name, values in rates.items()}}


def dataset_loader(dataset: ImageDataset, k: int, workers: int, options, device: torch.device) -> DataLoader:
    return DataLoader(
        CPULogicMix(dataset, P, k, k),
        options.batch_size,
        shuffle=True,
        drop_last=True,
        num_workers=workers,
        persistent_workers=workers > 0,
        prefetch_factor=4 if workers else None,
        pin_memory=device.type == "cuda",
    )


def summary(run: dict, k: int) -> dict[str, float]:
    """Median rates, and medians of the ratios of neighbours in time."""
    rate = {m: statistics.median(run["rates"][f"{m}{k}"]) for m in "abcd"}

    def ratio(m: str) -> float:
        pairs = zip(run["rates"][f"{m}{k}"], run["rates"][f"a{k}"], strict=True)
        return statistics.median(x / a for x, a in pairs)

    return {**rate, "c/a": ratio("c"), "c/b": rate["c"] / rate["b"], "d/a": ratio("d")}


def show(report: dict, console: Console) -> None:
    for run in report["runs"]:
        title = f"{run['workers']} workers, {run['threads']} threads: images a second"
        table = Table(title=title, title_justify="left")
        for heading in ("K", "a: none", "b: dataset", "c: device", "d: cache", "c/a", "c/b", "d/a"):
            table.add_column(heading, justify="right", no_wrap=True)
        for k in report["k"]:
            line = summary(run, k)
            cells = [f"{line[m]:,.0f}" for m in "abcd"]
            table.add_row(str(k), *cells, f"{line['c/a']:.3f}", f"{line['c/b']:.2f}", f"{line['d/a']:.1f}")
        console.print(table)


def plot(report: dict, path: Path) -> None:
    from matplotlib.figure import Figure

    colours = {"a": "#999999", "b": "#D55E00", "c": "#0072B2", "d": "#009E73"}
    words = {"a": "no augmentation", "b": "in the dataset", "c": "GPULogicMix", "d": "GPULogicMix, cache"}
    names = ["a", *(f"{m}{k}" for m in "bcd" for k in report["k"])]
    figure = Figure(figsize=(4.4 * len(report["runs"]) + 1.6, 4.6), layout="constrained")
    for at, run in enumerate(report["runs"]):
        axes = figure.add_subplot(1, len(report["runs"]), at + 1)
        of_a = [rate for k in report["k"] for rate in run["rates"][f"a{k}"]]
        rates = [statistics.median(run["rates"].get(name, of_a)) for name in names]
        y = np.arange(len(names))[::-1]
        axes.barh(y, rates, color=[colours[name[0]] for name in names])
        for place, rate in zip(y, rates, strict=True):
            axes.text(rate * 1.06, place, f"{rate:,.0f}", va="center", fontsize=9)
        axes.set_xscale("log")
        axes.set_xlim(min(rates) / 2, max(rates) * 3)
        axes.set_title(f"{run['workers']} workers")
        axes.set_xlabel("images a second (log)")
        labels = [words[name[0]] + (f", K={name[1:]}" if name[1:] else "") for name in names]
        axes.set_yticks(y, labels if at == 0 else [""] * len(names))
        axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle(f"Data loading with LogicMix, {report['images']} JPEGs to {report['size']} px, {report['cpu']}")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


def other_runs(file: Path, report: dict) -> list[dict]:
    """Runs of the file with other numbers of workers, if they were made under the same conditions."""
    if not file.exists():
        return []
    old = json.loads(file.read_text())
    if any(old[key] != report[key] for key in report if key not in ("command", "runs")):
        return []
    measured = {run["workers"] for run in report["runs"]}
    return [run for run in old["runs"] if run["workers"] not in measured]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", help="dataset, as coco:PATH; JPEGs are made if none is given")
    parser.add_argument("--size", type=int, default=224, help="images become SIZE x SIZE")
    parser.add_argument("--count", type=int, default=256, help="images, the first of the dataset")
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--workers", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--k", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--rounds", type=int, default=8, help="epochs that count, of each method")
    parser.add_argument("--shards", action="store_true", help="compare files, shards and cache instead")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--name", default="loader", help="results/NAME.json and .png are written")
    options = parser.parse_args()
    console, device = Console(), torch.device(options.device)
    keep_memory()  # as CUDA's allocator does

    with tempfile.TemporaryDirectory() as folder:
        spec = options.data or make_photos(Path(folder), options.count)
        dataset = first_images(open_dataset(spec, "train", options.size), options.count)
        if len(dataset) < options.batch_size:
            parser.error(f"{len(dataset)} images do not fill a batch of {options.batch_size}")
        bytes_of = [os.path.getsize(os.path.join(dataset.source.root, path)) for path in dataset.source.paths]
        report = {
            "command": f"python bench/loader.py {' '.join(sys.argv[1:])}".strip(),
            "data": options.data.split(":")[0] if options.data else "made: 640 x 480",
            "images": len(dataset),
            "kB_per_image": round(statistics.mean(bytes_of) / 1000),
            "size": options.size,
            "batch_size": options.batch_size,
            "p": P,
            "k": options.k,
            "device": torch.cuda.get_device_name(device) if device.type == "cuda" else str(device),
            "cpu": f"{cpu_name()}, {os.cpu_count()} cores",
            "versions": {
                "gpu_logicmix": __version__,
                "torch": torch.__version__,
                "pillow": Image.__version__,
                "numpy": np.__version__,
                "python": platform.python_version(),
            },
            "runs": [],
        }
        cached = cache_dataset(dataset, Path(folder) / "cache")
        if options.shards:
            os.environ["GPU_LOGICMIX_INDEX"] = str(Path(folder) / "index")
            pack_dataset(dataset, Path(folder) / "shards", per_shard=64)
            packed = open_dataset(f"tar:{folder}/shards", "train", options.size)
            report["runs"] = [compare_shards(dataset, cached, packed, options)]
            RESULTS.joinpath("shards.json").write_text(json.dumps(report, indent=1) + "\n")
            console.print(report["runs"][0]["median"])
            return
        for workers in options.workers:
            report["runs"].append(measure(dataset, cached, workers, options, device))
    file = RESULTS / f"{options.name}.json"
    report["runs"] = sorted(report["runs"] + other_runs(file, report), key=lambda run: run["workers"])
    show(report, console)
    plot(report, RESULTS / f"{options.name}.png")
    file.write_text(json.dumps(report, indent=1) + "\n")
    console.print(f"wrote {RESULTS.name}/{options.name}.json and .png")


if __name__ == "__main__":
    main()
