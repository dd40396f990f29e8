"""Whole runs with the structured methods: killed and resumed, in two processes, and with their presets."""

import os
import signal
from pathlib import Path

import pytest
import torch
from launch import CONTEXT, ranks, serve
from oracles import same
from rich.console import Console

from gpu_logicmix import build_model
from gpu_logicmix.losses.base import Batch
from gpu_logicmix.study.plan import read_study
from gpu_logicmix.train import loop
from gpu_logicmix.train.build import make_loss
from gpu_logicmix.train.checkpoint import read_checkpoint
from gpu_logicmix.train.config import PRESETS, make_config

STUDIES = Path(__file__).resolve().parents[2] / "studies"
SMALL = ["width=16", "joint=8", "out=16", "words=12"]
OPTIONS = {
    "ssgrl": SMALL,
    "kggr": SMALL,
    "gcn-ml": ["hidden=16", "words=12"],
    "p-gcn": ["width=16"],
    "sst": [*SMALL, "start=1", "threshold=0.5", "stored=10"],
    "hst": [*SMALL, "start=1", "threshold=0.5", "prototypes=3"],
    "sarb": [*SMALL, "start=1", "prototypes=3"],
    "dsrb": [*SMALL, "start=1"],
}


def config(head, **given):
    """A run that takes seconds, and has everything in it that is random or keeps a state."""
    small = {"option": ["count=40"], "size": 32, "known": 0.5, "model": "test_resnet", "weights": "none", "epochs": 3}
    small |= {"batch_size": 8, "accumulate": 2, "cft": False, "workers": 0, "threads": 1, "log_every": 1}
    small |= {"head": head, "head_option": OPTIONS[head], "crop": "multi-scale", "theta_pos": 0.2, "theta_neg": -0.2}
    return make_config(small | given)


def train_and_die(head, folder):
    """Killed in the ninth step: in the second epoch, when labels are already carried over, between two updates. The
    last checkpoint is from two steps before."""
    calls, seed_step = [], loop.seed_step

    def die_in_step_9(*arguments):
        calls.append(1)
        if len(calls) == 9:
            os.kill(os.getpid(), signal.SIGKILL)
        return seed_step(*arguments)

    loop.seed_step = die_in_step_9
    loop.fit(config(head, save_every=1e-9), folder, console=Console(quiet=True))


@pytest.mark.slow
@pytest.mark.parametrize("head", OPTIONS)
def test_killed_in_an_epoch_and_resumed_is_bit_equal(head, tmp_path):
    serve()
    killed = CONTEXT.Process(target=train_and_die, args=(head, tmp_path / "resumed"))
    killed.start()
    loop.fit(config(head), tmp_path / "whole", console=Console(quiet=True))
    killed.join(120)
    assert killed.exitcode == -signal.SIGKILL
    assert read_checkpoint(tmp_path / "resumed" / "last.pt")["step"] == 7
    loop.fit(config(head), tmp_path / "resumed", resume="must", console=Console(quiet=True))
    whole, resumed = (read_checkpoint(tmp_path / name / "last.pt") for name in ("whole", "resumed"))
    for key in ("model", "ema", "optimizer", "scheduler", "step"):
        assert same(whole[key], resumed[key]), key


@pytest.mark.parametrize("head", OPTIONS)
def test_with_mixed_precision(head, tmp_path):
    given = {"amp": "bf16", "epochs": 2, "accumulate": 1, "mix": "none", "cl": False, "eval_every": 2}
    given |= {"decisions": False, "option": ["count=16"]}
    loop.fit(config(head, **given), tmp_path / "run", console=Console(quiet=True))
    model = read_checkpoint(tmp_path / "run" / "last.pt")["model"]
    assert all(value.isfinite().all() for value in model.values())
    if head in ("hst", "sarb", "dsrb"):
        assert model["head.prototypes"].abs().sum() > 0


PLAIN = """
    fit shapes -o count=40 --size 32 --known 0.5 --model test_vit --weights none --mix none --no-flip --no-randaugment
    --epochs 3 --no-cft --no-cl --log-every 5 --workers 0 --threads 1 --accumulate 1 --loss bce
"""


@pytest.mark.slow
@pytest.mark.parametrize("head", ["sst", "sarb"])
def test_two_processes_are_one_with_the_doubled_batch(head, tmp_path):
    """Without chance in the input, and without batch norm, which would see another batch in each process."""
    options = [o for o in OPTIONS[head] if not o.startswith("width")]
    arguments = [*PLAIN.split(), "--head", head]
    for option in (*options, "width=none"):
        arguments += ["--head-option", option]
    one = ranks(tmp_path, 1, *arguments, "--batch-size", 8, "--out", tmp_path / "one")
    two = ranks(tmp_path, 2, *arguments, "--batch-size", 4, "--out", tmp_path / "two")
    for command in (*one, *two):
        assert command.process.exitcode == 0, command.text
    first, second = (read_checkpoint(tmp_path / name / "last.pt")["model"] for name in ("one", "two"))
    state = {"head.queue", "head.prototypes", "head.draws", "head.seen"} & first.keys()
    assert len(state) == 3
    for key, value in first.items():
        torch.testing.assert_close(second[key], value, atol=1e-5, rtol=1e-4, msg=key)


@pytest.mark.parametrize("name", PRESETS)
def test_presets_are_valid(name):
    chosen = make_config({}, name)
    if chosen.head in ("sst", "hst", "sarb", "dsrb", "ssgrl"):
        assert (chosen.optimizer, chosen.lr, chosen.epochs) == ("adam", 1e-5, 20)
        assert (chosen.schedule, chosen.lr_step) == ("step", 10)
        assert (chosen.mix, chosen.p, chosen.k_min, chosen.k_max) == ("none", 0.1, 2, 2)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in PRESETS if name.endswith(("-coco", "-tresnet", "-swin"))])
def test_presets_take_a_step_at_full_size(name):
    """On the meta device, whose tensors have shapes but no values: every part fits the others, and all that is trained
    gets a gradient."""
    chosen = make_config({}, name)
    with torch.device("meta"):
        model = build_model(
            chosen.model,
            80,
            chosen.head,
            head_options=chosen.head_option or (),
            image_size=chosen.size,
            freeze=chosen.freeze,
        )
    images = torch.empty(chosen.batch_size, 3, chosen.size, chosen.size, device="meta")
    batch = Batch(torch.empty(chosen.batch_size, 80, dtype=torch.int8, device="meta"), epoch=chosen.epochs - 1)
    model.head.training_step(model, [images], batch, make_loss(chosen)).total.backward()
    assert [n for n, p in model.named_parameters() if p.requires_grad and p.grad is None] == []
    if chosen.freeze:  # layer4 alone
        trained = {n.split(".")[1] for n, p in model.named_parameters() if p.requires_grad and n.startswith("backbone")}
        assert trained == {"layer4"}


@pytest.mark.parametrize(
    ("study", "runs"),
    [
        ("paper-cooperation", 18),
        ("paper-architectures", 18),
        ("coco-64-methods", 15),
        ("coco-64-methods-first", 14),
    ],
)
def test_studies_can_be_read(study, runs):
    planned = read_study(STUDIES / f"{study}.toml")
    assert len({plan.folder for plan in planned}) == runs
