"""The checks for a new device, on the CPU: they pass, and they can fail."""

import json
import os

import pytest
import torch
from commands import run

from gpu_logicmix.augment import check
from gpu_logicmix.cli import check as command

CPU = torch.device("cpu")


@pytest.mark.slow
def test_the_command_on_a_cpu(tmp_path):
    code, text = run("check", "--device", "cpu", "--out", tmp_path)
    assert code == 0, text
    data = json.loads((tmp_path / "check.json").read_text())
    states = {name: row["result"] for name, row in data["checks"].items()}
    assert list(states) == list(check.CHECKS)
    assert states.pop("no sync in a step") == states.pop("CUDA graph") == "skipped"
    assert set(states.values()) == {"passed"}
    for row in data["mix"].values():
        assert {"clone", "GPULogicMix", "timm batch", "torchvision", "Kornia"} <= set(row)
        assert row["GPULogicMix"] > row["clone"] > 0
    assert data["mix"]["8x3x224x224 uint8"]["torchvision"] is None  # it refuses bytes
    assert data["step"]["ms"]["bare step"] > 0
    page = (tmp_path / "check.md").read_text()
    assert "| mixes equal the CPU | passed |" in page
    assert "| mixing, ms | clone | GPULogicMix |" in page
    assert "| a step of test_resnet, 64 px, batch 16 | ms |" in page


def test_a_failure_is_told(monkeypatch, tmp_path):
    def wrong(device):
        raise RuntimeError("no kernel image\nis available")

    monkeypatch.setattr(check, "CHECKS", {"wrong": wrong})
    monkeypatch.setattr(command, "mix_cases", lambda device: [])
    monkeypatch.setattr("gpu_logicmix.train.stepbench.measure_step", lambda *_: {**SOME_STEP})
    code, text = run("check", "--device", "cpu", "--out", tmp_path)
    assert code == 1
    assert "failed  wrong: RuntimeError: no kernel image" in text
    assert "| wrong | failed |" in (tmp_path / "check.md").read_text()


SOME_STEP = {"model": "m", "size": 1, "batch_size": 1, "threads": 1, "variants": {"bare step": {"ms": 1.0}}}


def test_on_a_gpu_the_usual_batches_are_timed():
    names = {(shape[0], shape[-1]) for shape, *_ in command.mix_cases(torch.device("cuda"))}
    assert names == {(32, 448), (128, 224)}
    assert command.step_options(torch.device("cuda"))["model"] == "resnet50"


def test_wrong_pixels_are_found(monkeypatch):
    class Off(check.GPULogicMix):
        calls = 0

        def forward(self, images, targets, plan=None):
            Off.calls += 1
            mixed, labels = super().forward(images, targets, plan)
            return (mixed + 1 if Off.calls % 2 == 0 else mixed), labels

    monkeypatch.setattr(check, "MIXES", {"logicmix": Off})
    state, words = check.check_mixes(CPU)
    assert state == "failed"
    assert "images differ" in words


def test_a_wrong_operation_is_found(monkeypatch):
    class Off(check.RandAugment):
        calls = 0

        def forward(self, images, plan=None, mirror=None):
            Off.calls += 1
            result = super().forward(images, plan, mirror)
            return result // 2 if Off.calls % 2 == 0 else result

    assert check.check_randaugment(CPU)[0] == "passed"
    monkeypatch.setattr(check, "RandAugment", Off)
    assert check.check_randaugment(CPU)[0] == "failed"


@pytest.mark.slow
def test_two_ranks_that_crash_when_their_interpreter_ends_have_answered(monkeypatch, tmp_path):
    (tmp_path / "sitecustomize.py").write_text(
        "import atexit, os, sys\n'spawn_main' in str(sys.orig_argv) and atexit.register(os.abort)\n"
    )
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])]))
    assert check.check_two_ranks(CPU)[0] == "passed"
