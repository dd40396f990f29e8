"""losses/pu.py: worked numbers and a slow loop, category by category."""

import math

import pytest
import torch
from cases import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from gpu_logicmix import VariationalPULoss
from gpu_logicmix.losses.pu import COLDEST, consistency_cells

NAN = float("nan")
Z = torch.tensor([[2.0, -1], [0, 1], [-1, -3]])
Y = torch.tensor([[1, -1], [-1, 1], [0, 0]])  # of METHODS: 1 present, 0 unknown, -1 absent


def test_worked_numbers():
    loss = VariationalPULoss(alpha=1, gamma=0.55, reduction="sum")
    assert loss(Z, Y).item() == pytest.approx(-0.580101, abs=1e-6)
    ones = torch.ones(3, 1)
    mean = Z.sigmoid().mean(0)
    assert mean.tolist() == pytest.approx([0.549913, 0.349142], abs=1e-6)
    assert (mean**0.55).tolist() == pytest.approx([0.719717, 0.560597], abs=1e-6)
    first = VariationalPULoss(alpha=1, gamma=0.55, reduction="none")(Z, torch.zeros_like(Y))  # without positives
    assert first.tolist() == pytest.approx(
        [w * math.log(m) for w, m in ((0.719717, 0.549913), (0.560597, 0.349142))], abs=2e-6
    )
    assert loss.temperature(Z, ones).tolist() == [1, 1]
    assert loss.temperature(Z * 0.3, ones).tolist() == pytest.approx([0.374166, 0.489898], abs=1e-6)


def sigmoid(z):
    return 1 / (1 + math.exp(-z)) if z > -700 else 0.0


def oracle(logits, targets, mixed, alpha, gamma):
    """[C], in Python numbers."""
    out = []
    everything = list(range(len(logits)))
    originals = [i for i in everything if not mixed[i]] or everything
    spread = originals if len(originals) > 1 else everything  # one sample has none
    for c in range(len(logits[0])):
        z = [logits[i][c] for i in spread]
        middle = sum(z) / len(z)
        std = math.sqrt(sum((x - middle) ** 2 for x in z) / len(z))
        s = 1.0 if alpha * std < COLDEST else min(1.0, alpha * std)
        z = [logits[i][c] for i in originals]
        mean = max(1e-10, sum(sigmoid(x / s) for x in z) / len(z))
        positives = [logits[i][c] / s for i in range(len(logits)) if targets[i][c] == 1]
        gain = sum(-math.log1p(math.exp(-x)) if x > -700 else x for x in positives) / max(1, len(positives))
        out.append(mean**gamma * math.log(mean) - gain)
    return out


@settings(max_examples=examples(200), deadline=None)
@given(
    data=st.data(),
    b=st.integers(1, 5),
    c=st.integers(1, 4),
    alpha=st.sampled_from([0.5, 1.0, 2.0]),
    gamma=st.sampled_from([0.0, 0.55, 1.0]),
)
def test_is_the_slow_loop(data, b, c, alpha, gamma):
    rows = [data.draw(st.lists(st.floats(-6, 6, width=16), min_size=c, max_size=c)) for _ in range(b)]
    labels = [data.draw(st.lists(st.sampled_from([-1, 0, 1, NAN]), min_size=c, max_size=c)) for _ in range(b)]
    mixed = [data.draw(st.booleans()) for _ in range(b)]
    logits, targets = torch.tensor(rows, dtype=torch.float64), torch.tensor(labels)
    wanted = torch.tensor(oracle(rows, labels, mixed, alpha, gamma), dtype=torch.float64)
    for reduction, value in (("none", wanted), ("sum", wanted.sum()), ("mean", wanted.mean())):
        found = VariationalPULoss(alpha, gamma, reduction)(logits, targets, mixed=torch.tensor(mixed))
        torch.testing.assert_close(found, value, rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize(
    ("rows", "mixed"),
    [
        (1, None),  # a batch of one
        (1, [True]),
        (8, [False] + [True] * 7),  # one original
        (8, [True] * 8),
    ],
)
def test_a_single_sample_is_not_blown_up(rows, mixed):
    """With a temperature of 0.001 the loss would be hundreds and a gradient 1000 / C."""
    logits = torch.randn(rows, 10, generator=torch.Generator().manual_seed(0)).requires_grad_()
    targets = (torch.arange(rows * 10).view(rows, 10) % 3 == 0).long()
    loss = VariationalPULoss()(logits, targets, mixed=None if mixed is None else torch.tensor(mixed))
    loss.backward()
    assert loss.abs() < 3
    assert logits.grad.abs().max() < 0.2


def test_logits_that_are_all_alike_have_no_temperature():
    logits = torch.tensor([[0.4, -2.0], [0.4, 0.5], [0.4 + 1e-6, 1.0]])
    loss = VariationalPULoss(reduction="none")
    assert loss.temperature(logits, torch.ones(3, 1)).tolist() == [1, 1]
    mean = logits[:, 0].sigmoid().mean().item()
    assert loss(logits, torch.full((3, 2), -1))[0].item() == pytest.approx(mean**0.55 * math.log(mean), abs=1e-6)


def test_known_negatives_are_unlabeled_and_positives_count():
    loss = VariationalPULoss(reduction="sum")
    assert loss(Z, Y) == loss(Z, Y.masked_fill(Y == 0, -1))
    logits = Z.clone().requires_grad_()
    loss(logits, Y).backward()
    assert (logits.grad[Y == 1] < 0).all()
    assert (logits.grad[Y != 1] > 0).all()


def test_constants_have_no_gradient():
    """The gradient is that of the formula with temperature and weight as numbers."""
    logits = (torch.randn(6, 3, generator=torch.Generator().manual_seed(0)) * 0.4).double().requires_grad_()
    targets = torch.randint(-1, 2, (6, 3), generator=torch.Generator().manual_seed(1))
    loss = VariationalPULoss(reduction="sum")
    (found,) = torch.autograd.grad(loss(logits, targets), logits)
    s = loss.temperature(logits.detach(), torch.ones(6, 1))
    assert (s < 1).all()
    weight = torch.sigmoid(logits.detach() / s).mean(0) ** 0.55

    def frozen(z):
        f = torch.sigmoid(z / s)
        positive = (targets == 1).double()
        return (weight * f.mean(0).log() - (positive * f.log()).sum(0) / positive.sum(0).clamp(min=1)).sum()

    for i in range(6):
        for c in range(3):
            step = torch.zeros_like(logits)
            step[i, c] = 1e-6
            with torch.no_grad():
                slope = (frozen(logits + step) - frozen(logits - step)) / 2e-6
            assert found[i, c].item() == pytest.approx(slope.item(), abs=1e-7)


def test_consistency_by_hand():
    soft, logits = torch.tensor([[0.5, 1.0], [0.25, 0.0]]), torch.tensor([[0.0, 2.0], [1.0, -30.0]])

    def log(x):
        return math.log(max(x, 1e-10))

    wanted = [
        sum((log(soft[i, c].item()) - log(sigmoid(logits[i, c].item()))) ** 2 for i in range(2)) / 2 for c in range(2)
    ]
    assert consistency_cells(logits, soft).mean(0).tolist() == pytest.approx(wanted, rel=1e-4)


@pytest.mark.parametrize("name", ["alpha", "gamma"])
def test_bad_arguments_are_named(name):
    with pytest.raises(ValueError, match=f"{name}=-1: must be 0 or more"):
        VariationalPULoss(**{name: -1})
