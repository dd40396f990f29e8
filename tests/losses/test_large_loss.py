"""losses/large_loss.py: worked numbers, a slow loop, mlcpl's own, and the table that LL-Cp writes to."""

import math
from fractions import Fraction

import mlcpl.losses
import pytest
import torch
from cases import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from gpu_logicmix import CurriculumLabels, LargeLossCorrection, LargeLossRejection, PartialBCELoss, PartialFocalLoss
from gpu_logicmix.losses import LOSSES, Batch, Output

NAN = float("nan")
Y = torch.tensor([[1, 0, -1, -1], [-1, -1, 0, 1]])
Z = torch.tensor([[2, -1, 1.5, -0.5], [0.5, -2, -3, 1]])


def at(loss, epoch):
    loss.set_epoch(epoch)
    return loss


# ------------------------------------------------------------------------------------------------ worked numbers
@pytest.mark.parametrize(
    ("loss", "epoch", "value"),
    [
        (LargeLossRejection(20, rule="released"), 0, 0.509817),
        (LargeLossRejection(20, rule="released"), 1, 0.175380),
        (LargeLossCorrection(20, rule="released"), 1, 0.259817),
        (LargeLossCorrection(10, rule="released", permanent=True), 0, 0.509817),
        (LargeLossCorrection(10, rule="released", permanent=True), 1, 0.322317),
        (LargeLossCorrection(10, rule="released", permanent=True), 7, 0.322317),
        (LargeLossRejection(1, rule="mlcpl"), 20, 0.509817),
        (LargeLossRejection(1, rule="mlcpl"), 50, 0.297140),
    ],
)
def test_worked_numbers(loss, epoch, value):
    assert at(loss, epoch)(Z, Y).item() == pytest.approx(value, abs=5e-7)


def test_what_is_selected_in_the_worked_example():
    losses = torch.nn.functional.softplus(Z)  # of labels that are taken as absent
    large = at(LargeLossRejection(20, rule="released"), 1).large(losses, Y == -1, None)
    assert large.nonzero().tolist() == [[0, 2], [1, 0]]
    assert losses[large].min().item() == pytest.approx(0.974077, abs=1e-6)


def test_more_to_reject_than_is_unknown():
    """The released code returns 0.0 here: it also drops all known labels."""
    loss = at(LargeLossRejection(20, "none", rule="released"), 4)  # a share of 0.8: 7 labels, of which 4 are unknown
    found = loss(Z, Y)
    assert (found == 0).tolist() == (Y == -1).tolist()
    corrected = at(LargeLossCorrection(20, "none", rule="released"), 4)(Z, Y)
    assert torch.equal(corrected[Y != -1], found[Y != -1])
    assert torch.allclose(corrected[Y == -1], torch.nn.functional.softplus(-Z)[Y == -1])


# ------------------------------------------------------------------------------------------------ the slow loop
def cost(z, y, base):
    """One label in Python numbers."""
    softplus = max(-z, 0) + math.log1p(math.exp(-abs(z)))  # -log p
    if base == "bce":
        return y * softplus + (1 - y) * (softplus + z)
    p = 1 / (1 + math.exp(-z))
    q = min(1 - p + 0.05, 1)
    return y * softplus + (1 - y) * (1 - q) ** 4 * -math.log(q)


def treated(cells, epoch, delta, rule, permanent):
    """cells: (row, column) -> (loss, unknown). Which are treated."""
    share = min(Fraction(1), Fraction(delta) * (min(epoch, 1) if permanent else epoch) / 100)
    able = {key: value for key, (value, unknown) in cells.items() if unknown and value > 0}
    if rule == "mlcpl":
        k = max(1, round(len(able) * float(share)))
    else:
        k = math.ceil(share * (len(cells) if rule == "released" else sum(u for _, u in cells.values())))
    if not able or k == 0:
        return set()
    limit = sorted(able.values(), reverse=True)[min(k, len(able)) - 1]
    return {key for key, value in able.items() if (value > limit if rule == "mlcpl" else value >= limit)}


@st.composite
def cases(draw):
    b, c = draw(st.integers(1, 5)), draw(st.integers(1, 5))
    # Few different logits, so that there are ties; in halves, so that both sides see the same number.
    z = draw(st.lists(st.lists(st.integers(-12, 12), min_size=c, max_size=c), min_size=b, max_size=b))
    kinds = draw(st.sampled_from([[-1], [0, 1], [-1, 0, 1], [-1, -1, -1, 1]]))
    y = draw(st.lists(st.lists(st.sampled_from(kinds), min_size=c, max_size=c), min_size=b, max_size=b))
    mixed = draw(st.lists(st.booleans(), min_size=b, max_size=b))
    return torch.tensor(z).double() / 2, torch.tensor(y), torch.tensor(mixed)


@settings(max_examples=examples(300), deadline=None)
@given(
    case=cases(),
    name=st.sampled_from(["ll-r", "ll-ct", "ll-cp"]),
    rule=st.sampled_from(["paper", "released", "mlcpl"]),
    base=st.sampled_from(["bce", "asl"]),
    per_group=st.booleans(),
    epoch=st.sampled_from([0, 1, 2, 5, 300]),
    delta=st.sampled_from([1, 10, 20, 100]),
)
def test_is_the_slow_loop(case, name, rule, base, per_group, epoch, delta):
    logits, targets, mixed = case
    if name == "ll-cp" and rule == "mlcpl":
        rule = "paper"
    options = [f"delta={delta}", f"rule={rule}", f"base={base}", f"per_group={per_group}"]
    loss = at(LOSSES.make(name, options, reduction="none"), epoch)
    cells = {}
    for i, (row, labels) in enumerate(zip(logits.tolist(), targets.tolist(), strict=True)):
        for c, (z, y) in enumerate(zip(row, labels, strict=True)):
            cells[i, c] = (cost(z, max(y, 0), base), y == -1)
    groups = [cells]
    if per_group:
        groups = [{key: cells[key] for key in cells if bool(mixed[key[0]]) == kind} for kind in (True, False)]
    large = set().union(*(treated(group, epoch, delta, rule, name == "ll-cp") for group in groups if group))
    wanted = torch.zeros_like(logits)
    for (i, c), (value, _) in cells.items():
        other = 0.0 if name == "ll-r" else cost(logits[i, c].item(), 1, base)
        wanted[i, c] = other if (i, c) in large else value
    torch.testing.assert_close(loss(logits, targets, mixed=mixed), wanted, rtol=1e-9, atol=1e-12)
    if name == "ll-cp":
        expected = {(i, c) for i, c in large if not mixed[i]}
        assert {tuple(cell) for cell in loss.corrected.nonzero().tolist()} == expected
    mean = at(LOSSES.make(name, options), epoch)(logits, targets, mixed=mixed)
    torch.testing.assert_close(mean, wanted.mean(), rtol=1e-9, atol=1e-12)


@settings(max_examples=examples(60), deadline=None)
@given(case=cases(), epoch=st.integers(0, 120), delta=st.sampled_from([0.1, 1, 7]))
def test_rule_mlcpl_is_mlcpl(case, epoch, delta):
    logits, targets, _ = case
    with_nan = targets.double().masked_fill(targets == -1, NAN)
    for ours, theirs in (
        (LargeLossRejection, mlcpl.losses.LargeLossRejection),
        (LargeLossCorrection, mlcpl.losses.LargeLossCorrectionTemporary),
    ):
        found = at(ours(delta, rule="mlcpl"), epoch)(logits, targets)
        torch.testing.assert_close(found, theirs(delta_rel=delta)(logits, with_nan, epoch), rtol=1e-6, atol=1e-6)


def test_shares_are_not_off_by_one():
    """0.1 * 3 is a little more than 0.3 in floating point, and would treat one label too many."""
    logits = torch.arange(1000.0).view(10, 100) / 500
    loss = at(LargeLossRejection(0.1, "none", rule="released"), 3)
    assert (loss(logits, torch.full((10, 100), -1)) == 0).sum() == 3


def test_base_can_be_a_loss():
    loss = at(LargeLossRejection(20, "none", rule="released", base=PartialFocalLoss(gamma=2)), 1)
    focal = PartialFocalLoss(gamma=2, reduction="none", assume_negative=True)(Z, Y)
    assert torch.equal(loss(Z, Y)[0, :2], focal[0, :2])


def test_the_delta_of_each_is_that_of_the_follow_up():
    losses = (LargeLossRejection(), LargeLossCorrection(), LargeLossCorrection(permanent=True))
    assert [loss.delta for loss in losses] == [0.5, 0.2, 0.1]
    assert [LOSSES.make(name, []).delta for name in ("ll-r", "ll-ct", "ll-cp")] == [0.5, 0.2, 0.1]
    assert LargeLossCorrection(0.3, permanent=True).delta == LOSSES.make("ll-ct", ["delta=0.3"]).delta == 0.3


def test_epoch_can_be_set_as_an_attribute():
    loss = LargeLossRejection(20, rule="released")
    loss.epoch = 1
    assert loss(Z, Y).item() == pytest.approx(0.175380, abs=5e-7)
    assert (loss.epoch, loss.share.item()) == (1, 0.2)


# ------------------------------------------------------------------------------------------------ LL-Cp and the table
def test_corrections_are_written_for_good_and_never_for_mixed_samples():
    labels = torch.tensor([[-1, -1, 0], [1, -1, -1], [-1, -1, -1], [-1, 0, -1]])
    table = CurriculumLabels(labels)
    loss = at(LOSSES.make("ll-cp", ["delta=50", "rule=released"]), 1)
    assert loss.writes_labels
    loss.__dict__["table"] = table  # as the run does: not as a part of the loss, whose state it is not
    index = torch.tensor([3, 0, 2])
    logits = torch.tensor([[5.0, 9, 4], [3, 2, 9], [8, 8, 8]])
    mixed = torch.tensor([False, False, True])
    loss(Output(logits), Batch(table.lookup(index), index, mixed, 1))
    # ceil(9 * 0.5) = 5 of 7 unknown labels: three of the mixed sample, and the two largest of the others
    assert table.lookup(torch.arange(4)).tolist() == [[-1, -1, 0], [1, -1, -1], [-1, -1, -1], [1, 0, 1]]
    table.begin_update()
    table.update(torch.arange(4), torch.full((4, 3), -9.0))
    table.end_update()
    assert table.lookup(torch.tensor([3])).tolist() == [[1, 0, 1]]
    again = CurriculumLabels(labels)
    again.load_state_dict(table.state_dict())
    assert torch.equal(again.lookup(torch.arange(4)), table.lookup(torch.arange(4)))


def test_nothing_is_written_in_eval_or_in_the_first_epoch():
    table = CurriculumLabels(torch.full((2, 4), -1))
    loss = LOSSES.make("ll-cp", ["delta=50"])
    loss.__dict__["table"] = table
    for epoch, training in ((0, True), (1, False)):
        at(loss, epoch).train(training)
        loss(Output(Z), Batch(table.lookup(torch.arange(2)), torch.arange(2), None, epoch))
        assert (table.lookup(torch.arange(2)) == -1).all()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: LargeLossRejection(-1), "delta=-1: must be 0 or more"),
        (lambda: LargeLossRejection(NAN), "delta=nan: must be 0 or more"),
        (lambda: LargeLossRejection(rule="best"), "rule='best': must be one of paper, released, mlcpl"),
        (lambda: LargeLossCorrection(base="hinge"), "base='hinge': must be one of bce, asl"),
        (lambda: LargeLossCorrection(permanent=True, rule="mlcpl"), "mlcpl has no LL-Cp"),
        (
            lambda: LargeLossRejection(base=PartialBCELoss(normalize="mlcpl")),
            "base has normalize='mlcpl': must be None",
        ),
    ],
)
def test_bad_arguments_are_named(make, message):
    with pytest.raises(ValueError, match=message):
        make()
