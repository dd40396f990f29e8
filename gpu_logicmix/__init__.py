"""GPU LogicMix: mix partially labeled images inside the training step.

    from gpu_logicmix import GPULogicMix

    mix = GPULogicMix()
    images, targets = mix(images, targets)

The transform and the labels load with torch alone. What needs more packages (`pip install "gpu-logicmix[train]"`) is
imported when it is first asked for.
"""

from importlib import import_module

from gpu_logicmix.augment.logicmix import GPULogicMix, MixPlan
from gpu_logicmix.augment.siblings import Mixup, MixupPME, MultiLabelMixup, OrMixup
from gpu_logicmix.labels import convert_labels, hide_labels, label_counts, logic_or

__version__ = "0.1.0"

_LATER = {
    "RandAugment": "augment.randaugment",
    "RandomHorizontalFlip": "augment.randaugment",
    "PartialAsymmetricLoss": "losses",
    "PartialBCELoss": "losses",
    "PartialFocalLoss": "losses",
    "DecoupledAsymmetricLoss": "losses",
    "average_precision": "metrics",
    "mean_average_precision": "metrics",
    "precision_recall": "metrics",
    "evaluate": "metrics",
    "build_model": "models.classifier",
    "cache_dataset": "data",
    "make_loader": "data",
    "open_dataset": "data",
    "CurriculumLabels": "curriculum",
    "category_wise_fine_tune": "cft",
    "CFTOptions": "cft",
    "CFTRecord": "cft",
    "Config": "train.config",
    "fit": "train.engine",
}

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


def __getattr__(name: str):
    if name not in _LATER:
        raise AttributeError(f"module 'gpu_logicmix' has no attribute {name!r}")
    return getattr(import_module(f"gpu_logicmix.{_LATER[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*__all__, *_LATER])
