"""Category-wise fine-tuning."""

from gpu_logicmix.cft.solver import CFTRecord, category_wise_fine_tune

__all__ = ["CFTRecord", "category_wise_fine_tune"]
