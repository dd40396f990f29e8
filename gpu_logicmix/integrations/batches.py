"""A whole batch through a mix, whatever it looks like: dicts, tuples, lists, with other entries in them.

batch = mix_batch(GPULogicMix(), {"pixel_values": images, "labels": targets, "path": names}, "pixel_values", "labels")
batch["mixed"]                                            # bool [B]: which samples are mixed
images, targets, index = mix_batch(mix, (images, targets, index))
"""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Any

import torch

from gpu_logicmix.augment.base import Mix

Key = str | int


def mix_batch(
    mix: Mix, batch: Any, images: Key = 0, targets: Key = 1, mixed: str | None = "mixed", *, training: bool = True
) -> Any:
    """A batch like `batch` with its images and labels mixed. `batch` itself stays as it is.

    images, targets: where they are, keys of a dict or places of a tuple or list.
    mixed: in a dict, the key under which to leave which samples are mixed; None: do not.
    training: False: leave all as it is, as `mix` does in `eval()`.
    """
    try:
        x, y = batch[images], batch[targets]
    except (KeyError, IndexError, TypeError):
        have = f"has {', '.join(map(repr, batch))}" if isinstance(batch, MutableMapping) else f"is {_shape(batch)}"
        raise ValueError(f"images={images!r}, targets={targets!r}: the batch {have}") from None
    count = torch.zeros(len(x), dtype=torch.bool, device=x.device)
    if training and mix.active and len(x):
        plan = mix.plan(len(x), x.device)
        x, y = mix(x, y, plan)
        count = plan.mixed
    if isinstance(batch, MutableMapping):
        new = batch.copy() if hasattr(batch, "copy") else dict(batch)
        new[images], new[targets] = x, y
        if mixed is not None:
            new[mixed] = count
        return new
    parts = list(batch)
    parts[images], parts[targets] = x, y
    if hasattr(batch, "_make"):  # a named tuple
        return batch._make(parts)
    return type(batch)(parts)


def _shape(batch: Any) -> str:
    return f"a {type(batch).__name__}" + (f" of {len(batch)}" if hasattr(batch, "__len__") else "")
