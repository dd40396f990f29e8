"""Whole runs with the losses of the field, BoostLU, SR and PU-MLC: trained, stopped and resumed."""

import os
import signal
from pathlib import Path

import pytest
import torch
from oracles import same
from rich.console import Console

from gpu_logicmix.study.plan import read_study
from gpu_logicmix.train import loop
from gpu_logicmix.train.checkpoint import read_checkpoint
from gpu_logicmix.train.config import make_config
from gpu_logicmix.train.signals import Interrupted

STUDIES = Path(__file__).resolve().parents[2] / "studies"
LL = {"loss_option": ["delta=20"]}
METHODS = {
    "ll-r": {"loss": "ll-r", **LL},
    "ll-ct": {"loss": "ll-ct", "loss_option": ["delta=20", "per_group=true", "base=asl"]},
    "ll-cp": {"loss": "ll-cp", **LL},
    "splc": {"loss": "splc"},
    "hill": {"loss": "hill"},
    "csl": {"loss": "csl", "loss_option": ["prior=known", "threshold=0.1"]},
    "pu-mlc": {"loss": "pu-mlc"},
    "boostlu": {"loss": "ll-r", "head": "boostlu", **LL},
    "sr": {"loss": "bce", "head": "sr"},
    "pu-mlc head": {"loss": "pu-mlc", "head": "pu-mlc", "head_option": ["local_global=true"]},
}


def config(name, **given):
    """A run that takes seconds, with LogicMix and pseudo-labels."""
    small = {"option": ["count=24"], "size": 32, "known": 0.5, "model": "test_resnet", "weights": "none", "epochs": 2}
    small |= {"batch_size": 8, "accumulate": 2, "cft": False, "workers": 0, "threads": 1, "log_every": 1}
    small |= {"head": "linear", "theta_pos": 0.2, "theta_neg": -0.2, "cl": name not in ("ll-cp", "sr")}
    return make_config(small | METHODS[name] | given)


def marks(checkpoint) -> torch.Tensor:
    """Where the table of a checkpoint has labels that are not known ones."""
    table = checkpoint["curriculum"]
    return (table["known"] == -1) & (table["table"] != -1)


@pytest.mark.slow
@pytest.mark.parametrize("name", METHODS)
def test_stopped_in_an_epoch_and_resumed_is_bit_equal(name, tmp_path, monkeypatch):
    quiet = Console(quiet=True)
    end = loop.fit(config(name), tmp_path / "whole", console=quiet)
    assert 0 < end["mAP"] <= 1
    calls, seed_step = [], loop.seed_step

    def stop_in_step_4(*arguments):
        calls.append(1)
        if len(calls) == 4:  # in the second epoch, when labels are already treated
            os.kill(os.getpid(), signal.SIGTERM)
        return seed_step(*arguments)

    monkeypatch.setattr(loop, "seed_step", stop_in_step_4)
    with pytest.raises(Interrupted):
        loop.fit(config(name), tmp_path / "resumed", console=quiet)
    stopped = read_checkpoint(tmp_path / "resumed" / "last.pt")
    assert stopped["step"] == 5  # of 6; the update has two
    if name == "ll-cp":
        assert marks(stopped).any()  # there is something to lose
    loop.fit(config(name), tmp_path / "resumed", resume="must", console=quiet)
    whole, resumed = (read_checkpoint(tmp_path / each / "last.pt") for each in ("whole", "resumed"))
    for key in ("model", "ema", "optimizer", "scheduler", "curriculum", "step"):
        assert same(whole[key], resumed[key]), key


@pytest.mark.slow
def test_val_loss_does_not_write_labels(tmp_path):
    """Nor does a batch that could not be read."""
    loop.fit(config("ll-cp", epochs=1), tmp_path / "run", console=Console(quiet=True))
    assert not marks(read_checkpoint(tmp_path / "run" / "last.pt")).any()  # nothing is treated in the first epoch


def test_the_study_of_methods_can_be_read():
    planned = read_study(STUDIES / "methods.toml")
    assert len({plan.folder for plan in planned}) == 44
    assert {plan.config.loss for plan in planned} >= {"ll-r", "ll-ct", "ll-cp", "splc", "hill", "csl", "pu-mlc"}
