"""Category-wise fine-tuning."""

from gpu_logicmix.cft.api import CFTRecord, category_wise_fine_tune
from gpu_logicmix.cft.options import CFTOptions

__all__ = ["CFTOptions", "CFTRecord", "category_wise_fine_tune"]
