"""LogicMix in timm's `train.py`, in the place of `timm.data.Mixup`.

    mixup_fn = MixupFn(p=0.5)                        # instead of: mixup_fn = Mixup(**mixup_args)

timm calls `input, target = mixup_fn(input, target)` on the device and, with `--mixup-off-epoch`, sets
`mixup_fn.mixup_enabled = False`. The targets are [B, C] of 0, 1 and -1, not class numbers; `train_loss_fn` is one that
ignores unknown labels.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from gpu_logicmix.augment.base import Mix, finished
from gpu_logicmix.augment.logicmix import GPULogicMix


class MixupFn:
    """mix: another mix than `GPULogicMix(**options)`. mixup_enabled: whether to mix; timm's train script sets it."""

    def __init__(self, mix: Mix | None = None, **options: Any) -> None:
        self.mix = GPULogicMix(**options) if mix is None else mix
        self.mixup_enabled = True

    def __call__(self, x: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        return self.mix(x, target) if self.mixup_enabled else (finished(x, self.mix.finish), target)
