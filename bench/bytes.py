"""Kernels and bytes of the augmentation of one batch, part by part, on fake CUDA tensors: no GPU is needed.

    python bench/bytes.py                          # 32x448 and 128x224: table, bench/results/bytes.json
    python bench/bytes.py --batch 64 --size 288 --categories 9605

A kernel is an operator that is dispatched and is not a view. Bytes are what it reads and writes, nominally: every input
and output once; of a gather only what it takes; of the mix its own pixels and its partners', on average; of statistics
the samples that drew an operation with any, on average.
The batch is uint8 and channels_last on the device; a bfloat16 batch, normalised, comes out.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from gpu_logicmix import GPULogicMix, RandAugment, RandomHorizontalFlip
from gpu_logicmix.augment.randaugment import OPERATIONS

RESULTS = Path(__file__).parent / "results" / "bytes.json"
NORMALIZE = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
NOT_KERNELS = {"empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided", "empty_permuted", "lift_fresh"}
NOT_KERNELS |= {"detach", "alias", "_unsafe_view", "_reshape_alias", "device"}
OVERWRITES = {"copy_", "fill_", "zero_", "random_", "uniform_"}
MAKES = {"new_zeros", "new_ones", "new_full", "full_like", "zeros_like", "ones_like"}
TAKES = {"index_select", "gather", "index"}
DRAW, AUGMENT, MIX = "draw of all three", "flip, RandAugment", "mix, / 255, normalise, cast; labels"


def nbytes(tensor: Tensor) -> int:
    """What an expanded dimension repeats is read once."""
    count = tensor.element_size()
    for length, step in zip(tensor.shape, tensor.stride(), strict=True):
        count *= length if step else 1
    return count


class Count(TorchDispatchMode):
    def __init__(self, members: float) -> None:
        super().__init__()
        self.part, self.members = "", members  # samples read for each sample written, on average
        self.described = 3 / len(OPERATIONS)  # AutoContrast, Equalize and Contrast have statistics
        self.rows: list[tuple[str, str, int]] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        name = function._overloadpacket.__name__
        if function.is_view or name in NOT_KERNELS:
            return result
        ins, outs = ([t for t in tree_leaves(x) if isinstance(t, Tensor)] for x in ((args, kwargs or {}), result))
        if not any(t.device.type == "cuda" for t in ins + outs):
            return result
        read, write = sum(map(nbytes, ins)), sum(map(nbytes, outs))
        if name in OVERWRITES:
            read -= nbytes(ins[0])
        elif name in MAKES:
            read = 0
        elif name in TAKES:
            read = write + sum(nbytes(t) for t in ins[1:])
        elif name == "index_copy_":
            read, write = nbytes(ins[1]) + nbytes(ins[2]), nbytes(ins[2])
        elif name in ("mix_rows", "or_rows"):
            row = nbytes(ins[0]) // max(1, ins[0].shape[0])
            read = round(self.members * outs[0].shape[0] * row) + sum(nbytes(t) for t in ins[1:])
        elif name == "augment_statistics":
            read, write = round(self.described * nbytes(ins[0])) + sum(map(nbytes, ins[1:])), nbytes(ins[-1])
        self.rows.append((self.part, name, read + write))
        return result


def count(batch: int, size: int, categories: int = 80) -> dict[str, dict[str, float]]:
    """{part: {"kernels", "MB"}} of one batch."""
    flip, augment = RandomHorizontalFlip(), RandAugment()
    mix = GPULogicMix(normalize=NORMALIZE, out_dtype=torch.bfloat16)
    # p of the samples have 1 to 2 partners beside themselves.
    counter = Count(members=1 + mix.p * ((mix.k_min + mix.k_max) / 2 - 1))
    with FakeTensorMode(allow_non_fake_inputs=True):
        images = torch.empty(batch, 3, size, size, dtype=torch.uint8, device="cuda")
        images = images.contiguous(memory_format=torch.channels_last)
        targets = torch.empty(batch, categories, dtype=torch.int8, device="cuda")
        made = mix.finish.of(images)[1:]
        mix.finish._constants = lambda *_: made  # on a GPU they are made once, not in every step
        with counter:
            counter.part = DRAW
            mirror, plan, groups = flip.plan(batch, "cuda"), augment.plan(batch, "cuda"), mix.plan(batch, "cuda")
            counter.part = AUGMENT
            images = augment(images, plan, mirror)
            counter.part = MIX
            mix(images, targets, groups)
    parts: dict[str, dict[str, float]] = {}
    for part, _, moved in counter.rows:
        row = parts.setdefault(part, {"kernels": 0, "MB": 0.0})
        row["kernels"] += 1
        row["MB"] += moved / 1e6
    return parts


def limit(batch: int, size: int) -> float:
    """MB: each byte of the batch read once, one bfloat16 batch written."""
    return 3 * batch * 3 * size * size / 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, help="images in a batch; with --size, in place of the two usual shapes")
    parser.add_argument("--size", type=int, default=448, help="height and width (default 448)")
    parser.add_argument("--categories", type=int, default=80)
    parser.add_argument(
        "--out", type=Path, help="where to write (default for the two usual shapes: bench/results/bytes.json)"
    )
    options = parser.parse_args()
    shapes = [(options.batch, options.size)] if options.batch else [(32, 448), (128, 224)]
    found = {}
    for batch, size in shapes:
        parts = count(batch, size, options.categories)
        found[f"{batch}x3x{size}x{size}"] = {"parts": parts, "limit MB": limit(batch, size)}
        print(f"{batch}x3x{size}x{size}, {options.categories} categories")
        total = {name: sum(row[name] for row in parts.values()) for name in ("kernels", "MB")}
        for name, row in [*parts.items(), ("all", total)]:
            print(f"  {name:40s} {row['kernels']:5.0f} kernels {row['MB']:9.1f} MB")
        print(f"  {'limit (read once, written once)':40s} {limit(batch, size):23.1f} MB")
    out = options.out or (None if options.batch else RESULTS)
    if out:
        out.write_text(json.dumps({"torch": torch.__version__, "shapes": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
