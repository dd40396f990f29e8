"""RandAugment: pixels against torchvision's operations, draws, both ways to compute, devices, bad input."""

from __future__ import annotations

import math

import pytest
import torch
from cases import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from pictures import made_up
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torchvision.transforms import InterpolationMode
from torchvision.transforms import autoaugment as reference

import gpu_logicmix
from gpu_logicmix.augment import randaugment as module
from gpu_logicmix.augment.pixel_ops import resize
from gpu_logicmix.augment.randaugment import OPERATIONS, AugmentPlan, RandAugment, RandomHorizontalFlip

GEOMETRIC = ("Rotate", "ShearX", "ShearY", "TranslateX", "TranslateY")
SIGNED = (*GEOMETRIC, "Color", "Contrast", "Brightness", "Sharpness")
EXACT = ("Identity", "AutoContrast", "Equalize", "Posterize", "Solarize", "TranslateX", "TranslateY")
BINS = 31


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """The tensors here are small: threads would spend their time waiting for each other on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def by_torchvision(images, name, m, sign, interpolation="bilinear", fill=None, bins=BINS):
    """The operation as torchvision's RandAugment applies it to uint8 tensors, the same for the whole batch."""
    magnitudes, signed = reference.RandAugment()._augmentation_space(bins, tuple(images.shape[2:]))[name]
    magnitude = float(magnitudes[m]) if magnitudes.ndim else 0.0
    magnitude = magnitude * sign if signed else magnitude
    return reference._apply_op(images, name, magnitude, InterpolationMode(interpolation), fill)


def one_operation(name, m, sign, batch, bins=BINS, **options):
    """A RandAugment of this operation alone, and the plan that gives it this sign."""
    plan = AugmentPlan(torch.zeros(batch, 1, dtype=torch.int64), torch.full((batch, 1), sign))
    return RandAugment(1, m, bins=bins, ops=[name], **options), plan


def check_pixels(images, name, m, sign, bins=BINS):
    augment, plan = one_operation(name, m, sign, len(images), bins=bins)
    expected = by_torchvision(images, name, m, sign, bins=bins).int()
    got = augment(images, plan)
    assert got.dtype is torch.uint8
    off = (got.int() - expected).abs()
    of_float = (augment(images / 255, plan) * 255 - expected).abs()
    if name in GEOMETRIC:
        # Only where rounding falls may differ: both sample the same four pixels with weights equal to some 1e-5.
        assert (off <= 2).float().mean() >= 0.99
        assert off.max() <= 2
        assert of_float.max() <= 2
    else:
        assert off.max() <= 1
        assert of_float.max() <= 2
    if name in EXACT:
        assert off.max() == 0


@pytest.mark.parametrize("name", OPERATIONS)
def test_pixels_made_up(name):
    for m in range(BINS):
        for sign in (1, -1) if name in SIGNED else (1,):
            check_pixels(made_up(), name, m, sign)


@pytest.mark.parametrize("name", OPERATIONS)
def test_pixels_photos(name, photos):
    for m in range(BINS):
        for sign in (1, -1) if name in SIGNED else (1,):
            check_pixels(photos, name, m, sign)


@settings(max_examples=examples(60), deadline=None)
@given(
    name=st.sampled_from(OPERATIONS),
    bins=st.integers(2, 60),
    magnitude=st.floats(0, 1),
    sign=st.sampled_from([1, -1]),
    shape=st.tuples(st.integers(1, 3), st.sampled_from([1, 3]), st.integers(1, 40), st.integers(1, 40)),
    low=st.integers(0, 255),
    span=st.integers(1, 256),
    seed=st.integers(0, 1000),
)
def test_pixels_of_any_shape_and_bins(name, bins, magnitude, sign, shape, low, span, seed):
    generator = torch.Generator().manual_seed(seed)
    images = torch.randint(low, min(low + span, 256), shape, generator=generator).to(torch.uint8)
    check_pixels(images, name, round(magnitude * (bins - 1)), sign, bins)


def halfway(name, shear, height, width):
    """[H, W] where a sheared pixel falls just between two (every fifth row at shear 0.2): either is the nearest."""
    y, x = torch.meshgrid(torch.arange(height) + 0.5, torch.arange(width) + 0.5, indexing="ij")
    moved = shear * {"ShearX": y, "ShearY": x}.get(name, 0 * x)
    return (moved % 1 - 0.5).abs() < 1e-3


@pytest.mark.parametrize("name", GEOMETRIC)
def test_nearest_and_fill(name, photos):
    """torchvision mixes `fill` in by the weight outside, but weighs the image's part twice: bilinear pixels on the edge
    differ, by a formula; all others are equal."""
    for m in (1, 9, 20, 30):
        for sign in (1, -1):
            augment, plan = one_operation(name, m, sign, len(photos), interpolation="nearest", fill=(10, 200, 90))
            off = augment(photos, plan).int() - by_torchvision(photos, name, m, sign, "nearest", [10.0, 200.0, 90.0])
            assert (off[..., ~halfway(name, augment.shear, *photos.shape[2:])] == 0).float().mean() >= 0.99

            augment, plan = one_operation(name, m, sign, len(photos), fill=77)
            inside = by_torchvision(torch.full_like(photos, 255), name, m, sign).float() / 255
            edge = (inside > 0) & (inside < 1)
            got, theirs = augment(photos, plan), by_torchvision(photos, name, m, sign, fill=[77.0])
            off = (got.int() - theirs.int()).abs()
            assert off[~edge].max() <= 1
            exact = by_torchvision(photos, name, m, sign, fill=None) + (1 - inside) * 77
            assert (got - exact).abs().max() <= 2
            assert (off <= 2).float().mean() >= 0.99


def test_fill_is_in_the_range_of_the_images():
    augment, plan = one_operation("TranslateX", 30, 1, 1, fill=(0.25, 0.5, 1.0))
    got = augment(torch.zeros(1, 3, 8, 8), plan)
    assert torch.equal(got[0, :, 0, 0], torch.tensor([0.25, 0.5, 1.0]))
    warped, plan = one_operation("ShearX", 30, 1, 1, fill=(0.25, 0.5, 1.0))
    got = warped(torch.zeros(1, 3, 64, 8), plan)
    torch.testing.assert_close(got[0, :, -1, -1], torch.tensor([0.25, 0.5, 1.0]))


def test_flat_float_image_is_not_stretched():
    """Rounding errors are no contrast; one grey level is."""
    flat = torch.full((1, 3, 8, 8), 0.3)
    flat[..., 0] += 1e-6
    augment, plan = one_operation("AutoContrast", 9, 1, 1)
    assert torch.equal(augment(flat, plan), flat)
    flat[..., 0] = 0.3 + 1 / 255
    got = augment(flat, plan)
    assert got.min() == 0
    assert got.max() == 1


# Draws


def test_plan_is_uniform_and_independent():
    torch.manual_seed(0)
    batch = 28000
    operations, signs = RandAugment(n=3).plan(batch)
    assert operations.shape == signs.shape == (batch, 3)
    assert operations.dtype is torch.int64
    assert operations.device.type == "cpu"
    assert set(signs.unique().tolist()) == {-1, 1}

    def chi2(codes, cells):
        counts = torch.bincount(codes.flatten(), minlength=cells).double()
        expected = codes.numel() / cells
        statistic = ((counts - expected) ** 2 / expected).sum().item()
        return (statistic - (cells - 1)) / math.sqrt(2 * (cells - 1))  # about normal

    sign_code = (signs > 0).long()
    for a in range(3):
        assert abs(chi2(operations[:, a], 14)) < 4
        assert abs(chi2(operations[:, a] * 2 + sign_code[:, a], 28)) < 4  # sign and operation
        for b in range(a):
            assert abs(chi2(operations[:, a] * 14 + operations[:, b], 196)) < 4  # two rounds
            assert abs(chi2(sign_code[:, a] * 2 + sign_code[:, b], 4)) < 4
    assert abs(chi2(operations[1:, 0] * 14 + operations[:-1, 0], 196)) < 4  # neighbouring samples


def test_equal_images_come_back_different():
    torch.manual_seed(3)
    images = made_up()[:1].expand(8, -1, -1, -1)
    out = RandAugment()(images)
    assert len({bytes(image.flatten().tolist()) for image in out}) >= 6


def test_generator_and_seed_fix_the_draw():
    images = made_up()
    first, second = (RandAugment(generator=torch.Generator().manual_seed(5))(images) for _ in range(2))
    assert torch.equal(first, second)
    torch.manual_seed(7)
    state = torch.get_rng_state()
    augment = RandAugment(generator=torch.Generator().manual_seed(5))
    assert not torch.equal(augment(images), augment(images))
    assert torch.equal(state, torch.get_rng_state())
    third = RandAugment()(images)
    torch.manual_seed(7)
    assert torch.equal(third, RandAugment()(images))


def test_only_the_operations_given():
    augment = RandAugment(n=2, ops=["Posterize", "Identity"])
    images = made_up()
    allowed = images & (256 - 2 ** (8 - augment.bits))
    for _ in range(5):
        for got, original, posterized in zip(augment(images), images, allowed, strict=True):
            assert torch.equal(got, original) or torch.equal(got, posterized)


# The module


@settings(max_examples=examples(25), deadline=None)
@given(
    batch=st.integers(1, 20),
    n=st.integers(0, 3),
    m=st.integers(0, 30),
    channels=st.sampled_from([1, 3]),
    size=st.tuples(st.integers(1, 24), st.integers(1, 24)),
    dtype=st.sampled_from([torch.uint8, torch.float32, torch.float16, torch.bfloat16]),
    fill=st.sampled_from([0, 0.5]),
    piece=st.sampled_from([1, 2**20]),
    seed=st.integers(0, 1000),
)
def test_both_ways_give_the_same_pixels(batch, n, m, channels, size, dtype, fill, piece, seed):
    """Grouped and dense, against one sample and one operation at a time."""
    torch.manual_seed(seed)
    images = torch.randint(256, (batch, channels, *size), dtype=torch.uint8)
    images = images if dtype is torch.uint8 else (images / 255).to(dtype)
    before = images.clone()
    augment = RandAugment(n, m, fill=fill)
    plan = augment.plan(batch)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "CPU_PIECE", piece)
        grouped = augment(images, plan)
    dense = augment._dense(images, plan)
    assert grouped.dtype is dense.dtype is dtype
    assert torch.equal(grouped, dense)
    slow = []
    for image, operations, signs in zip(images, *plan, strict=True):
        image = image[None]
        for code, sign in zip(operations.tolist(), signs.tolist(), strict=True):
            single, single_plan = one_operation(OPERATIONS[code], m, sign, 1, fill=fill)
            image = single(image, single_plan)
        slow.append(image)
    assert torch.equal(grouped, torch.cat(slow))
    assert torch.equal(images, before)


def test_two_rounds_follow_torchvision_in_order(photos):
    """First one operation, then the other, on uint8 in between."""
    names = ("Rotate", "Equalize"), ("Equalize", "Rotate"), ("Color", "Solarize"), ("Identity", "Posterize")
    operations = torch.tensor([[OPERATIONS.index(name) for name in pair] for pair in names])
    got = RandAugment()(photos[:4], AugmentPlan(operations, torch.ones_like(operations)))
    for image, pair, result in zip(photos, names, got, strict=False):
        expected = image[None]
        for name in pair:
            expected = by_torchvision(expected, name, 9, 1)
        off = (result.int() - expected[0].int()).abs()
        assert (off <= 2).float().mean() >= 0.99


def test_identity_in_eval_and_without_operations():
    images = made_up()
    assert RandAugment().eval()(images) is images
    assert RandAugment(n=0)(images) is images
    assert RandAugment()(images[:0]).shape == images[:0].shape


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32])
def test_memory_format_is_kept(dtype, device):
    images = made_up().to(device)
    images = images if dtype is torch.uint8 else images / 255
    last = images.contiguous(memory_format=torch.channels_last)
    augment = RandAugment()
    plan = augment.plan(len(images))
    for run in (augment, augment._dense):
        got = run(last, plan)
        assert got.is_contiguous(memory_format=torch.channels_last)
        torch.testing.assert_close(got, run(images, plan), rtol=0, atol=1e-6)
        assert run(images, plan).is_contiguous()


def test_inputs_that_are_views(device):
    """Every second image of a batch, seen from the right, cropped."""
    images = made_up().to(device)
    view = images.transpose(2, 3)[::2, :, 3:40, 2:]
    augment = RandAugment()
    plan = augment.plan(len(view))
    assert torch.equal(augment(view, plan), augment(view.contiguous(), plan))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32, torch.float16])
def test_no_host_sync_on_cuda(dtype):
    """Fake CUDA tensors have no values: reading one raises, and so does a tensor made on the wrong device."""
    augment = RandAugment(fill=(0, 0.5, 1))
    on_host = [augment.plan(32) for _ in range(4)]
    with FakeTensorMode(allow_non_fake_inputs=True):
        images = torch.empty(32, 3, 24, 20, dtype=dtype, device="cuda")
        with pytest.raises(DataDependentOutputException):
            images.amax().item()  # so that this test can fail
        plans = [*on_host, augment.plan(32, "cuda")]
        assert plans[-1].operations.device.type == "cuda"
        for result in (augment(images, plan) for plan in plans):
            assert (result.shape, result.dtype, result.device) == (images.shape, dtype, images.device)
        assert RandomHorizontalFlip()(images).device.type == "cuda"
        assert resize(images, (12, 10)).dtype is dtype


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32])
def test_compiles_into_one_graph(dtype):
    images = made_up() if dtype is torch.uint8 else made_up() / 255
    augment, flip = RandAugment(), RandomHorizontalFlip()
    plan = augment.plan(len(images))
    whole = torch.compile(lambda x, plan=None: flip(augment(x, plan)), fullgraph=True, backend="eager")
    torch.manual_seed(0)
    first = whole(images)
    assert not torch.equal(first, whole(images))  # drawn anew in every call, not once for the graph
    applied = torch.compile(augment, fullgraph=True, backend="eager")(images, plan)
    assert torch.equal(applied, augment(images, plan))


def test_compiled_kernels_give_the_same_pixels():
    """By the real compiler, for the operations with the most intricate lines."""
    images = made_up()
    augment = RandAugment(n=1, ops=["Equalize", "Solarize", "Sharpness", "ShearX"])
    plan = AugmentPlan(torch.arange(8)[:, None] % 4, torch.tensor([1, -1] * 4)[:, None])
    got = torch.compile(augment, fullgraph=True)(images, plan)
    off = (got.int() - augment(images, plan).int()).abs()
    assert off.max() <= 1  # fused multiply-add may round the other way
    assert (off > 0).float().mean() < 0.01


def test_device_plan_on_a_real_device(device):
    images = made_up().to(device)
    augment = RandAugment()
    plan = augment.plan(len(images))
    moved = AugmentPlan(*(tensor.to(device) for tensor in plan))
    torch.testing.assert_close(augment(images, plan), augment(images, moved), rtol=0, atol=1)


def test_exported_from_the_package():
    assert gpu_logicmix.RandAugment is RandAugment
