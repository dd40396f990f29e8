"""The mix in one pass on a GPU: gather, mean, / 255, normalise and cast in one Triton kernel; labels in a second one.

Both read the plan on the device. Places past the size of a group are never read, whatever their index says. A sample is
a row of numbers as it lies in memory, so every memory format takes the same path. The accumulator is float32; the
multiplication and the addition of the normalisation are rounded apart (no fused multiply-add), as torch does it.

Whole numbers among the arguments become constants where they are 1, which `tl.cast` takes and `.to` does not. All
programs are on the first axis of the grid, the only one that can be longer than 65,535.

`mix_rows` and `or_rows` are operators of torch, so they run on fake tensors too. Only eager code calls them: under
`torch.compile` plain indexing becomes one kernel together with what comes before and after it.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

# Fixed, because trying out others is not allowed while a CUDA graph is captured. With 1024 numbers and 4 warps a thread
# reads 8 bytes of uint8 and writes 16 of bfloat16 at a time.
BLOCK, WARPS = 1024, 4
LABEL_BLOCK = 256
DTYPES = (torch.uint8, torch.float16, torch.bfloat16, torch.float32)
# How labels that are unknown count: as unknown, as absent in mixed samples, as absent in all.
KEEP, ABSENT_IF_MIXED, ABSENT = 0, 1, 2


@triton.jit
def mix_kernel(
    table,  # [N, row], each row in one piece
    index,  # [B, K] int64
    size,  # [B] int64
    weight,  # [B, K] float32, read if WEIGHTED
    out,  # [B, row]
    scale,  # [channels] float32, read if FINISH
    shift,  # [channels] float32
    row,  # numbers in a sample
    step,  # numbers from one row of `table` to the next
    inner,  # numbers that lie together in one channel: H * W, or 1 for channels_last
    K: tl.constexpr,
    WEIGHTED: tl.constexpr,
    FINISH: tl.constexpr,
    CHANNELS: tl.constexpr,
    ROUND: tl.constexpr,  # to whole numbers, halves to even
    EVEN: tl.constexpr,  # the row is a multiple of BLOCK: no masks
    BLOCK: tl.constexpr,
):
    # B * row may be past 2^31: bases are 64 bits wide, columns 32.
    blocks = tl.cdiv(row, BLOCK)
    b = (tl.program_id(0) // blocks).to(tl.int64)
    column = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    within = column < row
    members = tl.load(size + b).to(tl.int32)
    total = tl.zeros([BLOCK], tl.float32)
    for k in tl.static_range(K):
        if k < members:
            source = table + tl.load(index + b * K + k) * tl.cast(step, tl.int64) + column
            pixel = (tl.load(source) if EVEN else tl.load(source, mask=within, other=0)).to(tl.float32)
            total += pixel * tl.load(weight + b * K + k) if WEIGHTED else pixel
    if not WEIGHTED:
        total = tl.div_rn(total, members.to(tl.float32) + tl.zeros([BLOCK], tl.float32))
    if FINISH:
        channel = (column // inner) % CHANNELS
        total = total * tl.load(scale + channel) + tl.load(shift + channel)
    if ROUND:
        total = (total + 8388608.0) - 8388608.0  # 2^23: the sum has no room for a fraction, and rounds it off
    target = out + b * tl.cast(row, tl.int64) + column
    if EVEN:
        tl.store(target, total.to(out.dtype.element_ty))
    else:
        tl.store(target, total.to(out.dtype.element_ty), mask=within)


@triton.jit(do_not_specialize=["unknown"])
def or_kernel(
    labels,  # [N, categories] of any type and strides
    index,
    size,
    out,  # [B, categories], contiguous
    categories,
    step,  # numbers from one row of `labels` to the next
    stride,  # and from one label to the next
    unknown,
    K: tl.constexpr,
    ASSUME: tl.constexpr,
    BLOCK: tl.constexpr,
):
    blocks = tl.cdiv(categories, BLOCK)
    b = (tl.program_id(0) // blocks).to(tl.int64)
    column = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    within = column < categories
    members = tl.load(size + b).to(tl.int32)
    kind = out.dtype.element_ty
    hidden = tl.full([BLOCK], unknown, kind)
    present = tl.zeros([BLOCK], tl.int1)
    absent = column >= 0
    for k in tl.static_range(K):
        if k < members:
            sample = labels + tl.load(index + b * K + k) * tl.cast(step, tl.int64)
            source = sample + column * tl.cast(stride, tl.int64)
            label = tl.load(source, mask=within, other=0)
            lacks = label == 0
            if ASSUME > 0:
                lacks = lacks | (((label == hidden) | (label != label)) & ((ASSUME == 2) | (members > 1)))
            present = present | (label == 1)
            absent = absent & lacks
    one = tl.full([BLOCK], 1, kind)
    zero = tl.full([BLOCK], 0, kind)
    result = tl.where(present, one, tl.where(absent, zero, hidden))
    tl.store(out + b * tl.cast(categories, tl.int64) + column, result, mask=within)


def launch_mix(
    table: Tensor,
    index: Tensor,
    size: Tensor,
    weight: Tensor | None,
    scale: Tensor | None,
    shift: Tensor | None,
    inner: int,
    dtype: torch.dtype,
) -> Tensor:
    """rows [N, row] -> [B, row] of `dtype`: the mean of each group, times `scale` plus `shift` of its
    channel, rounded if `dtype` is uint8."""
    batch, k = index.shape
    row = table.shape[1]
    table = table if table.stride(1) == 1 else table.contiguous()
    size = size.contiguous()
    out = torch.empty(batch, row, dtype=dtype, device=table.device)
    grid = (triton.cdiv(row, BLOCK) * batch,)
    with on_device(table.device):
        mix_kernel[grid](
            table,
            index.contiguous(),
            size,
            size if weight is None else weight.float().contiguous(),
            out,
            size if scale is None else scale,
            size if shift is None else shift,
            row,
            table.stride(0),
            inner,
            K=k,
            WEIGHTED=weight is not None,
            FINISH=scale is not None,
            CHANNELS=1 if scale is None else len(scale),
            ROUND=dtype == torch.uint8,
            EVEN=row % BLOCK == 0,
            BLOCK=BLOCK,
            num_warps=WARPS,
            enable_fp_fusion=False,
        )
    return out


def launch_or(targets: Tensor, index: Tensor, size: Tensor, unknown: float, assume: int) -> Tensor:
    """labels [N, C] -> [B, C]: present if any of the group is 1, absent if all are 0, else `unknown`."""
    categories = targets.shape[1]
    labels = targets.view(torch.uint8) if targets.dtype == torch.bool else targets
    out = torch.empty(len(index), categories, dtype=labels.dtype, device=labels.device)
    grid = (triton.cdiv(categories, LABEL_BLOCK) * len(index),)
    value = float(unknown) if labels.is_floating_point() else int(unknown)
    with on_device(labels.device):
        or_kernel[grid](
            labels,
            index.contiguous(),
            size.contiguous(),
            out,
            categories,
            labels.stride(0),
            labels.stride(1),
            value,
            K=index.shape[1],
            ASSUME=assume,
            BLOCK=LABEL_BLOCK,
            num_warps=2,
            enable_fp_fusion=False,
        )
    return out.view(torch.bool) if targets.dtype == torch.bool else out


def on_device(device: torch.device) -> contextlib.AbstractContextManager:
    """Launch on the tensors' device and its current stream."""
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


mix_rows = torch.library.custom_op("gpu_logicmix::mix_rows", launch_mix, mutates_args=())
or_rows = torch.library.custom_op("gpu_logicmix::or_rows", launch_or, mutates_args=())


@mix_rows.register_fake
def _(
    table: Tensor,
    index: Tensor,
    size: Tensor,
    weight: Tensor | None,
    scale: Tensor | None,
    shift: Tensor | None,
    inner: int,
    dtype: torch.dtype,
) -> Tensor:
    return torch.empty(index.shape[0], table.shape[1], dtype=dtype, device=table.device)


@or_rows.register_fake
def _(targets: Tensor, index: Tensor, *_: Any) -> Tensor:
    return targets.new_empty(index.shape[0], targets.shape[1])
