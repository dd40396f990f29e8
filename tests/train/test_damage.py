"""Damaged checkpoints, full disks, NaN: nothing that was saved is lost, nothing bad is saved."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from launch import SMALL, good, run
from oracles import same
from runs import (
    ALWAYS,
    assert_same_run,
    at_call,
    here,
    log_of,
)
from safetensors.torch import load_file

from gpu_logicmix.train import loop
from gpu_logicmix.train.checkpoint import read_checkpoint

pytestmark = pytest.mark.usefixtures("no_report")


# ---------------------------------------------------------------------------------------------------------- damaged ...
def truncate(file: Path) -> None:
    os.truncate(file, file.stat().st_size // 2)


def flip(file: Path) -> None:
    """One bit, in the middle of the weights."""
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 4
    file.write_bytes(data)


def empty(file: Path) -> None:
    file.write_bytes(b"")


def text(file: Path) -> None:
    file.write_text("no checkpoint")


@pytest.mark.parametrize("damage", [truncate, flip, empty, text])
def test_damaged_checkpoint_falls_back_to_the_one_before(copied, tmp_path, reference, damage):
    damage(copied / "last.pt")
    command = good(tmp_path, "fit", "--out", copied, "--resume")
    assert f"warning: {copied}/last.pt: damaged" in command.out
    assert "previous.pt, step 7" in command.out
    assert_same_run(copied, reference)


def test_both_checkpoints_damaged(copied, tmp_path):
    flip(copied / "last.pt")
    truncate(copied / "previous.pt")
    command = run(tmp_path, "fit", "--out", copied, "--resume")
    assert command.process.exitcode == 1
    assert command.err.startswith(f"error: {copied}/last.pt: damaged")
    assert command.err.count("\n") == 1


# ---------------------------------------------------------------------------------------------------- full disk and NaN
def test_disk_full_while_saving(copied, tmp_path, reference):
    before = (copied / "last.pt").read_bytes()
    command = run(tmp_path, "fit", "--out", copied, "--resume", *ALWAYS, limit=len(before) // 2)
    assert command.process.exitcode == 1
    assert command.err.startswith(f"error: {copied}/next.pt: cannot be written (File too large)")
    assert command.err.count("\n") == 1
    assert (copied / "last.pt").read_bytes() == before
    good(tmp_path, "fit", "--out", copied, "--resume")
    assert_same_run(copied, reference)


def test_a_really_full_disk(tmp_path, reference):
    disk = tmp_path / "disk"
    disk.mkdir()
    if os.geteuid() != 0 or subprocess.run(["mount", "-t", "tmpfs", "-o", "size=9M", "tmpfs", disk]).returncode:
        pytest.skip("a small file system cannot be mounted here")
    try:
        command = run(tmp_path, *SMALL, *ALWAYS, "--out", disk / "run")  # a checkpoint has 6 MB
        assert command.process.exitcode == 1
        assert command.err.startswith(f"error: {disk}/run/next.pt: cannot be written (No space left on device)")
        assert command.err.count("\n") == 1
        folder = Path(shutil.copytree(disk / "run", tmp_path / "run"))
    finally:
        subprocess.run(["umount", disk], check=True)
    good(tmp_path, "fit", "--out", folder, "--resume")
    assert_same_run(folder, reference)


def test_loss_that_is_no_number(tmp_path):
    command = run(tmp_path, *SMALL, "--out", tmp_path / "run", "--lr", "1e30", "--schedule", "constant")
    assert command.process.exitcode == 1
    assert "the loss became non-finite at step 3 (epoch 1)" in command.err
    assert "there is no checkpoint yet" in command.err
    assert command.err.count("\n") == 1


def poison(run: loop.Training) -> None:
    with torch.no_grad():
        run.model.classifier.weight[0, 0] = float("nan")


def test_nan_stops_the_run_before_it_is_saved(copied, monkeypatch, reference):
    with monkeypatch.context() as patch:
        found = []
        at_call(patch, loop.Training, "batch", 1, lambda run, *_: found.append(run))
        at_call(patch, loop, "seed_step", 3, lambda *_: poison(found[0]))
        code, text = here("fit", "--out", copied, "--resume", "--log-every", "100")
    assert code == 1
    assert "the loss became non-finite at step 12 (epoch 3); the last checkpoint" in text
    assert read_checkpoint(copied / "last.pt")["step"] == 10  # the end of the epoch before
    assert here("fit", "--out", copied, "--resume", "--log-every", "1")[0] == 0
    lines = [line["step"] for line in log_of(copied) if line["kind"] == "step"]
    assert lines == sorted(set(lines))
    assert same(load_file(copied / "cft.safetensors"), load_file(reference / "cft.safetensors"))


@pytest.mark.parametrize("step", [12, 15])
def test_update_that_spoils_the_weights_is_not_saved(copied, monkeypatch, step):
    """The loss was still a number. At step 15, the last one, no other loss would tell."""
    update = loop.Training._update

    def spoil(run):
        update(run)
        if run.step == step:
            poison(run)

    with monkeypatch.context() as patch:
        patch.setattr(loop.Training, "_update", spoil)
        code, text = here("fit", "--out", copied, "--resume", *ALWAYS)
    assert code == 1
    assert f"became non-finite at step {step} (epoch 3)" in text
    state = read_checkpoint(copied / "last.pt")
    assert state["step"] < step
    assert all(tensor.isfinite().all() for tensor in state["model"].values())
