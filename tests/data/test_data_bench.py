"""The benchmark's LogicMix in the dataset is the one it says it is, and the script runs through."""

import json
import sys

import numpy as np
import pytest
import torch

from gpu_logicmix.data import open_dataset


@pytest.fixture
def bench(script):
    return script("bench/loader.py")


def test_cpu_logicmix_is_mlcpls(bench):
    LogicMix = pytest.importorskip("mlcpl.augs").LogicMix
    dataset = open_dataset("shapes", size=16, count=60)
    labels = np.random.default_rng(0).integers(-1, 2, dataset.labels.shape)
    dataset.labels = labels
    ours = bench.CPULogicMix(dataset, 0.5, 2, 5)

    class Samples:
        num_categories = 12

        def __len__(self):
            return 60

        def __getitem__(self, index):
            return ours.sample(index)

    theirs = LogicMix(Samples(), 0.5, 2, 5)
    mixed = 0
    for index in range(60):
        np.random.seed(index)
        image, targets = ours[index]
        np.random.seed(index)
        their_image, their_targets = theirs[index]
        assert torch.equal(image, their_image)
        assert torch.equal(targets, their_targets.float()) or torch.allclose(
            targets, their_targets.float(), rtol=0, atol=0, equal_nan=True
        )
        mixed += not torch.equal(image, ours.sample(index)[0])
    assert 15 < mixed < 45


def test_shards_are_compared(bench, tmp_path, monkeypatch):
    monkeypatch.setattr(bench, "RESULTS", tmp_path)
    monkeypatch.setenv("GPU_LOGICMIX_INDEX", str(tmp_path / "index"))
    sizes = ["--count", "8", "--batch-size", "4", "--size", "32", "--rounds", "1"]
    monkeypatch.setattr(sys, "argv", ["loader.py", "--shards", *sizes])
    monkeypatch.setattr(bench, "keep_memory", lambda: None)
    bench.main()
    rates = json.loads((tmp_path / "shards.json").read_text())["runs"][0]["rates"]
    assert set(rates) == {"files", "shards", "cache"}
    assert all(rate > 0 for values in rates.values() for rate in values)


def test_script(bench, tmp_path, monkeypatch):
    monkeypatch.setattr(bench, "RESULTS", tmp_path)
    arguments = [
        "--count",
        "12",
        "--batch-size",
        "4",
        "--size",
        "32",
        "--rounds",
        "1",
        "--workers",
        "0",
        "--k",
        "2",
        "3",
    ]
    monkeypatch.setattr(sys, "argv", ["loader.py", *arguments])
    monkeypatch.setattr(bench, "keep_memory", lambda: None)  # not in the process of the tests
    threads = torch.get_num_threads()
    try:
        bench.main()
    finally:
        torch.set_num_threads(threads)
    report = json.loads((tmp_path / "loader.json").read_text())
    assert report["images"] == 12
    assert set(report["runs"][0]["rates"]) == {"a2", "b2", "c2", "d2", "a3", "b3", "c3", "d3"}
    assert (tmp_path / "loader.png").stat().st_size > 5000
