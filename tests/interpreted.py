"""Run by tests/augment/test_kernels.py with TRITON_INTERPRET=1: kernels on CPU tensors against plain torch."""

import itertools
import sys

import torch

from gpu_logicmix.augment import kernels
from gpu_logicmix.augment.apply import mix_images, or_targets
from gpu_logicmix.augment.plan import MixPlan, filled

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


def images():
    cases = 0
    shapes = [(3, 5, 7), (3, 16, 16), (1, 9, 13), (3, 32, 32)]
    for k, (source, out), last, weighted in itertools.product(range(1, 9), PAIRS, (False, True), (False, True)):
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
        got = kernels.launch_or(targets, index, size, unknown, modes.index(mode))
        want = or_targets(targets, filled(MixPlan(index, size, size > 1)), unknown, mode)
        assert got.dtype == want.dtype
        torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)
        cases += 1
    print(cases, "cases")


if __name__ == "__main__":
    {"images": images, "labels": labels}[sys.argv[1]]()
