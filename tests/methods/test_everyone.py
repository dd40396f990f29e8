"""Two processes compute what one computes with the whole batch: losses, gradients and state of the transfer methods."""

import os
import socket

import launch
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from gpu_logicmix.losses.base import Batch, LossSum
from gpu_logicmix.losses.everyone import Everyone
from gpu_logicmix.methods.base import HEADS

OPTIONS = ["words=7", "width=none", "joint=5", "out=9", "start=1", "contrast=0.5"]
pytestmark = pytest.mark.slow  # two processes
NAMES = ["sst", "hst", "sarb", "dsrb"]
STEPS, BATCH, CATEGORIES = 4, 6, 4


def make(name):
    torch.manual_seed(0)
    options = [*OPTIONS, *{"sst": ["stored=3", "threshold=0.4", "lowest=0.1"], "hst": ["threshold=0.3"]}.get(name, [])]
    head = HEADS.make(name, options, 10, CATEGORIES)
    head.prepare(torch.randint(-1, 2, (40, CATEGORIES)), list("abcd"))
    head.begin_epoch(1, 9, lambda: iter([(torch.randn(30, 10, 3, 3), torch.randint(-1, 2, (30, CATEGORIES)), None)]))
    return head


def data(step):
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(BATCH, 10, 3, 3, generator=generator)
    targets = torch.randint(-1, 2, (BATCH, CATEGORIES), generator=generator)
    return x, Batch(targets, torch.arange(BATCH), torch.rand(BATCH, generator=generator) < 0.3, step // 2)


def train(name, rank, world, left_out=0):
    """As a run does: sums of all processes divided by counts of all processes. `left_out`: rows that the last process
    could not read."""
    head, values = make(name), []
    for step in range(STEPS):
        x, batch = data(step)
        mine = slice(rank, BATCH, world)
        x, batch = x[mine], Batch(batch.targets[mine], batch.index[mine], batch.mixed[mine], batch.epoch)
        if left_out and rank == world - 1 and step == STEPS - 1:
            keep = slice(0, len(x) - left_out)
            x, batch = x[keep], Batch(batch.targets[keep], batch.index[keep], batch.mixed[keep], batch.epoch)
        output = head(x, batch)
        known = batch.targets >= 0
        loss = torch.nn.functional.binary_cross_entropy_with_logits(
            output.logits, batch.targets.clamp(min=0).float(), known.float(), reduction="sum"
        )
        loss = head.with_auxiliary(LossSum(loss, known.sum()), output, batch)
        loss.total.backward()
        count, total = loss.count.clone(), loss.total.detach().clone()
        gradients = [p.grad for p in head.parameters()]
        if world > 1:
            for tensor in (count, total, *gradients):
                dist.all_reduce(tensor)
        values.append((total / count).item())
        with torch.no_grad():
            for p in head.parameters():
                p -= 0.1 * p.grad / count
                p.grad = None
    return head.state_dict(), values


def rows_of(rank, world):
    rows, device = 3 - rank, torch.device("cpu")
    everyone = Everyone(rows, Everyone.agree(rows, device), device)
    numbers = torch.arange(rows).float()[:, None] * world + rank
    return everyone.all(numbers)[:, 0].tolist(), everyone.valid.tolist(), everyone.reversed().tolist()


def process(rank, world, port, folder):
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=world)
    try:
        result = {name: train(name, rank, world) for name in NAMES}
        result |= {"unequal": train("sst", rank, world, left_out=2), "rows": rows_of(rank, world)}
        torch.save(result, folder / f"{rank}.pt")
    finally:
        dist.destroy_process_group()


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    """What two processes found."""
    folder = tmp_path_factory.mktemp("two")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    launch.serve()
    mp.start_processes(process, (2, port, folder), nprocs=2, start_method=launch.CONTEXT.get_start_method())
    return [torch.load(folder / f"{rank}.pt") for rank in range(2)]


@pytest.mark.parametrize("name", NAMES)
def test_two_processes_are_one_with_the_whole_batch(name, both):
    """Three samples each, so that there are rows in the gathered batch that only fill it."""
    state, values = train(name, 0, 1)
    assert values[0] != values[-1]
    for rank in both:
        other, its_values = rank[name]
        assert its_values == pytest.approx(values, abs=1e-5)
        for key, value in state.items():
            torch.testing.assert_close(other[key], value, atol=1e-5, rtol=1e-4, msg=key)


def test_processes_with_unequal_shares_agree(both):
    first, second = both[0]["unequal"], both[1]["unequal"]
    assert first[1] == second[1]
    assert all(torch.equal(value, second[0][key]) for key, value in first[0].items())


def test_rows_are_in_the_order_of_one_process(both):
    """The first process has rows 0, 2, 4 and the second 1, 3: there are four places for each."""
    first, second = both[0]["rows"], both[1]["rows"]
    for rows, valid, _ in (first, second):
        assert [row for row, there in zip(rows, valid, strict=True) if there] == [0, 1, 2, 3, 4]
        assert len(rows) == 8
    rows = first[0]
    assert [rows[i] for i in first[2]] == [4, 2, 0]
    assert [rows[i] for i in second[2]] == [3, 1]
