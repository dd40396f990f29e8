"""The asymmetric loss in closed form is the one by autograd: values, first and second derivatives."""

import pytest
import torch
from cases import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from gpu_logicmix import PartialAsymmetricLoss
from gpu_logicmix.losses.base import PartialLoss


class ByAutograd(PartialAsymmetricLoss):
    costs = PartialLoss.costs


def value_and_gradient(loss, logits, targets):
    logits = logits.detach().clone().requires_grad_()
    value = loss(logits, targets)
    (value.sum() / 3).backward()
    return value.detach(), logits.grad


@settings(max_examples=examples(60), deadline=None)
@given(
    seed=st.integers(0, 10_000),
    scale=st.sampled_from([0.5, 5.0, 40.0, 1e4]),
    gamma=st.sampled_from([0.5, 1, 2, 2.5, 4]),
    clip=st.sampled_from([0.01, 0.05, 0.3]),
    shape=st.sampled_from([(1, 1), (1, 7), (5, 1), (6, 9)]),
    soft=st.booleans(),
    assume_negative=st.booleans(),
    reduction=st.sampled_from(["mean", "sum", "none"]),
    normalize=st.sampled_from([None, "known", "mlcpl"]),
)
def test_as_by_autograd(seed, scale, gamma, clip, shape, soft, **options):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(shape, generator=generator, dtype=torch.float64) * scale
    targets = torch.randint(-1, 2, shape, generator=generator)
    if soft:
        targets = torch.where(targets == -1, -1.0, torch.rand(shape, generator=generator).double())
    for dtype, close in ((torch.float64, 1e-12), (torch.float32, 2e-6), (torch.bfloat16, 2e-2)):
        found, wanted = (
            value_and_gradient(kind(gamma, 0, clip, **options), logits.to(dtype), targets)
            for kind in (PartialAsymmetricLoss, ByAutograd)
        )
        for ours, theirs in zip(found, wanted, strict=True):
            assert ours.dtype == theirs.dtype
            # At the kink, where q is cut, rounding decides; costs and slopes are then next to nothing.
            torch.testing.assert_close(ours, theirs, rtol=close, atol=close)


def test_second_derivatives():
    """Of the gradient as it is, with a constant weight: not those that differences of the loss would give."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(3, 5, generator=generator, dtype=torch.float64)
    targets = torch.randint(-1, 2, (3, 5), generator=generator)
    found = []
    for kind in (PartialAsymmetricLoss, ByAutograd):
        x = logits.clone().requires_grad_()
        (first,) = torch.autograd.grad(kind()(x, targets), x, create_graph=True)
        (second,) = torch.autograd.grad(first.square().sum(), x)
        found.append((first.detach(), second))
    torch.testing.assert_close(found[0], found[1])
    assert found[0][1].abs().max() > 0


def test_under_the_transforms_of_torch_func():
    logits, targets = torch.randn(4, 6), torch.randint(-1, 2, (4, 6))
    loss = PartialAsymmetricLoss(reduction="sum")
    each = torch.func.vmap(torch.func.grad(lambda x, y: loss(x[None], y[None])))(logits, targets)
    torch.testing.assert_close(each, 3 * value_and_gradient(loss, logits, targets)[1])


@pytest.mark.parametrize("options", [{"gamma_pos": 1}, {"clip": 0}, {"gamma_neg": 0}, {"alpha_pos": 2}])
def test_other_settings_go_by_autograd(options, monkeypatch):
    from gpu_logicmix.losses import closed_form

    monkeypatch.setattr(closed_form, "clipped_cells", None)
    PartialAsymmetricLoss(**options)(torch.randn(4, 6), torch.randint(-1, 2, (4, 6)))
    with pytest.raises(TypeError):
        PartialAsymmetricLoss()(torch.randn(4, 6), torch.randint(-1, 2, (4, 6)))
