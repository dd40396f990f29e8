"""Losses for labels that are present, absent or unknown: one method, one file."""

from gpu_logicmix.losses.asymmetric import (
    DecoupledAsymmetricLoss,
    PartialAsymmetricLoss,
    PartialBCELoss,
    PartialFocalLoss,
    PartialLoss,
)

__all__ = [
    "DecoupledAsymmetricLoss",
    "PartialAsymmetricLoss",
    "PartialBCELoss",
    "PartialFocalLoss",
    "PartialLoss",
]
