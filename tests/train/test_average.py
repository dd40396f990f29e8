"""average.py: timm's values, no state but the weights, nothing lost in half precision."""

import pytest
import torch
from timm.utils import ModelEmaV3
from torch import nn

from gpu_logicmix.train.average import WeightAverage


def network() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Flatten(), nn.Linear(8 * 36, 5))


def train(model: nn.Module, steps: int, *averages) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(1, steps + 1):
        model(torch.randn(4, 3, 8, 8)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        for average in averages:
            average(model, step)


@pytest.mark.parametrize("warmup", [True, False])
def test_values_are_those_of_timm(warmup):
    torch.manual_seed(0)
    model = network()
    ours = WeightAverage(model, 0.9, warmup=warmup)
    timms = ModelEmaV3(model, decay=0.9, use_warmup=warmup)
    train(model, 12, ours.update, lambda model, step: timms.update(model, step=step))
    for name, value in timms.module.state_dict().items():
        assert torch.equal(ours.module.state_dict()[name], value), name
    assert ours.module.state_dict()["1.num_batches_tracked"] == 12


def test_goes_on_from_its_weights_alone():
    torch.manual_seed(0)
    model = network()
    whole = WeightAverage(model, 0.9, warmup=True)
    train(model, 5, whole.update)
    again = WeightAverage(network(), 0.9, warmup=True)
    again.module.load_state_dict(whole.module.state_dict())
    train(
        model, 5, lambda model, step: whole.update(model, step + 5), lambda model, step: again.update(model, step + 5)
    )
    for name, value in whole.module.state_dict().items():
        assert torch.equal(again.module.state_dict()[name], value), name


def test_small_updates_of_a_bfloat16_model_are_not_rounded_away():
    model = nn.Linear(4, 4).bfloat16()
    with torch.no_grad():
        model.weight.fill_(1.0)
    average = WeightAverage(model, 0.999)
    average.update(model, 1)
    with torch.no_grad():
        model.weight.fill_(1.5)
    for update in range(2, 102):
        average.update(model, update)
    expected = 1.5 - 0.5 * 0.999**100
    assert average.module.weight.dtype is torch.float32
    torch.testing.assert_close(average.module.weight, torch.full((4, 4), expected), rtol=0, atol=1e-5)


def test_works_without_values():
    """On the device where steps are counted: it asks for no generator there."""
    model = network().to("meta")
    average = WeightAverage(model, 0.9)
    average.update(model, 1)
    assert next(average.module.parameters()).device.type == "meta"
