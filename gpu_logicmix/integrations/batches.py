"""A whole batch through a mix, whatever it looks like: dicts, tuples, lists, with other entries in them.

batch = mix_batch(GPULogicMix(), {"pixel_values": images, "labels": targets, "path": names}, "pixel_values", "labels")
batch["mixed"]                                            # bool [B]: which samples are mixed
images, targets, index = mix_batch(mix, (images, targets, index))
"""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Any

import torch
from torch import Tensor

from gpu_logicmix.augment.base import Mix, finished

Key = str | int


def mix_batch(
    mix: Mix, batch: Any, images: Key = 0, targets: Key = 1, mixed: str | None = "mixed", *, training: bool = True
) -> Any:
    """A batch like `batch` with its images and labels mixed. `batch` itself stays as it is.

    images, targets: where they are, keys of a dict or places of a tuple or list.
    mixed: in a dict, the key under which to leave which samples are mixed; None: do not.
    training: False: mix nobody, as `mix` does in `eval()`; `normalize` and `out_dtype` of the mix remain.
    """
    try:
        x, y = batch[images], batch[targets]
    except (KeyError, IndexError, TypeError):
        raise ValueError(f"images={images!r}, targets={targets!r}: the batch {_shape(batch)}") from None
    count = torch.zeros(len(x), dtype=torch.bool, device=x.device)
    if training and mix.active and len(x):
        plan = mix.plan(len(x), x.device)
        x, y = mix(x, y, plan)
        count = plan.mixed
    else:
        x = finished(x, mix.finish)
    new = {images: x, targets: y}
    return _replaced(batch, new if mixed is None or not isinstance(batch, MutableMapping) else new | {mixed: count})


def finish_batch(mix: Mix, batch: Any, images: Key = 0) -> Any:
    """A batch like `batch` with `normalize` and `out_dtype` of the mix applied to its images, nothing else: for
    validation and prediction, where there may be no labels and the batch may be the images alone."""
    if mix.finish.idle:
        return batch
    if isinstance(batch, Tensor):
        return finished(batch, mix.finish)
    try:
        x = batch[images]
    except (KeyError, IndexError, TypeError):
        raise ValueError(f"images={images!r}: the batch {_shape(batch)}") from None
    return _replaced(batch, {images: finished(x, mix.finish)})


def _replaced(batch: Any, parts: dict[Any, Any]) -> Any:
    """A batch of the same kind with other things in some places."""
    if isinstance(batch, MutableMapping):
        new = batch.copy() if hasattr(batch, "copy") else dict(batch)
        new.update(parts)
        return new
    every = list(batch)
    for place, part in parts.items():
        every[place] = part
    if hasattr(batch, "_make"):  # a named tuple
        return batch._make(every)
    return type(batch)(every)


def _shape(batch: Any) -> str:
    if isinstance(batch, MutableMapping):
        return f"has {', '.join(map(repr, batch))}"
    return f"is a {type(batch).__name__}" + (f" of {len(batch)}" if hasattr(batch, "__len__") else "")
