"""bench/bytes.py: the kernels and bytes of a step do not grow unnoticed."""

import pytest

pytest.importorskip("triton")


@pytest.mark.parametrize(("batch", "size"), [(32, 448), (128, 224)])
def test_kernels_and_bytes_of_a_step(script, batch, size):
    bench = script("bench/bytes.py")
    parts = bench.count(batch, size)
    mix, augment, draw = parts[bench.MIX], parts[bench.AUGMENT], parts[bench.DRAW]
    assert mix["kernels"] <= 2  # one for the images, one for the labels
    assert mix["MB"] <= 73
    assert augment["kernels"] <= 7  # three a round, and zeros to count in
    assert augment["MB"] <= 90
    assert draw["kernels"] <= 27


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


def test_the_docs_have_the_tables_of_the_results(script):
    tables = script("bench/tables.py")
    page = tables.PAGE.read_text()
    assert set(tables.TABLES) == {line.split()[2] for line in page.splitlines() if line.startswith("<!-- table ")}
    assert tables.filled(page) == page, "python bench/tables.py"
