"""The checks for a new device, on the CPU: they pass, and they can fail."""

import json

import pytest
import torch

from gpu_logicmix.augment import check


@pytest.mark.slow
def test_all_checks_on_a_cpu(tmp_path):
    said = []
    assert check.run_checks("cpu", tmp_path, said.append)
    data = json.loads((tmp_path / "check.json").read_text())
    states = {name: row["result"] for name, row in data["checks"].items()}
    assert states.pop("no sync in a step") == states.pop("CUDA graph") == "skipped"
    assert set(states.values()) == {"passed"}
    assert len(said) == len(check.CHECKS)
    assert data["ms"]["GPULogicMix, one pass"] > 0
    assert "| mixes equal the CPU | passed |" in (tmp_path / "check.md").read_text()


def test_a_failure_is_told(monkeypatch):
    def wrong(device):
        raise RuntimeError("no kernel image\nis available")

    monkeypatch.setattr(check, "CHECKS", {"wrong": wrong})
    monkeypatch.setattr(check, "measure", lambda device: {})
    said = []
    assert not check.run_checks("cpu", say=said.append)
    assert said == ["failed  wrong: RuntimeError: no kernel image"]


def test_wrong_pixels_are_found(monkeypatch):
    class Off(check.GPULogicMix):
        calls = 0

        def forward(self, images, targets, plan=None):
            Off.calls += 1
            mixed, labels = super().forward(images, targets, plan)
            return (mixed + 1 if Off.calls % 2 == 0 else mixed), labels

    monkeypatch.setattr(check, "MIXES", {"logicmix": Off})
    state, words = check.check_mixes(torch.device("cpu"))
    assert state == "failed"
    assert "images differ" in words
