"""Compile the Triton kernels for sm_80 and sm_90 on a machine without a GPU, and look at the machine code.

    python bench/aot.py        # bench/results/aot.json: registers, spills, widths of loads and stores, rounding

Nothing runs on a device. Registers and spills come from `cuobjdump`, load and store widths from the disassembly, the
rounding of bfloat16 from the PTX: `cvt.rn` rounds to nearest, halves to even.
"""

from __future__ import annotations

import argparse
import collections
import json
import re
import subprocess
import tempfile
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from gpu_logicmix.augment import augment_kernels, augment_launch, kernels

RESULTS = Path(__file__).parent / "results" / "aot.json"
BIN = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
POINTER = {"uint8": "*u8", "int8": "*i8", "bfloat16": "*bf16", "float16": "*fp16", "float32": "*fp32", "int64": "*i64"}


def compiled(function, signature: dict, constants: dict, arch: int, warps: int, aligned: list[str]):
    """A kernel for `arch`; `aligned` names the arguments that are multiples of 16."""
    names = function.arg_names
    source = ASTSource(
        fn=function,
        signature={name: signature.get(name, "constexpr") for name in names},
        constexprs={(names.index(name),): value for name, value in constants.items()},
        attrs={(names.index(name),): [["tt.divisibility", 16]] for name in aligned},
    )
    options = {"num_warps": warps, "enable_fp_fusion": False}
    return triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)


def mix(arch: int, table: str, out: str, k: int, finish: bool = True, weighted: bool = False, even: bool = True):
    pointers = {"table": POINTER[table], "out": POINTER[out], "index": "*i64", "size": "*i64"}
    pointers |= {"weight": "*fp32" if weighted else "*i64"}
    pointers |= dict.fromkeys(("scale", "shift"), "*fp32" if finish else "*i64")
    constants = {"K": k, "WEIGHTED": weighted, "FINISH": finish, "CHANNELS": 3 if finish else 1}
    constants |= {"ROUND": out == "uint8", "EVEN": even, "BLOCK": kernels.BLOCK}
    aligned = [*pointers, *(["row", "inner"] if even else [])]
    signature = {**pointers, "row": "i32", "inner": "i32"}
    return compiled(kernels.mix_kernel, signature, constants, arch, kernels.WARPS, aligned)


def labels(arch: int, dtype: str, k: int):
    pointers = {"labels": POINTER[dtype], "out": POINTER[dtype], "index": "*i64", "size": "*i64"}
    numbers = {"categories": "i32", "step": "i32", "stride": "i32", "unknown": "fp32" if "float" in dtype else "i32"}
    constants = {"K": k, "ASSUME": kernels.KEEP, "BLOCK": kernels.LABEL_BLOCK}
    return compiled(kernels.or_kernel, {**pointers, **numbers}, constants, arch, 2, [*pointers])


def augment(arch: int, part: str, last: bool = True, even: bool = True, mirror: bool = False, nearest: bool = False):
    """A kernel of RandAugment: statistics, tables or apply."""
    function = getattr(augment_kernels, f"{part}_kernel")
    pointers = {"images": "*u8", "out": "*u8", "tables": "*u8", "mirror": "*u8", "stats": "*i32"}
    pointers |= {"operations": "*i64", "signs": "*i64"}
    whole = dict.fromkeys(("height", "width", "row", "pixels", "step", "keep", "level", "dx", "dy"), "i32")
    whole["codes"] = "i64"
    numbers = ("strength", "sin", "versine", "shear_x", "shear_y", "aspect", "fill_0", "fill_1", "fill_2")
    signature = pointers | whole | dict.fromkeys(numbers, "fp32")
    block = augment_launch.BLOCK * (2 if part == "statistics" else 1)
    constants = {"CHANNELS": 3, "LAST": last, "CHUNK": augment_launch.CHUNK, "BLOCK": block}
    constants |= {"MIRROR": mirror, "NEAREST": nearest, "EVEN": even}
    names = function.arg_names
    signature, constants = ({k: v for k, v in d.items() if k in names} for d in (signature, constants))
    # 448 x 448: every whole number of the shape is a multiple of 16. One from a plan [B, N] to the next sample is not.
    aligned = [n for n in names if n in pointers] + [n for n in ("height", "width", "row", "pixels") if n in names]
    return compiled(function, signature, constants, arch, augment_launch.WARPS, aligned if even else [])


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
