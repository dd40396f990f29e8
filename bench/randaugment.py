"""How long one batch through RandAugment (N=2, M=9, bilinear) takes, and how many operators a CUDA step dispatches.

    python bench/randaugment.py                # table, bench/results/randaugment.json and .png
    python bench/randaugment.py --sizes 256x96 --repeats 5
    python bench/randaugment.py --per-op       # each operation against Kornia's function for it
    python bench/randaugment.py --picture      # docs/images/randaugment.png

All contenders run in the same process, one call of each in turn, with fresh draws in every call; the table has medians.
Ours, Kornia and torchvision's tensor versions run on CUDA where there is one. DALI takes part where it is installed.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import multiprocessing
import os
import platform
import statistics
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from measure import cpu_name, versions
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from gpu_logicmix.augment import peers
from gpu_logicmix.augment import randaugment as ours
from gpu_logicmix.augment.pixel_ops import resize

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "bench" / "results" / "randaugment.json"
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
synchronize = partial(peers.synchronize, torch.device(DEVICE))
N, M = 2, 9
ABOUT = {
    "ours, uint8": "one draw a sample",
    "ours, float32": "one draw a sample",
    "Kornia, float32": "one draw a batch",
    "torchvision v2, batch": "one draw a batch",
    "torchvision v2, loop": "one draw a sample",
    "torchvision PIL, loop": "one draw a sample, one thread",
    "ours, uint8, nearest": "one draw a sample",
    "torchvision PIL, nearest": "one draw a sample, one thread",
    "DALI, CPU": "one draw a sample",
}


def photo_like(batch: int, size: int) -> Tensor:
    """Smooth shapes and some noise, so that histograms and edges are not those of white noise."""
    generator = torch.Generator().manual_seed(0)
    coarse = torch.rand(batch, 3, 8, 8, generator=generator)
    smooth = torch.nn.functional.interpolate(coarse, (size, size), mode="bicubic", align_corners=False)
    noise = torch.randn(batch, 3, size, size, generator=generator)
    return (smooth * 255 + 8 * noise).clamp(0, 255).to(torch.uint8)


def contenders(images: Tensor) -> dict[str, Callable[[], object]]:
    import kornia.augmentation.auto as kornia
    from torchvision.transforms import InterpolationMode, v2
    from torchvision.transforms.v2.functional import to_pil_image

    on_device = images.to(DEVICE)
    in_float = on_device / 255
    mine = ours.RandAugment(N, M)
    whole = kornia.RandAugment(N, M)
    vision = v2.RandAugment(N, M, interpolation=InterpolationMode.BILINEAR)
    mine_nearest = ours.RandAugment(N, M, interpolation="nearest")
    vision_nearest = v2.RandAugment(N, M)
    pil = [to_pil_image(image) for image in images]

    calls = {
        "ours, uint8": lambda: mine(on_device),
        "ours, float32": lambda: mine(in_float),
        "Kornia, float32": lambda: whole(in_float),
        "torchvision v2, batch": lambda: vision(on_device),
        "torchvision v2, loop": lambda: torch.stack([vision(image) for image in on_device]),
        "torchvision PIL, loop": lambda: [vision(image) for image in pil],
        "ours, uint8, nearest": lambda: mine_nearest(on_device),
        "torchvision PIL, nearest": lambda: [vision_nearest(image) for image in pil],
    }
    return calls


class Dali:
    """DALI's pipeline in a process of its own, which times itself: its threads next to torch's in one process slow
    torch's loops down many times."""

    def __init__(self, batch: int, size: int, threads: int) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, other = context.Pipe()
        self.process = context.Process(target=dali_worker, args=(other, batch, size, threads), daemon=True)
        self.process.start()
        self.pipe.recv()

    def __call__(self) -> float:
        self.pipe.send("run")
        return self.pipe.recv()

    def close(self) -> None:
        self.pipe.send(None)
        self.process.join()


def dali_worker(pipe, batch: int, size: int, threads: int) -> None:
    warnings.simplefilter("ignore")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # a warning for each operation, past Python's filter
    from nvidia.dali import fn, pipeline_def, types
    from nvidia.dali.auto_aug import rand_augment

    samples = [image.permute(1, 2, 0).contiguous().numpy() for image in photo_like(batch, size)]

    @pipeline_def(batch_size=batch, num_threads=threads, device_id=None, enable_conditionals=True, seed=0)
    def pipeline():
        image = fn.external_source(source=lambda: samples, layout="HWC", dtype=types.UINT8)
        return rand_augment.rand_augment(image, n=N, m=M, fill_value=0)

    built = pipeline(prefetch_queue_depth=1, exec_async=False, exec_pipelined=False)
    built.build()
    pipe.send("ready")
    while pipe.recv():
        start = time.perf_counter()
        built.run()
        pipe.send(1e3 * (time.perf_counter() - start))


def measure(batch: int, size: int, repeats: int, threads: int) -> dict[str, list[float]]:
    """Milliseconds of each call."""
    calls = contenders(photo_like(batch, size))
    dali = None
    if importlib.util.find_spec("nvidia") and importlib.util.find_spec("nvidia.dali"):
        dali = calls["DALI, CPU"] = Dali(batch, size, threads)
    times: dict[str, list[float]] = {name: [] for name in calls}
    for repeat in range(repeats + 2):
        for name, call in calls.items():
            torch.manual_seed(repeat)
            synchronize()
            start = time.perf_counter()
            result = call()
            synchronize()
            spent = result if name == "DALI, CPU" else 1e3 * (time.perf_counter() - start)
            del result
            if repeat >= 2:  # two rounds to warm up
                times[name].append(spent)
    if dali:
        dali.close()
    return times


class OperatorCount(TorchDispatchMode):
    """Counts the operators that would launch a kernel: not views, not allocations."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        view = any(r.alias_info is not None and not r.alias_info.is_write for r in func._schema.returns)
        allocation = func._schema.name.startswith(("aten::empty", "aten::new_empty", "aten::detach"))
        self.count += func.namespace in ("aten", "gpu_logicmix") and not view and not allocation
        return func(*args, **(kwargs or {}))


def count_operators(batch: int, size: int, draws: int = 5) -> dict[str, float]:
    """Operators dispatched per batch, mean over some draws. Ours on fake CUDA tensors, which have no values; the others
    read values on the way, so they are counted on the CPU, where they dispatch the same."""
    import kornia.augmentation.auto as kornia
    from torchvision.transforms import InterpolationMode, v2

    def mean(call: Callable[[int], object]) -> float:
        counts = []
        for seed in range(draws):
            torch.manual_seed(seed)
            with OperatorCount() as counter:
                call(seed)
            counts.append(counter.count)
        return statistics.mean(counts)

    mine = ours.RandAugment(N, M)
    real = photo_like(batch, size)
    vision = v2.RandAugment(N, M, interpolation=InterpolationMode.BILINEAR)
    whole = kornia.RandAugment(N, M)
    counts = {
        "torchvision v2, loop": mean(lambda _: [vision(image) for image in real]),
        "torchvision v2, batch (one draw a batch)": mean(lambda _: vision(real)),
        "Kornia (one draw a batch)": mean(lambda _: whole(real / 255)),
    }
    with FakeTensorMode(allow_non_fake_inputs=True):
        fake = torch.empty(batch, 3, size, size, dtype=torch.uint8, device="cuda")

        counts["ours, dense (where there is no Triton)"] = mean(lambda _: mine._dense(fake, mine.plan(batch, "cuda")))
        counts["ours, kernels (the default)"] = mean(lambda _: mine(fake))
    return counts


def per_operation(batch: int, size: int, repeats: int) -> list[tuple[str, float, float]]:
    """Each operation on a whole batch: ours on uint8 and float32, and Kornia's function on float32. Milliseconds."""
    import kornia.enhance as enhance
    import kornia.geometry.transform as geometry

    images = photo_like(batch, size).to(DEVICE)
    in_float = images / 255
    mine = ours.RandAugment(1, M)
    sign = torch.ones(batch, 1, dtype=torch.int64)
    factor = torch.full((batch,), 1 + mine.strength, device=DEVICE)
    angle = torch.full((batch,), 9.0, device=DEVICE)
    shear = torch.tensor([[mine.shear, 0.0]], device=DEVICE).expand(batch, 2)
    shift = torch.tensor([[float(mine._shift(size)), 0.0]], device=DEVICE).expand(batch, 2)
    theirs = {
        "AutoContrast": lambda: enhance.normalize_min_max(in_float),
        "Equalize": lambda: enhance.equalize(in_float),
        "Rotate": lambda: geometry.rotate(in_float, angle),
        "Solarize": lambda: enhance.solarize(in_float, mine.threshold / 255),
        "Color": lambda: enhance.adjust_saturation_with_gray_subtraction(in_float, factor),
        "Posterize": lambda: enhance.posterize(in_float, mine.bits),
        "Contrast": lambda: enhance.adjust_contrast_with_mean_subtraction(in_float, factor),
        "Brightness": lambda: enhance.adjust_brightness_accumulative(in_float, factor),
        "Sharpness": lambda: enhance.sharpness(in_float, factor),
        "ShearX": lambda: geometry.shear(in_float, shear),
        "TranslateX": lambda: geometry.translate(in_float, shift),
    }
    rows = []
    for name, their in theirs.items():
        plan = ours.AugmentPlan(torch.full((batch, 1), ours.OPERATIONS.index(name)), sign)
        calls = [lambda p=plan: mine(images, p), lambda p=plan: mine(in_float, p), their]
        times: list[list[float]] = [[], [], []]
        for repeat in range(repeats + 1):
            for call, record in zip(calls, times, strict=True):
                synchronize()
                start = time.perf_counter()
                call()
                synchronize()
                if repeat:
                    record.append(1e3 * (time.perf_counter() - start))
        rows.append((name, *(statistics.median(record) for record in times)))
    return rows


def environment(threads: int) -> dict[str, object]:
    return {
        "device": torch.cuda.get_device_name() if DEVICE == "cuda" else "cpu",
        "cpu": cpu_name(),
        "cores": os.cpu_count(),
        "threads": threads,
        "python": platform.python_version(),
        "versions": versions(("torch", "torchvision", "kornia", "pillow", "nvidia-dali-cuda120", "numpy")),
    }


def plot(report: dict, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    names = list(report["sizes"][0]["milliseconds"])
    fig, axes = plt.subplots(1, len(report["sizes"]), figsize=(4.2 * len(report["sizes"]), 3.4), sharey=True)
    for ax, entry in zip([axes] if len(report["sizes"]) == 1 else axes, report["sizes"], strict=True):
        values = [entry["milliseconds"][name] for name in names]
        colors = ["#d1495b" if name.startswith("ours") else "#8d99ae" for name in names]
        bars = ax.barh(names, values, color=colors)
        ax.bar_label(bars, [f"{v:.0f}" for v in values], padding=3, fontsize=9)
        ax.set_title(f"{entry['batch']} images of {entry['size']}x{entry['size']}", fontsize=10)
        ax.set_xlim(0, max(values) * 1.15)
        ax.spines[["top", "right"]].set_visible(False)
        ax.set_xlabel("ms a batch")
    axes_list = [axes] if len(report["sizes"]) == 1 else list(axes)
    axes_list[0].invert_yaxis()
    where = report["environment"]
    name = where["device"] if where["device"] != "cpu" else f"{where['cpu']}, {where['threads']} threads"
    fig.suptitle(f"RandAugment N={N} M={M}, median of {report['repeats']} batches ({name})", fontsize=11)
    fig.tight_layout()
    fig.savefig(path, dpi=110)
    plt.close(fig)


def picture(path: Path) -> None:
    """The 14 operations at M=9 and M=20, ours above torchvision's."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from sklearn.datasets import load_sample_image
    from torchvision.transforms import InterpolationMode, autoaugment

    photo = torch.from_numpy(load_sample_image("china.jpg").copy()).permute(2, 0, 1)[None]
    photo = resize(photo, (160, 240))
    space = autoaugment.RandAugment()._augmentation_space(31, (160, 240))
    columns = 7
    plan = ours.AugmentPlan(torch.zeros(1, 1, dtype=torch.int64), torch.ones(1, 1, dtype=torch.int64))
    fig, axes = plt.subplots(4, columns, figsize=(14, 12))
    for index, name in enumerate(ours.OPERATIONS):
        for block, m in enumerate((9, 20)):
            magnitudes = space[name][0]
            magnitude = magnitudes[m].item() if magnitudes.ndim else 0.0
            mine = ours.RandAugment(1, m, ops=[name])(photo, plan)[0]
            theirs = autoaugment._apply_op(photo, name, magnitude, InterpolationMode.BILINEAR, None)[0]
            gap = torch.full((3, 4, mine.shape[2]), 255, dtype=torch.uint8)
            ax = axes[2 * (index // columns) + block, index % columns]
            ax.imshow(torch.cat([mine, gap, theirs], dim=1).permute(1, 2, 0))
            ax.set_xticks([])
            ax.set_yticks([])
            ax.spines[:].set_visible(False)
            ax.set_title(f"{name}, M={m}", fontsize=11)
            if index % columns == 0:
                ax.set_ylabel("torchvision          ours      ", fontsize=10)
    fig.text(
        0.995,
        0.004,
        "Photo: danielbuechele (flickr), CC BY 2.0, from scikit-learn; resized and augmented",
        ha="right",
        fontsize=8,
    )
    fig.tight_layout(rect=(0, 0.012, 1, 1), h_pad=1.2, w_pad=0.4)
    path.parent.mkdir(parents=True, exist_ok=True)
    fig.savefig(path, dpi=80)
    plt.close(fig)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", default=["32x448", "128x224", "256x96"], help="batch x image side")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path, default=RESULTS, help="the JSON file; the plot is written next to it")
    parser.add_argument("--per-op", action="store_true")
    parser.add_argument("--picture", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    console = Console(width=110)
    if args.picture:
        path = ROOT / "docs" / "images" / "randaugment.png"
        picture(path)
        console.print(f"{path.relative_to(ROOT)} written")
        return
    sizes = [tuple(map(int, size.split("x"))) for size in args.sizes]
    if args.per_op:
        for batch, size in sizes:
            table = Table(title=f"{batch} images of {size}x{size}, every sample the same operation, ms a batch")
            for title in ("operation", "ours, uint8", "ours, float32", "Kornia, float32"):
                table.add_column(title, justify="left" if title == "operation" else "right")
            for name, *times in per_operation(batch, size, args.repeats):
                table.add_row(name, *(f"{t:.1f}" for t in times))
            console.print(table)
        return

    entries = []
    for batch, size in sizes:
        times = measure(batch, size, args.repeats, args.threads)
        entries.append(
            {
                "batch": batch,
                "size": size,
                "milliseconds": {name: round(statistics.median(t), 2) for name, t in times.items()},
                "mean": {name: round(statistics.mean(t), 2) for name, t in times.items()},
                "all": {name: [round(x, 2) for x in t] for name, t in times.items()},
            }
        )
    operators = count_operators(32, 448)
    report = {
        "command": f"python bench/randaugment.py --sizes {' '.join(args.sizes)} --repeats {args.repeats} "
        f"--threads {args.threads}",
        "environment": environment(args.threads),
        "n": N,
        "m": M,
        "repeats": args.repeats,
        "sizes": entries,
        "operators_32x448": operators,
    }
    table = Table(title=f"RandAugment N={N} M={M}, ms a batch, median of {args.repeats}, {args.threads} threads")
    table.add_column("who")
    table.add_column("draws")
    for batch, size in sizes:
        table.add_column(f"{batch}x{size}", justify="right")
    for name in entries[0]["milliseconds"]:
        style = "bold" if name.startswith("ours") else None
        table.add_row(name, ABOUT[name], *(f"{e['milliseconds'][name]:.0f}" for e in entries), style=style)
    console.print(table)
    counted = Table(title="Operators dispatched for one batch of 32x448 (no views, no allocations)")
    counted.add_column("who")
    counted.add_column("operators", justify="right")
    for name, value in operators.items():
        counted.add_row(name, f"{value:.0f}")
    console.print(counted)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(report, indent=1) + "\n")
    plot(report, args.out.with_suffix(".png"))
    console.print(f"{args.out.name} and {args.out.with_suffix('.png').name} written to {args.out.parent.name}/")


if __name__ == "__main__":
    main()
