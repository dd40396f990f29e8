"""What stands in the place of RandAugment in a run: Kornia's modules, the user's own, nothing."""

import sys
import types

import pytest
import torch
from commands import run as command
from kornia.augmentation import auto
from torch import nn

from gpu_logicmix.augment.crop import MultiScaleCrop
from gpu_logicmix.augment.randaugment import RandAugment
from gpu_logicmix.errors import RunError
from gpu_logicmix.train.batch import Augment, seed_step
from gpu_logicmix.train.config import Config, changed

KORNIA = {
    "kornia-randaugment": auto.RandAugment,
    "kornia-trivialaugment": auto.TrivialAugment,
    "kornia-autoaugment": auto.AutoAugment,
}


def augment_of(**options) -> Augment:
    return Augment(Config(**{"flip": False, "mix": "none", **options}))


def batch():
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (8, 3, 24, 24), dtype=torch.uint8, generator=generator)
    return images, torch.zeros(8, 5, dtype=torch.int8)


@pytest.fixture
def mine(monkeypatch):
    """A module of the user's, my_pipelines."""
    module = types.ModuleType("my_pipelines")
    monkeypatch.setitem(sys.modules, "my_pipelines", module)
    return module


def test_the_names():
    assert isinstance(augment_of().randaugment, RandAugment)
    assert isinstance(augment_of(randaugment=False).randaugment, nn.Identity)
    assert isinstance(augment_of(augment="none").randaugment, nn.Identity)
    assert isinstance(augment_of(augment="randaugment", randaugment=False).randaugment, RandAugment)  # it overrides
    for name, kind in KORNIA.items():
        assert isinstance(augment_of(augment=name).randaugment, kind)


@pytest.mark.parametrize("views", [1, 2])
def test_the_crop_comes_first(views):
    images, targets = batch()
    augment = Augment(Config(crop="multi-scale", flip=False, randaugment=False, mix="none"), views)
    seed_step(0, 7, 0)
    got, _, _ = augment(images, targets)
    seed_step(0, 7, 0)
    want = MultiScaleCrop()(images)
    assert not torch.equal(want, images)
    assert len(got) == views
    for view in got:
        torch.testing.assert_close(view, want / 255)
    got, _, _ = Augment(Config(flip=False, randaugment=False, mix="none"))(images, targets)
    torch.testing.assert_close(got[0], images / 255)


def test_n_and_m_are_passed_on():
    pipeline = augment_of(augment="kornia-randaugment", ra_n=3, ra_m=7).randaugment
    assert (pipeline.n, pipeline.m) == (3, 7)
    with pytest.raises(ValueError, match="ra_m=0"):
        augment_of(augment="kornia-randaugment", ra_m=0)


@pytest.mark.parametrize("name", KORNIA)
def test_kornia_in_a_batch(name, device):
    """Floats in [0, 1] that are not what went in; the same again in the same step of a resumed run."""
    augment = augment_of(augment=name).to(device)
    images, targets = (part.to(device) for part in batch())

    def augmented(step):
        seed_step(0, step, 0)
        return augment(images, targets)[0][0]

    steps = [augmented(step) for step in range(4)]
    for out in steps:
        assert out.dtype == torch.float32
        assert out.device.type == device.type
        assert out.shape == images.shape
        assert 0 <= out.min() <= out.max() <= 1
    assert any(not torch.allclose(out, images.float() / 255, atol=1e-3) for out in steps)
    assert torch.equal(steps[2], augmented(2))


def test_two_views_have_a_plain_one():
    images, targets = batch()
    augment = Augment(Config(flip=False, mix="none", augment="kornia-randaugment"), views=2)
    (weak, strong), _, _ = augment(images, targets)
    assert torch.equal(weak, images.float() / 255)
    assert not torch.equal(weak, strong)


def test_a_function_of_ones_own(mine):
    mine.invert = lambda: nn.Sequential(nn.Hardtanh(0, 0.5))
    images, targets = batch()
    out = augment_of(augment="my_pipelines:invert")(images, targets)[0][0]
    assert torch.equal(out, (images.float() / 255).clamp(max=0.5))


def test_wrong_names(mine):
    with pytest.raises(ValueError, match="augment='randagument': must be one of randaugment, kornia-randaugment"):
        Config(augment="randagument")
    with pytest.raises(ValueError, match="has no function 'missing'"):
        augment_of(augment="my_pipelines:missing")
    with pytest.raises(ValueError, match="No module named 'no_such'"):
        augment_of(augment="no_such:pipeline")
    mine.number = lambda: 3
    with pytest.raises(ValueError, match=r"must return an nn.Module, not int"):
        augment_of(augment="my_pipelines:number")


def test_without_kornia(monkeypatch):
    monkeypatch.setitem(sys.modules, "gpu_logicmix.augment.kornia", None)
    with pytest.raises(RunError, match="pip install kornia"):
        augment_of(augment="kornia-randaugment")


def test_names_of_earlier_runs_stay():
    """A study names a run by the options that differ from the defaults."""
    assert changed(Config(randaugment=False)) == {"randaugment": False}
    assert changed(Config(augment="none")) == {"augment": "none"}


def test_a_run_with_kornia_on_the_command_line(tmp_path):
    options = "--size 32 --model test_resnet --weights none --epochs 1 --batch-size 8 --workers 0 --no-cft --no-cl"
    code, output = command(
        "fit", "shapes", "-o", "count=24", *options.split(), "--augment", "kornia-randaugment", "--ra-m", "7",
        "--out", tmp_path / "run", "--threads", "1",
    )  # fmt: skip
    assert code == 0, output
    assert 'augment = "kornia-randaugment"' in (tmp_path / "run" / "config.toml").read_text()
