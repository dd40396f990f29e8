"""Losses for labels that are present, absent or unknown: one method, one file."""

from gpu_logicmix.losses.asymmetric import (
    DecoupledAsymmetricLoss,
    PartialAsymmetricLoss,
    PartialBCELoss,
    PartialFocalLoss,
)
from gpu_logicmix.losses.base import LOSSES, Batch, Loss, LossSum, Output, PartialLoss
from gpu_logicmix.losses.csl import ClassAwareSelectiveLoss, estimate_prior, write_prior
from gpu_logicmix.losses.large_loss import LargeLossCorrection, LargeLossRejection
from gpu_logicmix.losses.pu import VariationalPULoss
from gpu_logicmix.losses.splc import HillLoss, SPLCLoss

__all__ = [
    "LOSSES",
    "Batch",
    "ClassAwareSelectiveLoss",
    "DecoupledAsymmetricLoss",
    "HillLoss",
    "LargeLossCorrection",
    "LargeLossRejection",
    "Loss",
    "LossSum",
    "Output",
    "PartialAsymmetricLoss",
    "PartialBCELoss",
    "PartialFocalLoss",
    "PartialLoss",
    "SPLCLoss",
    "VariationalPULoss",
    "estimate_prior",
    "write_prior",
]
