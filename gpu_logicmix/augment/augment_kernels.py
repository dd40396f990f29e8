"""RandAugment and the flip on a GPU: three Triton kernels a round, bytes in and bytes out.

- `statistics_kernel`: histograms of the samples that drew AutoContrast or Equalize, the sum of the grey levels of those
  that drew Contrast; in whole numbers, so the order of the additions does not matter. All others are not read.
- `tables_kernel`: what becomes of each of the 256 levels, where an operation depends on the level alone.
- `apply_kernel`: one pass over the batch: a table, a warp of four taps, a move, Color or Sharpness. The flip of the
  first round is a column counted from the right.

The arithmetic follows `pixel_ops`, line by line: float32, no fused multiply-add. Plan and flip are read on the device,
so nothing waits, and all of it can be captured in a CUDA graph.
"""

from __future__ import annotations

import triton
import triton.language as tl

# The paper's order (`randaugment.OPERATIONS`).
IDENTITY, AUTOCONTRAST, EQUALIZE = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
ROTATE, SOLARIZE, COLOR = tl.constexpr(3), tl.constexpr(4), tl.constexpr(5)
POSTERIZE, CONTRAST, BRIGHTNESS = tl.constexpr(6), tl.constexpr(7), tl.constexpr(8)
SHARPNESS, SHEAR_X, SHEAR_Y = tl.constexpr(9), tl.constexpr(10), tl.constexpr(11)
TRANSLATE_X, TRANSLATE_Y = tl.constexpr(12), tl.constexpr(13)


@triton.jit
def _operation(operations, b, step, codes):
    """Which operation sample b drew; what is not in the table is Identity."""
    index = tl.load(operations + b * step).to(tl.int64)
    known = (index >= 0) & (index < 14)
    return tl.where(known, (codes >> (4 * tl.where(known, index, 0))) & 15, 0).to(tl.int32)


@triton.jit
def _clipped(value):
    return tl.minimum(tl.maximum(value, 0.0), 255.0).to(tl.uint8)


@triton.jit
def _rounded(value):
    return (value + 12582912.0) - 12582912.0  # 1.5 * 2^23: the sum has no room for a fraction; halves go to even


@triton.jit
def _grey(red, green, blue):
    return (0.2989 * red + green * 0.587 + blue * 0.114).to(tl.int32)


@triton.jit
def _at(y, x, c, height, width, CHANNELS: tl.constexpr, LAST: tl.constexpr):
    return (y * width + x) * CHANNELS + c if LAST else (c * height + y) * width + x


@triton.jit
def statistics_kernel(
    images,  # [B, ...] uint8
    operations,  # whole numbers, `step` from one sample to the next
    stats,  # [B, CHANNELS + 1, 256] int32, zeros: histograms; the grey sum is the first number of the last row
    pixels,  # in an image
    row,  # bytes in an image
    step,
    codes,
    CHANNELS: tl.constexpr,
    LAST: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    chunks = tl.cdiv(pixels, CHUNK)
    b = (tl.program_id(0) // chunks).to(tl.int64)
    operation = _operation(operations, b, step, codes)
    source = images + b * tl.cast(row, tl.int64)
    start = tl.program_id(0) % chunks * CHUNK
    stats += b * ((CHANNELS + 1) * 256)
    apart: tl.constexpr = CHANNELS if LAST else 1  # bytes from one pixel to the next
    if (operation == AUTOCONTRAST) | (operation == EQUALIZE):
        levels = tl.arange(0, 256)
        for c in tl.static_range(CHANNELS):
            counts = tl.zeros([256], tl.int32)
            for first in range(0, CHUNK, BLOCK):
                pixel = start + first + tl.arange(0, BLOCK)
                within = pixel < pixels
                at = pixel * apart + (c if LAST else c * pixels)
                level = tl.load(source + at, mask=within, other=0).to(tl.int32)
                counts += tl.histogram(level, 256, mask=within)
            tl.atomic_add(stats + c * 256 + levels, counts, mask=counts > 0, sem="relaxed")
    elif operation == CONTRAST:
        total = tl.zeros([BLOCK], tl.int32)
        for first in range(0, CHUNK, BLOCK):
            pixel = start + first + tl.arange(0, BLOCK)
            within = pixel < pixels
            red = tl.load(source + pixel * apart, mask=within, other=0).to(tl.float32)
            if CHANNELS == 1:
                total += red.to(tl.int32)
            else:
                between = 1 if LAST else pixels
                green = tl.load(source + pixel * apart + between, mask=within, other=0).to(tl.float32)
                blue = tl.load(source + pixel * apart + 2 * between, mask=within, other=0).to(tl.float32)
                total += _grey(red, green, blue)
        tl.atomic_add(stats + CHANNELS * 256, tl.sum(total), sem="relaxed")


@triton.jit
def tables_kernel(
    stats,
    operations,
    signs,
    tables,  # [B, CHANNELS, 256] uint8
    height,
    width,
    step,
    codes,
    keep,
    level,
    strength,
    CHANNELS: tl.constexpr,
):
    b, c = tl.program_id(0).to(tl.int64), tl.program_id(1)
    operation = _operation(operations, b, step, codes)
    x = tl.arange(0, 256)
    value = x.to(tl.float32)
    factor = 1.0 + strength * tl.load(signs + b * step).to(tl.float32)
    result = x.to(tl.uint8)
    if operation == SOLARIZE:
        result = tl.where(x >= level, 255 - x, x).to(tl.uint8)
    elif operation == POSTERIZE:
        result = (x & keep).to(tl.uint8)
    elif operation == BRIGHTNESS:
        result = _clipped(value * factor)
    elif operation == CONTRAST:
        grey = tl.load(stats + (b * (CHANNELS + 1) + CHANNELS) * 256).to(tl.float32)
        mean = tl.div_rn(tl.div_rn(grey, tl.cast(height, tl.float32)), tl.cast(width, tl.float32))
        result = _clipped(value * factor + mean * (1.0 - factor))
    elif (operation == AUTOCONTRAST) | (operation == EQUALIZE):
        counts = tl.load(stats + (b * (CHANNELS + 1) + c) * 256 + x)
        low = tl.min(tl.where(counts > 0, x, 255))
        high = tl.max(tl.where(counts > 0, x, 0))
        if operation == AUTOCONTRAST:
            if high > low:
                white = tl.full([256], 255.0, tl.float32)
                scale = tl.div_rn(white, (high - low).to(tl.float32) + tl.zeros([256], tl.float32))
                result = _clipped((value - low.to(tl.float32)) * scale)
        else:
            total = tl.cumsum(counts, 0)
            # All pixels but those of the brightest level present, in 255 steps.
            stride = (height * width - tl.sum(tl.where(x == high, counts, 0))) // 255
            if stride > 0:
                result = tl.minimum((total - counts + stride // 2) // stride, 255).to(tl.uint8)
    tl.store(tables + (b * CHANNELS + c) * 256 + x, result)


@triton.jit
def _tap(source, y, x, c, outside, height, width, flip, within, CHANNELS: tl.constexpr, LAST: tl.constexpr):
    """A pixel less what lies outside: 0 there."""
    inside = within & (y >= 0) & (y < height) & (x >= 0) & (x < width)
    at = _at(y, tl.where(flip > 0, width - 1 - x, x), c, height, width, CHANNELS, LAST)
    pixel = tl.load(source + at, mask=inside, other=0).to(tl.float32)
    return tl.where(inside, pixel - outside, 0.0)


@triton.jit
def _ticks(i, size):
    """The coordinate of pixel i of `size`, as `torch.linspace` has it: from both ends towards the middle."""
    one = tl.full([1], 1.0, tl.float32)
    length = tl.cast(size, tl.float32) + tl.zeros([1], tl.float32)
    start = tl.div_rn(one, length) - 1.0
    step = tl.div_rn(-start - start, tl.maximum(length - 1.0, 1.0))
    return tl.where(i < size // 2, start + step * i.to(tl.float32), -start - step * (size - 1 - i).to(tl.float32))


@triton.jit
def _warped(source, y, x, c, outside, operation, sign, sin, versine, shear_x, shear_y, aspect, height, width, flip,
            within, CHANNELS: tl.constexpr, LAST: tl.constexpr, NEAREST: tl.constexpr):  # fmt: skip
    rotates = (operation == ROTATE).to(tl.float32)
    sin = rotates * sign * sin
    cos = 1.0 - rotates * versine
    shear_x = (operation == SHEAR_X).to(tl.float32) * sign * shear_x
    shear_y = (operation == SHEAR_Y).to(tl.float32) * sign * shear_y
    across = tl.cast(width, tl.float32)
    down = tl.cast(height, tl.float32)
    u = _ticks(x, width)
    v = _ticks(y, height)
    # From -1..1 to pixels, as `grid_sample` does it.
    gx = (cos * u + ((shear_x - sin * aspect) * v + shear_x) + 1.0) * (across * 0.5) - 0.5
    wide = tl.div_rn(across + tl.zeros([1], tl.float32), down + tl.zeros([1], tl.float32))
    gy = ((shear_y + sin * wide) * u + (cos * v + shear_y) + 1.0) * (down * 0.5) - 0.5
    if NEAREST:
        near_y, near_x = _rounded(gy).to(tl.int32), _rounded(gx).to(tl.int32)
        total = _tap(source, near_y, near_x, c, outside, height, width, flip, within, CHANNELS, LAST)
    else:
        left, top = tl.floor(gx), tl.floor(gy)
        w, n = gx - left, gy - top
        e, s = 1.0 - w, 1.0 - n
        x0, y0 = left.to(tl.int32), top.to(tl.int32)
        total = _tap(source, y0, x0, c, outside, height, width, flip, within, CHANNELS, LAST) * (e * s)
        total += _tap(source, y0, x0 + 1, c, outside, height, width, flip, within, CHANNELS, LAST) * (w * s)
        total += _tap(source, y0 + 1, x0, c, outside, height, width, flip, within, CHANNELS, LAST) * (e * n)
        total += _tap(source, y0 + 1, x0 + 1, c, outside, height, width, flip, within, CHANNELS, LAST) * (w * n)
    return _rounded(total + outside).to(tl.uint8)


@triton.jit
def _blended(source, y, x, c, operation, factor, height, width, flip, within, CHANNELS: tl.constexpr,
             LAST: tl.constexpr):  # fmt: skip
    """Color: with the grey level. Sharpness: with the mean around a pixel, which counts five times; not on the edge."""
    own = _tap(source, y, x, c, 0.0, height, width, flip, within, CHANNELS, LAST)
    if operation == COLOR:
        red = _tap(source, y, x, 0, 0.0, height, width, flip, within, CHANNELS, LAST)
        green = _tap(source, y, x, 1, 0.0, height, width, flip, within & (CHANNELS == 3), CHANNELS, LAST)
        blue = _tap(source, y, x, 2, 0.0, height, width, flip, within & (CHANNELS == 3), CHANNELS, LAST)
        other = _grey(red, green, blue).to(tl.float32)
        edge = within & (CHANNELS == 1)
    else:
        total = own * 4.0
        for j in tl.static_range(9):
            total += _tap(source, y + j // 3 - 1, x + j % 3 - 1, c, 0.0, height, width, flip, within, CHANNELS, LAST)
        other = _rounded(total * (1 / 13))
        edge = (y == 0) | (y == height - 1) | (x == 0) | (x == width - 1)
    return _clipped(tl.where(edge, own, own * factor + other * (1.0 - factor)))


@triton.jit
def apply_kernel(
    images,  # [B, ...] uint8
    operations, signs,
    mirror,  # [B] bytes, read if MIRROR
    tables,
    out,  # like `images`
    height, width,
    row,  # bytes in an image
    step, codes, dx, dy, strength, sin, versine, shear_x, shear_y, aspect, fill_0, fill_1, fill_2,
    MIRROR: tl.constexpr, NEAREST: tl.constexpr, CHANNELS: tl.constexpr, LAST: tl.constexpr,
    EVEN: tl.constexpr,  # the row is a multiple of BLOCK: no masks
    BLOCK: tl.constexpr,
):  # fmt: skip
    # B * row may be past 2^31: bases are 64 bits wide, places in an image 32.
    blocks = tl.cdiv(row, BLOCK)
    b = (tl.program_id(0) // blocks).to(tl.int64)
    i = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    within = i < row
    operation = _operation(operations, b, step, codes)
    source = images + b * tl.cast(row, tl.int64)
    flip = tl.load(mirror + b).to(tl.int32) if MIRROR else 0
    c = i % CHANNELS if LAST else i // (height * width)
    pixel = i // CHANNELS if LAST else i % (height * width)
    y = pixel // width
    x = pixel % width
    if (operation == COLOR) | (operation == SHARPNESS):
        factor = 1.0 + strength * tl.load(signs + b * step).to(tl.float32)
        result = _blended(source, y, x, c, operation, factor, height, width, flip, within, CHANNELS, LAST)
    elif (operation == TRANSLATE_X) | (operation == TRANSLATE_Y):
        sign = tl.load(signs + b * step).to(tl.int32)
        outside = tl.where(c == 0, fill_0, tl.where(c == 1, fill_1, fill_2)).to(tl.uint8).to(tl.float32)
        from_y = y - tl.where(operation == TRANSLATE_Y, sign * dy, 0)
        from_x = x - tl.where(operation == TRANSLATE_X, sign * dx, 0)
        moved = _tap(source, from_y, from_x, c, outside, height, width, flip, within, CHANNELS, LAST)
        result = (moved + outside).to(tl.uint8)
    elif (operation == ROTATE) | (operation == SHEAR_X) | (operation == SHEAR_Y):
        sign = tl.load(signs + b * step).to(tl.float32)
        outside = tl.where(c == 0, fill_0, tl.where(c == 1, fill_1, fill_2))
        result = _warped(source, y, x, c, outside, operation, sign, sin, versine, shear_x, shear_y, aspect,
                         height, width, flip, within, CHANNELS, LAST, NEAREST)  # fmt: skip
    else:
        if flip == 0:
            result = tl.load(source + i) if EVEN else tl.load(source + i, mask=within, other=0)
        else:
            at = _at(y, width - 1 - x, c, height, width, CHANNELS, LAST)
            result = tl.load(source + at, mask=within, other=0)
        if operation != IDENTITY:
            result = tl.load(tables + (b * CHANNELS + c) * 256 + result.to(tl.int32), mask=within, other=0)
    target = out + b * tl.cast(row, tl.int64) + i
    if EVEN:
        tl.store(target, result)
    else:
        tl.store(target, result, mask=within)
