"""bench/bytes.py: the kernels and bytes of a step do not grow unnoticed."""

import pytest

pytest.importorskip("triton")
MIX = "mix, / 255, normalise, cast; labels"


@pytest.mark.parametrize(("batch", "size"), [(32, 448), (128, 224)])
def test_kernels_and_bytes_of_a_step(script, batch, size):
    parts = script("bench/bytes.py").count(batch, size)
    assert parts[MIX]["kernels"] <= 5  # one for the images, four small ones; it is 2
    assert parts[MIX]["MB"] <= 75
    assert parts["draw of the mix"]["kernels"] <= 25
    assert parts["flip"]["kernels"] <= 4
    assert parts["RandAugment"]["kernels"] <= 330
    assert sum(row["MB"] for row in parts.values()) <= 1_900


def test_the_counter_sees_every_pass(script):
    """A mean in plain torch would be seen: half of the batch read and written costs its bytes."""
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode

    counter = script("bench/bytes.py").Count(members=1.0)
    with FakeTensorMode():
        images = torch.empty(8, 3, 64, 64, device="cuda")
        with counter:
            images * 2
            images[::2].clone()
    assert [(name, moved) for _, name, moved in counter.rows] == [("mul", 2 * 8 * 49152), ("clone", 8 * 49152)]
