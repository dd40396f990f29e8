"""The package as a whole: what is promised at the top can be had from there, and costs what it must."""

import subprocess
import sys

from places import ROOT

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


def loaded_by(code: str) -> set[str]:
    """The modules that are loaded after some code, in a process of its own."""
    script = f"import sys\n{code}\nprint(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT, check=True)
    return set(done.stdout.split())


def test_every_name_can_be_imported_from_the_top():
    assert set(PUBLIC) <= set(dir(gpu_logicmix))
    for name in dir(gpu_logicmix):
        assert callable(getattr(gpu_logicmix, name)), name


def test_other_names_are_refused_as_usual():
    assert not hasattr(gpu_logicmix, "LogicMix")


def test_importing_the_package_loads_nothing():
    assert not loaded_by("import gpu_logicmix") & {"torch", "numpy"}


def test_the_transform_needs_torch_alone():
    """Also everything that a star import gives."""
    more = {"timm", "kornia", "torchvision", "PIL", "pycocotools", "matplotlib", "rich", "typer", "safetensors"}
    hidden = f"sys.modules.update(dict.fromkeys({sorted(more)!r}))\n"  # importing any of them fails
    one = loaded_by(hidden + "from gpu_logicmix import GPULogicMix")
    assert "gpu_logicmix.augment.logicmix" in one
    assert not [
        name for name in one if name.startswith(("gpu_logicmix.cli", "gpu_logicmix.train", "gpu_logicmix.data"))
    ]
    names = loaded_by(hidden + "from gpu_logicmix import *\nsys.modules = [name for name in dir() if name[0] != '_']")
    assert names - {"sys"} == set(gpu_logicmix.__all__)
    assert set(PUBLIC) - names == {"open_dataset"}  # it needs Pillow
