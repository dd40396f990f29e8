"""GPU LogicMix: mix partially labeled images inside the training step.

    from gpu_logicmix import GPULogicMix

    mix = GPULogicMix()
    images, targets = mix(images, targets)

The names below load with torch alone. The others are imported when first used, since they need more packages
(`pip install "gpu-logicmix[train]"`).
"""

from gpu_logicmix.labels import convert_labels, hide_labels, label_counts, logic_or
from gpu_logicmix.mix import GPULogicMix, Mixup, MixPlan, MixupPME, MultiLabelMixup, OrMixup

__version__ = "0.1.0"

__all__ = [
    "GPULogicMix",
    "MixPlan",
    "Mixup",
    "MixupPME",
    "MultiLabelMixup",
    "OrMixup",
    "convert_labels",
    "hide_labels",
    "label_counts",
    "logic_or",
]
