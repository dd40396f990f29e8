"""Networks for images of other than three channels."""

import pytest
import timm
import torch

from gpu_logicmix.models.classifier import build_model

CONFIG = timm.models.get_pretrained_cfg("test_resnet")


@pytest.mark.parametrize("channels", [1, 2, 4])
@pytest.mark.parametrize("head", ["linear", "ssgrl"])
@pytest.mark.parametrize("normalisation", ["none", "backbone"])
def test_a_network_for_images_of_other_channels(channels, head, normalisation):
    model = build_model("test_resnet", 3, head=head, in_chans=channels, normalisation=normalisation)
    images = torch.rand(2, channels, 64, 64)
    assert model(images).shape == (2, 3)
    assert model.mean.shape == model.std.shape == (channels, 1, 1)
    mean, std = (0, 1) if normalisation == "none" else (sum(values) / 3 for values in (CONFIG.mean, CONFIG.std))
    torch.testing.assert_close(model.mean.flatten(), torch.full((channels,), float(mean)))
    torch.testing.assert_close(model.std.flatten(), torch.full((channels,), float(std)))
    model(images).sum().backward()
    assert [n for n, p in model.named_parameters() if p.requires_grad and p.grad is None] == []


def test_its_weights_come_back(tmp_path):
    torch.manual_seed(0)
    model = build_model("test_resnet", 3, in_chans=1, normalisation="backbone").eval()
    torch.save(model.state_dict(), tmp_path / "one.pt")
    images = torch.rand(2, 1, 64, 64)
    for normalisation in ("auto", "backbone"):
        again = build_model("test_resnet", 3, weights=tmp_path / "one.pt", in_chans=1, normalisation=normalisation)
        with torch.no_grad():
            assert torch.equal(again.eval()(images), model(images))


def test_three_channels_have_a_mean_each():
    model = build_model("test_resnet", 3, normalisation="backbone")
    assert model.mean.flatten().tolist() == pytest.approx(CONFIG.mean)
    assert model.std.flatten().tolist() == pytest.approx(CONFIG.std)
