"""stepbench.py and bench/step.py: what is timed is what it says, and a host sync would be noticed."""

import json
import sys

import pytest
import torch
from commands import run

from gpu_logicmix.train import batch as batches
from gpu_logicmix.train import stepbench
from gpu_logicmix.train.stepbench import VARIANTS, measure_step, step_config


def tiny(**options):
    shared = {"model": "test_byobnet", "weights": "none", "size": 32, "batch_size": 4, "threads": 1}
    return step_config(**shared | options)


@pytest.fixture
def bench(script):
    return script("bench/step.py")


@pytest.fixture(autouse=True)
def same_threads():
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def test_each_variant_adds_what_its_name_says(monkeypatch):
    """And all of them train: the weights move in every step, whatever the variant."""
    seen, weights = [], []
    batch = stepbench.Training.batch

    def spy(self, *arguments, **options):
        augment = self.augment
        seen.append([type(part).__name__ for part in (augment.flip, augment.randaugment, augment.mix)])
        batch(self, *arguments, **options)
        weights.append(torch.cat([p.detach().flatten() for p in self.params]).double().sum().item())

    monkeypatch.setattr(stepbench.Training, "batch", spy)
    result = measure_step(tiny(), rounds=2)
    off = "Identity", "Identity", "NoneType"
    on = "RandomHorizontalFlip", "RandAugment", "GPULogicMix"
    turn = [list(off), [on[0], *off[1:]], [off[0], on[1], off[2]], [*off[:2], on[2]], list(on)]
    assert seen == turn[::-1] + turn + turn[::-1]  # taking turns, there and back; the first one warms up
    assert len(set(weights)) == len(weights)
    assert list(result["variants"]) == list(VARIANTS)
    for row in result["variants"].values():
        assert len(row["all_ms"]) == 2
        assert row["images_per_second"] == pytest.approx(4000 / row["ms"])
        assert row["cpu_ms"] > row["augmentation_cpu_ms"] > 0
    assert result["variants"]["bare step"]["times_bare"] == 1


def test_speed_is_of_the_images_that_are_there():
    """A batch cannot have more of them than the dataset."""
    result = measure_step(tiny(batch_size=8, option=["count=6"]), rounds=1)
    assert result["batch_size"] == 6
    for row in result["variants"].values():
        assert row["images_per_second"] == pytest.approx(6000 / row["ms"])


def test_slower_augmentation_shows(monkeypatch):
    """On a clock of its own, which only augmentation moves: a busy machine does not disturb it."""
    now = [0.0]
    forward = batches.Augment.forward

    def slow(self, *arguments):
        now[0] += 1 + 2 * (self.mix is not None)
        return forward(self, *arguments)

    monkeypatch.setattr(batches.Augment, "forward", slow)
    monkeypatch.setattr(stepbench.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(stepbench.time, "process_time", lambda: 2 * now[0])
    rows = measure_step(tiny(), rounds=1)["variants"]
    for name, row in rows.items():
        seconds = 3 if name in ("+ LogicMix", "all three") else 1
        assert row["ms"] == row["augmentation_ms"] == 1000 * seconds
        assert row["cpu_ms"] == row["augmentation_cpu_ms"] == 2000 * seconds
        assert row["times_bare"] == row["cpu_times_bare"] == seconds


def test_command(tmp_path):
    out = tmp_path / "step.json"
    options = ["--model", "test_byobnet", "--size", 32, "--batch-size", 4, "--rounds", 1, "--threads", 1, "--out", out]
    code, text = run("bench", *options)
    assert code == 0, text
    assert set(json.loads(out.read_text())["variants"]) == set(VARIANTS)
    code, text = run("bench", "--model", "test_byobnett")
    assert code == 1
    assert "test_byobnet" in text


# -------------------------------------------------------------------------------------------------------- bench/step.py
def test_no_host_sync_in_a_step(bench):
    assert bench.host_syncs(tiny(), steps=3) == []


class Syncing(torch.nn.Module):
    def __init__(self, how):
        super().__init__()
        self.how = how

    def forward(self, images, targets):
        self.how(images)
        return [images.float()], targets, None


@pytest.mark.parametrize(
    "how",
    [
        lambda images: images[0, 0, 0, 0].item(),
        lambda images: images.cpu(),
        lambda images: images[0].tolist(),
        lambda images: bool((images > 0).all()),
        lambda images: images[images > 0],
        lambda images: torch.zeros(4, 3).to(images.device),
        lambda images: images.float().copy_(torch.zeros(images.shape)),
    ],
)
def test_a_host_sync_would_be_noticed(bench, how):
    assert len(bench.host_syncs(tiny(), 2, Syncing(how))) == 2
    assert (
        bench.host_syncs(tiny(), 1, Syncing(lambda images: torch.zeros(4, 3).to(images.device, non_blocking=True)))
        == []
    )


def test_operators_are_counted_where_they_belong(bench):
    with_all = bench.count_operators(tiny())
    bare = bench.count_operators(tiny(**stepbench.BARE))
    first, *others = bench.PARTS
    assert all(with_all[part]["operators"] > 0 for part in bench.PARTS)
    assert with_all[first]["operators"] > bare[first]["operators"] + 20
    for part in others:
        assert with_all[part] == bare[part]
    deeper = bench.count_operators(tiny(model="test_resnet"))
    assert deeper["loss"] == with_all["loss"]
    assert deeper["model"] != with_all["model"]


@pytest.mark.slow
def test_script(bench, tmp_path, monkeypatch):
    out = tmp_path / "step.json"
    options = [
        "--model",
        "test_byobnet",
        "--size",
        "32",
        "--batch-size",
        "4",
        "--rounds",
        "1",
        "--threads",
        "1",
        "--note",
        "busy",
        "--out",
    ]
    monkeypatch.setattr(sys, "argv", ["step.py", *options, str(out)])
    bench.main()
    found = json.loads(out.read_text())
    assert found["note"] == "busy"
    assert [row["size"] for row in found["rows"]] == [32, 64]  # and the demo's network
    assert found["host_syncs"] == {"steps": bench.STEPS, "found": []}
