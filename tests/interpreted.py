"""Run by tests/augment/test_kernels.py with TRITON_INTERPRET=1: kernels on CPU tensors against plain torch."""

import itertools
import sys
from unittest import mock

import torch

from gpu_logicmix.augment import apply, augment_launch, kernels
from gpu_logicmix.augment.apply import mix_images, or_targets
from gpu_logicmix.augment.finish import Ending
from gpu_logicmix.augment.plan import MixPlan, filled
from gpu_logicmix.augment.randaugment import OPERATIONS, AugmentPlan, RandAugment, mirrored

U8, BF, HF, FL = torch.uint8, torch.bfloat16, torch.float16, torch.float32
PAIRS = [(U8, BF), (U8, U8), (FL, BF), (BF, BF), (U8, HF), (U8, FL), (FL, FL)]
# The interpreter cuts bfloat16 off where a GPU rounds it (bench/aot.py: cvt.rn): twice the rounding error.
CLOSE = {BF: 2**-7, HF: 2**-10, FL: 1e-6, U8: 0.0}


def groups(batch, samples, k):
    """A plan whose places past the size would be far outside of memory, if they were read."""
    index, size = torch.randint(samples, (batch, k)), torch.randint(1, k + 1, (batch,))
    index[:, 0], size[0] = torch.arange(batch), k
    nonsense = torch.arange(k) >= size[:, None]
    return torch.where(nonsense, 10**12, index), size, ~nonsense


def oracle(table, index, size, weight):
    rows = []
    for i in range(len(index)):
        members = index[i, : size[i]].tolist()
        share = [1.0] * len(members) if weight is None else weight[i].double().tolist()
        total = sum(w * table[m].double() for w, m in zip(share, members, strict=False))
        rows.append(total / len(members) if weight is None else total)  # in one division, so that halves are halves
    return torch.stack(rows)


def spaced(tensor):
    """The same values, with others between them in memory."""
    return torch.stack([tensor, torch.full_like(tensor, 77)], dim=-1).select(-1, 0)


def sliced():
    """Batches with holes in memory, or with less memory than samples, against the torch way on the CPU."""
    cases = 0
    for dtype, finish in itertools.product((U8, FL), (False, True)):
        pixels = torch.randint(0, 256, (8, 4, 6, 10)).to(dtype)
        last = pixels.contiguous(memory_format=torch.channels_last)
        for batch in (
            pixels[:, :3], pixels[::2], pixels[:1].expand(5, -1, -1, -1), pixels[..., ::2], pixels[:, 1:2, :, ::2],
            pixels[:, :, 2:], last[:, :3], last[::2], last[:, :, 1:], spaced(pixels),
        ):  # fmt: skip
            index, size, _ = groups(len(batch), len(batch), 3)
            plan = MixPlan(index, spaced(size), size > 1)
            ending = Ending(FL, torch.rand(batch.shape[1]), torch.rand(batch.shape[1])) if finish else None
            want = mix_images(batch, plan, ending=ending)
            with mock.patch.object(apply, "_by_kernel", return_value=True):
                got = mix_images(batch, plan, ending=ending)
            assert (got.stride(), got.dtype) == (want.stride(), want.dtype)
            torch.testing.assert_close(got, want, rtol=0, atol=0 if want.dtype == U8 else 1e-4)
            cases += 1
    print(cases, "cases")


def images():
    cases = 0
    shapes = [(3, 5, 7), (3, 16, 16), (1, 9, 13), (3, 32, 32)]
    for k, (source, out), last, weighted in itertools.product((1, 2, 3, 5, 8), PAIRS, (False, True), (False, True)):
        shape = shapes[cases % len(shapes)]
        torch.manual_seed(cases)
        table = torch.rand(5, *shape)
        table = (table * 256).to(U8) if source == U8 else table.to(source)
        index, size, inside = groups(4, 5, k)
        weight = None
        if weighted:
            weight = torch.rand(4, k) * inside
            weight /= weight.sum(1, keepdim=True)
        finish = out != U8 and cases % 3 > 0
        scale, shift = (torch.rand(shape[0]), torch.rand(shape[0])) if finish else (None, None)
        rows = (table.permute(0, 2, 3, 1) if last else table).reshape(5, -1)
        inner = 1 if last else shape[1] * shape[2]
        got = kernels.launch_mix(rows, index, size, weight, scale, shift, inner, out)
        want = oracle(table, index, size, weight)
        if finish:
            want = want * scale.view(-1, 1, 1) + shift.view(-1, 1, 1)
        want = (want.permute(0, 2, 3, 1) if last else want).reshape(4, -1)
        if out == U8 and not weighted:
            assert torch.equal(got, want.round().to(U8)), (k, shape)
            plan, wide = filled(MixPlan(index, size, size > 1)), rows.view(5, 1, -1)
            assert torch.equal(got, mix_images(wide[:4], plan, wide)[:, 0]), "the torch way"
        elif out == U8:
            assert (got.double() - want).abs().max() <= 0.5001, (k, shape)
        else:
            close = CLOSE[out] * max(1.0, want.abs().max().item())
            assert got.dtype == out
            assert (got.double() - want).abs().max() <= close, (k, source, out, last, weighted, finish)
        cases += 1
    print(cases, "cases")


def labels():
    cases = 0
    modes = ("unknown", "absent-if-mixed", "absent")
    types = (torch.int8, torch.int64, torch.float32, torch.float64, torch.float16, torch.bool, torch.uint8)
    for k, dtype, mode, categories in itertools.product((1, 2, 3, 8), types, modes, (1, 80, 301)):
        torch.manual_seed(cases)
        unknown = float("nan") if dtype.is_floating_point and cases % 2 else -1
        values = [0.0, 1.0]
        if dtype.is_floating_point:
            values += [unknown, float("nan"), 0.5]
        elif dtype in (torch.int8, torch.int64):
            values += [-1.0, 3.0]
        targets = torch.tensor(values, dtype=torch.float64)[torch.randint(len(values), (9, categories))].to(dtype)
        if cases % 4 == 1:
            targets = targets.T.contiguous().T  # column-major
        index, size, _ = groups(7, 9, k)
        size = spaced(size) if cases % 5 == 1 else size
        got = kernels.launch_or(targets, index, size, unknown, modes.index(mode))
        want = or_targets(targets, filled(MixPlan(index, size, size > 1)), unknown, mode)
        assert got.dtype == want.dtype
        torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)
        cases += 1
    print(cases, "cases")


def augment(options, shape, last, batch=28, rounds=1, names=OPERATIONS):
    """One batch through the kernels and through the dense form in torch, every operation with both signs in it."""
    transform = RandAugment(rounds, ops=names, **options)
    pixels = torch.randint(0, 256, (batch, *shape), dtype=U8)
    pixels[:3] //= 8  # something to stretch; and a flat channel
    pixels[1, 0] = 77
    pixels = pixels.contiguous(memory_format=torch.channels_last) if last else pixels
    number = torch.arange(batch * rounds).view(rounds, batch).T + torch.arange(rounds)
    plan = AugmentPlan(number % len(names), 1 - 2 * (number // len(names) % 2))
    mirror, kept = torch.rand(batch) < 0.5, pixels.clone()
    got = augment_launch.augmented(pixels, *plan, mirror, transform._magnitudes(pixels))
    want = transform._dense(mirrored(pixels, mirror), plan)
    assert torch.equal(pixels, kept), "the input was written to"
    assert got.is_contiguous(memory_format=torch.channels_last if last else torch.contiguous_format)
    return (got.int() - want.int()).abs(), plan


def randaugment():
    """Within one level of the dense form, which the tests compare with torchvision. Where an operation picks a pixel
    ("nearest"), a coordinate half-way between two of them may go to either: few, not none."""
    cases = 0
    augment_launch.CHUNK = 1024  # so that the statistics of the largest come from several programs
    shapes = [(16, 16), (45, 51), (7, 64), (2, 9), (1, 1)]
    fills = {1: (0, 77), 3: (0, (10, 200, 90.5))}
    for (height, width), channels, last in itertools.product(shapes, (3, 1), (False, True)):
        torch.manual_seed(cases)
        m = (9, 30, 1, 0)[cases % 4]
        off, plan = augment({"m": m, "fill": fills[channels][cases % 2]}, (channels, height, width), last)
        wrong = {OPERATIONS[plan.operations[i]]: n for i, n in enumerate(off.flatten(1).amax(1).tolist()) if n > 1}
        assert not wrong, (height, width, channels, last, m, wrong)
        assert (off > 0).float().mean() < 0.01, (height, width, channels, last, m)
        cases += 1
    off, _ = augment({"interpolation": "nearest", "fill": 9}, (3, 21, 34), True)
    assert (off > 1).float().mean() < 0.002
    # Two rounds: a level in the first can become several in the second.
    off, _ = augment({}, (3, 24, 24), True, batch=14, rounds=2)
    assert (off > 1).float().mean() < 0.002
    off, _ = augment({}, (3, 9, 9), True, batch=4, names=("Sharpness", "Identity"))
    assert off.max() <= 1
    pixels = torch.randint(0, 256, (5, 3, 9, 14), dtype=U8)[:, :, 1:]
    mirror = torch.tensor([True, False, True, True, False])
    for flags in (mirror, spaced(mirror), mirror.long()):
        assert torch.equal(augment_launch.mirrored(pixels, flags), mirrored(pixels, mirror))
    nothing = torch.zeros(5, 0, dtype=torch.int64)
    none = augment_launch.augmented(pixels, nothing, nothing, mirror, RandAugment()._magnitudes(pixels))
    assert torch.equal(none, mirrored(pixels, mirror))
    # An operation that the plan cannot hold is none.
    odd, sign = torch.tensor([[-3], [14], [99], [0], [0]]), torch.ones(5, 1, dtype=torch.int64)
    same = augment_launch.augmented(pixels, odd, sign, None, RandAugment()._magnitudes(pixels))
    assert torch.equal(same, pixels)
    print(cases + 8, "cases")


if __name__ == "__main__":
    {"images": images, "sliced": sliced, "labels": labels, "randaugment": randaugment}[sys.argv[1]]()
