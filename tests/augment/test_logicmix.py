"""The arithmetic of the mixes against a Python loop, and what they promise about their tensors."""

import itertools
import subprocess
import sys

import numpy as np
import pytest
import torch
from cases import examples
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from mixing import ALL, MIXES, NAMES, NAN, TOLERANCE, assert_same, logicmix_oracle, or_oracle, pair_oracle, some_batch
from mlcpl.augs.logic_mix import logic_mix_images, logic_mix_target
from mlcpl.augs.mixup_pme import mixup_pme_with_batch

from gpu_logicmix import GPULogicMix, MixPlan, Mixup, MixupPME, MultiLabelMixup, OrMixup

every_mix = pytest.mark.parametrize("make", ALL, ids=NAMES)


@settings(max_examples=examples(150), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_logicmix_equals_the_oracle(way, data):
    batch = data.draw(st.integers(1, 12), "batch")
    k_min = data.draw(st.integers(1, 5), "k_min")
    k_max = data.draw(st.integers(k_min, 6), "k_max")
    shape = data.draw(st.sampled_from([(3, 4, 5), (1, 1, 1), (7, 3), (2, 3, 2, 2), (3, 64, 48), (3, 37, 41)]), "shape")
    dtype = data.draw(st.sampled_from(list(TOLERANCE)), "dtype")
    unknown = data.draw(st.sampled_from([-1, NAN, -7.0, 2]), "unknown")
    p = data.draw(st.sampled_from([0.0, 0.5, 1.0]), "p")
    images, targets = some_batch(batch, 4, shape, unknown, dtype, seed=data.draw(st.integers(0, 99), "seed"))
    before = images.clone(), targets.clone()
    mix = GPULogicMix(p, k_min, k_max, unknown=unknown)
    plan = mix.plan(batch)
    mixed, labels = mix(images, targets, plan)

    expected, expected_labels = logicmix_oracle(images, targets, plan, unknown)
    assert (mixed.dtype, mixed.shape, labels.dtype) == (images.dtype, images.shape, targets.dtype)
    if dtype == torch.uint8:
        assert torch.equal(mixed, expected.round().to(torch.uint8))
    else:
        torch.testing.assert_close(mixed.double(), expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    assert_same(labels, expected_labels)
    assert torch.equal(mixed[~plan.mixed], images[~plan.mixed])
    assert_same(labels[~plan.mixed], targets[~plan.mixed])
    assert torch.equal(images, before[0])
    assert_same(targets, before[1])


@pytest.mark.parametrize("k", range(1, 7))
def test_every_combination_of_labels_through_forward(k, device):
    """Sample j of the batch holds the j-th label of each of the 3^k combinations, and sample 0 is mixed with all."""
    targets = torch.tensor(list(itertools.product([1, 0, -1], repeat=k)), device=device).T.contiguous().to(torch.int8)
    images = torch.rand(k, 1, 2, 2, device=device)
    index = torch.stack([torch.roll(torch.arange(k), -i) for i in range(k)]).to(device)
    plan = MixPlan(index, torch.full((k,), k, device=device), torch.full((k,), k > 1, device=device))
    mixed, labels = GPULogicMix(k_max=6)(images, targets, plan)
    expected = torch.tensor([or_oracle(column, -1) for column in targets.T.tolist()], dtype=torch.int8, device=device)
    assert torch.equal(labels, expected.expand(k, -1))
    torch.testing.assert_close(mixed, images.mean(0, keepdim=True).expand_as(images))


def test_equals_mlcpl_on_the_same_groups(device):
    images, targets = some_batch(64, 80, unknown=NAN, device=device)
    mix = GPULogicMix(p=0.7, k_min=2, k_max=5, unknown=NAN)
    plan = mix.plan(64, device)
    mixed, labels = mix(images, targets, plan)
    for i in range(64):
        group = plan.index[i, : plan.size[i]]
        torch.testing.assert_close(mixed[i], logic_mix_images(images[group]))
        torch.testing.assert_close(labels[i], logic_mix_target(targets[group]), equal_nan=True)


@pytest.mark.parametrize("method", MIXES[1:])
@pytest.mark.parametrize("unknown", [-1, NAN])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.uint8])
def test_siblings_equal_the_oracle(way, method, unknown, dtype):
    mix = method(unknown=unknown)
    for seed in range(20):
        images, targets = some_batch(9, 6, unknown=unknown, dtype=dtype, seed=seed)
        plan = mix.plan(9)
        mixed, labels = mix(images, targets, plan)
        expected, expected_labels = pair_oracle(method, images, targets, plan, unknown)
        assert mixed.dtype == dtype
        atol = 0.5001 if dtype == torch.uint8 else TOLERANCE[dtype]
        torch.testing.assert_close(mixed.double(), expected, rtol=0, atol=atol)
        torch.testing.assert_close(labels.double(), expected_labels.double(), atol=1e-6, rtol=0, equal_nan=True)


def test_mixup_pme_equals_mlcpl():
    images, targets = some_batch(10, 6, unknown=NAN)
    np.random.seed(3)
    their_images, their_targets = mixup_pme_with_batch(images, targets, alpha=0.75)
    np.random.seed(3)
    lam = np.random.uniform(0.75, 1)
    index = torch.tensor([[i, (i + 5) % 10] for i in range(10)])
    weight = torch.tensor([[lam, 1 - lam]], dtype=torch.float32).expand(10, 2)
    plan = MixPlan(index, torch.full((10,), 2), torch.ones(10, dtype=torch.bool), weight)
    mixed, labels = MixupPME(unknown=NAN)(images, targets, plan)
    torch.testing.assert_close(mixed[:5], their_images)
    torch.testing.assert_close(labels[:5], their_targets, equal_nan=True)


@pytest.mark.parametrize(
    "dtype", [torch.bool, torch.uint8, torch.int8, torch.int32, torch.int64, torch.float16, torch.float64]
)
def test_labels_of_any_type(dtype):
    images, targets = some_batch(16)
    targets = (targets == 1 if dtype in (torch.bool, torch.uint8) else targets).to(dtype)
    for mix in (GPULogicMix(), OrMixup(), MultiLabelMixup()):
        assert mix(images, targets)[1].dtype == dtype
    for mix in (Mixup(), MixupPME()):
        assert mix(images, targets)[1].dtype == (dtype if dtype.is_floating_point else torch.float32)


@every_mix
@pytest.mark.parametrize("dtype", [torch.float32, torch.uint8])
def test_memory_format_is_kept(make, dtype, device):
    images, targets = some_batch(8, dtype=dtype, device=device)
    video, _ = some_batch(8, shape=(3, 4, 5, 6), dtype=dtype, device=device)
    for batch, layout in ((images, torch.channels_last), (video, torch.channels_last_3d)):
        mix = make()
        plan = mix.plan(8, device)
        plain = mix(batch, targets, plan)[0]
        assert plain.is_contiguous()
        if hasattr(mix, "reset_bank"):
            mix.reset_bank()
        last = mix(batch.to(memory_format=layout), targets, plan)[0]
        assert last.is_contiguous(memory_format=layout)
        assert not last.is_contiguous()
        assert torch.equal(plain, last)


def test_views_of_other_tensors_mix_as_their_copies_do():
    big, targets = some_batch(16, shape=(3, 8, 8))
    mix = GPULogicMix(p=1.0)
    plan = mix.plan(8)
    for view in (big[::2], big[:8, :, ::2, 1:7], big[8:].transpose(2, 3), big[:1].expand(8, -1, -1, -1)):
        assert torch.equal(mix(view, targets[:8], plan)[0], mix(view.contiguous(), targets[:8], plan)[0])


def test_infinite_pixels_stay_where_they_are(way):
    images, targets = some_batch(6)
    images[2] = torch.inf
    images[3] = -torch.inf
    images[4] = NAN
    mix = GPULogicMix(p=0.5, k_max=5)
    plan = mix.plan(6)
    mixed, _ = mix(images, targets, plan)
    expected, _ = logicmix_oracle(images, targets, plan)
    torch.testing.assert_close(mixed, expected.float(), rtol=1e-6, atol=1e-6, equal_nan=True)
    mixed, _ = GPULogicMix(p=0.0, k_max=5)(images, targets)
    torch.testing.assert_close(mixed, images, rtol=0, atol=0, equal_nan=True)


@every_mix
def test_eval_is_the_identity(make):
    mix = make().eval()
    images, targets = some_batch()
    same_images, same_targets = mix(images, targets)
    assert same_images is images
    assert same_targets is targets


@every_mix
def test_results_are_new_tensors_and_inputs_stay(make):
    mix = make()
    images, targets = some_batch()
    before = images.clone(), targets.clone()
    mixed, labels = mix(images, targets)
    mixed.zero_()
    labels.zero_()
    assert torch.equal(images, before[0])
    assert torch.equal(targets, before[1])


@every_mix
def test_small_batches(make):
    for batch in (0, 1, 2):
        images, targets = some_batch(batch, unknown=-1)
        mixed, _ = make()(images, targets)
        assert mixed.shape == images.shape
        if batch < 2:
            assert torch.equal(mixed, images)
    plan = GPULogicMix(p=1.0, k_min=4, k_max=6).plan(3)
    assert plan.size.tolist() == [3, 3, 3]
    assert plan.index.sort(1).values.unique(dim=1).max() == 2
    assert [sorted(row[:3]) for row in plan.index.tolist()] == [[0, 1, 2]] * 3
    assert GPULogicMix(p=1.0).plan(1).mixed.tolist() == [False]


def test_or_mixup_is_on_and_off_in_turn():
    mix = OrMixup()
    images, targets = some_batch()
    for epoch in range(4):
        mix.set_epoch(epoch)
        assert (mix(images, targets)[0] is images) == (epoch % 2 == 1)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: GPULogicMix(p=1.1), ValueError, r"p=1.1: must be from 0 to 1"),
        (lambda: GPULogicMix(p=-0.5), ValueError, r"p=-0.5"),
        (lambda: GPULogicMix(p=NAN), ValueError, r"p=nan"),
        (lambda: GPULogicMix(k_min=0), ValueError, r"k_min=0: must be at least 1"),
        (lambda: GPULogicMix(k_min=4), ValueError, r"k_max=3: must be at least k_min=4"),
        (lambda: GPULogicMix(k_max=2.5), TypeError, r"k_max=2.5: must be a whole number"),
        (lambda: GPULogicMix(bank=-1), ValueError, r"bank=-1: must be at least 0"),
        (lambda: GPULogicMix(unknown=0), ValueError, r"unknown=0: 0 and 1 mean"),
        (lambda: GPULogicMix(generator=7), TypeError, r"generator=7: must be a torch.Generator"),
        (lambda: Mixup(alpha=0), ValueError, r"alpha=0: must be above 0"),
        (lambda: OrMixup(lam=2), ValueError, r"lam=2: must be from 0 to 1"),
        (lambda: MixupPME(alpha=-1), ValueError, r"alpha=-1: must be from 0 to 1"),
        (lambda: GPULogicMix().plan(0), ValueError, r"batch_size=0: must be at least 1"),
    ],
)
def test_bad_arguments(make, error, message):
    with pytest.raises(error, match=message):
        make()


X, Y = torch.rand(4, 3, 8, 8), torch.zeros(4, 5)


@every_mix
@pytest.mark.parametrize(
    ("images", "targets", "error", "message"),
    [
        (X[0, 0], Y, ValueError, r"images has shape \(8, 8\): must be a batch of images \[B, C, H, W\]"),
        (X[..., None, None], Y, ValueError, r"images has shape \(4, 3, 8, 8, 1, 1\)"),
        (X.long(), Y, TypeError, r"images.dtype=torch.int64: must be a floating type or uint8"),
        (X.numpy(), Y, TypeError, r"images is a ndarray: must be a tensor"),
        (X, [0, 1, 2, 3], TypeError, r"targets is a list: must be a tensor"),
        (X, Y[:3], ValueError, r"images has 4 samples and targets 3"),
        (X, Y[0], ValueError, r"targets has shape \(5,\): must be \[batch, categories\]"),
        (X, Y.to("meta"), ValueError, r"images are on cpu and targets on meta"),
    ],
)
def test_bad_batches(make, images, targets, error, message):
    with pytest.raises(error, match=message):
        make()(images, targets)


@every_mix
def test_bad_plans(make):
    mix = make()
    with pytest.raises(ValueError, match=r"plan is for 3 samples, images has 4"):
        mix(X, Y, mix.plan(3))
    with pytest.raises(ValueError, match=r"plan is on meta and images on cpu"):
        mix(X, Y, MixPlan(*(t if t is None else t.to("meta") for t in mix.plan(4))))


def test_integer_labels_cannot_be_nan():
    with pytest.raises(TypeError, match=r"targets.dtype=torch.int64 cannot hold unknown=NaN"):
        GPULogicMix(unknown=NAN)(X, Y.long())


def test_validate_names_the_first_bad_label():
    bad = Y.clone()
    bad[2, 3] = 0.5
    bad[3, 0] = 7
    for method in MIXES:
        with pytest.raises(ValueError, match=r"targets\[2, 3\] is 0.5: must be 1, 0 or -1"):
            method(validate=True)(X, bad)
        method(validate=True)(X, Y)
    GPULogicMix(validate=True)(X, torch.tensor([[1.0], [NAN], [0.0], [-1.0]]))  # NaN is always unknown
    GPULogicMix(validate=True, unknown=NAN)(X, torch.tensor([[1.0], [NAN], [0.0], [0.0]]))


def test_the_transform_needs_torch_alone():
    """In an interpreter where the packages of the training run cannot be imported at all."""
    code = """
import sys
refused = "timm kornia pycocotools typer torchvision torchmetrics matplotlib PIL rich".split()
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in refused:
            raise ImportError(name)
sys.meta_path.insert(0, Refuse())
from gpu_logicmix import *
import torch
images, targets = GPULogicMix()(torch.rand(4, 3, 8, 8), torch.zeros(4, 5))
print(tuple(images.shape))
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == "(4, 3, 8, 8)"
