"""The bank of earlier samples against a plain list."""

import copy
import pickle

import pytest
import torch
from mixing import assert_same, chi_square, counts, logicmix_oracle, some_batch
from torch.optim.swa_utils import AveragedModel

from gpu_logicmix import GPULogicMix, Mixup, MixupPME, MultiLabelMixup, OrMixup, logic_or


@pytest.mark.parametrize("sizes", [[4] * 6, [1] * 30, [3, 5, 2, 1, 8, 8, 1, 4, 2, 9, 1, 1]])
@pytest.mark.parametrize("bank", [1, 5, 16])
@pytest.mark.parametrize("grad", [False, True])
def test_bank_equals_a_list_of_the_last_samples(way, sizes, bank, grad, device):
    """The pool of a batch is the batch and then, newest first, the last `bank` samples before it."""
    torch.manual_seed(0)
    mix = GPULogicMix(p=0.8, k_min=2, k_max=4, bank=bank).to(device)
    earlier = []
    partners = set()
    for step, size in enumerate(sizes):
        images, targets = some_batch(size, seed=step, device=device)
        images.requires_grad_(grad)
        plan = mix.plan(size, device)
        mixed, labels = mix(images, targets, plan)
        pool = [*zip(images.detach(), targets, strict=True), *earlier[::-1][:bank]]
        assert plan.index.max() < len(pool)
        assert (plan.size <= len(pool)).all()
        expected, expected_labels = logicmix_oracle([x for x, _ in pool], torch.stack([y for _, y in pool]), plan)
        torch.testing.assert_close(mixed.detach().double(), expected, rtol=1e-6, atol=1e-6)
        assert_same(labels, expected_labels)
        earlier += zip(images.detach(), targets, strict=True)
        partners |= {i - size for i in plan.index.flatten().tolist() if i >= size}
    assert partners <= set(range(bank))
    assert len(partners) >= min(bank, 12), "the bank is hardly drawn from"


def test_bank_is_drawn_from_uniformly():
    torch.manual_seed(0)
    mix = GPULogicMix(p=1.0, k_min=2, k_max=2, bank=9)
    images, targets = some_batch(3)
    for _ in range(4):
        mix(images, targets)
    partner = torch.cat([mix.plan(3).index[:1, 1] for _ in range(20_000)])
    assert chi_square(counts(partner, 12)[1:]) > 1e-5


def filled_mix(bank=6, steps=5, batch=4, **options):
    torch.manual_seed(0)
    mix = GPULogicMix(p=1.0, bank=bank, **options)
    for step in range(steps):
        mix(*some_batch(batch, seed=step))
    return mix


def test_bank_travels_in_the_state_dict():
    mix, fresh = filled_mix(), GPULogicMix(p=1.0, bank=6)
    saved = mix.state_dict()
    fresh.load_state_dict(saved)
    images, targets = some_batch(4, seed=9)
    plan = mix.plan(4)
    assert plan.index.max() > 3
    for a, b in zip(mix(images, targets, plan), fresh(images, targets, plan), strict=True):
        assert torch.equal(a, b)
    assert saved["bank_seen"] == 24  # the mix's own, not a copy
    assert fresh.state_dict()["bank_seen"].data_ptr() != saved["bank_seen"].data_ptr()
    fresh.load_state_dict(GPULogicMix(bank=6).state_dict())
    assert fresh.state_dict() == {}
    assert fresh.plan(1).size.tolist() == [1]
    assert GPULogicMix().state_dict() == {}


@pytest.mark.parametrize("size", [2, 6, 40])
def test_loaded_into_a_bank_of_another_size(size):
    """Only samples that were saved are drawn, and they are the right ones."""
    mix = filled_mix()
    other = GPULogicMix(p=1.0, k_min=3, k_max=3, bank=size)
    other.load_state_dict(mix.state_dict())
    earlier = [sample for step in range(5) for sample in zip(*some_batch(4, seed=step), strict=True)]
    for step in range(20, 32):
        images, targets = some_batch(5, seed=step)
        plan = other.plan(5)
        pool = [*zip(images, targets, strict=True), *earlier[::-1][:size]]
        assert plan.index.max() < len(pool)
        if step == 20:
            assert plan.index.max() < 5 + 10, "six samples of bank and four of batch were saved"
        expected, labels = logicmix_oracle([x for x, _ in pool], torch.stack([y for _, y in pool]), plan)
        mixed, got = other(images, targets, plan)
        torch.testing.assert_close(mixed.double(), expected, rtol=1e-6, atol=1e-6)
        assert_same(got, labels)
        earlier += zip(images, targets, strict=True)


@pytest.mark.parametrize("batch", [1, 4, 9])
@pytest.mark.parametrize("grad", [False, True])
def test_the_same_plan_twice_gives_the_same_result(batch, grad):
    mix = filled_mix()
    images, targets = some_batch(batch, seed=9)
    images.requires_grad_(grad)
    plan = mix.plan(batch)
    assert plan.index.max() >= batch
    first, again = mix(images, targets, plan), mix(images, targets, plan)
    for a, b in zip(first, again, strict=True):
        assert torch.equal(a, b)
    assert mix.state_dict()["bank_seen"] == 20 + batch


def test_an_old_plan_drops_the_partners_that_are_gone():
    """Drawn before reset_bank(), or many batches ago: the mean of what is left, never of black images."""
    for reset in (True, False):
        mix = filled_mix(k_min=3, k_max=3)
        plan = mix.plan(4)
        assert plan.index.max() > 3
        if reset:
            mix.reset_bank()
        else:
            for step in range(30, 40):
                mix(*some_batch(4, seed=step))
        images, targets = some_batch(4, seed=9)
        mixed, labels = mix(images, targets, plan)
        for i, group in enumerate(plan.index.tolist()):
            members = [j for j in group[: plan.size[i]] if j < 4]
            torch.testing.assert_close(mixed[i], images[members].mean(0))
            assert_same(labels[i], torch.stack([logic_or(targets[None, members])[0]])[0])


@pytest.mark.parametrize("bank", [1, 3, 40])
@pytest.mark.parametrize("steps", [0, 5])
def test_a_plan_of_another_bank_drops_the_partners_that_this_one_lacks(bank, steps):
    """One that is smaller or has seen nothing holds fewer of them; none is read outside of it."""
    plan = filled_mix(bank=12, k_min=4, k_max=4).plan(4)
    assert plan.index.max() > 4 + 3
    other = filled_mix(bank=bank, steps=steps)
    images, targets = some_batch(4, seed=9)
    mixed, labels = other(images, targets, plan)
    earlier = [sample for step in range(steps) for sample in zip(*some_batch(4, seed=step), strict=True)]
    pool = [*zip(images, targets, strict=True), *earlier[::-1][:bank]]
    for i, group in enumerate(plan.index.tolist()):
        members = [pool[j] for j in group[: plan.size[i]] if j < len(pool)]
        torch.testing.assert_close(mixed[i], torch.stack([x for x, _ in members]).mean(0))
        assert_same(labels[i], logic_or(torch.stack([y for _, y in members]), dim=0))


@pytest.mark.parametrize("make", [GPULogicMix, Mixup, OrMixup, MultiLabelMixup, MixupPME])
def test_a_plan_with_partners_from_a_bank_needs_a_bank(make):
    """On a GPU its indices would be read outside of the batch."""
    mix = filled_mix()
    images, targets = some_batch(4, seed=9)
    with pytest.raises(ValueError, match="plan was drawn by a mix with a bank, and this one has none"):
        make()(images, targets, mix.plan(4))
    make()(images, targets, GPULogicMix(bank=6).plan(4))  # an empty one: all partners are of the batch
    mix(images, targets, make().plan(4))


def test_averages_of_weights_and_copies_leave_the_bank_alone():
    from timm.utils import ModelEmaV2, ModelEmaV3

    def model():
        torch.manual_seed(0)
        return torch.nn.ModuleDict({"mix": GPULogicMix(bank=6), "norm": torch.nn.BatchNorm2d(3)})

    for average in (AveragedModel, ModelEmaV2, ModelEmaV3):
        net = model()
        averaged = average(net)
        for step in range(3):
            images, targets = some_batch(4, seed=step)
            net["norm"](net["mix"](images, targets)[0])
            averaged.update_parameters(net) if average is AveragedModel else averaged.update(net)
            averaged = copy.deepcopy(averaged)
        assert set(net.state_dict()) == {f"norm.{key}" for key in net["norm"].state_dict()}
        twin = copy.deepcopy(net)
        twin.load_state_dict(net.state_dict())
        assert twin["mix"].state_dict()["bank_seen"] == 12
    pickled = pickle.loads(pickle.dumps(net["mix"]))
    assert pickled.state_dict()["bank_seen"] == 12


def test_bank_made_in_inference_mode_works_outside():
    mix = GPULogicMix(bank=6)
    with torch.inference_mode():
        mix(*some_batch(4))
    mix(*some_batch(4, seed=1))
    images, targets = some_batch(9, seed=2)
    mixed, _ = mix(images.requires_grad_(), targets)
    mixed.sum().backward()
    with torch.inference_mode():
        mix(*some_batch(12, seed=3))
    mix(*some_batch(12, seed=4))
    assert mix.state_dict()["bank_seen"] == 41


def test_bank_rests_in_eval_and_after_reset():
    mix = GPULogicMix(bank=6)
    images, targets = some_batch(4)
    mix.eval()(images, targets)
    assert mix.state_dict() == {}
    mix.train()(images, targets)
    assert mix.state_dict()["bank_seen"] == 4
    mix.reset_bank()
    assert mix.plan(1).size.tolist() == [1]
    mix(images[..., :2], targets)  # another size is fine now


def test_bank_names_samples_that_do_not_fit():
    mix = GPULogicMix(bank=6)
    images, targets = some_batch(4)
    mix(images, targets)
    with pytest.raises(ValueError, match=r"images are torch.float32 of shape \(3, 6, 2\).*reset_bank"):
        mix(images[..., :2], targets)
    with pytest.raises(ValueError, match=r"targets are torch.float32 of shape \(4,\)"):
        mix(images, targets[:, :4])
