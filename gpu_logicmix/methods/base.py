"""What a head is: from the features of a backbone to logits, with losses and a state of its own.

A method with more than a loss is one file in this folder: a class derived from `Head` that registers itself under its
name on the command line. Its options are the keyword arguments of its `__init__`, after `features` (the width of what
the backbone gives) and `categories` (how many). What must survive a kill is in its `state_dict`: parameters, buffers.
See docs/architecture.md.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import Tensor, nn

from gpu_logicmix.losses.base import Batch, Loss, LossSum, Output
from gpu_logicmix.registry import Registry

HEADS = Registry("head", "gpu_logicmix.methods", given=("features", "categories"))


class Head(nn.Module):
    """From features to logits.

    takes: "pooled": features [B, D]; "map": features [B, D, H, W] before pooling.
    views: 2: the run augments each batch twice, weakly (flip alone) and strongly, mixed by the same plan.
    uses_word_vectors: `prepare` is given word vectors where the user has some.
    leaves_parameters_unused: some parameters have no gradient in some steps; several processes have to know.
    """

    takes = "pooled"
    views = 1
    uses_word_vectors = False
    leaves_parameters_unused = False
    writes_labels = False  # True: wants `table`, the pseudo-labels of the run, and writes to it
    table: Any = None

    def prepare(self, labels: Any, categories: list[str], word_vectors: Tensor | None = None) -> None:
        """Before the first step of a run: the known labels of the training set [N, C] before any mixing, names of the
        categories, word vectors [C, E] or None."""

    def adapt(self, backbone: nn.Module) -> None:
        """Change the backbone, once: after pretrained weights are in it, before those of a run are."""

    def begin_epoch(
        self, epoch: int, epochs: int, samples: Callable[[], Iterator[tuple[Tensor, Tensor, Tensor]]]
    ) -> None:
        """At the start of an epoch, counted from 0; not called again where a run resumes within it.

        samples: all training images, un-augmented and unmixed, as (features, targets, index), batch by batch, from the
            model in eval mode without gradients; every process sees all of them.
        """

    def forward(self, features: Tensor, batch: Batch | None = None) -> Output:
        """`batch` is None at prediction."""
        raise NotImplementedError

    def auxiliary(self, output: Output, batch: Batch) -> LossSum | None:
        """A loss of the head's own, which is added to the loss as a mean: total / count."""
        return None

    def embed(self, features: Tensor) -> Tensor | None:
        """The input of the last linear layer [B, D']. None: there is no such layer, and no category-wise
        fine-tuning."""
        return None

    @property
    def classifier(self) -> nn.Linear | None:
        """The last linear layer, where `embed` has a result."""
        return None

    def training_step(self, net: nn.Module, views: Sequence[Tensor], batch: Batch, loss: Loss) -> LossSum:
        """The loss of a step. `net(images, batch)` is the whole model, and gives an `Output`. Only what needs more than
        one forward pass overrides this."""
        output = net(views[0], batch)
        return self.with_auxiliary(loss(output, batch), output, batch)

    def with_auxiliary(self, main: LossSum, output: Output, batch: Batch) -> LossSum:
        """The mean of the head's own loss, added to that of `main`, as one sum."""
        own = self.auxiliary(output, batch)
        if own is None:
            return main
        return LossSum(main.total + own.total / own.count.clamp(min=1) * main.count, main.count)
