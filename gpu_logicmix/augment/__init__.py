"""What happens to a batch on the device: mixes, RandAugment, flip."""

from typing import Any

from gpu_logicmix.augment.base import Mix
from gpu_logicmix.augment.logicmix import GPULogicMix
from gpu_logicmix.augment.siblings import Mixup, MixupPME, MultiLabelMixup, OrMixup

# The names of the command line; "none" is no mix at all.
MIXES: dict[str, type[Mix] | None] = {
    "logicmix": GPULogicMix,
    "mixup": Mixup,
    "ormixup": OrMixup,
    "mlmixup": MultiLabelMixup,
    "mixup-pme": MixupPME,
    "none": None,
}
# What an image goes through before it is mixed, by the names of the command line.
AUGMENTS = ("randaugment", "kornia-randaugment", "kornia-trivialaugment", "kornia-autoaugment", "none")


def make_mix(name: str, **options: Any) -> Mix | None:
    """A mix by its name in `MIXES`; None for "none"."""
    if name not in MIXES:
        raise ValueError(f"mix={name!r}: the mixes are {', '.join(MIXES)}")
    kind = MIXES[name]
    return None if kind is None else kind(**options)
