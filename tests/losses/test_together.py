"""Two processes train to what one trains to with the doubled batch, for every method of the field; one process that
accumulates too, where the loss is a sum over labels."""

import contextlib
import os
import socket

import pytest
import torch
import torch.multiprocessing as mp
from rich.console import Console

from gpu_logicmix.losses import LOSSES, Batch, Output
from gpu_logicmix.train import loop
from gpu_logicmix.train.checkpoint import read_checkpoint
from gpu_logicmix.train.config import make_config

pytestmark = pytest.mark.slow  # two processes
LL = ["delta=20"]
METHODS = {
    "ll-r": {"loss": "ll-r", "loss_option": LL},
    "ll-r, mlcpl": {"loss": "ll-r", "loss_option": [*LL, "rule=mlcpl"]},
    "ll-ct": {"loss": "ll-ct", "loss_option": [*LL, "rule=released", "per_group=true"]},
    "ll-cp": {"loss": "ll-cp", "loss_option": LL},
    "splc": {"loss": "splc", "loss_option": ["tau=0.3"]},
    "hill": {"loss": "hill"},
    "csl": {"loss": "csl", "loss_option": ["prior=known", "threshold=0.3", "topk=1"]},
    "csl, negative": {"loss": "csl", "loss_option": ["mode=negative"]},
    "pu-mlc": {"loss": "pu-mlc"},
    "boostlu": {"loss": "bce", "head": "boostlu"},
    "sr": {"loss": "bce", "head": "sr", "head_option": ["tau=0.51"]},
}
# Its mixup draws partners within a process: another split of the batch is another result.
DRAWS = {"pu-mlc head": {"loss": "pu-mlc", "head": "pu-mlc"}}
SUMS = ["splc", "hill", "csl, negative", "boostlu"]  # over labels, each for itself


def config(name, **given):
    """Without chance in the input, and without batch norm, which would see another batch in each process."""
    small = {"option": ["count=24"], "size": 32, "known": 0.5, "model": "test_vit", "weights": "none", "epochs": 2}
    small |= {"head": "linear", "mix": "none", "flip": False, "randaugment": False, "cl": False, "cft": False}
    small |= {"decisions": False, "workers": 0, "threads": 1, "ema_decay": 0.0, "eval_every": 2}
    return make_config(small | (METHODS | DRAWS)[name] | given)


def train(name, folder, **given):
    loop.fit(config(name, **given), folder, console=Console(quiet=True))
    return read_checkpoint(folder / "last.pt")


def process(rank, ports, folder):
    place = {"MASTER_ADDR": "127.0.0.1", "WORLD_SIZE": 2, "RANK": rank, "LOCAL_RANK": rank}
    for name, port in zip(METHODS | DRAWS, ports, strict=True):
        os.environ |= {key: str(value) for key, value in {**place, "MASTER_PORT": port}.items()}
        loop.fit(config(name, batch_size=6, accumulate=1), folder / name, console=Console(quiet=True))


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    """A folder with the runs of two processes."""
    folder = tmp_path_factory.mktemp("two")
    with contextlib.ExitStack() as stack:
        free = [stack.enter_context(socket.socket()) for _ in METHODS | DRAWS]
        for each in free:
            each.bind(("127.0.0.1", 0))
        ports = [each.getsockname()[1] for each in free]
    mp.spawn(process, (ports, folder), nprocs=2)
    return folder


def assert_same(ours, theirs):
    for key, value in ours.items():
        other = theirs[key]
        if key.endswith("qkv.bias"):  # that of the keys has no gradient but rounding, of which Adam makes a step
            value, other = (torch.cat(x.chunk(3)[::2]) for x in (value, other))
        torch.testing.assert_close(other, value, atol=1e-5, rtol=1e-4, msg=key)


@pytest.mark.parametrize("name", METHODS)
def test_two_processes_are_one_with_the_doubled_batch(name, both, tmp_path):
    """Six samples each, so that there are rows in the gathered batch that only fill it."""
    one, two = train(name, tmp_path / "one", batch_size=12, accumulate=1), read_checkpoint(both / name / "last.pt")
    assert one["step"] == two["step"] == 4
    assert_same(one["model"], two["model"])
    if name == "ll-cp":
        table, known = one["curriculum"]["table"], one["curriculum"]["known"]
        assert torch.equal(two["curriculum"]["table"], table)
        assert ((known == -1) & (table != -1)).sum() > 5  # labels that were corrected for good


@pytest.mark.parametrize("name", DRAWS)
def test_two_processes_train(name, both):
    assert read_checkpoint(both / name / "last.pt")["step"] == 4


@pytest.mark.parametrize("name", SUMS)
def test_accumulated_batches_are_one_batch(name, tmp_path):
    one, parts = (train(name, tmp_path / str(n), batch_size=n, accumulate=12 // n)["model"] for n in (12, 6))
    assert_same(one, parts)


@pytest.mark.parametrize("name", ["ll-r", "csl", "pu-mlc"])
def test_halves_on_their_own_would_differ(name):
    """So that the tests above can fail: what the loss looks at is the whole batch."""
    loss = LOSSES.make(name, METHODS[name].get("loss_option"))
    logits = torch.randn(8, 5, generator=torch.Generator().manual_seed(0)) + torch.arange(8)[:, None] / 2
    targets = torch.randint(-1, 2, (8, 5), generator=torch.Generator().manual_seed(1))
    loss.prepare(targets, list("abcde"))
    loss.set_epoch(2)
    whole, *halves = (loss(Output(logits[s]), Batch(targets[s])) for s in (slice(8), slice(4), slice(4, 8)))
    assert not torch.isclose(whole.total / whole.count, sum(h.total for h in halves) / sum(h.count for h in halves))
