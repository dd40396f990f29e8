"""Methods that are more than a loss: a head, its losses and its state, one method told whole in one file."""

from gpu_logicmix.methods.base import HEADS, Head

__all__ = ["HEADS", "Head"]
