"""losses.py: against mlcpl, against the formulas label by label, at extreme logits, and on fake CUDA tensors."""

import math

import mlcpl.losses
import pytest
import torch
from cases import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

from gpu_logicmix import DecoupledAsymmetricLoss, PartialAsymmetricLoss, PartialBCELoss, PartialFocalLoss

NAN = float("nan")
LOSSES = [PartialBCELoss, PartialFocalLoss, PartialAsymmetricLoss, DecoupledAsymmetricLoss]
every_loss = pytest.mark.parametrize("make", LOSSES, ids=lambda c: c.__name__)
KINK = math.log(0.05 / 0.95)  # where clip=0.05 begins to cut: rounding alone decides on the gradient there


def some_batch(batch=16, categories=12, scale=4.0, dtype=torch.float32, seed=0, soft=False, device="cpu"):
    """Logits within +-scale and targets of 0, 1, -1, or of anything in [0, 1] and -1."""
    generator = torch.Generator().manual_seed(seed)
    logits = (torch.rand(batch, categories, generator=generator, dtype=torch.float64) * 2 - 1) * scale
    logits[(logits - KINK).abs() < 1e-3] += 0.01
    targets = torch.randint(-1, 2, (batch, categories), generator=generator).double()
    if soft:
        targets = torch.where(targets == -1, -1, torch.rand(batch, categories, generator=generator).double())
    return logits.to(dtype).to(device), targets.to(dtype).to(device)


def value_and_gradient(loss, logits, *inputs):
    logits = logits.detach().clone().requires_grad_()
    out = loss(logits, *inputs)
    out.sum().backward()
    return out.detach(), logits.grad


def as_nan(targets):
    return targets.masked_fill(targets == -1, NAN)


def formula(z, y, gamma_pos=0.0, gamma_neg=0.0, clip=0.0):
    """One label in Python numbers, straight from the papers; None is unknown."""
    if y is None:
        return 0.0
    p = 1 / (1 + math.exp(-z))
    q = min(1 - p + clip, 1)
    return -y * (1 - p) ** gamma_pos * math.log(p) - (1 - y) * (1 - q) ** gamma_neg * math.log(q)


# ------------------------------------------------------------------------------------------------ mlcpl
def both(kind, gamma, gamma_neg, clip, alpha, assume_negative, discard, **rest):
    """Our loss and the one of mlcpl with the same settings."""
    weights = {"alpha_pos": alpha, "alpha_neg": 1.5}
    theirs = {**weights, **rest}
    ours = {**weights, **rest, "assume_negative": assume_negative, "normalize": "mlcpl" if rest["normalize"] else None}
    name = f"Partial{'Negative' if assume_negative else ''}{kind}WithLogitLoss"
    if kind == "BCE":
        return PartialBCELoss(**ours), getattr(mlcpl.losses, name)(**theirs)
    extra = {"discard_focal_grad": discard}
    if kind == "Focal":
        return PartialFocalLoss(gamma, **ours, **extra), getattr(mlcpl.losses, name)(gamma, **theirs, **extra)
    extra |= {"gamma_pos": gamma, "gamma_neg": gamma_neg, "clip": clip}
    return PartialAsymmetricLoss(**ours, **extra), getattr(mlcpl.losses, name)(**theirs, **extra)


# In float32, the rounding of 1 - sigmoid alone puts mlcpl further than 1e-6 from the truth at a logit of 4.
@pytest.mark.parametrize(("dtype", "scale"), [(torch.float32, 2.0), (torch.float64, 15.0)])
@settings(max_examples=examples(100), deadline=None)
@given(
    kind=st.sampled_from(["BCE", "Focal", "Asymmetric"]),
    gamma=st.sampled_from([0, 0.5, 1, 2, 4]),
    gamma_neg=st.sampled_from([0, 1, 2.5, 4]),
    clip=st.sampled_from([0, 0.05, 0.2]),
    alpha=st.sampled_from([1, 0.25]),
    assume_negative=st.booleans(),
    normalize=st.booleans(),
    discard=st.booleans(),
    reduction=st.sampled_from(["mean", "sum", "none"]),
    soft=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_values_and_gradients_are_those_of_mlcpl(dtype, scale, seed, soft, **settings):
    ours, theirs = both(**settings)
    logits, targets = some_batch(scale=scale, dtype=dtype, seed=seed, soft=soft)
    logits[(torch.sigmoid(logits) - settings["clip"]).abs() < 1e-5] += 0.01
    value, gradient = value_and_gradient(ours, logits, targets)
    expected, expected_gradient = value_and_gradient(theirs, logits, as_nan(targets))
    torch.testing.assert_close(value, expected, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(gradient, expected_gradient, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("kind", ["BCE", "Focal", "Asymmetric"])
def test_float32_is_closer_to_the_truth_than_mlcpl(kind):
    """At a logit of 15, 1 - sigmoid has lost most of its digits in float32, log-sigmoid none."""
    ours, theirs = both(kind, 2, 4, 0, 1, False, True, normalize=False, reduction="none")
    logits, targets = some_batch(64, 80, scale=15.0)
    truth, slope = value_and_gradient(theirs, logits.double(), as_nan(targets).double())
    value, gradient = value_and_gradient(ours, logits, targets)
    torch.testing.assert_close(value.double(), truth, rtol=2e-6, atol=1e-6)
    torch.testing.assert_close(gradient.double(), slope, rtol=2e-6, atol=1e-6)
    assert (theirs(logits, as_nan(targets)) - truth).abs().max() > 100 * (value - truth).abs().max()


def test_the_default_asymmetric_loss_is_the_one_of_the_authors_code():
    logits, targets = some_batch(32, 80)
    theirs = mlcpl.losses.PartialAsymmetricWithLogitLoss(clip=0.05, gamma_pos=0, gamma_neg=4)
    value, gradient = value_and_gradient(PartialAsymmetricLoss(), logits, targets)
    expected, expected_gradient = value_and_gradient(theirs, logits, as_nan(targets))
    torch.testing.assert_close(value, expected, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(gradient, expected_gradient, rtol=1e-5, atol=1e-9)  # gradients are small: look closer


# ------------------------------------------------------------------------------------------------ formulas
labels = st.sampled_from([0.0, 1.0, 0.3, None])


@settings(max_examples=examples(100), deadline=None)
@given(
    rows=st.lists(st.lists(st.tuples(st.floats(-8, 8), labels), min_size=3, max_size=3), min_size=1, max_size=4),
    gammas=st.tuples(st.sampled_from([0, 0.5, 3]), st.sampled_from([0, 4])),
    clip=st.sampled_from([0, 0.05]),
    unknown=st.sampled_from([-1.0, NAN]),
)
def test_label_by_label(rows, gammas, clip, unknown):
    logits = torch.tensor([[z for z, _ in row] for row in rows], dtype=torch.float64)
    targets = torch.tensor([[unknown if y is None else y for _, y in row] for row in rows], dtype=torch.float64)
    expected = torch.tensor([[formula(z, y, *gammas, clip) for z, y in row] for row in rows], dtype=torch.float64)
    known = sum(y is not None for row in rows for _, y in row)

    def loss(reduction):
        return PartialAsymmetricLoss(gammas[1], gammas[0], clip, reduction, unknown=unknown)(logits, targets)

    torch.testing.assert_close(loss("none"), expected)
    torch.testing.assert_close(loss("sum"), expected.sum())
    torch.testing.assert_close(loss("mean"), expected.sum() / max(known, 1))


def test_bce_is_torch_on_full_labels():
    logits, targets = some_batch()
    targets = (targets == 1).float()
    expected = torch.nn.functional.binary_cross_entropy_with_logits(logits, targets)
    torch.testing.assert_close(PartialBCELoss()(logits, targets), expected)


@pytest.mark.parametrize("normalize", ["known", (-4.45, 5.45, 1.0)])
def test_durand_normalisation(normalize):
    logits, targets = some_batch(5, 4, dtype=torch.float64)
    targets[0], targets[1] = -1, 1  # none known, all known
    a, b, c = (1, 0, -1) if normalize == "known" else normalize
    samples = []
    for z_row, y_row in zip(logits.tolist(), targets.tolist(), strict=True):
        terms = [formula(z, y) for z, y in zip(z_row, y_row, strict=True) if y != -1]
        if terms:
            samples.append((a * (len(terms) / 4) ** c + b) / 4 * sum(terms))
    assert 1 < len(samples) < 5
    expected = torch.tensor(sum(samples) / len(samples), dtype=torch.float64)
    loss = PartialBCELoss(normalize=normalize)
    torch.testing.assert_close(loss(logits, targets), expected)
    assert loss.count(targets) == len(samples)
    summed = PartialBCELoss("sum", normalize=normalize)(logits, targets)
    torch.testing.assert_close(summed, expected * len(samples))
    each = PartialBCELoss("none", normalize=normalize)(logits, targets)
    torch.testing.assert_close(each.sum(), summed)


def test_the_worked_weights_of_durand():
    """g(s) = -4.45 s + 5.45, as a sample with the share s of its labels known weighs more."""
    loss = PartialBCELoss("sum", normalize=(-4.45, 5.45, 1.0))
    for known, weight in ((1, 5.005), (5, 3.225), (10, 1.0)):
        targets = torch.full((1, 10), -1.0)
        targets[0, :known] = 1
        expected = weight / 10 * known * math.log(2)
        assert loss(torch.zeros(1, 10), targets).item() == pytest.approx(expected, rel=1e-6)


def test_the_worked_numbers_of_the_decoupled_loss():
    logits, targets = torch.tensor([[1.0, -1.0]] * 2), torch.tensor([[1, 0]] * 2)
    cells = DecoupledAsymmetricLoss(reduction="none")(logits, targets, torch.tensor([False, True]))
    assert cells.flatten().tolist() == pytest.approx([0.313262, 0.000568, 0.001639, 0.313262], abs=1e-6)


def test_durand_known_weighs_samples_alike():
    """The mean over a sample's known labels, so that one with few labels counts as much as one with many."""
    logits = torch.tensor([[0.3, 1.0, -2.0, 0.5], [1.5, 0.0, 0.0, 0.0]])
    targets = torch.tensor([[1, 0, 1, 1], [0, -1, -1, -1]])
    bce = torch.nn.functional.binary_cross_entropy_with_logits
    first, second = bce(logits[0], targets[0].float()), bce(logits[1, :1], targets[1, :1].float())
    torch.testing.assert_close(PartialBCELoss(normalize="known")(logits, targets), (first + second) / 2)


# ------------------------------------------------------------------------------------------------ decoupled
def test_decoupled_is_one_policy_per_kind_of_sample():
    logits, targets = some_batch()
    mixed = torch.arange(16) % 3 == 0
    value, gradient = value_and_gradient(DecoupledAsymmetricLoss(reduction="sum"), logits, targets, mixed)
    original, a = value_and_gradient(PartialAsymmetricLoss(4, 0, 0.05, "sum"), logits[~mixed], targets[~mixed])
    other, b = value_and_gradient(PartialAsymmetricLoss(0, 4, 0, "sum"), logits[mixed], targets[mixed])
    torch.testing.assert_close(value, original + other)
    torch.testing.assert_close(gradient[~mixed], a)
    torch.testing.assert_close(gradient[mixed], b)
    mean = DecoupledAsymmetricLoss()(logits, targets, mixed)
    torch.testing.assert_close(mean, (original + other) / (targets != -1).sum())


def test_decoupled_without_mixed_samples_is_the_asymmetric_loss():
    logits, targets = some_batch()
    expected = PartialAsymmetricLoss()(logits, targets)
    assert DecoupledAsymmetricLoss()(logits, targets) == expected
    assert DecoupledAsymmetricLoss()(logits, targets, torch.zeros(16, dtype=torch.bool)) == expected


def test_decoupled_takes_the_plan_of_the_mix():
    from gpu_logicmix import GPULogicMix

    torch.manual_seed(0)
    mix = GPULogicMix(p=0.5)
    plan = mix.plan(16)
    _, targets = mix(torch.rand(16, 3, 4, 4), some_batch()[1], plan)
    assert DecoupledAsymmetricLoss()(some_batch()[0], targets, plan.mixed) > 0


# ------------------------------------------------------------------------------------------------ robustness
def with_mixed(make, batch):
    return (torch.arange(batch) % 2 == 0,) if make is DecoupledAsymmetricLoss else ()


@every_loss
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("discard", [True, False])
@pytest.mark.parametrize("gamma", [0.5, 4])
def test_finite_at_extreme_logits(make, dtype, discard, gamma, device):
    extremes = [-1e4, -100.0, -20.0, KINK, 0.0, 20.0, 100.0, 1e4]
    logits = torch.tensor(extremes, dtype=dtype, device=device).repeat(4, 1)
    targets = torch.tensor([0.0, 1.0, -1.0, 0.5], device=device)[:, None].expand(4, 8)
    options = {} if make is PartialBCELoss else {"discard_focal_grad": discard}
    if make is PartialFocalLoss:
        options |= {"gamma": gamma}
    elif make is not PartialBCELoss:
        options |= {"gamma_neg": gamma, "gamma_pos": gamma}
    value, gradient = value_and_gradient(
        make(**options, reduction="none"), logits, targets, *(m.to(device) for m in with_mixed(make, 4))
    )
    assert value.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert gradient.dtype == dtype
    assert value.isfinite().all()
    assert gradient.isfinite().all()
    assert (value >= 0).all()
    assert (gradient[0] >= 0).all()  # an absent label never pulls a logit up
    assert (gradient[1] <= 0).all()
    if make is PartialBCELoss:
        assert value[1, 0] == pytest.approx(1e4, rel=1e-2)  # not capped at the logarithm of some epsilon
        assert gradient[1, 0] == -1


@every_loss
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("normalize", [None, "known", "mlcpl"])
def test_no_known_label_gives_zero(make, reduction, normalize, device):
    logits, targets = some_batch(device=device)
    targets = torch.full_like(targets, -1)
    loss = make(reduction=reduction, normalize=normalize)
    value, gradient = value_and_gradient(loss, logits, targets, *(m.to(device) for m in with_mixed(make, 16)))
    assert torch.equal(value, torch.zeros_like(value))
    assert torch.equal(gradient, torch.zeros_like(gradient))


@every_loss
def test_unknown_labels_get_no_gradient_and_known_ones_do(make):
    logits, targets = some_batch(scale=2.0)
    _, gradient = value_and_gradient(make(), logits, targets, *with_mixed(make, 16))
    assert (gradient[targets == -1] == 0).all()
    assert (gradient[targets == 1] < 0).all()
    assert (gradient[targets == 0] > 0).all()


@every_loss
@pytest.mark.parametrize("dtype", [torch.int8, torch.int64, torch.float16, torch.float64])
def test_label_types(make, dtype):
    logits, targets = some_batch()
    expected = make()(logits, targets, *with_mixed(make, 16))
    assert make()(logits, targets.to(dtype), *with_mixed(make, 16)) == expected
    by_nan = make(unknown=NAN)(logits, as_nan(targets), *with_mixed(make, 16))
    assert by_nan == expected
    positive = targets == 1
    negative = make(assume_negative=True)(logits, targets, *with_mixed(make, 16))
    assert make()(logits, positive, *with_mixed(make, 16)) == negative  # bool: everything known


@every_loss
def test_assume_negative(make):
    logits, targets = some_batch()
    value = make(assume_negative=True)(logits, targets, *with_mixed(make, 16))
    assert value == make()(logits, targets.clamp(min=0), *with_mixed(make, 16))
    assert value == make(assume_negative=True, unknown=NAN)(logits, as_nan(targets), *with_mixed(make, 16))
    assert make(assume_negative=True).count(targets) == targets.numel()


@every_loss
def test_inputs_are_not_written_to(make):
    logits, targets = some_batch()
    before = logits.clone(), targets.clone()
    make()(logits, targets, *with_mixed(make, 16))
    assert torch.equal(logits, before[0])
    assert torch.equal(targets, before[1])


@every_loss
def test_a_nan_logit_is_not_hidden(make):
    logits, targets = some_batch()
    logits[0, 0], targets[0, 0] = NAN, 1
    assert make()(logits, targets, *with_mixed(make, 16)).isnan()


@every_loss
@pytest.mark.parametrize("normalize", [None, "known"])
def test_sum_and_count_make_a_mean_over_several_batches(make, normalize):
    """As gradient accumulation and several processes need it."""
    logits, targets = some_batch()
    targets[:4] = -1  # so that the parts differ in known labels
    mixed = with_mixed(make, 16)
    loss = make(reduction="sum", normalize=normalize)
    parts = [slice(0, 5), slice(5, 16)]
    total = sum(loss(logits[part], targets[part], *(m[part] for m in mixed)) for part in parts)
    count = sum(loss.count(targets[part]) for part in parts)
    torch.testing.assert_close(total / count, make(normalize=normalize)(logits, targets, *mixed))


# ------------------------------------------------------------------------------------------------ promises
@every_loss
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("options", [{}, {"assume_negative": True}, {"normalize": "known"}, {"unknown": NAN}], ids=str)
@pytest.mark.parametrize("kind", ["cuda", "cpu"])
def test_no_host_sync_on_fake_tensors(make, dtype, options, kind):
    """Fake CUDA also sees a tensor made in the wrong place, but autograd does not run there without a device: the
    backward pass is looked at on the fake CPU."""
    with FakeTensorMode():
        logits = torch.empty(8, 80, device=kind, dtype=dtype, requires_grad=True)
        targets = torch.empty(8, 80, device=kind)
        mixed = (torch.empty(8, device=kind, dtype=torch.bool),) if make is DecoupledAsymmetricLoss else ()
        value = make(**options)(logits, targets, *mixed)
        assert value.device.type == kind
        if kind == "cpu":
            value.backward()
            assert logits.grad.dtype == dtype


def test_fake_cuda_would_notice_a_sync():
    with FakeTensorMode(), pytest.raises(DataDependentOutputException):
        PartialBCELoss()(torch.empty(8, 80, device="cuda"), torch.empty(8, 80, device="cuda")).item()


@every_loss
@pytest.mark.filterwarnings("ignore")
def test_compiles_without_a_graph_break(make, device):
    torch._dynamo.reset()
    loss = make(normalize="known")
    # The last loss has the operators of all: generating code for that one is enough.
    backend = "inductor" if make is DecoupledAsymmetricLoss else "aot_eager"
    compiled = torch.compile(loss, fullgraph=True, dynamic=False, backend=backend)
    logits, targets = some_batch(device=device)
    mixed = tuple(m.to(device) for m in with_mixed(make, 16))
    value, gradient = value_and_gradient(loss, logits, targets, *mixed)
    graph_value, graph_gradient = value_and_gradient(compiled, logits, targets, *mixed)
    torch.testing.assert_close(graph_value, value, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(graph_gradient, gradient, rtol=1e-5, atol=1e-7)


# ------------------------------------------------------------------------------------------------ bad input
@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: PartialBCELoss("average"), "reduction='average': must be one of mean, sum, none"),
        (lambda: PartialBCELoss(normalize="yes"), "normalize='yes': must be None, 'known'"),
        (lambda: PartialBCELoss(normalize=(1, 2)), r"normalize=\(1, 2\)"),
        (lambda: PartialFocalLoss(-1), "gamma=-1: must be 0 or more"),
        (lambda: PartialAsymmetricLoss(gamma_neg=NAN), "gamma_neg=nan: must be 0 or more"),
        (lambda: PartialAsymmetricLoss(clip=1.5), "clip=1.5: must be at least 0 and below 1"),
        (lambda: DecoupledAsymmetricLoss(mixed_clip=-0.1), "mixed_clip=-0.1"),
        (lambda: PartialBCELoss()(torch.rand(2, 3), torch.ones(3)), r"logits \[2, 3\] and targets \[3\]"),
        (lambda: PartialBCELoss()(torch.ones(2, 3).int(), torch.ones(2, 3)), "floating-point type, not torch.int32"),
        (
            lambda: DecoupledAsymmetricLoss()(torch.rand(2, 3), torch.ones(2, 3), torch.ones(2, 3).bool()),
            r"mixed must be \[2\] of bool",
        ),
        (
            lambda: DecoupledAsymmetricLoss()(torch.rand(2, 3), torch.ones(2, 3), torch.ones(2)),
            "not .2. of torch.float32",
        ),
    ],
)
def test_bad_arguments_are_named(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_the_settings_can_be_read():
    assert "gamma_neg=4, gamma_pos=0, clip=0.05" in repr(PartialAsymmetricLoss())
