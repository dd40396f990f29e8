"""Runs that several tests compare with."""

import shutil
import signal
from pathlib import Path

import pytest
import torch
from launch import SMALL, good
from runs import ALWAYS, stopped

from gpu_logicmix.train import loop
from gpu_logicmix.train.checkpoint import read_checkpoint


@pytest.fixture(scope="session")
def reference(tmp_path_factory) -> Path:
    """The small run, uninterrupted and with a checkpoint after each epoch alone."""
    folder = tmp_path_factory.mktemp("reference")
    good(folder, *SMALL, "--out", folder / "run")
    return folder / "run"


@pytest.fixture(autouse=True)
def _threads_of_before():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture
def no_report(monkeypatch):
    """It has tests of its own, and takes longer than the run."""
    monkeypatch.setattr("gpu_logicmix.cli.runs.write_report", lambda folder: None)


@pytest.fixture(scope="session")
def half(tmp_path_factory) -> Path:
    """The small run, stopped in its second epoch: last.pt is at step 9, previous.pt at 7."""
    folder = tmp_path_factory.mktemp("half") / "run"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("gpu_logicmix.cli.runs.write_report", lambda folder: None)
        code, text = stopped(patch, folder, loop, "seed_step", 8, signal.SIGTERM, *ALWAYS)
    assert code == 0, text
    assert read_checkpoint(folder / "last.pt")["step"] == 9
    assert read_checkpoint(folder / "previous.pt")["step"] == 7
    return folder


@pytest.fixture
def copied(half, tmp_path) -> Path:
    """A copy of the half run, to be spoilt."""
    return Path(shutil.copytree(half, tmp_path / "run"))
