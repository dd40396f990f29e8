"""What the documentation of the transforms shows runs, and what it says was measured was."""

import json
import pkgutil
import re

import pytest
import torch
from places import ROOT
from torch._subclasses.fake_tensor import FakeTensorMode

PAGES = ["logicmix", "randaugment", "drop-in", "benchmarks"]


def text_of(page):
    return (ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8")


def test_the_first_example_of_randaugment():
    """On fake CUDA tensors: where the batch comes from the loader, it is on the CPU."""
    example = re.search(r"```python\n(.*?)```", text_of("randaugment"), re.DOTALL)[1]
    lines = example.split("for images")
    names = {}
    exec(lines[0], names)
    with FakeTensorMode():
        names["loader"] = [(torch.empty(4, 3, 8, 8, dtype=torch.uint8), torch.empty(4, 5))]
        exec(f"for images{lines[1]}", names)
        assert (names["images"].device.type, names["targets"].device.type) == ("cuda", "cuda")


@pytest.mark.parametrize("page", PAGES)
def test_names_on_the_pages_exist(page):
    for name in re.findall(r"`(gpu_logicmix(?:\.\w+)*)[`(]", text_of(page)):
        pkgutil.resolve_name(name)


def test_the_training_step_was_measured_as_it_says():
    rows = json.loads((ROOT / "bench" / "results" / "step.json").read_text(encoding="utf-8"))["rows"]
    part = " ".join(text_of("benchmarks").split("## The training step")[1].split("<!--")[0].split())
    sizes, rounds, threads = re.search(r"bench/step.py --size ([\d ]+) --rounds (\d+) --threads (\d+)", part).groups()
    assert [row["size"] for row in rows[:-1]] == [int(size) for size in sizes.split()]
    assert {row["rounds"] for row in rows} == {int(rounds)}
    assert f"medians of {rounds} turns" in part
    assert {row["threads"] for row in rows[:-1]} == {int(threads)}
    assert ("with its one thread" in part) == (rows[-1]["threads"] == 1)
