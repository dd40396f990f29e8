"""Labels of the size of OpenImages: how long it takes to open, hide, count and look them up, and in how much memory.

    python bench/labels.py                          # 9,011,219 images, 9,605 classes, 60 million labels: some minutes
    python bench/labels.py --share 0.01             # a hundredth of the images

Makes a label file in OpenImages' form, without images: ids as theirs, classes with a long tail (Zipf), about a third
of the labels present. Contradicting and repeated rows are as frequent as chance makes them. Parts, each in a process of
its own: first (reads all of it and keeps an index), again (opens the index, looks up, hides, counts), stats, train (50
steps on a slice), csv and csv_stats (a table of 1,000,000 and of 500,000 rows with 80 columns). Seconds are of one run;
CPU seconds are given beside them.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from measure import RESULTS, environment

IMAGES, CLASSES, LABELS = 9_011_219, 9_605, 60_000_000
SLICE, STEPS = 800, 50  # images to train on, and steps in two epochs
HEX = np.frombuffer(b"0123456789abcdef", dtype=np.uint8)


def make_labels(folder: Path, share: float, seed: int = 0) -> dict[str, int]:
    """A folder as OpenImages' V6 comes, but for the images."""
    import pyarrow as pa
    from pyarrow import csv as arrow

    rng = np.random.default_rng(seed)
    images = max(10, round(IMAGES * share))
    ids = np.unique(rng.integers(0, 2**63, images, dtype=np.uint64) * np.uint64(2))
    mids = [f"/m/0{number:05x}" for number in range(CLASSES)]
    (folder / "oidv6-classes-trainable.txt").write_text("\n".join(mids) + "\n")
    weight = 1 / np.arange(1, CLASSES + 1) ** 0.8
    edges = np.cumsum(weight / weight.sum())
    names = pa.array(mids)
    schema = pa.schema([(name, pa.string()) for name in ("ImageID", "Source", "LabelName", "Confidence")])
    rows = 0
    file = folder / "oidv6-train-annotations-human-imagelabels.csv"
    with arrow.CSVWriter(file, schema, write_options=arrow.WriteOptions(quoting_style="none")) as writer:
        for start in range(0, len(ids), 200_000):
            block = ids[start : start + 200_000]
            each = np.repeat(block, rng.poisson(LABELS / IMAGES, len(block)))
            digits = each.astype(">u8").view(np.uint8).reshape(-1, 8)
            text = np.stack((HEX[digits >> 4], HEX[digits & 15]), 2).reshape(-1, 16)
            texts = (
                pa.array(np.ascontiguousarray(text).view("S16")[:, 0], pa.binary(16))
                .cast(pa.binary())
                .cast(pa.string())
            )
            classes = names.take(pa.array(np.minimum(np.searchsorted(edges, rng.random(len(each))), CLASSES - 1)))
            confidence = pa.array(["0", "1"]).take(pa.array((rng.random(len(each)) < 0.35).astype(np.int8)))
            source = pa.array(["verification"]).take(pa.array(np.zeros(len(each), dtype=np.int8)))
            writer.write_table(pa.table([texts, source, classes, confidence], schema=schema))
            rows += len(each)
    return {"images": len(ids), "classes": CLASSES, "rows": rows, "bytes": file.stat().st_size}


def make_table(file: Path, rows: int, seed: int = 0) -> None:
    """A table of one's own, a column for each of 80 categories: 1, 0, -1 or nothing."""
    rng, cells = np.random.default_rng(seed), np.array([b"0,", b"1,", b",", b"-1,"])
    with open(file, "wb") as out:
        out.write(b"image," + b",".join(b"class%02d" % c for c in range(80)) + b"\n")
        for start in range(0, rows, 10_000):
            drawn = cells[rng.choice(4, (min(10_000, rows - start), 80), p=(0.5, 0.1, 0.35, 0.05))]
            for row, of_row in enumerate(drawn, start):
                out.write(b"images/%012d.jpg,%b\n" % (row, b"".join(of_row)[:-1]))


def timed(function: Callable[[], Any]) -> tuple[Any, dict[str, float]]:
    wall, cpu = time.perf_counter(), time.process_time()
    out = function()
    return out, {"seconds": time.perf_counter() - wall, "cpu_seconds": time.process_time() - cpu}


def resident() -> float:
    """GB in use now."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS"):
            return int(line.split()[1]) / 1e6
    return float("nan")


def peak() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6


def measure(folder: Path) -> dict[str, Any]:
    """In a process of its own: open, look up, hide, count, fingerprint."""
    import torch

    from gpu_logicmix import hide_labels, label_counts, open_dataset

    torch.set_num_threads(1)
    before = resident()
    dataset, opened = timed(
        lambda: open_dataset(f"openimages:{folder}", "train", 224, labels="sparse", on_bad_image="skip")
    )
    out: dict[str, Any] = {"open": opened, "images": len(dataset), "known": dataset.labels.known}
    out["GB"] = {"before": before, "open": resident(), "peak_open": peak()}
    rng = np.random.default_rng(0)
    batches = [rng.integers(0, len(dataset), 256) for _ in range(50)]
    times = []
    for rows in batches:
        times.append(timed(lambda rows=rows: dataset.labels_of(rows))[1]["seconds"])
    out["labels_of 256"] = {"seconds": float(np.median(times))}
    table = dataset.labels.table()
    times = [timed(lambda rows=rows: table(torch.from_numpy(rows)))[1]["seconds"] for rows in batches]
    out["table 256"] = {"seconds": float(np.median(times))}
    table = None
    for name, protocol, known in (("uniform", "uniform", 0.3), ("single-positive", "single-positive", None)):
        hidden, out[f"hide {name}"] = timed(lambda p=protocol, k=known: hide_labels(dataset.labels, k, 1, p))
        out[f"hide {name}"]["known"] = hidden.known
        del hidden
    _, out["counts per category and image"] = timed(lambda: [label_counts(dataset.labels, dim) for dim in (None, 0, 1)])
    _, out["fingerprint"] = timed(dataset.fingerprint)
    _, out["take a tenth"] = timed(lambda: dataset.take(np.arange(0, len(dataset), 10)))
    out["GB"]["peak"] = peak()
    return out


def train(folder: Path) -> dict[str, Any]:
    """50 steps on a slice with all classes, with pseudo-labels and mixing."""
    import torch
    from PIL import Image

    from gpu_logicmix import Config, fit, open_dataset
    from gpu_logicmix.train.inputs import open_train, open_val

    torch.set_num_threads(1)
    count = len(open_dataset(f"openimages:{folder}", "train", 32, labels="sparse", on_bad_image="skip"))
    batch = SLICE // STEPS * 2  # in two epochs: the second has pseudo-labels
    config = Config(
        data=f"openimages:{folder}", option=["labels=sparse"], size=32, images=batch * STEPS // 2, holdout=300 / count,
        model="test_resnet", weights="none", epochs=2, batch_size=batch, cl=True, cl_start=1, cft=False, workers=0,
        device="cpu", threads=1, amp="off", on_bad_image="skip",
    )  # fmt: skip
    rng, images = np.random.default_rng(0), 0
    with tempfile.TemporaryDirectory() as out:
        for dataset in (open_train(config)[0], open_val(config)):
            for name in dataset.ids:
                path = folder / "train" / f"{name}.jpg"
                Image.fromarray(rng.integers(0, 256, (4, 4, 3), dtype=np.uint8)).resize((64, 48)).save(path)
                images += 1
        _, report = timed(lambda: fit(config, Path(out) / "run"))
        lines = [json.loads(line) for line in (Path(out) / "run" / "log.jsonl").read_text().splitlines()]
    log = {kind: [line for line in lines if line["kind"] == kind] for kind in ("epoch", "curriculum")}
    made = {"images": images, "classes": CLASSES, "steps": lines[-1].get("step", STEPS), "batch": batch}
    return {**report, **made, **log, "peak_GB": peak()}


def csv(folder: Path) -> dict[str, Any]:
    from gpu_logicmix import open_dataset

    before = resident()
    file = folder / "table.csv"
    dataset, report = timed(lambda: open_dataset(f"csv:{file}", on_bad_image="skip"))
    report |= {"rows": len(dataset), "columns": len(dataset.categories), "bytes": file.stat().st_size}
    return {**report, "GB": {"before": before, "open": resident(), "peak": peak()}}


def stats(folder: Path) -> dict[str, Any]:
    return command("stats", f"openimages:{folder}", "-o", "labels=sparse", "--plot", str(folder / "stats.png"))


def csv_stats(folder: Path) -> dict[str, Any]:
    return command("stats", f"csv:{folder / 'half.csv'}")


def command(*arguments: str) -> dict[str, Any]:
    """A command, from the start of its process to its end."""
    from gpu_logicmix.cli import main

    sys.argv = ["gpu-logicmix", *arguments]
    screen, sys.stdout = sys.stdout, open(os.devnull, "w")  # noqa: SIM115
    start = float(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19]) / os.sysconf("SC_CLK_TCK")
    try:
        main()
    except SystemExit as end:
        if end.code:
            raise
    finally:
        sys.stdout.close()
        sys.stdout = screen
    uptime = float(Path("/proc/uptime").read_text().split()[0])
    return {"seconds": uptime - start, "cpu_seconds": time.process_time(), "peak_GB": peak()}


def first(folder: Path) -> dict[str, Any]:
    from gpu_logicmix import open_dataset

    open_ = lambda: open_dataset(f"openimages:{folder}", labels="sparse", on_bad_image="skip")  # noqa: E731
    return {"open": timed(open_)[1], "peak_GB": peak()}


PARTS: dict[str, Callable[[Path], dict[str, Any]]] = {
    "first": first,
    "again": measure,
    "stats": stats,
    "train": train,
    "csv": csv,
    "csv_stats": csv_stats,
}


def child(part: str, folder: Path) -> dict[str, Any]:
    """Each part in a process of its own: its time and memory are not those of another."""
    environ = {**os.environ, "GPU_LOGICMIX_INDEX": str(folder / "index")}
    command = [sys.executable, __file__, "--child", part, "--folder", str(folder)]
    found = subprocess.run(command, env=environ, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(found.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--share", type=float, default=1.0, help="of OpenImages' images")
    parser.add_argument("--folder", type=Path, help="to keep the label file and its index in; a temporary one else")
    parser.add_argument(
        "--parts", default=",".join(PARTS), help="which of them to measure; the others stay as they are"
    )
    parser.add_argument("--child", choices=tuple(PARTS), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        print(json.dumps(PARTS[options.child](options.folder)))
        return
    import torch

    with tempfile.TemporaryDirectory() as temporary:
        folder = options.folder or Path(temporary) / "oid"
        (folder / "train").mkdir(parents=True, exist_ok=True)
        made = folder / "made.json"
        if not made.exists():
            made.write_text(json.dumps(make_labels(folder, options.share)))
        report = {"command": f"python bench/labels.py --share {options.share:g}", "made": json.loads(made.read_text())}
        RESULTS.mkdir(exist_ok=True)
        file = RESULTS / "labels.json"
        if file.exists() and options.folder is not None:
            report = {**json.loads(file.read_text()), **report}
        for part, rows, name in (("csv", 1_000_000, "table.csv"), ("csv_stats", 500_000, "half.csv")):
            if part in options.parts.split(",") and not (folder / name).exists():
                make_table(folder / name, round(rows * options.share))
        for part in options.parts.split(","):
            report[part] = child(part, folder)
    report["environment"] = environment(torch.device("cpu"), ("torch", "numpy", "pyarrow"))
    file.write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
