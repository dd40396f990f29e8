"""The quick answer to "has a new version of a package broken us?": all imports, the transform, one tiny run."""

import importlib
import json
import pkgutil

import torch
from launch import SMALL, good

import gpu_logicmix
from gpu_logicmix import GPULogicMix
from gpu_logicmix.machine import version_line


def test_every_module_is_imported():
    names = [module.name for module in pkgutil.walk_packages(gpu_logicmix.__path__, "gpu_logicmix.")]
    assert len(names) > 20
    for name in names:
        if not name.endswith("__main__"):
            importlib.import_module(name)


def test_the_transform():
    images, targets = torch.rand(16, 3, 8, 8), torch.randint(-1, 2, (16, 5))
    mix = GPULogicMix(p=1.0)
    plan = mix.plan(16)
    mixed, labels = mix(images, targets, plan)
    for row in range(16):
        parts = plan.index[row, : plan.size[row]]
        torch.testing.assert_close(mixed[row], images[parts].mean(0))
        chosen = targets[parts]
        expected = torch.where((chosen == 1).any(0), 1, torch.where((chosen == 0).all(0), 0, -1))
        assert torch.equal(labels[row], expected)


def test_a_tiny_run(tmp_path):
    good(tmp_path, *SMALL, "--epochs", 1, "--out", tmp_path / "run")
    assert (tmp_path / "run" / "model.safetensors").stat().st_size > 0
    start = json.loads((tmp_path / "run" / "log.jsonl").read_text().splitlines()[0])
    assert start["version_line"] == version_line()
