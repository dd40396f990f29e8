"""methods/boostlu.py: worked numbers, and a head that is linear where alpha is 1."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from gpu_logicmix.losses import Batch, LargeLossRejection
from gpu_logicmix.methods import HEADS
from gpu_logicmix.methods.boostlu import BoostLU, boosted_logits
from gpu_logicmix.models.classifier import build_model


def test_worked_numbers():
    maps = torch.tensor([[[[2, -1], [0.5, -0.5]]]])
    assert boosted_logits(maps, 1).item() == 0.25
    assert boosted_logits(maps, 5).item() == 2.75


def test_position_by_position():
    torch.manual_seed(0)
    head, features = HEADS.make("boostlu", ["alpha=3"], 4, 2), torch.randn(2, 4, 3, 5)
    found = head(features).logits
    weight, bias = head.layer.weight[:, :, 0, 0], head.layer.bias
    for b in range(2):
        for c in range(2):
            values = [(weight[c] @ features[b, :, i, j] + bias[c]).item() for i in range(3) for j in range(5)]
            assert found[b, c].item() == pytest.approx(sum(3 * v if v > 0 else v for v in values) / 15, abs=1e-6)
    assert (boosted_logits(features, 5) >= boosted_logits(features, 1)).all()


def test_prediction_only():
    head, features = BoostLU(4, 2, prediction_only=True), torch.randn(3, 4, 2, 2)
    plain = head.layer(features).mean((2, 3))
    torch.testing.assert_close(head.train()(features).logits, plain)
    assert (head.eval()(features).logits > plain).any()


def test_on_a_backbone():
    model = build_model("test_resnet", 3, head="boostlu")
    images = torch.rand(2, 3, 64, 64)
    assert model(images).shape == (2, 3)
    assert model(images, Batch(torch.zeros(2, 3))).logits.shape == (2, 3)
    with pytest.raises(ValueError, match="no last linear layer"):
        model.embed(images)


def test_no_host_sync():
    head = HEADS.make("boostlu", [], 8, 4)
    with FakeTensorMode(allow_non_fake_inputs=True):
        images, batch = torch.empty(6, 8, 3, 3, device="cuda"), Batch(torch.empty(6, 4, device="cuda"))
        total, _ = head.to("cuda").training_step(head, [images], batch, LargeLossRejection())
        assert total.device.type == "cuda"


def test_bad_arguments_are_named():
    with pytest.raises(ValueError, match=r"alpha=0.5: must be 1 or more"):
        HEADS.make("boostlu", ["alpha=0.5"], 4, 2)
