"""Devices by name, and what a machine with a GPU would ask for; without one, on stand-ins."""

import warnings
from types import SimpleNamespace

import pytest
import torch

from gpu_logicmix import machine
from gpu_logicmix.errors import RunError
from gpu_logicmix.train import build, distributed
from gpu_logicmix.train.config import Config


@pytest.fixture
def cuda(monkeypatch):
    """As if there were GPUs: tensors go to the CPU, the current device is noted."""
    chosen = []
    zeros = torch.zeros
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch, "zeros", lambda *size, device=None, **rest: zeros(*size, **rest))
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: chosen.append(torch._utils._get_device_index(device)))
    return chosen


@pytest.mark.parametrize(("name", "rank", "want"), [("auto", "0", 0), ("cuda", "0", 0), ("cuda:1", "0", 1)])
def test_a_gpu_has_a_number(cuda, monkeypatch, name, rank, want):
    """`torch.cuda.set_device` takes no device without one."""
    monkeypatch.setenv("LOCAL_RANK", rank)
    with distributed.joined_world(name) as world:
        assert (world.device.type, world.device.index) == ("cuda", want)
    assert cuda == [want]


def test_each_process_of_torchrun_takes_its_own(cuda, monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "3")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert [distributed.usable_device(name).index for name in ("auto", "cuda")] == [3, 3]
    with (
        pytest.raises(RunError, match="device='cuda:1': several processes cannot share a GPU"),
        distributed.joined_world("cuda:1"),
    ):
        pass


@pytest.mark.parametrize(("native", "want"), [(True, torch.bfloat16), (False, torch.float16)])
def test_older_gpus_compute_in_float16(monkeypatch, native, want):
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: native or including_emulation)
    assert build.amp_dtype(Config(), torch.device("cuda:0")) is want
    assert build.amp_dtype(Config(amp="bf16"), torch.device("cuda:0")) is torch.bfloat16
    assert build.amp_dtype(Config(), torch.device("cpu")) is torch.float32


def test_without_a_compiler_there_is_a_warning_and_no_kernel(monkeypatch):
    class Driver:
        @property
        def active(self):
            raise RuntimeError("Failed to find C compiler. Please specify via CC environment variable")

    runtime = pytest.importorskip("triton.runtime")
    machine.triton_works.cache_clear()
    assert machine.triton_works()  # no GPU: nothing to ask
    machine.triton_works.cache_clear()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(runtime, "driver", Driver())
    with pytest.warns(UserWarning, match=r"Triton cannot be used here \(Failed to find C compiler"):
        assert not machine.triton_works()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not machine.triton_works()  # said once
    machine.triton_works.cache_clear()


def test_what_arrives_on_the_host_is_waited_for():
    """A copy to the CPU that does not wait gives memory that is still to be filled."""
    asked = []
    tensor = SimpleNamespace(to=lambda device, non_blocking: asked.append((str(device), non_blocking)))
    for device in ("cpu", torch.device("cpu"), "cuda", torch.device("cuda:1")):
        machine.sent(tensor, device)
    assert asked == [("cpu", False), ("cpu", False), ("cuda", True), ("cuda:1", True)]
