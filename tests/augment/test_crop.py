"""Multi-scale crop against torch's own crop and resize, one sample at a time."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.nn import functional as F

from gpu_logicmix.augment.crop import SIDES, MultiScaleCrop


def slow(images, plan):
    out = []
    for image, (top, left), (height, width) in zip(images, plan.start.tolist(), plan.length.tolist(), strict=True):
        crop = image[:, top : top + height, left : left + width].float()
        out.append(F.interpolate(crop[None], image.shape[1:], mode="bilinear", align_corners=False)[0])
    out = torch.stack(out)
    return out if images.is_floating_point() else out.round().to(images.dtype)


@settings(deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 5), st.integers(1, 33), st.integers(1, 33))
def test_against_torch(seed, batch, height, width):
    torch.manual_seed(seed)
    images, crop = torch.rand(batch, 3, height, width), MultiScaleCrop()
    plan = crop.plan(images)
    torch.testing.assert_close(crop(images, plan), slow(images, plan), atol=1e-5, rtol=1e-5)


def test_bytes(device):
    torch.manual_seed(0)
    images, crop = torch.randint(0, 256, (9, 3, 64, 48), dtype=torch.uint8, device=device), MultiScaleCrop()
    plan = crop.plan(images)
    found = crop(images, plan)
    assert found.dtype == torch.uint8
    assert (found.int() - slow(images, plan).int()).abs().max() <= 1  # a half may round either way
    assert (found == slow(images, plan)).float().mean() > 0.99


def test_what_is_drawn():
    torch.manual_seed(0)
    crop = MultiScaleCrop()
    plan = crop.plan(torch.empty(5000, 1, 64, 32))
    assert sorted(set(plan.length[:, 0].tolist())) == [32, 40, 48, 56, 64]
    assert (plan.length[:, 0] == 2 * plan.length[:, 1]).all()
    times = torch.bincount(plan.length[:, 0])[[round(64 * side) for side in SIDES]]
    assert times.min() > 900
    assert (plan.start >= 0).all()
    assert (plan.start + plan.length <= torch.tensor([64, 32])).all()
    half = plan.start[plan.length[:, 0] == 32]
    assert sorted(set(half[:, 0].tolist())) == list(range(33))
    assert sorted(set(half[:, 1].tolist())) == list(range(17))


def test_the_whole_image_stays_as_it_is_and_eval_is_the_identity():
    images = torch.rand(3, 3, 20, 20)
    torch.testing.assert_close(MultiScaleCrop((1.0,))(images), images)
    assert MultiScaleCrop().eval()(images) is images
    with pytest.raises(ValueError, match="above 0 and at most 1"):
        MultiScaleCrop((1.0, 0.0))
    with pytest.raises(ValueError, match=r"must be \[B, C, H, W\]"):
        MultiScaleCrop()(images[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
def test_type_layout_and_input_are_kept(dtype):
    torch.manual_seed(0)
    images = (torch.rand(4, 3, 16, 16) * 200).to(dtype).to(memory_format=torch.channels_last)
    before = images.clone()
    found = MultiScaleCrop()(images)
    assert found.dtype == dtype
    assert found.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(images, before)


def test_a_generator_of_ones_own():
    images = torch.rand(4, 3, 16, 16)
    one, two = (MultiScaleCrop(generator=torch.Generator().manual_seed(5)) for _ in range(2))
    assert torch.equal(one(images), two(images))


@pytest.mark.filterwarnings("ignore:CUDA is not available")
def test_no_sync_on_fake_cuda():
    with FakeTensorMode():
        out = MultiScaleCrop()(torch.empty(4, 3, 32, 32, dtype=torch.uint8, device="cuda"))
        assert out.device.type == "cuda"
        with pytest.raises(DataDependentOutputException):
            out[0, 0, 0, 0].item()


def test_one_graph():
    crop, images = MultiScaleCrop(), torch.rand(4, 3, 16, 16)
    compiled = torch.compile(crop, fullgraph=True, backend="eager")
    plan = crop.plan(images)
    torch.testing.assert_close(compiled(images, plan), crop(images, plan))
    assert compiled(images).shape == images.shape


@pytest.mark.parametrize("sides", [16, 0.5, (), (0.5, 2.0), (0.0,)])
def test_sides_are_shares(sides):
    with pytest.raises(ValueError, match=r"sides=.*: must be shares of the side, above 0 and at most 1"):
        MultiScaleCrop(sides)
