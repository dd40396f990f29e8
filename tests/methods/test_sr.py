"""methods/sr.py: worked numbers, and a training step against the formula label by label."""

import math

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from gpu_logicmix import PartialBCELoss
from gpu_logicmix.losses import Batch
from gpu_logicmix.methods import HEADS
from gpu_logicmix.methods.sr import salient_logits, weak_labels
from gpu_logicmix.models.classifier import build_model

NAN = float("nan")


def test_worked_numbers():
    maps = torch.tensor([[[[3.0, 1, 0], [-1, 2, -2], [0, -1, -2]]]])
    logit = salient_logits(maps, 0.5, 5)
    assert torch.sigmoid(logit).item() == pytest.approx(0.645656, abs=1e-6)
    labels, sure = weak_labels(logit, torch.tensor([[-1]]), 0.6)
    assert (labels.item(), sure.item()) == (1, True)


def test_fewer_positions_than_k():
    maps = torch.randn(2, 3, 1, 2)
    torch.testing.assert_close(salient_logits(maps, 0.5, 5), 1.5 * maps.mean((2, 3)))


def test_weak_labels_cell_by_cell():
    z = torch.tensor([[2.0, 0.3, -0.3, -2.0, 2.0, -2.0, 0.0, NAN]])
    targets = torch.tensor([[-1, -1, -1, -1, 0, 1, -1, -1]])
    labels, sure = weak_labels(z, targets, 0.6)
    assert sure.tolist() == [[True, False, False, True, False, False, False, False]]
    assert labels[sure].tolist() == [1, 0]
    assert not weak_labels(z.requires_grad_(), targets, 0.6)[0].requires_grad
    with_nan = targets.float().masked_fill(targets == -1, NAN)
    assert torch.equal(weak_labels(z, with_nan, 0.6)[1], sure)


def softplus(z):
    return math.log1p(math.exp(z))


@pytest.mark.parametrize("weight", [1.0, 0.5, 0.0])
def test_a_step_is_the_formula(weight):
    torch.manual_seed(0)
    model = build_model("test_resnet", 4, head="sr", head_options=[f"weight={weight}", "k=2"]).eval().double()
    model.head.layer.weight.data *= 40  # so that the weak view is sure of some labels
    weak, strong = torch.rand(2, 5, 3, 64, 64, dtype=torch.float64)
    targets = torch.tensor([[1, 0, -1, -1], [-1, -1, -1, -1], [0, 0, 1, 1], [1, -1, -1, 0], [-1, -1, 1, 0]])
    batch = Batch(targets, torch.arange(5), None, 0)
    total, count = model.head.training_step(model, [weak, strong], batch, PartialBCELoss())
    z_weak, z_strong = model(weak).tolist(), model(strong).tolist()
    known = own = n_known = n_own = 0
    for i in range(5):
        for c in range(4):
            y = targets[i, c].item()
            if y != -1:
                known += sum(softplus(z[i][c]) - y * z[i][c] for z in (z_weak, z_strong))
                n_known += 2
                continue
            p = 1 / (1 + math.exp(-z_weak[i][c]))
            if p >= 0.6 or 1 - p >= 0.6:
                own += softplus(z_strong[i][c]) - (p >= 0.6) * z_strong[i][c]
                n_own += 1
    assert n_own > 3
    assert count == n_known
    assert (total / count).item() == pytest.approx(known / n_known + weight * own / n_own, rel=1e-9)
    total.backward()
    assert all(p.grad is not None for p in model.parameters() if p.requires_grad)


def test_nothing_known_and_nothing_sure():
    model = build_model("test_resnet", 4, head="sr").eval()
    model.head.layer.weight.data.zero_()
    views = [torch.rand(2, 3, 64, 64)] * 2
    total, count = model.head.training_step(model, views, Batch(torch.full((2, 4), -1)), PartialBCELoss())
    assert (total, count) == (0, 0)
    total.backward()


def test_no_host_sync():
    head = HEADS.make("sr", [], 8, 4)
    with FakeTensorMode(allow_non_fake_inputs=True):
        views = [torch.empty(6, 8, 3, 3, device="cuda") for _ in range(2)]
        batch = Batch(torch.empty(6, 4, device="cuda"), None, torch.empty(6, device="cuda", dtype=torch.bool))
        head = head.to("cuda")
        total, _ = head.training_step(head, views, batch, PartialBCELoss())
        assert total.device.type == "cuda"


@pytest.mark.parametrize("options", [["k=0"], ["tau=0.4"], ["tau=1"], ["alpha=-1"]])
def test_bad_arguments_are_named(options):
    with pytest.raises(ValueError, match=options[0].split("=")[0] + "="):
        HEADS.make("sr", options, 8, 4)
