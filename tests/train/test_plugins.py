"""A method is one file: a loss and a head in a module of one's own train by name, are killed and resume."""

import re
import signal
import sys

import pytest
import torch
from launch import Command, good, until
from safetensors.torch import load_file

from gpu_logicmix.losses.base import LOSSES, Batch, Output
from gpu_logicmix.methods.base import HEADS
from gpu_logicmix.train.checkpoint import read_checkpoint
from gpu_logicmix.train.config import Config

MODULE = '''
"""A toy method, for tests."""
import torch
from torch import nn
from gpu_logicmix.losses.base import LOSSES, Loss, LossSum, Output
from gpu_logicmix.methods.base import HEADS, Head


@LOSSES.register("toy")
class ToyLoss(Loss):
    """Squared error on known labels.

    power: of the error.
    """

    def __init__(self, reduction="mean", *, unknown=-1, power: int = 2):
        super().__init__(reduction, unknown=unknown)
        self.power = power
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))  # a state that must survive a kill
        self.register_buffer("positives", torch.zeros(()))

    def prepare(self, labels, categories):
        self.positives = torch.tensor(float((labels == 1).sum()))

    def cells(self, output, batch):
        self.steps += 1
        known = batch.targets != -1
        error = (output.logits.sigmoid() - batch.targets.clamp(min=0)).abs() ** self.power
        return error * known * (1 + 0.01 * self.steps), known.sum()


@HEADS.register("toy")
class ToyHead(Head):
    """A linear layer on the class map, with a memory of what it has seen."""

    takes = "map"

    def __init__(self, features, categories, shift: float = 0.0):
        super().__init__()
        self.layer, self.shift = nn.Conv2d(features, categories, 1), shift
        self.register_buffer("memory", torch.zeros(categories))
        self.register_buffer("epochs", torch.zeros((), dtype=torch.int64))

    def begin_epoch(self, epoch, epochs, samples):
        self.epochs += sum(len(index) for _, _, index in samples())

    def forward(self, features, batch=None):
        logits = self.layer(features).mean((2, 3)) + self.shift + 0.01 * self.memory.detach().clone()
        if batch is not None:
            self.memory = 0.9 * self.memory + 0.1 * logits.detach().float().mean(0)
        return Output(logits, {"size": logits.square().mean()})

    def auxiliary(self, output, batch):
        return LossSum(0.1 * output.extra["size"], torch.ones((), device=output.logits.device))
'''


@pytest.fixture
def toy(tmp_path, monkeypatch):
    """The module, where Python finds it."""
    (tmp_path / "toy_method.py").write_text(MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield
    sys.modules.pop("toy_method", None)
    for registry in (LOSSES, HEADS):
        registry._classes.pop("toy", None)


def found_in(folder: str) -> None:
    """As PYTHONPATH does it."""
    sys.path.insert(0, folder)


_FIT = """
    fit shapes -o count=40 --size 32 --known 0.5 --model test_resnet --weights none --batch-size 8
    --accumulate 2 --epochs 3 --no-cl --log-every 1 --workers 0 --threads 1
    --loss toy_method:toy --loss-option power=3 --head toy_method:toy --head-option shift=0.5
"""
FIT = _FIT.split()


@pytest.mark.slow
def test_a_toy_method_trains_by_name_is_killed_and_resumes(toy, tmp_path):
    hook = (found_in, str(tmp_path))
    good(tmp_path, *FIT, "--out", tmp_path / "whole", hook=hook)
    state = read_checkpoint(tmp_path / "whole" / "last.pt")
    assert state["loss"]["steps"] == 15  # one a step; validation does not count
    assert state["loss"]["positives"] > 0
    assert state["model"]["head.epochs"] == 3 * 40
    assert state["model"]["head.memory"].abs().sum() > 0
    with Command(tmp_path, *FIT, "--out", tmp_path / "killed", "--save-every", "1e-9", hook=hook) as command:
        until((tmp_path / "killed" / "previous.pt").exists, 200, every=0.002)
        command.signal(signal.SIGKILL)
        assert command.wait() == -signal.SIGKILL
    good(tmp_path, "fit", "--out", tmp_path / "killed", "--resume", hook=hook)
    one, two = (load_file(tmp_path / name / "model.safetensors") for name in ("whole", "killed"))
    assert all(torch.equal(one[key], two[key]) for key in one)
    one, two = (read_checkpoint(tmp_path / name / "last.pt")["loss"] for name in ("whole", "killed"))
    assert all(torch.equal(one[key], two[key]) for key in one)


def test_options_come_from_the_signature_and_help_from_the_docstring(toy):
    config = Config(loss="toy_method:toy", loss_option=["power=3"], head="toy_method:ToyHead", head_option=["shift=1"])
    loss = LOSSES.make(config.loss, config.loss_option, reduction="sum")
    assert (loss.power, loss.reduction) == (3, "sum")
    logits, targets = torch.zeros(1, 3), torch.tensor([[1, 0, -1]])
    assert loss(logits, targets) == pytest.approx(2 * 0.5**3 * 1.01)
    total, count = loss(Output(logits), Batch(targets))
    assert (float(total), int(count)) == (pytest.approx(2 * 0.5**3 * 1.02), 2)
    text = LOSSES.help("toy_method:toy")
    assert "Squared error on known labels." in text
    assert "power=2" in text
    assert "A toy method, for tests." in text


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"loss": "toy_method:none"}, "toy_method has no loss 'none'"),
        ({"loss": "no_such_module:toy"}, "cannot import 'no_such_module'"),
        ({"loss": "as"}, "did you mean asl"),
        ({"loss": "toy_method:toy", "loss_option": ["strength=3"]}, "loss toy_method:toy takes power"),
        ({"loss": "toy_method:toy", "loss_option": ["power"]}, "write NAME=VALUE"),
        ({"loss": "toy_method:toy", "loss_option": ["power=2.5"]}, "must be a whole number"),
        ({"loss_option": ["normalize=1,2"]}, "normalize"),
        ({"head_option": ["reduction=sum"]}, "head mlp takes"),
        ({"head": "linear", "head_option": ["dropout=much"]}, "must be a number"),
    ],
)
def test_mistakes_are_one_line(toy, options, words):
    with pytest.raises(ValueError, match=re.escape(words)) as error:
        LOSSES.make(*(getattr(Config(**options), name) for name in ("loss", "loss_option")))
    assert "\n" not in str(error.value)
