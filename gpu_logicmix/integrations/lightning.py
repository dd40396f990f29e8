"""LogicMix as a Lightning callback: no line of the LightningModule changes.

    Trainer(callbacks=[LogicMixCallback(p=0.5, k_max=3)])

The mix runs on the device, after Lightning has moved the batch there, in training alone; its `normalize` and
`out_dtype` hold for every batch, also of `validate`, `test` and `predict`. The hook for that is one of the module or
the data module (`on_after_batch_transfer`), not of callbacks, so the callback wraps theirs for the time of the call.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

try:
    from lightning.pytorch import Callback
    from lightning.pytorch.utilities.model_helpers import is_overridden
except ImportError:  # the older name of the same package
    from pytorch_lightning import Callback
    from pytorch_lightning.utilities.model_helpers import is_overridden

from gpu_logicmix.augment.base import Mix
from gpu_logicmix.augment.logicmix import GPULogicMix
from gpu_logicmix.integrations.batches import Key, finish_batch, mix_batch

HOOK = "on_after_batch_transfer"


class LogicMixCallback(Callback):
    """Mixes each training batch. Of other batches it normalises and casts the images, if the mix does.

    mix: another mix than `GPULogicMix(**options)`, or one made before.
    images, targets, mixed: where they are in the batch, see `mix_batch`.
    options: of `GPULogicMix`: p, k_min, k_max, bank ...
    """

    def __init__(
        self,
        mix: Mix | None = None,
        *,
        images: Key = 0,
        targets: Key = 1,
        mixed: str | None = "mixed",
        **options: Any,
    ) -> None:
        if mix is not None and options:
            raise ValueError(f"mix and {', '.join(options)}: choose one")
        self.mix = GPULogicMix(**options) if mix is None else mix
        self.keys = {"images": images, "targets": targets, "mixed": mixed}
        self._hooked: Any = None

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        if self._hooked is not None:
            return
        data = trainer.datamodule
        self._hooked = data if data is not None and is_overridden(HOOK, data) else pl_module
        before = getattr(self._hooked, HOOK)

        def after_transfer(batch: Any, dataloader_idx: int) -> Any:
            batch = before(batch, dataloader_idx)
            # A tensor alone has no labels: Lightning sends `example_input_array` this way, before the first batch.
            if trainer.training and not isinstance(batch, Tensor):
                return mix_batch(self.mix, batch, **self.keys)
            return finish_batch(self.mix, batch, self.keys["images"])

        setattr(self._hooked, HOOK, after_transfer)

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        if self._hooked is not None:
            delattr(self._hooked, HOOK)  # the method of the class shows again
            self._hooked = None

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self.teardown(trainer, pl_module, "")

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        self.mix.to(pl_module.device)

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        self.mix.set_epoch(trainer.current_epoch)

    # The samples of a bank are part of the state.
    def state_dict(self) -> dict[str, Any]:
        return self.mix.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.mix.load_state_dict(state_dict)
