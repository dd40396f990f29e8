"""The mixes as Kornia augmentations: in Kornia's own containers, equal to ours, kept and replayed by Kornia's means."""

import copy
import pickle

import pytest
import torch

kornia = pytest.importorskip("kornia")
import kornia.augmentation as K  # noqa: E402

from gpu_logicmix import GPULogicMix, Mixup, MixupPME, MultiLabelMixup, OrMixup  # noqa: E402
from gpu_logicmix.augment.kornia import (  # noqa: E402
    KorniaLogicMix,
    KorniaMixup,
    KorniaMixupPME,
    KorniaMultiLabelMixup,
    KorniaOrMixup,
)
from gpu_logicmix.augment.plan import MixPlan  # noqa: E402

KEYS = ["input", "class"]
SIBLINGS = [
    (KorniaMixup, Mixup),
    (KorniaOrMixup, OrMixup),
    (KorniaMultiLabelMixup, MultiLabelMixup),
    (KorniaMixupPME, MixupPME),
]


def batch(device, count=16, categories=5, seed=0):
    generator = torch.Generator().manual_seed(seed)
    images = torch.rand(count, 3, 8, 8, generator=generator)
    targets = torch.randint(-1, 2, (count, categories), generator=generator)
    return images.to(device), targets.to(device)


@pytest.mark.parametrize("unknown", [-1, float("nan")])
def test_equals_gpu_logicmix_with_the_same_seed(device, unknown):
    images, targets = batch(device)
    targets = targets.float().masked_fill(targets == -1, unknown)
    ours, theirs = GPULogicMix(0.5, 2, 4, unknown=unknown), KorniaLogicMix(0.5, 2, 4, unknown=unknown).to(device)
    torch.manual_seed(3)
    wanted = ours(images, targets)
    torch.manual_seed(3)
    got = theirs(images, targets, data_keys=KEYS)
    assert torch.equal(got[0], wanted[0])
    assert torch.equal(got[1].nan_to_num(7), wanted[1].nan_to_num(7))
    assert not torch.equal(got[0], images)


@pytest.mark.parametrize(("theirs", "ours"), SIBLINGS)
def test_siblings_equal_ours_with_the_same_plan(device, theirs, ours):
    images, targets = batch(device)
    mix = theirs().to(device)
    got = mix(images, targets, data_keys=KEYS)
    p = mix._params
    plan = MixPlan(p["index"], p["size"], p["size"] > 1, p["weight"])
    wanted = ours()(images, targets, plan)
    assert torch.equal(got[0], wanted[0])
    assert torch.equal(got[1], wanted[1])


def test_in_a_container_after_geometric_and_colour_augmentations(device):
    images, targets = batch(device)
    augment = K.AugmentationSequential(
        K.RandomHorizontalFlip(p=0.5), K.ColorJitter(0.2, 0.2, 0.2, p=1.0), KorniaLogicMix(p=0.7), data_keys=KEYS
    ).to(device)
    got_images, got_targets = augment(images, targets)
    alone = K.AugmentationSequential(*list(augment.children())[:2], data_keys=["input"])
    plain = alone(images, params=augment._params[:2])
    p = augment._params[2].data
    mixed = p["batch_prob"] > 0.5
    plan = MixPlan(p["index"], torch.where(mixed, p["size"], 1), mixed)
    wanted = GPULogicMix()(plain, targets, plan)
    assert torch.equal(got_images, wanted[0])
    assert torch.equal(got_targets, wanted[1])
    assert got_targets.dtype == targets.dtype
    assert 0 < int(mixed.sum()) < 16
    assert torch.equal(got_targets[~mixed], targets[~mixed])


def test_a_container_takes_a_dict(device):
    images, targets = batch(device)
    augment = K.AugmentationSequential(KorniaLogicMix(p=1.0), data_keys=None).to(device)
    got = augment({"image": images, "class": targets})
    assert set(got) == {"image", "class"}
    again = augment({"image": images, "class": targets}, params=augment._params)
    assert torch.equal(got["image"], again["image"])
    assert torch.equal(got["class"], again["class"])


def test_parameters_are_kept_and_replayed(device):
    images, targets = batch(device)
    others, other_targets = batch(device, seed=1)
    augment = K.AugmentationSequential(K.RandomVerticalFlip(), KorniaLogicMix(p=0.5), data_keys=KEYS).to(device)
    first = augment(images, targets)
    params = augment._params
    drawn_anew = augment(images, targets)
    again = augment(images, targets, params=params)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not torch.equal(first[0], drawn_anew[0])
    # Another batch with the same parameters: the same partners.
    out, labels = augment(others, other_targets, params=params)
    p = params[1].data
    on = p["batch_prob"] > 0.5
    plan = MixPlan(p["index"], torch.where(on, p["size"], 1), on)
    wanted = GPULogicMix()(augment[0](others, params=params[0].data), other_targets, plan)
    assert torch.equal(out, wanted[0])
    assert torch.equal(labels, wanted[1])


def test_p_and_batch_prob_say_who_is_mixed(device):
    images, targets = batch(device)
    mix = KorniaLogicMix(p=0.0, data_keys=KEYS).to(device)
    out, labels = mix(images, targets)
    assert torch.equal(out, images)
    assert torch.equal(labels, targets)
    mix = KorniaLogicMix(p=1.0, data_keys=KEYS).to(device)
    mix(images, targets)
    params = dict(mix._params)
    assert bool((params["batch_prob"] == 1).all())
    params["batch_prob"] = (torch.arange(16, device=device) % 2).float()
    out, labels = mix(images, targets, params=params)
    assert torch.equal(out[::2], images[::2])
    assert torch.equal(labels[::2], targets[::2])
    assert bool((out[1::2] != images[1::2]).flatten(1).any(1).all())


@pytest.mark.parametrize("kind", [KorniaLogicMix, KorniaMixup])
def test_p_is_a_share_of_the_samples(kind):
    torch.manual_seed(0)
    mix = kind(p=0.25)
    share = torch.stack([mix.forward_parameters((64, 3, 8, 8))["batch_prob"] for _ in range(100)])
    assert share.mean().item() == pytest.approx(0.25, abs=0.03)
    assert 0 < share[0].sum() < 64


def test_same_on_batch(device):
    torch.manual_seed(0)
    mix = KorniaLogicMix(p=0.5, k_min=2, k_max=4, same_on_batch=True).to(device)
    seen = set()
    for _ in range(40):
        p = mix.forward_parameters((16, 3, 8, 8))
        assert len(p["batch_prob"].unique()) == 1
        sizes = p["size"].unique().tolist()
        assert len(sizes) == 1
        seen.add(sizes[0])
        for row in p["index"][:, : sizes[0]].tolist():
            assert len(set(row)) == sizes[0]  # distinct partners
    assert seen == {1, 2, 3, 4}
    weights = KorniaMixup(same_on_batch=True).forward_parameters((16, 3, 8, 8))["weight"]
    assert bool((weights == weights[:1]).all())


def test_keepdim_and_one_image():
    image, targets = torch.rand(3, 8, 8), torch.tensor([1, 0, -1])
    out, labels = KorniaLogicMix(p=1.0, keepdim=True, data_keys=KEYS)(image, targets)
    assert torch.equal(out, image)
    assert torch.equal(labels, targets)
    out, labels = KorniaLogicMix(p=1.0, data_keys=KEYS)(image, targets)
    assert out.shape == (1, 3, 8, 8)
    assert labels.shape == (1, 3)


@pytest.mark.parametrize("keepdim", [False, True])
@pytest.mark.parametrize("shape", [(8, 8), (3, 8, 8), (1, 3, 8, 8), (4, 3, 8, 8)])
def test_shapes_are_those_of_kornias_own(shape, keepdim):
    image = torch.rand(shape)
    wanted = K.RandomMixUpV2(p=1.0, keepdim=keepdim)(image)
    assert KorniaLogicMix(p=1.0, keepdim=keepdim)(image).shape == wanted.shape
    container = K.AugmentationSequential(KorniaLogicMix(p=1.0), data_keys=["input"], keepdim=keepdim)
    own = K.AugmentationSequential(K.RandomMixUpV2(p=1.0), data_keys=["input"], keepdim=keepdim)
    assert container(image).shape == own(image).shape


def test_p_and_same_on_batch_mean_what_they_do_in_kornia():
    """p: a coin per sample, as in RandomJigsaw. same_on_batch: one share for all, not one partner, as in
    RandomMixUpV2; a container hands its own same_on_batch down."""
    shape = 64, 3, 8, 8
    for kind in (K.RandomJigsaw, KorniaLogicMix, KorniaMixup):
        torch.manual_seed(0)
        assert 16 <= kind(p=0.5).forward_parameters(shape)["batch_prob"].sum() <= 48
        together = kind(p=0.5, same_on_batch=True)
        assert all(len(together.forward_parameters(shape)["batch_prob"].unique()) == 1 for _ in range(20))
    own = K.RandomMixUpV2(same_on_batch=True).forward_parameters(shape)
    ours = KorniaMixup(same_on_batch=True).forward_parameters(shape)
    assert len(own["mixup_lambdas"].unique()) == len(ours["weight"][:, 1].unique()) == 1
    assert len(own["mixup_pairs"].unique()) > 8
    assert len(ours["index"][:, 1].unique()) > 8
    inner = KorniaLogicMix(p=0.5)
    K.AugmentationSequential(inner, data_keys=KEYS, same_on_batch=True)
    assert all(len(inner.forward_parameters(shape)["size"].unique()) == 1 for _ in range(20))


def test_copies_and_files_of_it_replay(tmp_path):
    """Parameters outlive the module: another one, or one from a file, makes the same of them."""
    images, targets = batch("cpu")
    mix = KorniaLogicMix(p=0.5, data_keys=KEYS)
    first = mix(images, targets)
    torch.save(mix._params, tmp_path / "params.pt")
    params = torch.load(tmp_path / "params.pt")
    for other in (KorniaLogicMix(data_keys=KEYS), copy.deepcopy(mix), pickle.loads(pickle.dumps(mix))):
        assert all(torch.equal(a, b) for a, b in zip(first, other(images, targets, params=params), strict=True))


def test_mixes_in_eval_as_kornia_does(device):
    images, targets = batch(device)
    mix = KorniaLogicMix(p=1.0).to(device).eval()
    assert not torch.equal(mix(images, targets, data_keys=KEYS)[0], images)


def test_ormixup_is_on_in_every_other_epoch(device):
    images, targets = batch(device)
    mix = KorniaOrMixup(data_keys=KEYS).to(device)
    mix.set_epoch(1)
    out, labels = mix(images, targets)
    assert torch.equal(out, images)
    assert torch.equal(labels, targets)
    mix.set_epoch(2)
    assert not torch.equal(mix(images, targets)[0], images)


def test_kornias_own_mixes_are_as_before():
    KorniaLogicMix()
    augment = K.AugmentationSequential(K.RandomMixUpV2(), data_keys=KEYS)
    with pytest.raises(NotImplementedError):
        augment(torch.rand(4, 3, 8, 8), torch.arange(4))
    with pytest.raises(NotImplementedError):
        KorniaLogicMix(data_keys=["input", "mask"])(torch.rand(4, 3, 8, 8), torch.rand(4, 1, 8, 8))


def test_wrong_values():
    with pytest.raises(ValueError, match="p=2"):
        KorniaLogicMix(p=2)
    with pytest.raises(ValueError, match="k_max=2"):
        KorniaLogicMix(k_min=3, k_max=2)


def test_nothing_waits_for_the_device():
    """On fake tensors, a value that is asked for raises."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    mix = KorniaLogicMix(p=0.5, data_keys=KEYS)
    with FakeTensorMode():
        out, labels = mix(torch.rand(8, 3, 8, 8), torch.zeros(8, 5, dtype=torch.int8))
    assert out.shape == (8, 3, 8, 8)
    assert labels.dtype == torch.int8


@pytest.mark.parametrize(("theirs", "ours"), [(KorniaLogicMix, GPULogicMix), *SIBLINGS])
def test_the_same_for_a_batch_in_which_nobody_is_mixed(device, theirs, ours):
    """A batch of one, and an epoch without: there are no shares to draw."""
    images, targets = batch(device)
    mix = theirs(same_on_batch=True, data_keys=KEYS).to(device)
    out, labels = mix(images[:1], targets[:1])
    assert torch.equal(out, images[:1])
    assert torch.equal(labels, targets[:1].to(labels.dtype))
    mix.set_epoch(1)
    out, labels = mix(images, targets)
    assert torch.equal(out, images) == (ours is OrMixup)
    assert torch.equal(labels, targets.to(labels.dtype)) == (ours is OrMixup)


@pytest.mark.parametrize(("theirs", "ours"), SIBLINGS)
@pytest.mark.parametrize("option", [{"normalize": ((0.5,), (0.25,))}, {"out_dtype": torch.bfloat16}])
def test_range_and_type_stay(theirs, ours, option):
    """Samples that are not mixed would stay without."""
    with pytest.raises(TypeError, match=rf"{next(iter(option))}=.*Kornia's Normalize.*{ours.__name__}\("):
        theirs(**option)
