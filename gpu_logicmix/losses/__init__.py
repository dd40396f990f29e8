"""Losses for labels that are present, absent or unknown: one method, one file."""

from gpu_logicmix.losses.asymmetric import (
    DecoupledAsymmetricLoss,
    PartialAsymmetricLoss,
    PartialBCELoss,
    PartialFocalLoss,
)
from gpu_logicmix.losses.base import LOSSES, Batch, Loss, LossSum, Output, PartialLoss

__all__ = [
    "LOSSES",
    "Batch",
    "DecoupledAsymmetricLoss",
    "Loss",
    "LossSum",
    "Output",
    "PartialAsymmetricLoss",
    "PartialBCELoss",
    "PartialFocalLoss",
    "PartialLoss",
]
