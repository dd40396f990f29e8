"""normalize= and out_dtype=: the same numbers as mixing first and normalising then, on every way."""

import pytest
import torch
from mixing import MIXES, some_batch

from gpu_logicmix import GPULogicMix, OrMixup
from gpu_logicmix.augment.plan import filled

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
CLOSE = {torch.float64: 1e-6, torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 2e-2}


def expected(images, plan):
    """In float64, one sample after the other."""
    plan = filled(plan)
    unit = images.double() / (255 if images.dtype == torch.uint8 else 1)
    rows = []
    for i, group in enumerate(plan.index.tolist()):
        members = group[: plan.size[i]]
        share = [1 / len(members)] * len(members) if plan.weight is None else plan.weight[i].tolist()
        rows.append(sum(w * unit[m] for w, m in zip(share, members, strict=False)))
    return torch.stack(rows)


def normalised(unit):
    mean, std = (torch.tensor(t, dtype=torch.float64).view(3, *[1] * (unit.ndim - 2)) for t in (MEAN, STD))
    return (unit - mean) / std


@pytest.mark.parametrize("method", MIXES)
@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("out", [None, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_the_one_pass_equals_the_steps(way, method, dtype, out, layout):
    images, targets = some_batch(9, shape=(3, 14, 10), dtype=dtype)
    images = images.contiguous(memory_format=layout)
    plan = method().plan(9)
    result = out or (torch.float32 if dtype == torch.uint8 else dtype)
    close = max(CLOSE[result], CLOSE.get(dtype, 0))
    mixed, labels = method(normalize=(MEAN, STD), out_dtype=out)(images, targets, plan)
    assert mixed.dtype == result
    assert mixed.is_contiguous(memory_format=layout)
    torch.testing.assert_close(mixed.double(), normalised(expected(images, plan)), rtol=close, atol=3 * close)
    torch.testing.assert_close(labels, method()(images, targets, plan)[1], rtol=0, atol=0)
    if out is not None:
        mixed, _ = method(out_dtype=out)(images, targets, plan)
        assert mixed.dtype == out
        torch.testing.assert_close(mixed.double(), expected(images, plan), rtol=close, atol=close)


@pytest.mark.parametrize("method", MIXES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_half_precision_is_rounded_once(way, method, dtype, layout):
    """The mean in float32, as the kernel has it: normalising would enlarge a rounding before it."""
    images, targets = some_batch(9, shape=(3, 40, 30), dtype=dtype)
    images = images.contiguous(memory_format=layout)
    plan = method().plan(9)
    unit = expected(images, plan)
    for options, exact in (({"normalize": (MEAN, STD)}, normalised(unit)), ({}, unit)):
        wide, _ = method(out_dtype=torch.float32, **options)(images, targets, plan)
        torch.testing.assert_close(wide.double(), exact, rtol=2e-6, atol=2e-6)
        if options:
            half, _ = method(**options)(images, targets, plan)
            gap = torch.finfo(dtype).eps * exact.abs().clamp(min=2**-6)  # from one number of the type to the next
            assert ((half.double() - exact).abs() <= gap).all()


def test_half_precision_has_gradients_and_infinite_pixels(way):
    images, targets = some_batch(6, dtype=torch.bfloat16)
    images[0, 0, 0, 0] = torch.inf
    mix = GPULogicMix(p=0.5, normalize=(MEAN, STD))
    plan = mix.plan(6)
    mixed, _ = mix(images, targets, plan)
    assert torch.equal(mixed.isinf(), expected(images, plan).isinf())
    assert not mixed.isnan().any()
    mixed, _ = mix(images.requires_grad_(), targets, plan)
    mixed.sum().backward()
    share = torch.zeros(6)
    for i, group in enumerate(filled(plan).index.tolist()):
        for member in group[: plan.size[i]]:
            share[member] += 1 / plan.size[i]
    wanted = share.view(6, 1, 1, 1) / torch.tensor(STD).view(3, 1, 1)
    torch.testing.assert_close(images.grad.float(), wanted.expand(images.shape), rtol=2e-2, atol=1e-2)


def test_video_and_one_number_for_all_channels():
    video, targets = some_batch(4, shape=(3, 2, 5, 4), dtype=torch.uint8)
    mix = GPULogicMix(p=1.0, normalize=(MEAN, STD))
    plan = mix.plan(4)
    for layout in (torch.contiguous_format, torch.channels_last_3d):
        mixed, _ = mix(video.contiguous(memory_format=layout), targets, plan)
        torch.testing.assert_close(mixed.double(), normalised(expected(video, plan)), rtol=1e-5, atol=1e-5)
    mixed, _ = GPULogicMix(normalize=([0.5], [0.25]))(video, targets, plan)
    torch.testing.assert_close(mixed.double(), (expected(video, plan) - 0.5) / 0.25, rtol=1e-5, atol=1e-5)


def test_what_is_not_mixed_is_normalised_too():
    images, targets = some_batch(4, dtype=torch.uint8)
    wanted = normalised(images.double() / 255).float()
    mix = OrMixup(normalize=(MEAN, STD))
    mix.set_epoch(1)
    for off in (mix, GPULogicMix(normalize=(MEAN, STD)).eval(), GPULogicMix(p=0.0, normalize=(MEAN, STD))):
        torch.testing.assert_close(off(images, targets)[0], wanted, rtol=1e-5, atol=1e-5)
    assert mix(images[:0], targets[:0])[0].dtype == torch.float32
    assert GPULogicMix(out_dtype=torch.float32).eval()(wanted, targets)[0] is wanted


def test_gradient_through_the_normalisation():
    images, targets = some_batch(6)
    images.requires_grad_()
    mix = GPULogicMix(p=1.0, normalize=(MEAN, STD))
    plan = mix.plan(6)
    mixed, _ = mix(images, targets, plan)
    upstream = torch.rand_like(mixed)
    mixed.backward(upstream)
    again = images.detach().clone().requires_grad_()
    std = torch.tensor(STD).view(3, 1, 1)
    (GPULogicMix()(again, targets, plan)[0] / std).backward(upstream)
    torch.testing.assert_close(images.grad, again.grad, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32])
def test_compiled(dtype):
    torch._dynamo.reset()
    mix = GPULogicMix(normalize=(MEAN, STD), out_dtype=torch.bfloat16)
    compiled = torch.compile(mix, fullgraph=True, backend="eager")
    for size in (8, 5, 3):
        images, targets = some_batch(size, dtype=dtype)
        plan = mix.plan(size)
        torch.testing.assert_close(
            compiled(images, targets, plan)[0], mix(images, targets, plan)[0], rtol=1e-2, atol=1e-2
        )
    mix.eval()
    assert compiled(images, targets)[0].dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"normalize": 0.5}, ValueError, r"normalize=0\.5: must be \(mean, std\)"),
        (
            {"normalize": (0.5, 0.5)},
            ValueError,
            r"normalize=\(0\.5, 0\.5\): must be \(mean, std\).*as \(\[0\.5\], \[0\.25\]\)",
        ),
        ({"normalize": ("mean", "std")}, ValueError, r"must be \(mean, std\)"),
        ({"normalize": (MEAN, (1, 1))}, ValueError, "must be as many"),
        ({"normalize": (MEAN, (1, 0, 1))}, ValueError, "every std above 0"),
        ({"out_dtype": torch.int64}, TypeError, "must be a floating type"),
        ({"out_dtype": torch.uint8, "normalize": (MEAN, STD)}, ValueError, "do not fit into bytes"),
    ],
)
def test_bad_options(options, error, message):
    with pytest.raises(error, match=message):
        GPULogicMix(**options)


def test_bad_images():
    images, targets = some_batch(4)
    with pytest.raises(TypeError, match="only uint8 images can stay uint8"):
        GPULogicMix(out_dtype=torch.uint8)(images, targets)
    with pytest.raises(ValueError, match="3 numbers, but images have 2 channels"):
        GPULogicMix(normalize=(MEAN, STD))(images[:, :2], targets)
