"""torch.compile(fullgraph=True) with batches of changing size, torch.export with a dynamic batch."""

import pytest
import torch
from mixing import ALL, MIXES, NAMES, some_batch
from torch._inductor.utils import run_and_get_code

from gpu_logicmix import GPULogicMix, Mixup, RandAugment, RandomHorizontalFlip

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
SIZES = (8, 5, 7, 1, 16)


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()


@pytest.mark.parametrize("dtype", [torch.float32, torch.uint8])
@pytest.mark.parametrize("make", ALL, ids=NAMES)
def test_many_batch_sizes_through_one_compiled_mix(make, dtype):
    compiled, mix = torch.compile(make(), fullgraph=True, backend="eager"), make()
    for size in SIZES:
        images, targets = some_batch(size, 24, (3, 8, 8), dtype=dtype, seed=size)
        plan = make().plan(size)
        mixed, labels = compiled(images, targets, plan)
        expected, expected_labels = mix(images, targets, plan)
        torch.testing.assert_close(mixed, expected, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(labels, expected_labels)
    if dtype is torch.uint8:  # drawn inside the graph, which has nothing to do with the type of the images
        for size in SIZES:
            images, targets = some_batch(size, 24, (3, 8, 8), dtype=dtype, seed=size)
            assert compiled(images, targets)[0].shape == images.shape
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    # The first size, any other size, one alone; each with and without a plan. The bank grows with the largest batch.
    most = 6 if not getattr(mix, "bank", 0) else 10
    assert graphs <= (most if dtype is torch.uint8 else most // 2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.uint8])
def test_inductor_gives_the_same_numbers_for_every_size(dtype):
    mix = GPULogicMix()
    compiled = torch.compile(GPULogicMix(), fullgraph=True)
    for size in (8, 5, 7):
        images, targets = some_batch(size, 24, (3, 8, 8), dtype=dtype, seed=size)
        images[0, 0, 0, 0] = 255 if dtype == torch.uint8 else torch.inf
        plan = mix.plan(size)
        for a, b in zip(compiled(images, targets, plan), mix(images, targets, plan), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)
        if dtype == torch.uint8:
            assert torch.equal(compiled(images, targets, plan)[0], mix(images, targets, plan)[0])


def test_group_sizes_drawn_inside_a_graph_are_uniform_from_k_min_to_k_max():
    graph = torch.compile(lambda: GPULogicMix(p=0.5, k_min=2, k_max=8).plan(70_000).size, fullgraph=True)
    torch.manual_seed(0)
    count = torch.bincount(graph(), minlength=9)
    assert len(count) == 9  # never more than k_max
    assert count[0] == 0
    assert abs(count[1] / 70_000 - 0.5) < 0.01
    # Chi squared with 6 degrees of freedom is above 22.5 once in a thousand draws.
    each = count[2:].sum() / 7
    assert ((count[2:] - each) ** 2 / each).sum() < 22.5


def test_the_compiler_does_not_draw_a_group_anew_for_every_pixel():
    compiled = torch.compile(GPULogicMix(), fullgraph=True, dynamic=False)
    images, targets = some_batch(8, 24, (3, 16, 16), dtype=torch.float32, seed=0)
    _, (code,) = run_and_get_code(compiled, images, targets)
    loops = code.split("for(int64_t x0=")
    pixels = [loop for loop in loops if "x1<static_cast<int64_t>(768L)" in loop]  # 3 x 16 x 16
    assert len(pixels) == 1
    assert "rand" not in pixels[0].split("async_compile")[0]


@pytest.mark.parametrize("part", [RandAugment, RandomHorizontalFlip])
@pytest.mark.parametrize("dtype", [torch.float32, torch.uint8])
def test_many_batch_sizes_through_randaugment_and_flip(part, dtype):
    compiled = torch.compile(part(), fullgraph=True, backend="eager")
    for size in SIZES:
        images, _ = some_batch(size, shape=(3, 16, 12), dtype=dtype)
        if dtype is torch.uint8:
            assert compiled(images).shape == images.shape
        plan = part().plan(size)
        off = compiled(images, plan).float() - part()(images, plan).float()
        assert off.abs().max() <= (1 if dtype is torch.uint8 else 1e-5)


@pytest.mark.parametrize(
    ("part", "dtype"),
    [
        *((part, torch.uint8) for part in (*MIXES, RandAugment, RandomHorizontalFlip)),
        *((part, torch.float32) for part in (GPULogicMix, Mixup, RandAugment)),
    ],
)
def test_export_with_a_dynamic_batch(part, dtype):
    def arguments(size):
        images, targets = some_batch(size, 24, (3, 16, 12), dtype=dtype)
        return (images, targets) if part in MIXES else (images,)

    batch = {0: torch.export.Dim("batch", min=2, max=4096)}
    example = arguments(4)
    program = torch.export.export(part(), example, dynamic_shapes=(batch,) * len(example))
    for size in (2, 5, 9):
        result = program.module()(*arguments(size))
        assert (result[0] if part in MIXES else result).shape == (size, 3, 16, 12)


@pytest.mark.parametrize("part", [*MIXES, RandAugment, RandomHorizontalFlip])
def test_a_generator_under_compile_says_what_to_do(part):
    made = part(generator=torch.Generator().manual_seed(0))
    arguments = some_batch(4) if part in MIXES else (some_batch(4)[0],)
    compiled = torch.compile(made, fullgraph=True, backend="eager")
    with pytest.raises(Exception, match="draw the plan outside and pass it"):
        compiled(*arguments)
    compiled(*arguments, made.plan(4))  # and this is how
