"""loop.py: its arithmetic, the ways to run it, its progress bar."""

import contextlib
import os
import signal

import numpy as np
import pytest
import torch
from launch import SMALL, good
from oracles import same
from PIL import Image
from rich.console import Console
from runs import (
    a_run,
    at_call,
    largest_difference,
    log_of,
    step_through,
)
from safetensors.torch import load_file

from gpu_logicmix.losses import LOSSES
from gpu_logicmix.train import loop
from gpu_logicmix.train.checkpoint import read_checkpoint
from gpu_logicmix.train.config import make_config
from gpu_logicmix.train.predict import val_loss
from gpu_logicmix.train.runlog import Log, read_log
from gpu_logicmix.train.signals import Interrupted, StopSignals
from gpu_logicmix.train.sums import check_finite

pytestmark = pytest.mark.usefixtures("no_report")


# ------------------------------------------------------------------------------------------------------- its arithmetic
@pytest.mark.parametrize("warmup", [True, False])
def test_moving_average_is_timms_formula(tmp_path, warmup):
    run = a_run(tmp_path, ema_decay=0.9, ema_warmup=warmup, accumulate=2, lr=0.01, schedule="constant")
    average = {k: v.double().clone() for k, v in run.model.state_dict().items() if v.is_floating_point()}
    for update in range(1, 9):
        step_through(run, 2)  # two batches are one update, and one step of the average
        # The first one is a copy.
        decay = 0 if update == 1 else min(0.9, 1 - update ** (-2 / 3)) if warmup else 0.9
        for name, value in run.model.state_dict().items():
            if name in average:
                average[name].lerp_(value.double(), 1 - decay)
    assert run.updates == 8
    for name, value in average.items():
        torch.testing.assert_close(run.shown.state_dict()[name].double(), value, rtol=1e-5, atol=1e-6)


def test_no_moving_average(tmp_path):
    run = a_run(tmp_path, ema_decay=0.0)
    assert run.shown is run.model
    good(tmp_path, *SMALL, "--epochs", 1, "--ema-decay", 0, "--out", tmp_path / "run")
    assert read_checkpoint(tmp_path / "run" / "last.pt")["ema"] is None


@pytest.mark.parametrize(("epochs", "accumulate"), [(1, 5), (1, 1), (3, 2), (4, 5), (9, 5)])
def test_rate_rises_to_its_peak_and_falls_to_nothing(tmp_path, epochs, accumulate):
    """Also in runs of few updates: 1, 5, 9, 4 and 9."""
    run = a_run(tmp_path, epochs=epochs, accumulate=accumulate, lr=0.1, backbone_lr=0.01)
    rates = []
    update = run._update

    def noted():
        rates.append([group["lr"] for group in run.optimizer.param_groups])
        update()

    run._update = noted
    log = Log(tmp_path, False, False)
    for _ in range(epochs):
        run.train_epoch(log, lambda images: None, StopSignals(tmp_path))
    assert len(rates) == epochs * -(-5 // accumulate) == run.updates
    head = [rate[-1] for rate in rates]
    peak = head.index(max(head))
    assert head[: peak + 1] == sorted(head[: peak + 1])
    assert head[peak:] == sorted(head[peak:], reverse=True)
    if len(rates) > 4:
        assert head[0] < 0.05
        assert max(head) > 0.09
    assert [group["lr"] for group in run.optimizer.param_groups][-1] <= (0.1 / 25 / 1e4) * (
        1.001 if len(rates) > 1 else 1e6
    )
    assert all(rate[0] == pytest.approx(rate[-1] / 10) for rate in rates)


def test_decay_is_not_on_biases_and_norms(tmp_path):
    run = a_run(tmp_path, weight_decay=0.5)
    for group in run.optimizer.param_groups:
        assert group["weight_decay"] == (0.0 if all(p.ndim < 2 for p in group["params"]) else 0.5)


def test_short_last_batch_is_dropped_unless_it_is_all_there_is(tmp_path):
    run = a_run(tmp_path, option=["count=21"])
    assert run.steps == 2
    seen = torch.cat([index for _, _, index in run.loader])
    assert len(seen.unique()) == 16
    run = a_run(tmp_path, option=["count=5"], epochs=2)
    assert run.steps == 1
    step_through(run, 2)
    assert run.sums.first_bad == -1


@pytest.mark.parametrize("model", ["test_resnet", "test_vit"])
def test_one_image(tmp_path, model):
    """Batch norm cannot do with one; the run can."""
    good(tmp_path, *SMALL, "-o", "count=1", "--model", model, "--known", 1, "--seed", 1, "--out", tmp_path / "run")
    assert read_log(tmp_path / "run")[-1]["kind"] == "end"


@pytest.mark.parametrize("assume", [True, False])
def test_batch_that_cannot_be_read_teaches_nothing(tmp_path, assume):
    """An update in which one batch is empty is the update without it."""
    runs = [
        a_run(tmp_path, model="test_vit", loss_option=[f"assume_negative={assume}"], mix="none", lr=0.01)
        for _ in range(2)
    ]
    images, targets, index = next(iter(runs[0].loader))
    nothing = images[:0], targets[:0], index[:0]
    for training in runs:
        training.model.train()
        if training is runs[0]:
            training.batch(*nothing, update=False)
        training.step = 1
        training.batch(images, targets, index, update=True)
    assert same(*(training.model.state_dict() for training in runs))
    assert runs[0].sums.totals.tolist() == runs[1].sums.totals.tolist()


def test_images_that_cannot_be_read_are_left_out(tmp_path):
    """A whole batch of them, and one of which a single image is left."""
    (tmp_path / "img").mkdir()
    lines = ["image,split,cat,dog"]
    pixels = np.random.default_rng(0).integers(0, 255, (12, 32, 32, 3), dtype=np.uint8)
    for i in range(12):
        lines += [f"img/{i}.png,{'train' if i < 8 else 'val'},{i % 2},{i // 2 % 2}"]
        if i in (1, 2, 3, 4, 5, 7, 9):
            (tmp_path / "img" / f"{i}.png").write_bytes(b"broken")
        else:
            Image.fromarray(pixels[i]).save(tmp_path / "img" / f"{i}.png")
    (tmp_path / "labels.csv").write_text("\n".join(lines))
    arguments = ["fit", f"csv:{tmp_path / 'labels.csv'}", *SMALL[SMALL.index("--model") :], "--size", 32]
    arguments += ["--batch-size", 2, "--on-bad-image", "skip", "--epochs", 4]
    for workers in (0, 1):
        folder = tmp_path / f"run-{workers}"
        good(tmp_path, *arguments, "--workers", workers, "--out", folder)
        lines = read_log(folder)
        assert [line["loss"] for line in lines if line["kind"] == "epoch"].count(None) == 0
        with np.load(folder / "predictions.npz") as saved:
            assert saved["index"].tolist() == [0, 2, 3]
    for line in (log_of(tmp_path / "run-0"), log_of(tmp_path / "run-1")):
        assert line == log_of(tmp_path / "run-0")


def test_validation_now_and_then_and_the_last_weights(tmp_path):
    good(tmp_path, *SMALL, "--eval-every", 2, "--keep", "last", "--out", tmp_path / "run")
    epochs = [line for line in read_log(tmp_path / "run") if line["kind"] == "epoch"]
    assert ["mAP" in line for line in epochs] == [False, True, True]
    state = read_checkpoint(tmp_path / "run" / "last.pt")
    assert same(load_file(tmp_path / "run" / "model.safetensors"), dict(state["ema"]))
    assert read_log(tmp_path / "run")[-1]["epoch"] == 3
    assert state["best_epoch"] == max((line for line in epochs if "mAP" in line), key=lambda line: line["mAP"])["epoch"]


def test_best_weights_are_those_of_the_best_epoch(reference):
    epochs = [line for line in log_of(reference) if line["kind"] == "epoch"]
    end = log_of(reference)[-1]
    assert end["epoch"] == max(epochs, key=lambda line: line["mAP"])["epoch"]
    assert end["mAP"] == end["mAP_best"] == max(line["mAP"] for line in epochs)
    assert same(load_file(reference / "model.safetensors"), dict(read_checkpoint(reference / "best.pt")["ema"]))


def test_other_ways_to_run(tmp_path):
    """A cache and mixed precision; with the cache the weights are the same, bit for bit."""
    short = (*SMALL, "--epochs", 1, "--no-cft")
    good(tmp_path, *short, "--out", tmp_path / "plain")
    good(tmp_path, *short, "--out", tmp_path / "cached", "--cache", tmp_path / "cache")
    good(tmp_path, *short, "--out", tmp_path / "bf16", "--amp", "bf16")
    plain, cached, bf16 = (load_file(tmp_path / name / "model.safetensors") for name in ("plain", "cached", "bf16"))
    assert same(plain, cached)
    assert 0 < largest_difference(plain, bf16) < 0.1


@pytest.mark.parametrize("loss", ["asl", "bce", "focal", "dp-asl"])
@pytest.mark.parametrize("mix", ["logicmix", "mixup", "ormixup", "mlmixup", "mixup-pme", "none"])
def test_every_mix_with_every_loss(tmp_path, mix, loss):
    run = a_run(tmp_path, mix=mix, loss=loss, option=["count=16"], lr=0.01)
    before = run.model.classifier.weight.clone()
    for epoch in range(2):
        run.augment.set_epoch(epoch)
        step_through(run, 2)
    check_finite(run, weights=True)
    assert not torch.equal(before, run.model.classifier.weight)


# ------------------------------------------------------------------------------------------------------- progress bars
@pytest.mark.parametrize(
    "options",
    [{}, {"eval_every": 2}, {"eval_every": 5}, {"cl": True}, {"cl": True, "cl_start": 3}, {"batch_size": 64}],
    ids=str,
)
def test_a_bar_ends_when_the_run_does(tmp_path, monkeypatch, options):
    given = {"option": ["count=20"], "size": 32, "known": 0.5, "model": "test_resnet", "weights": "none", "epochs": 3}
    given |= {"batch_size": 8, "eval_every": 1, "cl": False, "cft": False, "workers": 0, "threads": 1}
    bars = []

    @contextlib.contextmanager
    def bar(total, what, *, done=0, **options):
        bars.append([total, done])
        yield lambda images: bars[-1].__setitem__(1, bars[-1][1] + images)

    monkeypatch.setattr(loop, "progress_bar", bar)
    quiet = Console(quiet=True)
    config = make_config(given | options)
    loop.fit(config, tmp_path / "whole", console=quiet)
    assert bars[0][0] == bars[0][1] > 60  # images alone to train on, 16 or 20 an epoch, would be fewer
    folder = tmp_path / "stopped"
    for name, resume in (("batch", "never"), ("close_epoch", "must")):
        with monkeypatch.context() as patch:
            at_call(patch, loop.Training, name, 2, lambda *_: os.kill(os.getpid(), signal.SIGTERM))
            with pytest.raises(Interrupted):
                loop.fit(config, folder, resume=resume, console=quiet)
        assert bars[-1][1] <= bars[-1][0] == bars[0][0], name
    loop.fit(config, folder, resume="must", console=quiet)
    assert bars[-1] == bars[0]


def test_validation_takes_a_prepared_loss_that_training_leaves_alone(tmp_path):
    run = a_run(tmp_path, loss="csl", loss_option=["prior=known"], lr=0.01, epochs=2)
    logits, rows = torch.randn(40, 12), np.arange(40)
    labels = torch.from_numpy(run.val_set.labels_of(rows))
    prepared = LOSSES.make("csl", ["prior=known"])
    prepared.prepare(run.train_set.labels, run.train_set.categories)
    expected = prepared(logits, labels).item()
    assert torch.equal(run.unused_loss.prior, prepared.prior)
    for _ in range(2):
        assert val_loss(run, logits, rows) == pytest.approx(expected)
        step_through(run, 3)
