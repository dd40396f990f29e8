"""What every loss of the registry promises: no sync, one graph, known labels stay what they are, sums that add up."""

import math

import pytest
import torch
from cases import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from gpu_logicmix.losses import LOSSES, Batch, LossSum, Output
from gpu_logicmix.losses.csl import write_prior

NAMES = LOSSES.names()
PER_CATEGORY = {"pu-mlc"}  # no sum over labels
NAN = float("nan")
OPTIONS = {"ll-r": ["delta=20"], "ll-ct": ["delta=20"], "ll-cp": ["delta=20"], "csl": ["topk=1", "prior=known"]}
GROUPED = {name: [*OPTIONS[name], "per_group=true"] for name in OPTIONS}
every_loss = pytest.mark.parametrize("name", NAMES)


def make(name, options=OPTIONS, categories=6, **given):
    """A loss in its fourth epoch, when all that changes on the way has begun."""
    loss = LOSSES.make(name, options.get(name), **given)
    labels = torch.randint(-1, 2, (50, categories), generator=torch.Generator().manual_seed(1))
    loss.prepare(labels, [f"c{c}" for c in range(categories)])
    loss.set_epoch(3, 10)
    return loss


def some_batch(seed=0, batch=8, categories=6, dtype=torch.float64, device="cpu", scale=3.0):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(batch, categories, generator=generator, dtype=torch.float64) * scale
    targets = torch.randint(-1, 2, (batch, categories), generator=generator)
    mixed = torch.rand(batch, generator=generator) < 0.5
    return logits.to(dtype).to(device), targets.to(device), mixed.to(device)


def value_and_gradient(loss, logits, *inputs, **named):
    logits = logits.detach().clone().requires_grad_()
    out = loss(logits, *inputs, **named)
    out.sum().backward()
    return out.detach(), logits.grad


def test_the_field_is_there():
    assert {"asl", "bce", "focal", "dp-asl", "ll-r", "ll-ct", "ll-cp", "splc", "hill", "csl", "pu-mlc"} <= set(NAMES)


@every_loss
def test_help_names_paper_and_options(name):
    text = LOSSES.help(name)
    assert "https://arxiv.org/abs/" in text
    assert all(f"  {option}=" in text for option in LOSSES.options(name))
    assert not {"reduction", "unknown"} & set(LOSSES.options(name))


@every_loss
@pytest.mark.parametrize("per_group", [False, True])
def test_a_run_sees_what_a_plain_loop_sees(name, per_group):
    """`loss(output, batch)` gives the sum and the count of `loss(logits, targets)`."""
    options = GROUPED if per_group else OPTIONS
    logits, targets, mixed = some_batch()
    total, count = LossSum(*make(name, options)(Output(logits), Batch(targets, torch.arange(8), mixed, 3)))
    assert total == make(name, options, reduction="sum")(logits, targets, mixed=mixed)
    torch.testing.assert_close(total / count, make(name, options)(logits, targets, mixed=mixed))
    each = make(name, options, reduction="none")(logits, targets, mixed=mixed)
    assert each.shape == ((6,) if name in PER_CATEGORY else (8, 6))
    torch.testing.assert_close(each.sum(), total)


@every_loss
def test_labels_of_any_type_and_encoding(name):
    logits, targets, mixed = some_batch()
    expected = make(name)(logits, targets, mixed=mixed)
    for dtype in (torch.int8, torch.float16, torch.float64):
        assert make(name)(logits, targets.to(dtype), mixed=mixed) == expected
    with_nan = targets.float().masked_fill(targets == -1, NAN)
    assert make(name, unknown=NAN)(logits, with_nan, mixed=mixed) == expected
    assert make(name)(logits, with_nan, mixed=mixed) == expected  # whatever `unknown` says
    other = targets.masked_fill(targets == -1, 7)
    assert make(name, unknown=7)(logits, other, mixed=mixed) == expected
    assert make(name)(logits, targets.to(torch.uint8), mixed=mixed) == expected  # -1 is 255, as the mixes have it


@every_loss
@pytest.mark.parametrize("options", [OPTIONS, GROUPED], ids=["together", "grouped"])
def test_gradients_by_differences(name, options):
    """Of the loss as a function of the logits. Focal weights of the asymmetric kind are constants by definition: there
    the gradient is that of the loss with these weights frozen, for which `test_asymmetric` and the oracles stand."""
    if name in ("asl", "dp-asl", "focal", "csl", "pu-mlc"):
        pytest.skip("has factors that are constants in the backward pass")
    logits, targets, mixed = some_batch()
    loss = make(name, options)
    _, gradient = value_and_gradient(loss, logits, targets, mixed=mixed)
    for i in range(8):
        for c in range(6):
            step = torch.zeros_like(logits)
            step[i, c] = 1e-6
            slope = (loss(logits + step, targets, mixed=mixed) - loss(logits - step, targets, mixed=mixed)) / 2e-6
            assert gradient[i, c].item() == pytest.approx(slope.item(), abs=1e-7)


@every_loss
@pytest.mark.parametrize("options", [OPTIONS, GROUPED], ids=["together", "grouped"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_finite_at_extreme_logits(name, options, dtype, device):
    extremes = [-1e4, -100.0, -20.0, -2.0, 0.0, 2.0, 20.0, 100.0, 1e4]
    logits = torch.tensor(extremes, dtype=dtype, device=device).repeat(6, 1)
    targets = torch.tensor([0, 1, -1, 0, 1, -1], device=device)[:, None].expand(6, 9)
    mixed = torch.tensor([True, False, True, False, True, False], device=device)
    value, gradient = value_and_gradient(
        make(name, options, 9, reduction="none").to(device), logits, targets, mixed=mixed
    )
    assert value.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert gradient.dtype == dtype
    assert value.isfinite().all()
    assert gradient.isfinite().all()


@every_loss
@pytest.mark.parametrize("options", [OPTIONS, GROUPED], ids=["together", "grouped"])
@pytest.mark.parametrize("what", [-1, 0, 1])
@pytest.mark.parametrize("shape", [(1, 1), (1, 5), (4, 1), (3, 4)])
def test_all_labels_alike_and_small_batches(name, options, what, shape):
    logits = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    targets = torch.full(shape, what)
    loss = make(name, options, shape[1])
    for mixed in (None, torch.ones(shape[0], dtype=torch.bool), torch.arange(shape[0]) % 2 == 0):
        value, gradient = value_and_gradient(loss, logits, targets, mixed=mixed)
        assert value.isfinite()
        assert gradient.isfinite().all()


@every_loss
@pytest.mark.parametrize("options", [OPTIONS, GROUPED], ids=["together", "grouped"])
@pytest.mark.parametrize("mixed", [None, torch.zeros(0, dtype=torch.bool)], ids=["no mix", "mixed"])
def test_a_batch_without_samples(name, options, mixed):
    value, gradient = value_and_gradient(make(name, options), torch.zeros(0, 6), torch.zeros(0, 6), mixed=mixed)
    assert value.isfinite()
    assert gradient.shape == (0, 6)


@every_loss
@settings(max_examples=examples(40), deadline=None)
@given(
    labels=st.lists(st.lists(st.sampled_from([-1, 0, 1]), min_size=6, max_size=6), min_size=1, max_size=6),
    seed=st.integers(0, 10_000),
    scale=st.sampled_from([0.1, 3.0, 8.0, 50.0]),
    epoch=st.sampled_from([0, 1, 3, 1000]),
    per_group=st.booleans(),
)
def test_known_labels_are_never_dropped_or_turned(name, labels, seed, scale, epoch, per_group):
    """Their cost is what it would be with nothing unknown around them, in any epoch, whatever their logits."""
    loss = make(name, GROUPED if per_group else OPTIONS, reduction="none")
    loss.set_epoch(epoch)
    logits, _, mixed = some_batch(seed, batch=len(labels), scale=scale)
    targets = torch.tensor(labels)
    _, gradient = value_and_gradient(loss, logits, targets, mixed=mixed)
    if name == "pu-mlc":  # takes no known negatives by definition; a known positive pulls its logit up
        pulled = value_and_gradient(loss, logits, targets.masked_fill(targets == 1, -1), mixed=mixed)[1] - gradient
        assert (pulled[targets == 1] >= 0).all()
        return
    found = loss(logits, targets, mixed=mixed)
    for value in (0, 1):
        alone = loss(logits, torch.full_like(targets, value), mixed=mixed)
        assert torch.equal(found[targets == value], alone[targets == value])
    assert (gradient[targets == 1] <= 0).all()  # a known positive never pushes its logit down
    if name != "hill":  # of which that is the idea
        assert (gradient[targets == 0] >= 0).all()


@every_loss
def test_a_nan_logit_is_not_hidden(name):
    logits, targets, mixed = some_batch()
    logits[0, 0], targets[0, 0], mixed[0] = NAN, 1, False
    assert make(name)(logits, targets, mixed=mixed).isnan()


@every_loss
@pytest.mark.parametrize("options", [OPTIONS, GROUPED], ids=["together", "grouped"])
@pytest.mark.parametrize("kind", ["cuda", "cpu", "meta"])
def test_no_host_sync(name, options, kind):
    """Fake CUDA also sees a tensor made in the wrong place; autograd does not run there without a device, so the
    backward pass is looked at on the fake CPU and on meta."""
    loss = make(name, options, 80)
    with FakeTensorMode(allow_non_fake_inputs=True):
        logits = torch.empty(8, 80, device=kind, dtype=torch.bfloat16, requires_grad=True)
        targets, index = torch.empty(8, 80, device=kind), torch.empty(8, device=kind, dtype=torch.int64)
        mixed = torch.empty(8, device=kind, dtype=torch.bool)
        value, count = loss(Output(logits), Batch(targets, index, mixed, 3))
        assert value.device.type == count.device.type == kind
        if kind != "cuda":
            value.backward()
            assert logits.grad.dtype == torch.bfloat16


@pytest.mark.slow
@every_loss
@pytest.mark.filterwarnings("ignore")
def test_compiles_to_one_graph_in_every_epoch(name, device):
    torch._dynamo.reset()
    loss = make(name, GROUPED).to(device)
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph

    compiled = torch.compile(loss, fullgraph=True, dynamic=False, backend=backend)
    logits, targets, mixed = some_batch(device=device)
    for epoch in range(12):
        loss.set_epoch(epoch, 20)
        value, gradient = value_and_gradient(loss, logits, targets, mixed=mixed)
        graph_value, graph_gradient = value_and_gradient(compiled, logits, targets, mixed=mixed)
        torch.testing.assert_close(graph_value, value)
        torch.testing.assert_close(graph_gradient, gradient)
    assert len(graphs) <= 4  # not one for every epoch


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ll-ct", "csl"])
@pytest.mark.filterwarnings("ignore")
def test_generated_code_gives_the_same(name, device):
    """The two that select, with the compiler's own kernels."""
    torch._dynamo.reset()
    loss = make(name, GROUPED).to(device)
    compiled = torch.compile(loss, fullgraph=True, dynamic=False)
    logits, targets, mixed = some_batch(dtype=torch.float32, device=device)
    value, gradient = value_and_gradient(loss, logits, targets, mixed=mixed)
    graph_value, graph_gradient = value_and_gradient(compiled, logits, targets, mixed=mixed)
    torch.testing.assert_close(graph_value, value, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(graph_gradient, gradient, rtol=1e-5, atol=1e-7)


@every_loss
def test_a_mask_of_mixed_samples_must_fit(name):
    if name in ("asl", "bce", "focal", "hill"):
        pytest.skip("treats all samples alike")
    logits, targets, _ = some_batch()
    with pytest.raises(ValueError, match=r"mixed must be \[8\] of bool"):
        make(name)(logits, targets, mixed=torch.ones(8))


def test_a_prior_file_goes_by_name(tmp_path):
    write_prior(tmp_path / "p.csv", ["b", "a", "z"], torch.tensor([0.25, 0.75, 0.5]))
    loss = LOSSES.make("csl", [f"prior={tmp_path / 'p.csv'}"])
    loss.prepare(None, ["a", "b"])
    assert loss.prior.tolist() == [0.75, 0.25]
    assert math.isclose(loss.state_dict()["prior"].sum(), 1)
