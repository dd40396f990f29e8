"""losses/splc.py: worked numbers and a slow loop, label by label."""

import math

import pytest
import torch
from cases import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from gpu_logicmix import HillLoss, SPLCLoss

NAN = float("nan")
Z, Y = torch.tensor([[2, 1, 0.2, -1]]), torch.tensor([[1, -1, -1, -1]])


def test_worked_numbers():
    loss = SPLCLoss(reduction="none")
    first = loss(Z, Y)
    torch.testing.assert_close(first, torch.tensor([[0.022658, 0.701868, 0.241291, 0.022658]]), rtol=0, atol=1e-6)
    assert first.sum().item() == pytest.approx(0.988476, abs=1e-6)
    loss.epoch = 1
    assert loss(Z, Y).sum().item() == pytest.approx(0.309265, abs=1e-6)
    hill = HillLoss(reduction="none")(Z, Y)
    torch.testing.assert_close(hill, torch.tensor([[0.022658, 0.410958, 0.287252, 0.089042]]), rtol=0, atol=1e-6)
    assert HillLoss(reduction="sum")(Z, Y).item() == pytest.approx(0.809910, abs=1e-6)


def test_a_known_negative_is_not_turned():
    """The released code, whose data have none, would turn it."""
    loss = SPLCLoss(reduction="none")
    before = loss(Z, Y.clamp(min=0))
    loss.epoch = 5
    assert torch.equal(loss(Z, Y.clamp(min=0)), before)


def sigmoid(z):
    return 1 / (1 + math.exp(-z))


def splc(z, y, turn, tau, margin, gamma):
    """One label; y is None where it is unknown."""
    if y is None:
        if turn and sigmoid(z) > tau:
            return (1 - sigmoid(z)) ** gamma * -math.log(sigmoid(z))
        y = 0
    if y == 1:
        p = sigmoid(z - margin)
        return (1 - p) ** gamma * -math.log(p)
    return sigmoid(z) ** gamma * -math.log(1 - sigmoid(z))


def hill(z, y, lamb, margin, gamma):
    if y == 1:
        p = sigmoid(z - margin)
        return (1 - p) ** gamma * -math.log(p)
    return (lamb - sigmoid(z)) * sigmoid(z) ** 2


cell = st.tuples(st.floats(-8, 8), st.sampled_from([0, 1, None]))
samples = st.lists(st.tuples(st.lists(cell, min_size=3, max_size=3), st.booleans()), min_size=1, max_size=4)


@settings(max_examples=examples(150), deadline=None)
@given(
    rows=samples,
    tau=st.sampled_from([0.0, 0.5, 0.6, 0.9]),
    tau_mixed=st.sampled_from([None, 0.3, 0.8]),
    margin=st.sampled_from([0.0, 1.0]),
    gamma=st.sampled_from([0.0, 1.0, 2.0]),
    change=st.integers(0, 3),
    epoch=st.integers(0, 3),
    unknown=st.sampled_from([-1.0, NAN]),
)
def test_is_the_slow_loop(rows, tau, tau_mixed, margin, gamma, change, epoch, unknown):
    logits = torch.tensor([[z for z, _ in row] for row, _ in rows], dtype=torch.float64)
    targets = torch.tensor([[unknown if y is None else y for _, y in row] for row, _ in rows], dtype=torch.float64)
    mixed = torch.tensor([kind for _, kind in rows])
    loss = SPLCLoss(tau, change, margin, gamma, "none", tau_mixed=tau_mixed, unknown=unknown)
    loss.set_epoch(epoch)
    wanted = [
        [splc(z, y, epoch >= change, tau_mixed if kind and tau_mixed else tau, margin, gamma) for z, y in row]
        for row, kind in rows
    ]
    torch.testing.assert_close(loss(logits, targets, mixed=mixed), torch.tensor(wanted, dtype=torch.float64))
    mean = SPLCLoss(tau, change, margin, gamma, tau_mixed=tau_mixed, unknown=unknown)
    mean.epoch = epoch
    torch.testing.assert_close(mean(logits, targets, mixed=mixed), torch.tensor(wanted, dtype=torch.float64).mean())
    wanted = [[hill(z, y, 1.5, margin, gamma) for z, y in row] for row, _ in rows]
    found = HillLoss(1.5, margin, gamma, "none", unknown=unknown)(logits, targets)
    torch.testing.assert_close(found, torch.tensor(wanted, dtype=torch.float64))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: SPLCLoss(tau=1.5), "tau=1.5: must be at least 0 and below 1"),
        (lambda: SPLCLoss(tau_mixed=-0.1), "tau_mixed=-0.1"),
        (lambda: SPLCLoss(change_epoch=-1), "change_epoch=-1: must be 0 or more"),
        (lambda: HillLoss(gamma=NAN), "gamma=nan: must be 0 or more"),
    ],
)
def test_bad_arguments_are_named(make, message):
    with pytest.raises(ValueError, match=message):
        make()
