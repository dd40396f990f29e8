"""The drop-in examples run as they are, and do what they say."""

import re
import runpy
import sys

import pytest
from places import ROOT

from gpu_logicmix import open_dataset

EXAMPLES = sorted(path.stem for path in (ROOT / "examples").glob("*.py"))


def run(name, capsys):
    runpy.run_path(str(ROOT / "examples" / f"{name}.py"), run_name="__main__")
    return capsys.readouterr().out


LOOPS = ["accelerate_loop", "hf_trainer", "lightning_callback", "lightning_module", "plain_loop", "timm_mixup_fn"]


def test_all_examples_are_tested():
    assert set(EXAMPLES) == {*LOOPS, "kornia_pipeline", "make_csv", "onnx_predict", "torchvision_v2"}


@pytest.mark.parametrize("name", EXAMPLES)
def test_examples_are_short(name):
    assert len((ROOT / "examples" / f"{name}.py").read_text(encoding="utf-8").splitlines()) <= 60


@pytest.mark.slow
@pytest.mark.parametrize("name", LOOPS)
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


def test_make_csv(capsys, tmp_path, monkeypatch):
    """The table that the quickstart begins with can be opened, and half of it is unknown."""
    monkeypatch.setattr(sys, "argv", ["make_csv.py", str(tmp_path / "photos")])
    run("make_csv", capsys)
    dataset = open_dataset(f"csv:{tmp_path / 'photos' / 'labels.csv'}", "train", 64)
    assert dataset.labels.shape == (300, 4)
    assert 0.4 < (dataset.labels == -1).mean() < 0.6
    drawn = open_dataset("shapes", "train", size=64, count=300)
    assert (dataset[7][0] == drawn[7][0]).all()
