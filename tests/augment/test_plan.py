"""The draw of the plan against chi-square, and replaying it."""

import numpy as np
import pytest
import torch
from mixing import MIXES, assert_same, chi_square, counts, logicmix_oracle, some_batch
from scipy import stats

from gpu_logicmix import (
    GPULogicMix,
    Mixup,
    MixupPME,
    MultiLabelMixup,
    OrMixup,
    RandAugment,
    RandomHorizontalFlip,
    hide_labels,
    label_counts,
)
from gpu_logicmix.augment.plan import draw_groups


def test_draw_of_sizes_and_share():
    torch.manual_seed(0)
    plan = GPULogicMix(p=0.3, k_min=2, k_max=5).plan(100_000)
    assert stats.binomtest(int(plan.mixed.sum()), 100_000, 0.3).pvalue > 1e-4
    assert chi_square(counts(plan.size[plan.mixed], 6)[2:]) > 1e-4
    assert set(plan.size[~plan.mixed].tolist()) == {1}
    assert (plan.index[:, 0] == torch.arange(100_000)).all()


def test_draw_of_partners_is_uniform_distinct_and_independent():
    torch.manual_seed(0)
    others = torch.stack([draw_groups(7, 4, 7) for _ in range(20_000)])  # [draws, 7, 4]
    assert (others[..., 0] == torch.arange(7)).all()
    assert (others.sort(-1).values.diff(dim=-1) > 0).all()
    for i in range(7):
        for place in (1, 2, 3):
            seen = counts(others[:, i, place], 7)
            assert seen[i] == 0
            assert chi_square([n for j, n in enumerate(seen.tolist()) if j != i]) > 1e-5
        ordered = counts((others[:, i, 1] * 7 + others[:, i, 2]) * 7 + others[:, i, 3], 343)
        assert (ordered > 0).sum() == 6 * 5 * 4  # every order of three others
        assert chi_square(ordered[ordered > 0]) > 1e-5
    # The partner of one sample says nothing of the partner of another.
    table = counts(others[:, 0, 1] * 7 + others[:, 1, 1], 49).view(7, 7)
    table = table[table.sum(1) > 0][:, table.sum(0) > 0]
    assert stats.chi2_contingency(table.numpy()).pvalue > 1e-5


def test_draw_of_partners_in_a_large_batch():
    torch.manual_seed(0)
    seen = torch.cat([(draw_groups(1000, 2, 1000)[:, 1] - torch.arange(1000)) % 1000 for _ in range(100)])
    assert chi_square(counts(seen, 1000)[1:]) > 1e-5


def test_seed_and_generator_fix_the_draw(device):
    for method in MIXES:
        torch.manual_seed(5)
        first = method().plan(50, device)
        torch.manual_seed(5)
        again = method().plan(50, device)
        other = method().plan(50, device)
        assert all(a is b is None or torch.equal(a, b) for a, b in zip(first, again, strict=True))
        assert not torch.equal(first.index, other.index)

        state = torch.random.get_rng_state()
        plans = [method(generator=torch.Generator(device).manual_seed(9)).plan(50) for _ in range(2)]
        assert all(a is b is None or torch.equal(a, b) for a, b in zip(*plans, strict=True))
        assert plans[0].index.device.type == device.type
        assert torch.equal(state, torch.random.get_rng_state()), "the global generator was used"


def test_a_plan_replays():
    for method in MIXES:
        mix = method()
        images, targets = some_batch()
        plan = mix.plan(8)
        for a, b in zip(mix(images, targets, plan), mix(images, targets, plan), strict=True):
            assert torch.equal(a, b)


def test_a_plan_made_by_hand_may_hold_anything_past_the_sizes(way):
    images, targets = some_batch(6)
    mix = GPULogicMix(k_max=4)
    plan = mix.plan(6)
    outside = torch.arange(4) >= plan.size[:, None]
    scribbled = plan._replace(index=torch.where(outside, torch.randint(6, (6, 4)), plan.index))
    assert not torch.equal(plan.index, scribbled.index)
    for a, b in zip(mix(images, targets, plan), mix(images, targets, scribbled), strict=True):
        assert torch.equal(a, b)


def test_forward_draws_a_new_plan_each_time():
    images, targets = some_batch(32)
    for method in MIXES:
        mix = method()
        assert not torch.equal(mix(images, targets)[0], mix(images, targets)[0]), method


@pytest.mark.parametrize(
    ("mix", "distribution"),
    [
        (Mixup(), stats.beta(0.2, 0.2)),
        (Mixup(alpha=1.0), stats.uniform()),
        (Mixup(alpha=8.0), stats.beta(8, 8)),
        (MultiLabelMixup(), stats.uniform()),
        (MixupPME(), stats.uniform(0.75, 0.25)),
    ],
)
def test_shares_of_the_siblings(mix, distribution):
    torch.manual_seed(0)
    plan = mix.plan(50_000)
    edges = distribution.ppf(np.linspace(0, 1, 11))
    edges[[0, -1]] = distribution.support()
    assert chi_square(np.histogram(plan.weight[:, 0].double().numpy(), edges)[0]) > 1e-4
    torch.testing.assert_close(plan.weight.sum(1), torch.ones(50_000))
    assert plan.mixed.all()
    assert (OrMixup(lam=0.25).plan(9).weight == torch.tensor([0.25, 0.75])).all()


def test_shares_of_tiny_alpha_are_numbers():
    share = Mixup(alpha=1e-3).plan(10_000).weight
    assert torch.isfinite(share).all()
    assert share[:, 0].mean() == pytest.approx(0.5, abs=0.03)


@pytest.mark.parametrize("empty", [0, 702])
def test_coco_labels_after_mixing(shared, empty):
    """The paper, section 2.3: at 30 % known, K 2-3, all mixed: 2.11 positive and 4.32 negative labels a sample.

    The file leaves out the 702 training images without any object, the paper does not.
    """
    with np.load(shared / "data" / "coco2014_labels.npz") as coco:
        labels = np.pad(coco["labels"][coco["split"] == "train"], ((0, empty), (0, 0)))
    positive, negative = [], []
    mix = GPULogicMix(p=1.0)
    for seed in range(4):  # one draw alone is off by 0.01 or so
        torch.manual_seed(seed)
        hidden = torch.from_numpy(hide_labels(labels, 0.3, seed))
        for index in torch.randperm(len(hidden)).split(512):
            counts = label_counts(mix(torch.zeros(len(index), 1, 1, 1), hidden[index])[1], dim=1)
            positive.append(counts.positive)
            negative.append(counts.negative)
    assert torch.cat(positive).double().mean() == pytest.approx(2.11, abs=0.03)
    assert torch.cat(negative).double().mean() == pytest.approx(4.32, abs=0.05)


def test_partners_with_replacement():
    """The authors' rule: each partner from all samples, the sample itself included."""
    torch.manual_seed(0)
    mix = GPULogicMix(p=1.0, k_min=3, k_max=3, partners="with-replacement")
    drawn = torch.stack([mix.plan(5).index for _ in range(20_000)])
    assert (drawn[..., 0] == torch.arange(5)).all()
    for i in range(5):
        assert chi_square(counts(drawn[:, i, 1] * 5 + drawn[:, i, 2], 25)) > 1e-5
    images, targets = some_batch(5)
    plan = mix.plan(5)
    expected, labels = logicmix_oracle(images, targets, plan)
    got = mix(images, targets, plan)
    torch.testing.assert_close(got[0].double(), expected, rtol=1e-6, atol=1e-6)
    assert_same(got[1], labels)
    assert GPULogicMix(p=1.0, k_max=6, k_min=6, partners="with-replacement").plan(2).size.tolist() == [6, 6]
    assert not mix.plan(1).mixed.any()
    with pytest.raises(ValueError, match=r"partners='all': must be distinct or with-replacement"):
        GPULogicMix(partners="all")


@pytest.mark.parametrize("method", MIXES)
def test_a_plan_says_mixed_only_where_something_is_mixed(method):
    images, targets = some_batch()
    mix = method()
    assert mix.plan(8).mixed.any()
    assert not mix.plan(1).mixed.any()
    mix.eval()
    assert not mix.active
    assert not mix.plan(8).mixed.any()
    mix.train()
    mix.mixup_enabled = False  # timm's switch
    assert not mix.active
    assert not mix.plan(8).mixed.any()
    assert mix(images, targets)[0] is images
    mix.mixup_enabled = True
    mix.set_epoch(1)
    assert mix.active == (method is not OrMixup)
    assert mix.plan(8).mixed.any() == mix.active
    still = mix.eval().plan(8)
    mix.train().set_epoch(2)
    for a, b in zip(mix(images, targets, still), (images, targets), strict=True):
        assert_same(a, b.clamp(min=0) if b is targets and method in (Mixup, OrMixup, MultiLabelMixup) else b)


class Draws(torch.utils.data.Dataset):
    """What a mix, RandAugment and flip with generators of their own draw in the workers of a DataLoader."""

    def __init__(self):
        one, two = torch.Generator().manual_seed(1), torch.Generator().manual_seed(2)
        self.parts = GPULogicMix(generator=one), RandAugment(generator=two), RandomHorizontalFlip(generator=two)

    def __len__(self):
        return 4

    def __getitem__(self, row):
        mix, augment, flip = self.parts
        return mix.plan(64).index.flatten(), augment.plan(64).operations.flatten(), flip.plan(64)


@pytest.mark.slow
def test_generators_differ_between_workers_and_epochs():
    def epochs(seed):
        torch.manual_seed(seed)
        loader = torch.utils.data.DataLoader(Draws(), batch_size=1, num_workers=2)
        return [[part.tolist() for part in batch] for _ in range(2) for batch in loader]

    first = epochs(0)
    for part in range(3):
        assert len({str(batch[part]) for batch in first}) == 8  # 2 epochs of 2 workers of 2 batches
    assert first == epochs(0)
    assert first != epochs(1)
