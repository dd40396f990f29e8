"""Compile the Triton kernels for sm_80 and sm_90 on a machine without a GPU, and look at the machine code.

    python bench/aot.py        # bench/results/aot.json: registers, spills, widths of loads and stores, rounding

Nothing runs on a device: each launch goes through Triton's launcher with tensors on the CPU, and stops when its kernel
is compiled. Registers and spills come from `cuobjdump`, load and store widths from the disassembly, the rounding of
bfloat16 from the PTX: `cvt.rn` rounds to nearest, halves to even.
"""

from __future__ import annotations

import argparse
import collections
import json
import re
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from gpu_logicmix.augment import augment_launch, kernels
from gpu_logicmix.augment.randaugment import RandAugment

RESULTS = Path(__file__).parent / "results" / "aot.json"
BIN = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
SIZE, ODD = (448, 448), (45, 51)  # the second: not a multiple of a block


class Device:
    """What Triton asks a GPU before it compiles."""

    def __init__(self, arch: int) -> None:
        self.arch = arch

    def get_current_device(self) -> int:
        return self.arch  # kernels are kept by device: one for each architecture

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.arch, 32)


def compiled(arch: int, launch: Callable, *arguments: Any) -> list:
    """The kernels that a launch takes, for `arch`, each up to the moment before it would run. The tensors are on the
    CPU. Triton's own launcher decides which arguments are constants and which are aligned, as it does on a GPU."""
    found = []
    run = JITFunction.run

    def compile_alone(self: JITFunction, *args: Any, warmup: bool, **options: Any) -> None:
        found.append(run(self, *args, warmup=True, **options))

    before = driver._active  # asking for it by its name would look for a GPU
    driver.set_active(Device(arch))
    try:
        with mock.patch.object(JITFunction, "run", compile_alone):
            launch(*arguments)
    finally:
        driver._active = before
    return found


def groups(batch: int, k: int) -> tuple[Tensor, Tensor]:
    return torch.zeros(batch, k, dtype=torch.int64), torch.ones(batch, dtype=torch.int64)


def mix(arch: int, table: str, out: str, k: int, finish: bool = True, weighted: bool = False, even: bool = True):
    height, width = SIZE if even else ODD
    rows = torch.zeros(4, 3 * height * width, dtype=getattr(torch, table))
    constants = (torch.ones(3), torch.zeros(3)) if finish else (None, None)
    weight = torch.ones(4, k) if weighted else None
    arguments = (rows, *groups(4, k), weight, *constants, height * width, getattr(torch, out))
    return compiled(arch, kernels.launch_mix, *arguments)[0]


def labels(arch: int, dtype: str, k: int):
    targets = torch.zeros(4, 80, dtype=getattr(torch, dtype))
    return compiled(arch, kernels.launch_or, targets, *groups(4, k), -1.0, kernels.KEEP)[0]


def augment(arch: int, part: str, last: bool = True, even: bool = True, mirror: bool = False, nearest: bool = False):
    """A kernel of RandAugment: statistics, tables or apply."""
    transform = RandAugment(n=2, interpolation="nearest" if nearest else "bilinear")
    images = torch.zeros(4, 3, *(SIZE if even else ODD), dtype=torch.uint8)
    images = images.contiguous(memory_format=torch.channels_last) if last else images
    flip = torch.zeros(4, dtype=torch.bool) if mirror else None
    arguments = (images, *transform.plan(4), flip, transform._magnitudes(images))
    return compiled(arch, augment_launch.augmented, *arguments)[("statistics", "tables", "apply").index(part)]


def look_at(kernel) -> dict:
    """What the machine code says."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(kernel.asm["cubin"])
        run = {"capture_output": True, "text": True, "check": True}
        usage = subprocess.run([BIN / "cuobjdump", "--dump-resource-usage", file.name], **run).stdout
        code = subprocess.run([BIN / "nvdisasm", "-c", file.name], **run).stdout
    registers, stack, _, local = map(int, re.search(r"REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)", usage).groups())
    widths: collections.Counter = collections.Counter()
    for name, rest in re.findall(r"\b(LDG|STG|LDL|STL)\.([\w.]*)", code):
        wide = re.search(r"\b(128|64)\b|\b[US](8|16)\b", rest)
        widths[f"{name} {(wide.group(1) or wide.group(2)) if wide else 32}"] += 1
    return {
        "registers": registers,
        "spilled bytes": stack + local,
        "accesses by width in bits": dict(sorted(widths.items())),
        "rounding": sorted(set(re.findall(r"cvt\.r[nzmp]\.bf16[\w.]*|cvt\.r[nzmp]\.f16[\w.]*", kernel.asm["ptx"]))),
        "fused multiply-add": len(re.findall(r"\bfma\.", kernel.asm["ptx"])),
    }


def rows(arches: list[int]) -> dict[str, dict]:
    found = {}
    for arch in arches:
        for table, out, k, options in (
            ("uint8", "bfloat16", 3, {}),
            ("uint8", "bfloat16", 8, {}),
            ("uint8", "float16", 3, {}),
            ("uint8", "float32", 3, {}),
            ("uint8", "uint8", 3, {"finish": False}),
            ("float32", "float32", 3, {"finish": False}),
            ("bfloat16", "bfloat16", 3, {"finish": False}),
            ("uint8", "bfloat16", 2, {"weighted": True}),
            ("uint8", "bfloat16", 3, {"even": False}),
        ):
            words = "".join(f", {name}={value}" for name, value in options.items())
            found[f"sm_{arch} mix {table} -> {out}, K {k}{words}"] = look_at(mix(arch, table, out, k, **options))
        for dtype in ("int8", "float32"):
            found[f"sm_{arch} labels {dtype}, K 3"] = look_at(labels(arch, dtype, 3))
        for part, options in (
            ("statistics", {}),
            ("statistics", {"last": False}),
            ("tables", {}),
            ("apply", {"mirror": True}),
            ("apply", {}),
            ("apply", {"last": False}),
            ("apply", {"mirror": True, "even": False}),
            ("apply", {"nearest": True}),
        ):
            words = "".join(f", {name}={value}" for name, value in options.items())
            found[f"sm_{arch} RandAugment {part}{words}"] = look_at(augment(arch, part, **options))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arch", type=int, nargs="+", default=[80, 90], help="compute capabilities (default 80 90)")
    parser.add_argument("--out", type=Path, default=RESULTS, help="where to write (default bench/results/aot.json)")
    options = parser.parse_args()
    found = rows(options.arch)
    for name, row in found.items():
        print(f"{name:60s} {row['registers']:3d} registers, {row['spilled bytes']} B spilled, {row['rounding']}")
        print(f"{'':60s} {row['accesses by width in bits']}")
    options.out.write_text(json.dumps({"triton": triton.__version__, "kernels": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
