"""mix.py: the draw against chi-square, the arithmetic against a Python loop, the GPU promises on fake CUDA tensors."""

import copy
import itertools
import math
import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from mlcpl.augs.logic_mix import logic_mix_images, logic_mix_target
from mlcpl.augs.mixup_pme import mixup_pme_with_batch
from scipy import stats
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

import gpu_logicmix.augment.apply
from gpu_logicmix import GPULogicMix, MixPlan, Mixup, MixupPME, MultiLabelMixup, OrMixup, hide_labels, label_counts
from gpu_logicmix.augment.logicmix import draw_groups

NAN = float("nan")
MIXES = [GPULogicMix, Mixup, OrMixup, MultiLabelMixup, MixupPME]
ALL = [*MIXES, lambda: GPULogicMix(bank=16)]
NAMES = [mix.__name__ for mix in MIXES] + ["GPULogicMix-bank"]
every_mix = pytest.mark.parametrize("make", ALL, ids=NAMES)


# -------------------------------------------------------------------------------------------------------------- oracles
def is_unknown(label, unknown):
    return math.isnan(label) if math.isnan(unknown) else label == unknown


def or_oracle(labels, unknown):
    if any(label == 1 for label in labels):
        return 1
    if all(label == 0 for label in labels):
        return 0
    return unknown


def logicmix_oracle(images, targets, plan, unknown=-1):
    """One sample after the other, one category after the other."""
    new_images, new_targets = [], []
    for group, size in zip(plan.index.tolist(), plan.size.tolist(), strict=True):
        members = group[:size]
        new_images.append(sum(images[m].double() for m in members) / size)
        rows = [targets[m].tolist() for m in members]
        new_targets.append([or_oracle(labels, unknown) for labels in zip(*rows, strict=True)])
    return torch.stack(new_images), torch.tensor(new_targets, dtype=targets.dtype)


def pair_oracle(method, images, targets, plan, unknown=-1):
    """The siblings, from the paper's appendix."""

    def label(own, other, lam):
        if method is MixupPME:
            if is_unknown(own, unknown):
                return unknown
            return lam * own + (1 - lam) * (0.5 if is_unknown(other, unknown) else other)
        own, other = (0 if is_unknown(y, unknown) else y for y in (own, other))
        return lam * own + (1 - lam) * other if method is Mixup else int(own == 1 or other == 1)

    new_images, new_targets = [], []
    for (i, j), (lam, _) in zip(plan.index.tolist(), plan.weight.double().tolist(), strict=True):
        new_images.append(lam * images[i].double() + (1 - lam) * images[j].double())
        new_targets.append([label(a, b, lam) for a, b in zip(targets[i].tolist(), targets[j].tolist(), strict=True)])
    return torch.stack(new_images), torch.tensor(new_targets)


def some_batch(batch=8, categories=5, shape=(3, 6, 4), unknown=-1, dtype=torch.float32, device="cpu", seed=0):
    generator = torch.Generator().manual_seed(seed)
    images = torch.rand((batch, *shape), generator=generator)
    images = (images * 256).floor().to(dtype) if dtype == torch.uint8 else images.to(dtype)
    targets = torch.randint(-1, 2, (batch, categories), generator=generator).float()
    return images.to(device), targets.masked_fill(targets == -1, unknown).to(device)


def assert_same(a, b):
    torch.testing.assert_close(a.double(), b.double(), rtol=0, atol=0, equal_nan=True)


# ------------------------------------------------------------------------------------------------------- the arithmetic
TOLERANCE = {torch.float64: 1e-15, torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3, torch.uint8: 0.5}


@pytest.fixture(params=["host", "device"])
def way(request, monkeypatch):
    """Both ways of reading a group: its members alone, as on the CPU, or all places, as on a GPU or when compiled."""
    if request.param == "device":
        monkeypatch.setattr(gpu_logicmix.augment.apply, "_sizes_are_at_hand", lambda rows: False)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
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


# ------------------------------------------------------------------------------------------------------------- the draw
def chi_square(observed):
    """p-value of equal frequencies."""
    return stats.chisquare(torch.as_tensor(observed).flatten().numpy()).pvalue


def counts(values, bins):
    return torch.bincount(values.flatten(), minlength=bins)


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


# ------------------------------------------------------------------------------------------ what a GPU would mind about
@every_mix
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.uint8])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_no_sync_and_no_stray_device_on_fake_cuda(make, dtype, layout):
    mix = make()
    with FakeTensorMode():
        images = torch.empty(8, 3, 64, 64, dtype=dtype, device="cuda").to(memory_format=layout)
        targets = torch.empty(8, 9605, device="cuda")
        for _ in range(2):
            mixed, labels = mix(images, targets)
        assert (mixed.device.type, labels.device.type) == ("cuda", "cuda")
        assert (mixed.dtype, mixed.shape) == (images.dtype, images.shape)
        assert mixed.is_contiguous(memory_format=layout)
        plan = mix.plan(8, "cuda")
        assert {t.device.type for t in plan if t is not None} == {"cuda"}
        mix(images, targets, plan)


def test_fake_cuda_would_notice_a_sync():
    """`validate` waits for the device by design: the check above sees such a thing."""
    with FakeTensorMode():
        images, targets = torch.empty(8, 3, 8, 8, device="cuda"), torch.empty(8, 80, device="cuda")
        with pytest.raises(DataDependentOutputException):
            GPULogicMix(validate=True)(images, targets)


@every_mix
@pytest.mark.filterwarnings("ignore")
def test_compiles_without_a_graph_break(make, device):
    torch._dynamo.reset()
    images, targets = some_batch(8, shape=(3, 16, 16), device=device)
    mix = make()
    mix(images, targets)
    twin = copy.deepcopy(mix)
    compiled = torch.compile(twin, fullgraph=True, dynamic=False)
    plan = mix.plan(8, device)
    for eager, graph in zip(mix(images, targets, plan), compiled(images, targets, plan), strict=True):
        torch.testing.assert_close(eager, graph, rtol=1e-6, atol=1e-6)
    mixed, labels = compiled(images, targets)  # draws inside the graph
    again, _ = compiled(images, targets)
    assert mixed.shape == images.shape
    assert labels.shape == targets.shape
    assert not torch.equal(mixed, again)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_runs_inside_a_cuda_graph():
    images, targets = some_batch(32, 80, (3, 32, 32), device="cuda")
    mix = GPULogicMix()
    mix(images, targets)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        mixed, _ = mix(images, targets)
    graph.replay()
    first = mixed.clone()
    graph.replay()
    assert not torch.equal(first, mixed), "each replay must draw anew"


@every_mix
def test_gradient_goes_through_the_images(make, device):
    images, targets = some_batch(6, device=device)
    images = images.double().requires_grad_()
    mix = make()
    plan = mix.plan(6, device)
    mixed, _ = mix(images, targets, plan)
    upstream = torch.rand_like(mixed)
    mixed.backward(upstream)
    matrix = torch.zeros(6, 6, dtype=torch.float64, device=device)
    for i in range(6):
        for k in range(plan.size[i]):
            matrix[i, plan.index[i, k]] += 1 / plan.size[i] if plan.weight is None else plan.weight[i, k]
    expected = (matrix.T @ upstream.flatten(1)).view_as(images)
    torch.testing.assert_close(images.grad, expected, rtol=1e-6, atol=1e-6)
    if hasattr(mix, "reset_bank"):
        mix.reset_bank()
    torch.testing.assert_close(mix(images.detach(), targets, plan)[0], mixed, rtol=1e-12, atol=1e-12)


class LargestTensor(TorchDispatchMode):
    """The bytes of the largest tensor that any operator makes, leaving out the one that `result` is stored in."""

    def __init__(self):
        super().__init__()
        self.made = {}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(tensor, torch.Tensor):
                self.made[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage()  # keeps the address taken
        return result

    def beside(self, *results):
        theirs = {result.untyped_storage().data_ptr() for result in results}
        return max(storage.nbytes() for address, storage in self.made.items() if address not in theirs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
@pytest.mark.parametrize("k_max", [3, 8])
def test_no_temporary_as_large_as_the_batch(way, dtype, k_max):
    images, targets = some_batch(32, 80, (3, 96, 96), dtype=dtype)
    mix = GPULogicMix(k_max=k_max)
    with LargestTensor() as largest:
        mixed, labels = mix(images, targets)
    known = images.untyped_storage(), targets.untyped_storage()
    assert {s.data_ptr() for s in known}.isdisjoint({mixed.data_ptr(), labels.data_ptr()})
    for storage in known:
        largest.made.pop(storage.data_ptr(), None)
    assert largest.beside(mixed) <= 0.55 * mixed.nbytes  # uint8: an eighth of the batch as float32


def test_memory_of_the_draw_grows_with_batch_times_k():
    with LargestTensor() as largest:
        GPULogicMix(k_max=8).plan(4096)
    assert largest.beside() <= 4096 * 8 * 8


# ------------------------------------------------------------------------------------------------------------- the bank
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


def test_bank_travels_in_the_state_dict():
    torch.manual_seed(0)
    mix = GPULogicMix(p=1.0, bank=6)
    for step in range(5):
        mix(*some_batch(4, seed=step))
    fresh = GPULogicMix(p=1.0, bank=6)
    fresh.load_state_dict(mix.state_dict())
    images, targets = some_batch(4, seed=9)
    plan = mix.plan(4)
    assert plan.index.max() > 3
    for a, b in zip(mix(images, targets, plan), fresh(images, targets, plan), strict=True):
        assert torch.equal(a, b)
    assert fresh.bank_seen == 24
    assert not any(a.data_ptr() == b.data_ptr() for a, b in zip(fresh.buffers(), mix.buffers(), strict=True))
    empty = GPULogicMix(bank=6)
    fresh.load_state_dict(empty.state_dict())
    assert fresh.bank_seen is fresh.bank_images is None
    assert GPULogicMix().state_dict() == {}


def test_bank_rests_in_eval_and_after_reset():
    mix = GPULogicMix(bank=6)
    images, targets = some_batch(4)
    mix.eval()(images, targets)
    assert mix.bank_seen is None
    mix.train()(images, targets)
    assert mix.bank_seen == 4
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


# ------------------------------------------------------------------------------------------------------------ bad input
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
    with pytest.raises(ValueError, match=r"targets\[1, 0\] is nan"):
        GPULogicMix(validate=True)(X, torch.tensor([[1.0], [NAN], [0.0], [-1.0]]))
    GPULogicMix(validate=True, unknown=NAN)(X, torch.tensor([[1.0], [NAN], [0.0], [0.0]]))


# --------------------------------------------------------------------------------------------------------------- import
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
