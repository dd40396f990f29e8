"""The package as a whole: what is promised at the top can be had from there."""

import gpu_logicmix

# Others already write code against these.
PUBLIC = [
    "GPULogicMix",
    "MixPlan",
    "Mixup",
    "OrMixup",
    "MultiLabelMixup",
    "MixupPME",
    "logic_or",
    "hide_labels",
    "convert_labels",
    "label_counts",
    "RandAugment",
    "PartialAsymmetricLoss",
    "DecoupledAsymmetricLoss",
    "CurriculumLabels",
    "category_wise_fine_tune",
    "CFTRecord",
    "mean_average_precision",
    "average_precision",
    "open_dataset",
]


def test_every_name_can_be_imported_from_the_top():
    assert set(PUBLIC) <= set(dir(gpu_logicmix))
    for name in dir(gpu_logicmix):
        assert callable(getattr(gpu_logicmix, name)), name


def test_other_names_are_refused_as_usual():
    assert not hasattr(gpu_logicmix, "LogicMix")
