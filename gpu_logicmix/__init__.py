"""GPU LogicMix: mix partially labeled images inside the training step.

    from gpu_logicmix import GPULogicMix

    mix = GPULogicMix()
    images, targets = mix(images, targets)

Every name is imported when it is first used: `import gpu_logicmix` loads nothing, the library needs torch and numpy
alone, and what needs more packages (the extra `train`) asks for them when it is used.
"""

from importlib import import_module
from typing import Any

__version__ = "0.1.0"

# Name -> module.
_LATER = {
    "GPULogicMix": "augment.logicmix",
    "MixPlan": "augment.logicmix",
    "Mixup": "augment.siblings",
    "MixupPME": "augment.siblings",
    "MultiLabelMixup": "augment.siblings",
    "OrMixup": "augment.siblings",
    "KorniaLogicMix": "augment.kornia",
    "KorniaMixup": "augment.kornia",
    "KorniaMixupPME": "augment.kornia",
    "KorniaMultiLabelMixup": "augment.kornia",
    "KorniaOrMixup": "augment.kornia",
    "RandAugment": "augment.randaugment",
    "RandomHorizontalFlip": "augment.randaugment",
    "MultiScaleCrop": "augment.crop",
    "mix_batch": "integrations.batches",
    "convert_labels": "labels",
    "hide_labels": "labels",
    "label_counts": "labels",
    "logic_or": "labels",
    "PartialAsymmetricLoss": "losses",
    "PartialBCELoss": "losses",
    "PartialFocalLoss": "losses",
    "DecoupledAsymmetricLoss": "losses",
    "LargeLossRejection": "losses",
    "LargeLossCorrection": "losses",
    "SPLCLoss": "losses",
    "HillLoss": "losses",
    "ClassAwareSelectiveLoss": "losses",
    "VariationalPULoss": "losses",
    "estimate_prior": "losses",
    "write_prior": "losses",
    "average_precision": "metrics",
    "mean_average_precision": "metrics",
    "auroc": "metrics",
    "calibration_error": "metrics",
    "hamming_loss": "metrics",
    "ranking": "metrics",
    "precision_recall": "metrics",
    "evaluate": "metrics",
    "Decisions": "decisions",
    "fit_decisions": "decisions",
    "read_decisions": "decisions",
    "CurriculumLabels": "curriculum",
    "category_wise_fine_tune": "cft",
    "CFTOptions": "cft",
    "CFTRecord": "cft",
    "build_model": "models.classifier",
    "read_word_vectors": "models.word_vectors",
    "cache_dataset": "data",
    "make_loader": "data",
    "open_dataset": "data",
    "Config": "train.config",
    "fit": "train.loop",
}

# `from gpu_logicmix import *` gives what torch and numpy alone can load.
_NEEDS_MORE = ("augment.kornia", "models", "data", "train", "report", "study")
__all__ = [name for name, place in _LATER.items() if not place.startswith(_NEEDS_MORE)]


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module 'gpu_logicmix' has no attribute {name!r}")
    return getattr(import_module(f"gpu_logicmix.{_LATER[name]}"), name)


def __dir__() -> list[str]:
    return sorted(_LATER)
