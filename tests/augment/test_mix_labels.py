"""Labels that a mix must never get wrong: NaN, other values, any layout, no categories; plans of other mixes."""

import math
import re

import numpy as np
import pytest
import torch
from mixing import ALL, MIXES, NAMES, NAN, or_oracle, some_batch

from gpu_logicmix import GPULogicMix, Mixup, MixupPME, MultiLabelMixup, OrMixup

every_mix = pytest.mark.parametrize("make", ALL, ids=NAMES)
X = torch.rand(4, 3, 4, 4)


def test_nan_stays_unknown_in_samples_that_are_not_mixed():
    targets = torch.tensor([[NAN, 1, 0]])
    assert GPULogicMix(p=0.0)(X[:1], targets)[1].tolist() == [[-1, 1, 0]]
    assert GPULogicMix(p=0.0, unknown=5)(X[:1], targets)[1].tolist() == [[5, 1, 0]]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@every_mix
def test_nan_counts_as_the_unknown_value_does(make, dtype):
    """Some unknown labels written as NaN: the same result as with all of them as -1."""
    images, targets = some_batch(16, 40)
    targets = targets.to(dtype)
    hidden = targets == -1
    some = hidden & (torch.rand(16, 40, generator=torch.Generator().manual_seed(1)) < 0.5)
    assert 0 < some.sum() < hidden.sum()
    plan = make().plan(16)
    expected = make()(images, targets, plan)[1]
    assert torch.equal(make()(images, targets.masked_fill(some, NAN), plan)[1], expected)


@pytest.mark.parametrize("odd", [0.9, 0.1, 2.0, -0.5, -3.0, 256.0, math.inf])
@every_mix
def test_another_value_never_becomes_absent(make, odd):
    """0.9 cut to whole numbers is 0, and so is 256 in a byte."""
    targets = torch.tensor([[odd, 0.0, 1.0]] * 4)
    mix = make()
    plan = mix.plan(4)
    labels = mix(X, targets, plan)[1]
    assert (labels[:, 0] == -1).all()
    assert (labels[:, 1] == 0).all()
    assert ((labels[:, 2] - 1).abs() < 1e-6).all()
    mix.validate = True
    with pytest.raises(ValueError, match=r"targets\[0, 0\] is .*must be 1, 0 or -1"):
        mix(X, targets)


@pytest.mark.parametrize("odd", [2, -3, 127])
def test_another_whole_number_never_becomes_absent(odd):
    for dtype in (torch.int8, torch.int16, torch.int64, torch.uint8):
        if odd < 0 and dtype is torch.uint8:
            continue
        targets = torch.tensor([[odd, 0, 1]] * 4, dtype=dtype)
        for method in (GPULogicMix, OrMixup, MultiLabelMixup):
            labels = method()(X, targets)[1]
            assert labels.tolist() == [[255 if dtype is torch.uint8 else -1, 0, 1]] * 4


WHOLE = [torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64, torch.bool]


@pytest.mark.parametrize(
    "unknown", [NAN, math.inf, 0.5, -0.5, -2, 2, 127, 128, 255, 255.0, 256, -129, 2**31, 2**63, 1e30]
)
@pytest.mark.parametrize("dtype", WHOLE, ids=str)
@every_mix
def test_a_type_that_cannot_hold_unknown_is_refused(make, dtype, unknown):
    """Cast to it, 0.5 would be absent and 257 present."""
    numbers = dtype is not torch.bool and (torch.iinfo(dtype).min, torch.iinfo(dtype).max)
    holds = numbers and math.isfinite(unknown) and int(unknown) == unknown and numbers[0] <= unknown <= numbers[1]
    mix = make()
    mix.unknown = unknown
    targets = torch.tensor([[unknown if holds else 1, 0, 1]] * 4, dtype=dtype)
    if holds:
        labels = mix(X, targets)[1]
        assert labels[:, 1:].sum() == pytest.approx(4)
        assert (labels[:, 0] == (0 if type(mix) in (Mixup, OrMixup, MultiLabelMixup) else unknown)).all()
    else:
        value = "NaN" if math.isnan(unknown) else re.escape(str(unknown))
        with pytest.raises(TypeError, match=f"targets.dtype={dtype} cannot hold unknown={value}: use a floating type"):
            mix(X, targets)


@pytest.mark.parametrize("dtype", [torch.uint16, torch.uint32, torch.uint64], ids=str)
@every_mix
def test_types_that_torch_cannot_compute_with(make, dtype):
    with pytest.raises(TypeError, match=f"targets.dtype={dtype}: torch cannot compute with it; use int8"):
        make()(X, torch.ones(4, 3, dtype=dtype))


@pytest.mark.parametrize("dtype", WHOLE, ids=str)
@every_mix
def test_minus_one_is_taken_for_every_type(make, dtype):
    targets = torch.tensor([[1, 0]] * 4).to(dtype)
    torch.testing.assert_close(make()(X, targets)[1].float(), targets.float())


@pytest.mark.parametrize("categories", [0, 1, 7, 8, 16, 80])
@every_mix
def test_any_layout_of_the_labels(make, categories):
    images, targets = some_batch(6, categories)
    plan = make().plan(6)
    expected = make()(images, targets, plan)[1]
    assert expected.shape == (6, categories)
    wide = torch.zeros(6, 2 * categories + 3)
    wide[:, 1 : 2 * categories + 1 : 2] = targets
    views = {
        "column-major": targets.T.contiguous().T,
        "slice": wide[:, 1 : 2 * categories + 1 : 2],
        "fortran": torch.from_numpy(np.asfortranarray(targets.numpy())),
    }
    for name, view in views.items():
        assert view.shape == targets.shape
        torch.testing.assert_close(make()(images, view, plan)[1], expected, rtol=0, atol=0, msg=name)


@pytest.mark.parametrize("shape", [(3, 0, 5), (3, 4, 0), (0, 3), (3, 2, 0, 2)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.uint8])
@every_mix
def test_images_without_pixels(make, shape, dtype):
    mixed, _ = make()(torch.zeros(4, *shape, dtype=dtype), torch.zeros(4, 2))
    assert mixed.shape == (4, *shape)
    assert mixed.dtype == dtype


def test_unknown_taken_as_absent_in_mixed_samples_alone():
    torch.manual_seed(0)
    mix = GPULogicMix(unknown_as="absent", k_max=4)
    for seed in range(20):
        images, targets = some_batch(12, 9, seed=seed)
        plan = mix.plan(12)
        mixed, labels = mix(images, targets, plan)
        assert torch.equal(mixed, GPULogicMix(k_max=4)(images, targets, plan)[0])
        for i, group in enumerate(plan.index.tolist()):
            rows = targets[group[: plan.size[i]]]
            expected = targets[i] if plan.size[i] == 1 else (rows == 1).any(0).float()
            assert torch.equal(labels[i], expected)
    assert plan.mixed.any()
    with pytest.raises(ValueError, match=r"unknown_as='present': must be unknown or absent"):
        GPULogicMix(unknown_as="present")


@pytest.mark.parametrize("theirs", MIXES)
@pytest.mark.parametrize("ours", MIXES)
def test_any_mix_takes_the_plan_of_any_other(ours, theirs):
    images, targets = some_batch(8)
    plan = theirs().plan(8)
    mixed, labels = ours()(images, targets, plan)
    for i, group in enumerate(plan.index.tolist()):
        size = int(plan.size[i])
        share = torch.full((size,), 1 / size) if plan.weight is None else plan.weight[i, :size]
        torch.testing.assert_close(mixed[i], (share.view(-1, 1, 1, 1) * images[group[:size]]).sum(0))
        rows = targets[group[:size]]
        if ours is GPULogicMix:
            expected = torch.tensor([or_oracle(column, -1) for column in rows.T.tolist()]).float()
        elif ours is Mixup:
            expected = (share[:, None] * (rows == 1)).sum(0)
        elif ours is MixupPME:
            expected = (share[:, None] * rows.masked_fill(rows == -1, 0.5)).sum(0).masked_fill(rows[0] == -1, -1)
        else:
            expected = (rows == 1).any(0).float()
        torch.testing.assert_close(labels[i], expected)


def test_numpy_numbers_as_arguments():
    mix = GPULogicMix(np.float32(0.5), np.int64(2), np.uint8(4), bank=np.int32(3), unknown=np.float64(NAN))
    assert (mix.p, mix.k_min, mix.k_max, mix.bank) == (0.5, 2, 4, 3)
    assert {type(mix.k_min), type(mix.k_max), type(mix.bank)} == {int}
    assert "k_max=4" in repr(mix)
    assert Mixup(np.float32(1)).alpha == 1
    assert OrMixup(np.float32(0.5)).lam == 0.5
    assert MixupPME(np.float64(0.5)).alpha == 0.5
    assert GPULogicMix(unknown=np.int64(-1))(X, torch.zeros(4, 3))[1].shape == (4, 3)
    for bad in (True, "2", 2.0, np.float32(2)):
        with pytest.raises(TypeError, match=r"k_min=.*must be a whole number"):
            GPULogicMix(k_min=bad)
    with pytest.raises(TypeError, match=r"p='0\.5': must be a number"):
        GPULogicMix(p="0.5")


def test_unknown_is_a_number():
    with pytest.raises(TypeError, match="unknown='a': must be a number, or NaN"):
        GPULogicMix(unknown="a")
