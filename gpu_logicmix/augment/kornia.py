"""The mixes as Kornia augmentations, and Kornia's augmentations by name.

    import kornia.augmentation as K
    from gpu_logicmix.augment.kornia import KorniaLogicMix

    augment = K.AugmentationSequential(K.RandomHorizontalFlip(), KorniaLogicMix(p=0.5), data_keys=["input", "class"])
    images, targets = augment(images, targets)                             # targets: [B, C] of 0, 1 and -1
    again, same = augment(images_2, targets, params=augment._params)       # the same partners

A mix here is a `MixAugmentationBaseV2`. Its parameters are a dict (`index`, `size`, `weight`, `batch_prob`), kept
in `_params` and replayed by `params=`; `batch_prob` says which samples are mixed. As all of Kornia's augmentations they
work in `eval()` too, other than `GPULogicMix`. They are drawn where Kornia draws: on the CPU, or on the device that
`.to(device)` names.

Kornia: Riba et al., "Kornia: an Open Source Differentiable Computer Vision Library for PyTorch", WACV 2020.
"""

from __future__ import annotations

from typing import Any

import torch
from kornia.augmentation import MixAugmentationBaseV2, auto
from kornia.augmentation.container.ops import ClassSequentialOps
from torch import Tensor, nn

from gpu_logicmix.augment.base import Mix, check_share
from gpu_logicmix.augment.logicmix import GPULogicMix
from gpu_logicmix.augment.plan import MixPlan, draw_groups, filled
from gpu_logicmix.augment.siblings import Mixup, MixupPME, MultiLabelMixup, OrMixup

Params = dict[str, Tensor]


def kornia_pipeline(name: str, n: int, m: int) -> nn.Module:
    """Kornia's own kornia-randaugment, which takes N and M, kornia-trivialaugment or kornia-autoaugment, which have
    none. Operations are drawn once a batch, their magnitudes per image. Images are floats in [0, 1]."""
    if name == "kornia-randaugment":
        if not 0 < m < 30:
            raise ValueError(f"ra_m={m}: Kornia's RandAugment takes 1 to 29; or use augment=randaugment")
        return auto.RandAugment(n=n, m=m)
    return {"kornia-trivialaugment": auto.TrivialAugment, "kornia-autoaugment": auto.AutoAugment}[name]()


class KorniaMix(MixAugmentationBaseV2):
    """What the mixes share as Kornia augmentations.

    p: probability that a sample is mixed: one coin per sample, as `p` of Kornia's base class and of `RandomJigsaw`.
        That of Kornia's `RandomMixUpV2` and `RandomCutMixV2` is one coin per batch.
    same_on_batch: one draw for all samples of whether, how many and in which shares they are mixed; the partners remain
        those of each sample, as in `RandomMixUpV2`.
    keepdim: give back [C, H, W] for [C, H, W], [H, W] for [H, W]; else they become batches of one.
    data_keys: of a direct call, as ["input", "class"]; a container brings its own.
    """

    def __init__(
        self,
        mix: Mix,
        p: float,
        same_on_batch: bool = False,
        keepdim: bool = False,
        data_keys: list[str] | None = None,
    ) -> None:
        check_share("p", p)
        super().__init__(p=p, p_batch=1.0, same_on_batch=same_on_batch, keepdim=keepdim, data_keys=data_keys)
        self.mix = mix
        _teach_kornia()

    def train(self, mode: bool = True) -> KorniaMix:
        super().train(mode)
        self.mix.train()  # which would be the identity in eval(); Kornia's augmentations are not
        return self

    def set_epoch(self, epoch: int) -> None:
        """For a mix that is on in every other epoch: `KorniaOrMixup`."""
        self.mix.set_epoch(epoch)

    # ---------------------------------------------------------------------------------------------------- parameters
    def generate_parameters(self, batch_shape: tuple[int, ...]) -> Params:
        plan = self._same(self._plan(batch_shape[0])) if self.same_on_batch else self._plan(batch_shape[0])
        return {name: part for name, part in plan._asdict().items() if part is not None}

    def forward_parameters(self, batch_shape: tuple[int, ...]) -> Params:
        # Kornia's own, before 0.9, asks the device how many samples are mixed and draws for those alone.
        chosen = self.__batch_prob_generator__(batch_shape, self.p, self.p_batch, self.same_on_batch)
        params = self.generate_parameters(batch_shape)
        on = params.pop("mixed") if self.mix.active else torch.zeros_like(params.pop("mixed"))
        shape = torch.tensor(batch_shape, dtype=torch.long)
        return {**params, "batch_prob": chosen.to(on.device) * on, "forward_input_shape": shape}

    def _plan(self, batch_size: int) -> MixPlan:
        return self.mix.plan(batch_size, self.device)

    def _same(self, plan: MixPlan) -> MixPlan:
        if plan.weight is None:  # nobody is mixed: a batch of one, or an epoch without
            return plan
        return plan._replace(weight=plan.weight[:1].expand_as(plan.weight))

    def _plan_of(self, params: Params, device: torch.device) -> MixPlan:
        """The plan that parameters describe; a sample that `batch_prob` leaves out is a group of one."""
        index, size, weight = (params.get(name) for name in ("index", "size", "weight"))
        on = params["batch_prob"].to(device) > 0.5
        size = torch.where(on, size.to(device), 1)
        return filled(MixPlan(index.to(device), size, on, None if weight is None else weight.to(device)))

    # --------------------------------------------------------------------------------------------- images and labels
    # Kornia's own `transform_input` and `transform_class` ask the device whether anything is to be mixed.
    def transform_input(self, input: Tensor, params: Params, flags: dict[str, Any]) -> Tensor:
        images = self.transform_tensor(input)
        mixed = self.apply_transform(images, params, flags)
        return mixed.view(input.shape) if self.keepdim else mixed

    def transform_class(self, input: Tensor, params: Params, flags: dict[str, Any]) -> Tensor:
        targets = input[None] if input.ndim == 1 and len(params["index"]) == 1 else input
        mixed = self.apply_transform_class(targets, params, flags)
        return mixed.view(input.shape) if self.keepdim else mixed

    def apply_transform(self, input: Tensor, params: Params, flags: dict[str, Any] | None = None) -> Tensor:
        plan = self._plan_of(params, input.device)
        mixed, _ = self.mix(input, input.new_zeros(len(input), 1), plan)
        return torch.where(plan.mixed.view(-1, 1, 1, 1), mixed, input)

    def apply_transform_class(self, input: Tensor, params: Params, flags: dict[str, Any] | None = None) -> Tensor:
        plan = self._plan_of(params, input.device)
        _, mixed = self.mix(torch.zeros(len(input), 1, 1, device=input.device), input, plan)
        return torch.where(plan.mixed[:, None], mixed, input.to(mixed.dtype))


class KorniaLogicMix(KorniaMix):
    """`GPULogicMix` for Kornia: the same seed gives the same partners, images and labels.

    p, k_min, k_max, unknown, generator: as in `GPULogicMix`. There is no bank: parameters must say all there is to
    replay.
    """

    def __init__(
        self,
        p: float = 0.5,
        k_min: int = 2,
        k_max: int = 3,
        *,
        unknown: float = -1,
        generator: torch.Generator | None = None,
        same_on_batch: bool = False,
        keepdim: bool = False,
        data_keys: list[str] | None = None,
    ) -> None:
        mix = GPULogicMix(p, k_min, k_max, unknown=unknown, generator=generator)
        super().__init__(mix, p, same_on_batch, keepdim, data_keys)

    def __batch_prob_generator__(
        self, batch_shape: tuple[int, ...], p: float, p_batch: float, same_on_batch: bool
    ) -> Tensor:
        # The plan draws who is mixed: one draw, that of `GPULogicMix`.
        return torch.ones(batch_shape[0], device=self.device, dtype=self.dtype)

    def _same(self, plan: MixPlan) -> MixPlan:
        # Groups of the sizes drawn hold no more partners than these: draw them anew.
        count, k = plan.index.shape
        index = draw_groups(count, k, count, plan.index.device, self.mix.generator)
        size = plan.size[:1].expand(count)
        return filled(MixPlan(index, size, size > 1))


class _Sibling(KorniaMix):
    kind: type[Mix]

    def __init__(
        self,
        p: float = 1.0,
        *,
        same_on_batch: bool = False,
        keepdim: bool = False,
        data_keys: list[str] | None = None,
        **options: Any,
    ) -> None:
        for name in ("normalize", "out_dtype"):  # samples that are not mixed would stay without
            if options.get(name) is not None:
                raise TypeError(
                    f"{name}={options[name]!r}: a mix for Kornia keeps the images' range and type; put Kornia's "
                    f"Normalize behind it, or use {self.kind.__name__}({name}=...)"
                )
        super().__init__(self.kind(**options), p, same_on_batch, keepdim, data_keys)


class KorniaMixup(_Sibling):
    """`Mixup` for Kornia. p: share of samples that are mixed; other options as there."""

    kind = Mixup


class KorniaOrMixup(_Sibling):
    """`OrMixup` for Kornia. p: share of samples that are mixed; other options as there."""

    kind = OrMixup


class KorniaMultiLabelMixup(_Sibling):
    """`MultiLabelMixup` for Kornia. p: share of samples that are mixed; other options as there."""

    kind = MultiLabelMixup


class KorniaMixupPME(_Sibling):
    """`MixupPME` for Kornia. p: share of samples that are mixed; other options as there."""

    kind = MixupPME


def _teach_kornia() -> None:
    """Let a container hand class labels to these mixes.

    Up to 0.9 at least, Kornia's containers raise for the class labels of every mix augmentation, their own too, and
    leave no place to say otherwise. For all other modules nothing changes.
    """
    before = ClassSequentialOps.transform
    if getattr(before, "knows_logicmix", False):
        return

    def transform(cls: Any, input: Tensor, module: nn.Module, param: Any, extra_args: Any = None) -> Tensor:
        if isinstance(module, KorniaMix):
            return module.transform_class(input, cls.get_instance_module_param(param), module.flags)
        return before(input, module, param, extra_args)

    transform.knows_logicmix = True  # type: ignore[attr-defined]
    ClassSequentialOps.transform = classmethod(transform)
