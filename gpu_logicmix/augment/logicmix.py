"""LogicMix on the batch that is already on the device.

    mix = GPULogicMix()
    images, targets = mix(images, targets)      # inside the training step; in eval() it does nothing

It first draws a `MixPlan` (who is mixed with whom) and then applies it. Nothing here waits for the device or has a
shape that depends on the draw, so all of it runs under `torch.compile(fullgraph=True)` and inside a CUDA graph.

Chong et al., "Free Performance Gain from Mixing Multiple Partially Labeled Samples in Multi-label Image
Classification", 2024.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gpu_logicmix.augment.apply import mix_images, or_targets
from gpu_logicmix.augment.bank import Bank
from gpu_logicmix.augment.base import Mix, check_share, check_whole
from gpu_logicmix.augment.plan import MixPlan, draw_groups, draw_sizes, draw_with_replacement, drawn, filled

PARTNERS = {"distinct": draw_groups, "with-replacement": draw_with_replacement}
UNKNOWN_AS = ("unknown", "absent")


class GPULogicMix(Mix):
    """LogicMix: the mean of K images, the logical OR of their labels.

    With probability `p`, a sample is mixed with K - 1 others of the batch, K uniform from `k_min` to `k_max`. A
    category is then present if any of them has it, absent if all lack it, and else unknown. All other samples stay as
    they are. A batch smaller than K mixes what there is.

    p: share of samples that are mixed (the paper's s).
    k_min, k_max: how many samples make one, the sample itself among them. COCO and VG-200: 2 and 3; VOC 2007: 3 and 4.
    unknown: the value of an unknown label, which may be NaN.
    generator: where the random numbers come from, on any device; torch's own generator of the device if None.
    bank: also draw partners from the last `bank` samples of earlier batches, kept on the device as they came in. For
        batches too small to draw from. They take `bank` + B samples of memory. `mix.state_dict()` holds them; as a part
        of a larger module they are left out of its `state_dict`, which averages of weights go over.
    validate: check that all labels are 0, 1 or unknown, which has to wait for the device once a call.
    partners: "distinct", as the paper has it; or "with-replacement", as the authors' code draws them: each from all
        samples, so that one may come twice and the sample itself may be its own partner.
    unknown_as: how an unknown label counts in a mixed sample: "unknown", or "absent" for comparison with mixes that
        assume it absent. Samples that are not mixed keep their unknown labels.

    normalize: (mean, std) of images in 0..1, a number each per channel. In the same pass as the mix; in `eval()` too.
    out_dtype: of the images that come out, as torch.bfloat16. uint8 images that come out as floats are divided by 255.

    NaN in floating labels is unknown whatever `unknown` says. So is, without `validate`, every other label that is
    neither 0 nor 1.

    >>> mix = GPULogicMix(p=1.0, k_min=2, k_max=2)
    >>> images = torch.tensor([0.0, 1.0]).reshape(2, 1, 1, 1)  # two images of one pixel each
    >>> targets = torch.tensor([[1, 0, 0, -1], [0, 0, -1, -1]])
    >>> mixed_images, mixed_targets = mix(images, targets)
    >>> mixed_images.flatten().tolist()
    [0.5, 0.5]
    >>> mixed_targets[0].tolist()
    [1, 0, -1, -1]
    """

    def __init__(
        self,
        p: float = 0.5,
        k_min: int = 2,
        k_max: int = 3,
        *,
        unknown: float = -1,
        generator: torch.Generator | None = None,
        bank: int = 0,
        validate: bool = False,
        partners: str = "distinct",
        unknown_as: str = "unknown",
        normalize: tuple | None = None,
        out_dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(unknown, generator, validate, normalize, out_dtype)
        for name, value, names in (("partners", partners, PARTNERS), ("unknown_as", unknown_as, UNKNOWN_AS)):
            if value not in names:
                raise ValueError(f"{name}={value!r}: must be {' or '.join(names)}")
        self.p = check_share("p", p)
        self.k_min = check_whole("k_min", k_min, 1)
        self.k_max = check_whole("k_max", k_max, self.k_min, f"at least k_min={k_min}")
        self.bank = check_whole("bank", bank, 0)
        self.partners, self.unknown_as = partners, unknown_as
        self._bank = Bank(self.bank) if self.bank else None

    def extra_repr(self) -> str:
        text = f"p={self.p}, k_min={self.k_min}, k_max={self.k_max}, unknown={self.unknown}"
        extra = (("bank", 0), ("partners", "distinct"), ("unknown_as", "unknown"))
        return text + "".join(f", {n}={getattr(self, n)!r}" for n, usual in extra if getattr(self, n) != usual)

    def _draw(self, batch_size: int, device: torch.device | str | None) -> MixPlan:
        pool, seen = batch_size, None
        if self._bank is not None and self._bank.seen is not None:
            pool, seen = batch_size + self._bank.count(device), self._bank.seen.to(device, copy=True)
        index = PARTNERS[self.partners](batch_size, self.k_max, pool, device, self.generator)
        size = draw_sizes(batch_size, self.k_min, self.k_max, device, self.generator)
        if self.partners == "distinct":
            size = size.clamp(max=pool)
        size = torch.where(drawn(torch.rand, batch_size, device=device, generator=self.generator) < self.p, size, 1)
        return filled(MixPlan(index, size, size > 1, seen=seen))

    def _mix(self, images: Tensor, targets: Tensor, plan: MixPlan) -> tuple[Tensor, Tensor]:
        if self._bank is None:
            return super()._mix(images, targets, plan)
        table, table_targets, plan = self._bank.remember(images, targets, plan)
        mixed = mix_images(images, plan, table, self.finish.of(images))
        return mixed, self._mix_targets(table_targets, plan)

    def _mix_targets(self, targets: Tensor, plan: MixPlan) -> Tensor:
        return or_targets(targets, plan, self.unknown, "unknown" if self.unknown_as == "unknown" else "absent-if-mixed")

    def reset_bank(self) -> None:
        """Forget all earlier samples, for instance before the image size changes."""
        if self._bank is not None:
            self._bank.clear()

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if self._bank is not None and not prefix:
            destination.update(self._bank.state())

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        if self._bank is not None:
            names = [key for key in state_dict if key.startswith(f"{prefix}bank_")]
            saved = {key[len(prefix) :]: state_dict.pop(key) for key in names}
            if saved or not prefix:
                self._bank.load(saved)
        super()._load_from_state_dict(state_dict, prefix, *args)
