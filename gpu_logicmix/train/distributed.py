"""The processes of a run: alone, or one of those that torchrun started."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from gpu_logicmix.errors import RunError


class World(NamedTuple):
    """This process's place among all of them."""

    rank: int
    size: int
    device: torch.device
    control: Any = None  # a group of processes that agree by their CPUs, without a sync of the device

    @property
    def main(self) -> bool:
        return self.rank == 0

    @property
    def restarted(self) -> bool:
        """True if torchrun has started the processes again after a failure."""
        return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)) > 0

    def sum_(self, tensor: Tensor) -> Tensor:
        """Add up over all processes, in place."""
        if self.size > 1:
            dist.all_reduce(tensor)
        return tensor

    def wait(self) -> None:
        """Until all processes are here: what the first one has written can be read."""
        if self.size > 1:
            dist.barrier(group=self.control)

    def maximum(self, number: int) -> int:
        """The largest number of all processes. The hosts wait for each other, not for their devices."""
        if self.size == 1:
            return number
        largest = torch.tensor(number)
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=self.control)
        return int(largest)

    def gathered(self, state: dict[str, Tensor]) -> list[dict[str, Tensor]]:
        """What each process has, in the first one. Of tensors on the CPU."""
        if self.size == 1:
            return [state]
        states: list[dict[str, Tensor]] = [{} for _ in range(self.size)] if self.main else []
        dist.gather_object(state, states or None, group=self.control)
        return states

    def share_buffers(self, module: torch.nn.Module) -> None:
        """Give all processes the buffers of the first: those of batch norms have seen each rank's own samples."""
        if self.size > 1:
            for buffer in module.buffers():
                dist.broadcast(buffer, 0)


# The others wait this long for a process that works alone, as in fine-tuning. One that is lost is noticed at once.
PATIENCE = timedelta(days=1)


def usable_device(name: str) -> torch.device:
    """The device of that name; auto: a GPU if there is one."""
    name = ("cuda" if torch.cuda.is_available() else "cpu") if name == "auto" else name
    name = f"cuda:{os.environ.get('LOCAL_RANK', 0)}" if name == "cuda" else name  # each process its own
    try:
        device = torch.device(name)
        torch.zeros(1, device=device).item()  # one that cannot compute, such as "meta", raises here
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise RunError(f"device={name!r}: {str(error).splitlines()[0]}") from None
    return device


@contextlib.contextmanager
def joined_world(device: str = "auto", threads: int | None = None) -> Iterator[World]:
    """This process's place among those that torchrun started, or alone."""
    if threads:
        torch.set_num_threads(threads)
    chosen = usable_device(device)
    if chosen.type == "cuda" and device not in ("auto", "cuda") and int(os.environ.get("LOCAL_WORLD_SIZE", 1)) > 1:
        raise RunError(f"device={device!r}: several processes cannot share a GPU; with torchrun, use auto or cuda")
    if chosen.type == "cuda":
        torch.cuda.set_device(chosen)
    size = int(os.environ.get("WORLD_SIZE", 1))
    if size == 1:
        yield World(0, 1, chosen)
        return
    # torchrun keeps one store over all its restarts: without a prefix of its own, a process would find the addresses of
    # those that are dead.
    store, rank, size = next(dist.rendezvous("env://"))
    store = dist.PrefixStore(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"), store)
    on_gpu = chosen.type == "cuda"
    limit = None if on_gpu else PATIENCE
    dist.init_process_group("nccl" if on_gpu else "gloo", store=store, rank=rank, world_size=size, timeout=limit)
    yield World(rank, size, chosen, dist.new_group(backend="gloo", timeout=PATIENCE) if on_gpu else None)
    # Not after an error: the others may be in a collective, and NCCL would wait for them with the error unsaid.
    dist.destroy_process_group()
