"""RandAugment, flip and resize: bad input, odd sizes, ranges."""

import contextlib
import math

import pytest
import torch
import torch.nn.functional as F
from pictures import made_up
from torch._subclasses.fake_tensor import FakeTensorMode
from torchvision.transforms.functional import resize as reference_resize

from gpu_logicmix import RandAugment, RandomHorizontalFlip
from gpu_logicmix.augment.pixel_ops import resize
from gpu_logicmix.augment.randaugment import AugmentPlan

# Bad input


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"n": -1}, "n=-1"),
        ({"m": 31}, "from 0 to 30"),
        ({"m": -1}, "from 0 to 30"),
        ({"m": 10, "bins": 10}, "from 0 to 9"),
        ({"bins": 1, "m": 0}, "bins=1"),
        ({"interpolation": "bicubic"}, "bilinear, nearest"),
        ({"ops": ["Rotate", "Invert"]}, "Identity, AutoContrast, .*TranslateY"),
        ({"ops": []}, "Identity, AutoContrast"),
        ({"ops": "Rotate"}, "give a list"),
        ({"ops": ["Rotate", "Rotate"]}, "different"),
    ],
)
def test_bad_options(options, message):
    with pytest.raises(ValueError, match=message):
        RandAugment(**options)


def test_bad_images():
    augment = RandAugment()
    for shape in ((2, 4, 8, 8), (2, 2, 8, 8), (3, 8, 8), (1, 2, 3, 8, 8)):
        with pytest.raises(ValueError, match=r"\[B, 3, H, W\]"):
            augment(torch.zeros(shape))
    for dtype in (torch.int64, torch.int32, torch.int16, torch.int8, torch.bool, torch.complex64):
        with pytest.raises(TypeError, match="uint8"):
            augment(torch.zeros(2, 3, 8, 8, dtype=dtype))
    with pytest.raises(ValueError, match="fill"):
        RandAugment(fill=(1, 2))(torch.zeros(2, 3, 8, 8))


def test_bad_plans():
    augment, images = RandAugment(), torch.zeros(2, 3, 8, 8)
    good = augment.plan(2)
    with pytest.raises(ValueError, match=r"for 2 images both are \[2, N\]"):
        augment(images, augment.plan(3))
    with pytest.raises(ValueError, match="operation 14"):
        augment(images, AugmentPlan(torch.full((2, 2), 14), good.signs))
    with pytest.raises(ValueError, match="sign 0"):
        augment(images, AugmentPlan(good.operations, torch.zeros(2, 2, dtype=torch.int64)))
    with pytest.raises(ValueError, match=r"signs \[2, 1\]"):
        augment(images, AugmentPlan(good.operations, good.signs[:, :1]))


@pytest.mark.parametrize("shape", [(1,), (3,), (5,), (4, 1), ()])
@pytest.mark.parametrize("place", ["cpu", "cuda"])
def test_a_mirror_for_another_batch(shape, place):
    """On fake CUDA tensors: a kernel would read past its end."""
    augment, flip_alone = RandAugment(), RandAugment(n=0)
    with FakeTensorMode() if place == "cuda" else contextlib.nullcontext():
        images = torch.zeros(4, 3, 8, 8, dtype=torch.uint8, device=place)
        good, bad = (torch.ones(size, dtype=torch.bool, device=place) for size in (4, shape))
        for part in (augment, flip_alone):
            assert part(images, mirror=good).shape == images.shape
            with pytest.raises(ValueError, match=r"mirror has shape \(.*\): for 4 images it must be \[4\]"):
                part(images, mirror=bad)
        with pytest.raises(ValueError, match=r"plan has shape \(.*\): for 4 images it must be \[4\]"):
            RandomHorizontalFlip()(images, bad)


def test_no_fill_is_black():
    """torchvision's default."""
    images, black = made_up(), RandAugment(m=20, ops=["Rotate", "TranslateX"])
    plan = black.plan(len(images))
    assert torch.equal(RandAugment(m=20, ops=black.ops, fill=None)(images, plan), black(images, plan))


# Flip and resize


def test_flip_mirrors_the_samples_of_the_plan(device):
    images = made_up().to(device)
    flip = RandomHorizontalFlip()
    plan = torch.tensor([True, False] * 4, device=device)
    got = flip(images, plan)
    assert torch.equal(got[0::2], images[0::2].flip(-1))
    assert torch.equal(got[1::2], images[1::2])
    last = images.contiguous(memory_format=torch.channels_last)
    assert flip(last, plan).is_contiguous(memory_format=torch.channels_last)
    assert flip.eval()(images) is images


@pytest.mark.parametrize("place", ["cpu", "cuda"])
def test_flip_of_videos(place):
    with FakeTensorMode() if place == "cuda" else contextlib.nullcontext():
        video = torch.rand(4, 3, 2, 6, 5, device=place)
        assert RandomHorizontalFlip()(video).shape == video.shape


def test_flip_draws_with_probability():
    torch.manual_seed(0)
    share = RandomHorizontalFlip(0.3).plan(20000).float().mean()
    assert abs(share - 0.3) < 4 * math.sqrt(0.3 * 0.7 / 20000)
    images = made_up()
    assert torch.equal(RandomHorizontalFlip(0.0)(images), images)
    assert torch.equal(RandomHorizontalFlip(1.0)(images), images.flip(-1))
    first, second = (RandomHorizontalFlip(generator=torch.Generator().manual_seed(2)).plan(64) for _ in range(2))
    assert torch.equal(first, second)
    assert 0 < first.sum() < 64
    with pytest.raises(ValueError, match=r"p=1\.5"):
        RandomHorizontalFlip(1.5)


@pytest.mark.parametrize("antialias", [True, False])
@pytest.mark.parametrize("size", [(96, 110), (300, 260), (225, 80)])
def test_resize_like_torchvision(photos, size, antialias, device):
    got = resize(photos.to(device), size, antialias=antialias).cpu()
    assert got.dtype is torch.uint8
    expected = reference_resize(photos, list(size), antialias=antialias)
    in_float = F.interpolate(photos.float(), size, mode="bilinear", antialias=antialias, align_corners=False)
    assert (got.int() - expected.int()).abs().max() <= 1
    assert (got - in_float).abs().max() <= 1.01
    torch.testing.assert_close(resize(photos / 255, size, antialias=antialias) * 255, in_float, rtol=0, atol=1e-2)
    assert resize(photos, 32).shape == (4, 3, 32, 32)


# Ranges and sizes


@pytest.mark.parametrize("fill", [300, -1, (0, 0, 256), float("nan")])
def test_fill_outside_the_range_of_bytes(fill):
    with pytest.raises(ValueError, match=r"fill=.*0 to 255 for uint8"):
        RandAugment(fill=fill)(made_up())


def test_fill_outside_the_range_of_floats():
    with pytest.raises(ValueError, match=r"fill=128.*0 to 1 for float"):
        RandAugment(fill=128)(torch.rand(2, 3, 8, 8))


def test_float_images_that_are_not_in_0_to_1():
    for wrong in (made_up().float(), (torch.rand(8, 3, 9, 9) - 0.5) / 0.2):
        with pytest.raises(ValueError, match=r"images go from .* must be in 0 to 1"):
            RandAugment()(wrong)
    RandAugment()(torch.rand(2, 3, 8, 8) * 1.1 - 0.05)  # as resizing leaves them
    RandAugment().eval()(made_up().float())


@pytest.mark.parametrize("shape", [(0, 3, 8, 8), (2, 3, 0, 8), (2, 3, 8, 0), (2, 3, 0, 0)])
def test_images_without_pixels(shape):
    for part in (RandAugment(), RandomHorizontalFlip(1.0)):
        for dtype in (torch.uint8, torch.float32):
            assert part(torch.zeros(shape, dtype=dtype)).shape == shape
