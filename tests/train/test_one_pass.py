"""The augmentation as on CUDA: bytes up to the mix, which also normalises and casts; tried out on a CPU."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from gpu_logicmix.train.build import amp_dtype, make_augment
from gpu_logicmix.train.config import Config
from gpu_logicmix.train.distributed import World
from gpu_logicmix.train.stepbench import open_run

CPU = torch.device("cpu")


def config(**options):
    shared = {"data": "shapes", "option": ["count=64"], "size": 32, "model": "test_resnet", "weights": "none"}
    shared |= {"known": 0.5, "batch_size": 16, "accumulate": 1, "workers": 0, "epochs": 2, "normalisation": "backbone"}
    return Config(**shared | {"p": 1.0, "cft": False, "schedule": "constant"} | options)


def trained(one_pass, steps=1, **options):
    """Gradient of the first step and weights after some, from the same start, with the same draws."""
    run, batch = open_run(config(**options), World(0, 1, CPU))
    run.augment = make_augment(run.config, run.model, CPU, one_pass)
    parameters = list(run.model.parameters())
    run.batch(*batch, update=False)
    gradient = torch.cat([p.grad.flatten() for p in parameters])
    run.optimizer.zero_grad()
    run.step = 0
    run.sums.begin_update()
    for _ in range(steps):
        run.batch(*batch, update=True)
    return gradient, torch.cat([p.detach().flatten() for p in parameters])


@pytest.mark.parametrize("options", [{}, {"mix": "mixup"}, {"mix": "none", "flip": False}, {"normalisation": "none"}])
def test_a_step_gives_the_same_weights(options):
    """The mean of bytes is exact and divided by 255 once; the mean of floats rounds each. The gradient is the same to
    5e-6 of its largest, and the weights to 1e-6, but for the few whose gradient is a rounding error itself: the first
    step of Adam is the gradient divided by its size, whatever that is."""
    (floats, before), (_, after) = (trained(False, steps, **options) for steps in (0, 1))
    bytes_, weights = trained(True, 1, **options)
    assert (floats - bytes_).abs().max() <= 5e-6 * floats.abs().max()
    off = (after - weights).abs()
    assert (off > 1e-6).float().mean() < 1e-4
    assert off.mean() < 1e-9
    assert (after - before).abs().mean() > 1e-5  # the step did something


def test_the_model_normalises_what_it_is_evaluated_on():
    run, (images, targets, _) = open_run(config(randaugment=False, flip=False, mix="none"), World(0, 1, CPU))
    unit = images.float() / 255
    expected = run.model.eval().features(unit)
    run.augment = make_augment(run.config, run.model, CPU, one_pass=True)
    torch.testing.assert_close(run.model.features(unit), expected, rtol=0, atol=0)
    [view], _, mixed = run.augment(images, targets)
    assert mixed is None
    torch.testing.assert_close(view, (unit - run.model.mean) / run.model.std, rtol=1e-5, atol=1e-5)
    run.model.train().requires_grad_(False)
    assert not torch.allclose(run.model.features(view), run.model.features(unit))
    run.model.normalised_in_training = False
    assert torch.equal(run.model.features(unit), run.model.features(unit))


@pytest.mark.parametrize(("head", "dtype"), [("linear", torch.bfloat16), ("pu-mlc", torch.float32)])
def test_what_comes_out(head, dtype):
    run, (images, targets, _) = open_run(
        config(amp="bf16", head=head, loss="pu-mlc" if head != "linear" else "asl"), World(0, 1, CPU)
    )
    assert images.is_contiguous(memory_format=torch.channels_last)
    assert amp_dtype(run.config, CPU) is torch.bfloat16
    [view], _, _ = make_augment(run.config, run.model, CPU, one_pass=True)(images, targets)
    assert view.dtype is dtype  # a head with a step of its own may compute with the images
    assert view.is_contiguous(memory_format=torch.channels_last)


class Names(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.called = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        self.called.append(function)
        return result


def test_on_cuda_no_pass_is_made_twice():
    """On fake tensors: nothing waits, and all that touches images is seven kernels."""
    pytest.importorskip("triton")
    run, _ = open_run(config(), World(0, 1, CPU))
    cuda = torch.device("cuda")
    augment = make_augment(run.config, run.model, CPU, one_pass=True)
    augment.mix.finish.out_dtype = torch.bfloat16
    with FakeTensorMode(allow_non_fake_inputs=True):
        images = torch.empty(16, 3, 32, 32, dtype=torch.uint8, device=cuda).to(memory_format=torch.channels_last)
        targets = torch.empty(16, 10, dtype=torch.int8, device=cuda)
        with Names() as names:
            [view], labels, mixed = augment(images, targets)
    assert (view.dtype, view.shape, view.device) == (torch.bfloat16, images.shape, images.device)
    assert (labels.device, mixed.device) == (images.device, images.device)
    ours = [str(f) for f in names.called if f.namespace == "gpu_logicmix"]
    assert len(ours) == 8  # two rounds of three, images, labels
