"""LogicMix in the Hugging Face Trainer: `pixel_values` and `labels` are mixed in the training step, on the device.

    trainer = LogicMixTrainer(model, args, train_dataset=dataset, mix=GPULogicMix(p=0.5))

The labels are [B, C] of 0, 1 and -1 (unknown). Models of transformers would take -1 for a number: the loss is computed
here, by a loss that ignores unknown labels.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers import Trainer

from gpu_logicmix.augment.base import Mix
from gpu_logicmix.augment.logicmix import GPULogicMix
from gpu_logicmix.integrations.batches import finish_batch, mix_batch


def partial_bce(logits: Any, targets: Any) -> Any:
    """Binary cross-entropy, the mean over known labels."""
    known = (targets == 0) | (targets == 1)
    each = nn.functional.binary_cross_entropy_with_logits(
        logits.float(), targets.masked_fill(~known, 0).to(logits.dtype).float(), reduction="none"
    )
    return (each * known).sum() / known.sum().clamp(min=1)


class LogicMixTrainer(Trainer):
    """A `Trainer` that mixes. In `evaluate` and `predict` nobody is mixed, but images are normalised and cast, if the
    mix does.

    mix: a mix; `GPULogicMix()` unless given.
    partial_loss: loss(logits, labels) that ignores unknown labels, such as `PartialAsymmetricLoss()`; else binary
        cross-entropy.
    images, targets: keys of the inputs.
    """

    # The loss is a mean over the batch at hand: Trainer has to divide it by the steps it accumulates gradients over.
    # 5.0 asks `model_accepts_loss_kwargs` whether to, which speaks of the model's own loss; later versions ask this.
    loss_is_scaled_for_ga = False

    def __init__(
        self,
        *arguments: Any,
        mix: Mix | None = None,
        partial_loss: Any = None,
        images: str = "pixel_values",
        targets: str = "labels",
        **options: Any,
    ) -> None:
        super().__init__(*arguments, **options)
        self.model_accepts_loss_kwargs = False
        for name, given in (
            ("compute_loss_func", self.compute_loss_func),
            ("label_smoothing_factor", self.args.label_smoothing_factor),
        ):
            if given:
                raise ValueError(f"{name}={given!r}: would be ignored; give a loss(logits, labels) as partial_loss")
        self.mix = GPULogicMix() if mix is None else mix
        self.partial_loss = partial_loss or partial_bce
        self.keys = images, targets

    def compute_loss(self, model: nn.Module, inputs: Any, return_outputs: bool = False, **options: Any) -> Any:
        """Mixed while the model trains."""
        self.mix.set_epoch(int(self.state.epoch or 0))
        inputs = mix_batch(self.mix, inputs, *self.keys, mixed=None, training=model.training)
        labels = inputs.pop(self.keys[1])
        outputs = model(**inputs)
        loss = self.partial_loss(outputs.logits, labels)
        return (loss, outputs) if return_outputs else loss

    def prediction_step(self, model: nn.Module, inputs: Any, *arguments: Any, **options: Any) -> Any:
        """Where there are no labels, nobody asks `compute_loss`."""
        if not self.label_names or any(inputs.get(name) is None for name in self.label_names):
            inputs = finish_batch(self.mix, self._prepare_inputs(inputs), self.keys[0])
        return super().prediction_step(model, inputs, *arguments, **options)
