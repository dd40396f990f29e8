"""The drop-in examples run as they are, and do what they say."""

import re
import runpy

import pytest
from places import ROOT

EXAMPLES = sorted(path.stem for path in (ROOT / "examples").glob("*.py"))


def run(name, capsys):
    runpy.run_path(str(ROOT / "examples" / f"{name}.py"), run_name="__main__")
    return capsys.readouterr().out


def test_all_examples_are_here():
    assert set(EXAMPLES) == {"kornia_pipeline", "plain_loop", "timm_mixup_fn", "torchvision_v2", "training_step"}


@pytest.mark.parametrize("name", ["plain_loop", "timm_mixup_fn"])
def test_loss_falls(name, capsys):
    first, last = map(float, re.search(r"loss (\S+) -> (\S+)", run(name, capsys)).groups())
    assert last < 0.95 * first


def test_torchvision_v2(capsys):
    before, after = map(
        float, re.search(r"sample: (\S+) in the dataset, (\S+) in the batches", run("torchvision_v2", capsys)).groups()
    )
    assert after > 1.4 * before  # half of the samples carry the labels of 2 or 3


def test_kornia_pipeline(capsys):
    mixed, total = map(int, re.search(r"(\d+) of (\d+) samples", run("kornia_pipeline", capsys)).groups())
    assert total == 256
    assert 80 < mixed < 176


def test_training_step(capsys):
    output = run("training_step", capsys)
    losses = [float(x) for x in re.findall(r"(?:loss|validation) (\d\S+\d)", output)]
    assert len(losses) == 6
    assert all(0 < loss < 1 for loss in losses)
    assert "samples in the bank: 64" in output
    assert "mix.bank_images, mix.bank_targets, mix.bank_seen" in output
