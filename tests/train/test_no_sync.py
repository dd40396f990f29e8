"""The host never waits for the device between two logging points."""

import contextlib

import pytest
import torch
from runs import (
    a_run,
)
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from gpu_logicmix.train.distributed import World
from gpu_logicmix.train.sums import check_finite


# --------------------------------------------------------------------------------------------- no wait for the device
class NoWait(TorchDispatchMode):
    """Fails when the host asks for a value of a tensor."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.name()
        assert not any(word in name for word in ("_local_scalar_dense", "nonzero", "equal.", "unique")), name
        return func(*args, **(kwargs or {}))


def bits_on_a_device(targets, out=None):
    """On a CPU, where there is nothing to wait for, the labels are looked at."""
    bits = (targets != 0).view(torch.int8).sub((targets == 1).view(torch.int8), alpha=2)
    return bits if out is None else out.copy_(bits)


@pytest.mark.filterwarnings("ignore:Seems like")
@pytest.mark.parametrize("mix", ["logicmix", "none"])
def test_host_asks_for_nothing_between_logging_points(tmp_path, monkeypatch, mix):
    """Forward, backward, loss, counts, scheduler and average, over 20 steps. The optimiser is left out: on the CPU it
    keeps its number of steps in tensors, which it reads."""
    run = a_run(tmp_path, mix=mix, accumulate=2, loss="dp-asl")
    with NoWait(), pytest.raises(AssertionError, match="_local_scalar_dense"):
        check_finite(run)
    monkeypatch.setattr("gpu_logicmix.augment.apply.to_bits", bits_on_a_device)
    for index in range(20):
        batch = run.train_set[list(range(index, index + 8))]
        with NoWait(), patched(run.optimizer, "step", lambda *_: None):
            run.batch(*batch, update=index % 2 == 1)
    assert run.updates == 10


@contextlib.contextmanager
def patched(owner, name, value):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, name, value)
        yield


@pytest.mark.filterwarnings("ignore:CUDA is not available")
@pytest.mark.parametrize(
    ("mix", "loss"),
    [
        *((mix, "asl") for mix in ("logicmix", "mixup", "ormixup", "mlmixup", "mixup-pme", "none")),
        ("logicmix", "dp-asl"),
        ("none", "dp-asl"),
    ],
)
def test_a_step_on_fake_cuda(tmp_path, monkeypatch, mix, loss):
    """A fake CUDA tensor has no value to wait for, and a tensor in the wrong place raises. Autograd does not run there
    without a device: the gradients are put in by hand."""
    run = a_run(tmp_path, mix=mix, loss=loss)
    drawn = run.augment.randaugment.plan(8)  # on the host, where it is read
    run.augment.randaugment.plan = lambda *_: drawn
    index = torch.arange(8)
    with FakeTensorMode(allow_non_fake_inputs=True):
        for module in (*run.model.modules(), *run.ema.module.modules(), *run.table.modules()):
            for name, value in module.named_parameters(recurse=False):
                setattr(module, name, torch.nn.Parameter(torch.empty_like(value, device="cuda"), value.requires_grad))
            for name, value in module.named_buffers(recurse=False):
                module._buffers[name] = torch.empty_like(value, device="cuda")
        run.world = World(0, 1, torch.device("cuda"))
        run.params = [p for p in run.model.parameters() if p.requires_grad]
        run.optimizer = torch.optim.AdamW(run.model.param_groups(1e-3), fused=True)
        run.scheduler = torch.optim.lr_scheduler.LambdaLR(run.optimizer, lambda update: 1.0)
        for name in ("totals", "counted", "first_bad"):
            setattr(run.sums, name, getattr(run.sums, name).to("cuda"))
        for p in run.params:
            p.grad = torch.empty_like(p)
        monkeypatch.setattr(torch.Tensor, "backward", lambda loss: None)
        monkeypatch.setattr(run.optimizer, "zero_grad", lambda: None)
        images = torch.empty(8, 3, 32, 32, dtype=torch.uint8, device="cuda").to(memory_format=torch.channels_last)
        targets = torch.empty(8, 12, dtype=torch.int8, device="cuda")
        run.model.train()
        for step in range(4):
            run.batch(images, targets, index, update=step % 2 == 1)
        assert run.updates == 2
        assert {p.device.type for p in run.ema.module.parameters()} == {"cuda"}
        assert run.sums.totals.device.type == run.sums.first_bad.device.type == "cuda"
        with pytest.raises(DataDependentOutputException):  # so that this test can fail
            check_finite(run)
