"""What a GPU asks for: no sync, no stray device, one graph, gradients, little memory."""

import copy

import pytest
import torch
from mixing import ALL, NAMES, NAN, some_batch
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from gpu_logicmix import GPULogicMix, RandAugment, RandomHorizontalFlip
from gpu_logicmix.augment import apply
from gpu_logicmix.augment.crop import MultiScaleCrop
from gpu_logicmix.augment.plan import MixPlan

every_mix = pytest.mark.parametrize("make", ALL, ids=NAMES)


@every_mix
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.uint8])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_no_sync_and_no_stray_device_on_fake_cuda(make, dtype, layout):
    mix = make()
    with FakeTensorMode():
        images = torch.empty(8, 3, 64, 64, dtype=dtype, device="cuda").to(memory_format=layout)
        targets = torch.empty(8, 9605, device="cuda")
        for _ in range(2):
            mixed, labels = mix(images, targets)
        assert (mixed.device.type, labels.device.type) == ("cuda", "cuda")
        assert (mixed.dtype, mixed.shape) == (images.dtype, images.shape)
        assert mixed.is_contiguous(memory_format=layout)
        plan = mix.plan(8, "cuda")
        assert {t.device.type for t in plan if t is not None} == {"cuda"}
        mix(images, targets, plan)


def test_fake_cuda_would_notice_a_sync():
    """`validate` waits for the device by design: the check above sees such a thing."""
    with FakeTensorMode():
        images, targets = torch.empty(8, 3, 8, 8, device="cuda"), torch.empty(8, 80, device="cuda")
        with pytest.raises(DataDependentOutputException):
            GPULogicMix(validate=True)(images, targets)


class Generators(TorchDispatchMode):
    """What a GPU refuses and fake tensors let pass: a draw on another device than that of its generator."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for generator in (x for x in (*args, *(kwargs or {}).values()) if isinstance(x, torch.Generator)):
            assert result.device.type == generator.device.type, function
        return result


@pytest.mark.parametrize(
    "make", [*ALL[:-1], lambda **own: GPULogicMix(bank=16, **own), MultiScaleCrop, RandAugment, RandomHorizontalFlip]
)
def test_a_generator_on_another_device_than_the_images(make):
    images, targets = some_batch(dtype=torch.uint8)

    def draw(device):
        part = make(generator=torch.Generator().manual_seed(3))
        return part.plan(images.to(device)) if make is MultiScaleCrop else part.plan(8, device)

    with Generators():
        there = draw("meta")
        parts = [there] if isinstance(there, torch.Tensor) else [part for part in there if part is not None]
        assert {part.device.type for part in parts} == {"meta"}
        if make in ALL[:-1]:
            assert make(generator=torch.Generator())(images.to("meta"), targets.to("meta"))[0].is_meta


@pytest.mark.parametrize(
    ("unknown", "takes"), [(-1, 1), (NAN, 1), (2**24, 1), (2**63 - 1, 0), (2**53 + 1, 0), (0.3, 0)]
)
def test_the_kernel_is_not_told_an_unknown_that_float32_would_round(monkeypatch, unknown, takes):
    calls = []

    class Kernels:
        def or_rows(labels, index, *_):
            calls.append(labels)
            return labels[index[:, 0]]

    monkeypatch.setattr(apply, "_triton", lambda: Kernels)
    with FakeTensorMode():
        whole = isinstance(unknown, int) and unknown != -1
        targets = torch.zeros(4, 5, device="cuda", dtype=torch.int64 if whole else torch.float64)
        index = torch.zeros(4, 2, device="cuda", dtype=torch.int64)
        labels = apply.or_targets(targets, MixPlan(index, index[:, 0] + 1, index[:, 0] > 0), unknown)
        assert (labels.device.type, labels.dtype) == ("cuda", targets.dtype)
    assert len(calls) == takes


@every_mix
@pytest.mark.filterwarnings("ignore")
def test_compiles_without_a_graph_break(make, device):
    torch._dynamo.reset()
    images, targets = some_batch(8, shape=(3, 16, 16), device=device)
    mix = make()
    mix(images, targets)
    twin = copy.deepcopy(mix)
    compiled = torch.compile(twin, fullgraph=True, dynamic=False)
    plan = mix.plan(8, device)
    for eager, graph in zip(mix(images, targets, plan), compiled(images, targets, plan), strict=True):
        torch.testing.assert_close(eager, graph, rtol=1e-6, atol=1e-6)
    mixed, labels = compiled(images, targets)  # draws inside the graph
    again, _ = compiled(images, targets)
    assert mixed.shape == images.shape
    assert labels.shape == targets.shape
    assert not torch.equal(mixed, again)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_runs_inside_a_cuda_graph():
    images, targets = some_batch(32, 80, (3, 32, 32), device="cuda")
    mix = GPULogicMix()
    mix(images, targets)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        mixed, _ = mix(images, targets)
    graph.replay()
    first = mixed.clone()
    graph.replay()
    assert not torch.equal(first, mixed), "each replay must draw anew"


@every_mix
def test_gradient_goes_through_the_images(make, device):
    images, targets = some_batch(6, device=device)
    images = images.double().requires_grad_()
    mix = make()
    plan = mix.plan(6, device)
    mixed, _ = mix(images, targets, plan)
    upstream = torch.rand_like(mixed)
    mixed.backward(upstream)
    matrix = torch.zeros(6, 6, dtype=torch.float64, device=device)
    for i in range(6):
        for k in range(plan.size[i]):
            matrix[i, plan.index[i, k]] += 1 / plan.size[i] if plan.weight is None else plan.weight[i, k]
    expected = (matrix.T @ upstream.flatten(1)).view_as(images)
    torch.testing.assert_close(images.grad, expected, rtol=1e-6, atol=1e-6)
    if hasattr(mix, "reset_bank"):
        mix.reset_bank()
    torch.testing.assert_close(mix(images.detach(), targets, plan)[0], mixed, rtol=1e-12, atol=1e-12)


class LargestTensor(TorchDispatchMode):
    """The bytes of the largest tensor that any operator makes, leaving out the one that `result` is stored in."""

    def __init__(self):
        super().__init__()
        self.made = {}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(tensor, torch.Tensor):
                self.made[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage()  # keeps the address taken
        return result

    def beside(self, *results):
        theirs = {result.untyped_storage().data_ptr() for result in results}
        return max(storage.nbytes() for address, storage in self.made.items() if address not in theirs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
@pytest.mark.parametrize("k_max", [3, 8])
def test_no_temporary_as_large_as_the_batch(way, dtype, k_max):
    side = 224 if dtype is torch.uint8 else 96  # bytes are worked on 2^18 at a time, whatever the batch
    images, targets = some_batch(32, 80, (3, side, side), dtype=dtype)
    mix = GPULogicMix(k_max=k_max)
    with LargestTensor() as largest:
        mixed, labels = mix(images, targets)
    known = images.untyped_storage(), targets.untyped_storage()
    assert {s.data_ptr() for s in known}.isdisjoint({mixed.data_ptr(), labels.data_ptr()})
    for storage in known:
        largest.made.pop(storage.data_ptr(), None)
    assert largest.beside(mixed) <= 0.55 * mixed.nbytes  # uint8: 2 MB of floats


def test_memory_of_the_draw_grows_with_batch_times_k():
    with LargestTensor() as largest:
        GPULogicMix(k_max=8).plan(4096)
    assert largest.beside() <= 4096 * 8 * 8
