"""The Triton kernels against torch: in Triton's interpreter on the CPU, and on fake CUDA tensors."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from gpu_logicmix import GPULogicMix, Mixup, MixupPME, MultiLabelMixup, OrMixup, RandAugment, RandomHorizontalFlip
from gpu_logicmix.augment import augment_kernels, augment_launch, kernels
from gpu_logicmix.augment.randaugment import OPERATIONS

pytest.importorskip("triton")
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


@pytest.mark.slow
@pytest.mark.parametrize("part", ["images", "sliced", "labels", "randaugment"])
def test_kernels_in_the_interpreter(part):
    """In a process of its own: Triton decides on import whether it interprets."""
    checks = Path(__file__).parent.parent / "interpreted.py"
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    result = subprocess.run(
        [sys.executable, checks, part], env=environment, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert "cases" in result.stdout


# What Triton makes of a launch depends on its arguments: those that are 1 become constants.
U8 = torch.uint8
LABELS = {
    "a row is 80 labels": torch.zeros(4, 80, dtype=torch.int8),
    "column-major": torch.zeros(80, 4).T,
    "one category": torch.zeros(4, 1, dtype=torch.int64),
    "one sample": torch.zeros(1, 80, dtype=torch.bool),
}
ROWS = {
    "a block": torch.zeros(4, 1024, dtype=U8),
    "odd": torch.zeros(4, 75),
    "one number": torch.zeros(4, 1),
    "three of four channels": torch.zeros(4, 4 * 64)[:, : 3 * 64],
    "the same sample": torch.zeros(1, 75).expand(4, 75),
}
SHAPES = [(3, 32, 32), (3, 1, 9), (1, 9, 1), (3, 1, 1)]


@pytest.fixture
def compiled(script, tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    aot = script("bench/aot.py")
    return lambda launch, *arguments: aot.compiled(80, launch, *arguments)


@pytest.mark.parametrize("labels", LABELS.values(), ids=LABELS)
@pytest.mark.parametrize("mode", [kernels.KEEP, kernels.ABSENT_IF_MIXED])
def test_the_label_kernel_compiles_as_it_is_launched(compiled, labels, mode):
    index, size = torch.zeros(len(labels), 3, dtype=torch.int64), torch.ones(len(labels), dtype=torch.int64)
    assert len(compiled(kernels.launch_or, labels, index, size, -1.0, mode)) == 1


@pytest.mark.parametrize("rows", ROWS.values(), ids=ROWS)
@pytest.mark.parametrize("finish", [False, True])
def test_the_image_kernel_compiles_as_it_is_launched(compiled, rows, finish):
    index, size = torch.zeros(4, 3, dtype=torch.int64), torch.ones(4, dtype=torch.int64)
    constants = (torch.ones(1), torch.zeros(1)) if finish else (None, None)
    assert len(compiled(kernels.launch_mix, rows, index, size, None, *constants, 1, torch.bfloat16)) == 1


@pytest.mark.slow
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("names", [OPERATIONS, ("AutoContrast",)], ids=["all", "one"])
def test_randaugment_compiles_as_it_is_launched(compiled, shape, names):
    images, augment = torch.zeros(4, *shape, dtype=U8), RandAugment(1, 30, ops=names)
    mirror = torch.zeros(4, dtype=torch.bool)
    arguments = (images, *augment.plan(4), mirror, augment._magnitudes(images))
    assert len(compiled(augment_launch.augmented, *arguments)) == 3


class Names(torch.utils._python_dispatch.TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.called = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.called.append(str(function))
        return function(*args, **(kwargs or {}))


def with_bank(**options):
    return GPULogicMix(bank=4, **options)


@pytest.mark.parametrize("make", [GPULogicMix, Mixup, OrMixup, MultiLabelMixup, MixupPME, with_bank])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32])
def test_cuda_takes_one_kernel_for_the_images(make, layout, dtype):
    mix = make(normalize=(MEAN, STD), out_dtype=torch.bfloat16)
    with FakeTensorMode():
        images = torch.empty(8, 3, 64, 64, dtype=dtype, device="cuda").to(memory_format=layout)
        targets = torch.empty(8, 80, device="cuda")
        plan = mix.plan(8, "cuda")
        with Names() as names:
            mixed, labels = mix(images, targets, plan)
    assert (mixed.dtype, mixed.shape, mixed.device.type) == (torch.bfloat16, images.shape, "cuda")
    assert mixed.is_contiguous(memory_format=layout)
    assert labels.shape == targets.shape
    assert sum("gpu_logicmix.mix_rows" in name for name in names.called) == 1
    soft = isinstance(mix, (Mixup, MixupPME))
    assert sum("gpu_logicmix.or_rows" in name for name in names.called) == (0 if soft else 1)
    assert not any("embedding_bag" in name for name in names.called)


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("given", ["cpu", "cuda", None])
def test_cuda_takes_three_kernels_a_round(layout, given):
    """The flip among them; on fake tensors, so nothing waits for the device either."""
    augment, flip = RandAugment(n=2), RandomHorizontalFlip()
    drawn = augment.plan(8)
    with FakeTensorMode(allow_non_fake_inputs=True):
        images = torch.empty(8, 3, 64, 48, dtype=torch.uint8, device="cuda").to(memory_format=layout)
        plan = {"cpu": drawn, "cuda": augment.plan(8, "cuda"), None: None}[given]
        mirror = flip.plan(8, "cuda")
        with Names() as names:
            result = augment(images, plan, mirror)
        assert (result.dtype, result.shape, result.device.type) == (torch.uint8, images.shape, "cuda")
        assert result.is_contiguous(memory_format=layout)
        ours = [name for name in names.called if "gpu_logicmix" in name]
        kinds = ("augment_statistics", "augment_tables", "augment_apply")
        assert ours == [f"gpu_logicmix.{kind}.default" for kind in kinds * 2]
        with Names() as names:
            flip(images)
        assert [name for name in names.called if "gpu_logicmix" in name] == ["gpu_logicmix.augment_apply.default"]
        with Names() as names:
            augment(images / 255, drawn)  # floats have levels between the 256
        assert not any("gpu_logicmix" in name for name in names.called)


def test_the_kernels_know_the_operations():
    for name, number in zip(OPERATIONS, range(14), strict=True):
        word = "".join(f"_{letter}" if letter in "XY" else letter for letter in name).upper()
        assert getattr(augment_kernels, word).value == number


def test_offsets_past_32_bits():
    """4,096 images of 3 x 448 x 448 are more than 2^31 numbers; shapes alone can be followed here."""
    augment = RandAugment()
    with FakeTensorMode():
        images = torch.empty(4096, 3, 448, 448, dtype=torch.uint8, device="cuda")
        mixed, _ = GPULogicMix(out_dtype=torch.bfloat16)(images, torch.empty(4096, 80, device="cuda"))
        assert mixed.numel() == 4096 * 3 * 448 * 448
        assert augment(images).shape == images.shape


def test_a_batch_with_history_stays_differentiable_on_cuda():
    with FakeTensorMode():
        images = torch.empty(8, 3, 16, 16, device="cuda", requires_grad=True)
        mixed, _ = GPULogicMix(normalize=(MEAN, STD))(images, torch.empty(8, 80, device="cuda"))
        assert mixed.requires_grad
        with torch.no_grad(), Names() as names:
            GPULogicMix()(images, torch.empty(8, 80, device="cuda"))
    assert any("gpu_logicmix.mix_rows" in name for name in names.called)
