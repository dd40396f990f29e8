"""A timm backbone and a head for [B, C] logits.

    model = build_model("resnet101", 80, head="mlp", pretrained=True)
    logits = model(images)                          # images: float in [0, 1], [B, 3, H, W]
    output = model(images, batch)                   # in training: `Output`, logits and what the head's losses see
    features = model.features(images)               # what the head takes: [B, D], or the unpooled map [B, D, h, w]
    logits = model.head(features).logits
    embedding = model.embed(images)                 # [B, D'], the input of the last linear layer, if the head has one
    logits = model.classifier(embedding)            # that layer: .weight [C, D'], .bias [C]

timm: Wightman, "PyTorch Image Models", https://github.com/huggingface/pytorch-image-models
"""

from __future__ import annotations

import copy
import difflib
import os
from collections.abc import Sequence
from typing import Any

import timm
import torch
from timm.models import group_parameters
from torch import Tensor, nn

from gpu_logicmix.losses.base import Batch, Output
from gpu_logicmix.methods.base import HEADS, Head
from gpu_logicmix.models.weights import is_ours, load_weights, read_weights

NORMALISATIONS = ("auto", "none", "backbone")


class Classifier(nn.Module):
    """What `build_model` makes: normalisation, backbone, head.

    messages: what was done on the way that one should know of, such as a classifier left out of a weights file.
    num_stages: how many stages `freeze` knows.
    """

    def __init__(
        self, backbone: nn.Module, head: Head, mean: Tensor | None = None, std: Tensor | None = None, channels: int = 3
    ) -> None:
        super().__init__()
        self.backbone = backbone
        self.head = head
        self.messages: list[str] = []
        # By name: a copy of the model, or one with its batch norms exchanged for synchronised ones, has its own.
        self._always_eval: list[str] = []
        self.fixed_batch_norm = False
        # Never trained: DistributedDataParallel stops at a parameter without a gradient.
        self._unused = _behind_the_map(backbone, channels) if head.takes == "map" else frozenset()
        self._thaw(frozenset())
        self.normalises = mean is not None
        self.normalised_in_training = False  # the training run sets it where its augmentation does it in its last pass
        # In the state dict even where they do nothing: a checkpoint says how its images were normalised.
        self.register_buffer("mean", torch.zeros(channels, 1, 1) if mean is None else mean)
        self.register_buffer("std", torch.ones(channels, 1, 1) if std is None else std)

    def features(self, images: Tensor) -> Tensor:
        """What the head takes: pooled features of the backbone [B, D], or its map before pooling [B, D, h, w]."""
        if not images.is_floating_point():
            raise ValueError(f"images must be of a floating-point type with values in [0, 1], not {images.dtype}")
        if self.normalises and not (self.training and self.normalised_in_training):
            images = (images - self.mean.to(images.dtype)) / self.std.to(images.dtype)
        return feature_map(self.backbone, images) if self.head.takes == "map" else self.backbone(images)

    def forward(self, images: Tensor, batch: Batch | None = None) -> Tensor | Output:
        output = self.head(self.features(images), batch)
        return output.logits if batch is None else output

    def embed(self, images: Tensor) -> Tensor:
        """The input of the last linear layer, [B, D']: the features, or the hidden layer of an MLP head."""
        embedding = self.head.embed(self.features(images))
        if embedding is None:
            raise ValueError(f"{type(self.head).__name__} has no last linear layer that all categories share")
        return embedding

    @property
    def classifier(self) -> nn.Linear | None:
        """The last linear layer, if the head has one."""
        return self.head.classifier

    @torch.no_grad()
    def set_classifier(self, weight: Tensor, bias: Tensor) -> None:
        """Replace weight [C, D'] and bias [C] of the last linear layer, in place."""
        layer = self.classifier
        if layer is None:
            raise ValueError(f"{type(self.head).__name__} has no last linear layer that all categories share")
        for name, new, old in (("weight", weight, layer.weight), ("bias", bias, layer.bias)):
            if new.shape != old.shape:
                raise ValueError(f"{name} must be {list(old.shape)}, not {list(new.shape)}")
            old.copy_(new)

    # ------------------------------------------------------------------------------------------------------- freezing
    def stages(self) -> list[list[str]]:
        """Names of the backbone's parameters, stage by stage from the image on.

        A stage is one of timm's coarse groups (`group_matcher(coarse=True)`): the stem; each group of blocks at one
        resolution in a convolutional network (resnet101: stem, layer1 to layer4), each block in a plain transformer;
        what comes after them belongs to the last or is one of its own.
        """
        if not hasattr(self.backbone, "group_matcher"):
            raise ValueError(f"timm does not say what the stages of {type(self.backbone).__name__} are: cannot freeze")
        groups = group_parameters(self.backbone, self.backbone.group_matcher(coarse=True))
        return [groups[i] for i in sorted(groups)]

    @property
    def num_stages(self) -> int:
        return len(self.stages())

    def freeze(self, n: int) -> Classifier:
        """Freeze the first `n` stages (0: none, -1: the whole backbone) and thaw the others.

        Batch norms in frozen stages stay in eval mode during `train()`: their statistics are frozen as well.
        """
        stages = self.stages()
        if not -1 <= n <= len(stages):
            raise ValueError(
                f"freeze={n!r}: must be 0 to {len(stages)}, the stages of {type(self.backbone).__name__}, or -1 for all"
            )
        whole = n in (-1, len(stages))
        frozen = {name for stage in stages[: None if whole else n] for name in stage}
        self._thaw({name for name, _ in self.backbone.named_parameters()} if whole else frozen)
        if whole:
            # Features are then a function of the image: no dropout or stochastic depth either.
            self._always_eval = ["backbone"]
        else:
            self._always_eval = [
                f"backbone.{name}"
                for name, module in self.backbone.named_modules()
                if isinstance(module, nn.modules.batchnorm._BatchNorm)
                and (own := [f"{name}.{p}" for p, _ in module.named_parameters(recurse=False)])
                and frozen.issuperset(own)
            ]
        return self.train(self.training)

    def _thaw(self, frozen: set[str] | frozenset[str]) -> None:
        for name, parameter in self.backbone.named_parameters():
            parameter.requires_grad_(name not in frozen and name not in self._unused)

    def train(self, mode: bool = True) -> Classifier:
        super().train(mode)
        if self.fixed_batch_norm:
            for module in self.backbone.modules():
                if isinstance(module, nn.modules.batchnorm._BatchNorm):
                    module.eval()
        for name in self._always_eval:
            self.get_submodule(name).eval()
        return self

    # ------------------------------------------------------------------------------------------------------- optimiser
    def param_groups(self, lr: float, backbone_lr: float | None = None, weight_decay: float = 0.0) -> list[dict]:
        """Parameter groups for an optimiser: backbone at `backbone_lr` (`lr` if None), head at `lr`; no weight decay on
        biases, norms and whatever timm exempts (position embeddings and such). Frozen parameters are left out."""
        exempt = self.backbone.no_weight_decay() if hasattr(self.backbone, "no_weight_decay") else ()
        groups = []
        for part, rate in (("backbone", lr if backbone_lr is None else backbone_lr), ("head", lr)):
            decay, no_decay = [], []
            for name, parameter in getattr(self, part).named_parameters():
                if parameter.requires_grad:
                    plain = parameter.ndim <= 1 or name.endswith(".bias") or (part == "backbone" and name in exempt)
                    (no_decay if plain else decay).append(parameter)
            groups.append({"name": part, "params": decay, "lr": rate, "weight_decay": weight_decay})
            groups.append({"name": f"{part} (no decay)", "params": no_decay, "lr": rate, "weight_decay": 0.0})
        return [group for group in groups if group["params"]]


def build_model(
    name: str,
    num_classes: int,
    head: str = "linear",
    weights: str | os.PathLike | None = None,
    pretrained: bool = False,
    *,
    head_options: Sequence[str] = (),
    normalisation: str = "auto",
    hidden: int | None = None,
    dropout: float = 0.0,
    image_size: int | None = None,
    freeze: int = 0,
    batch_norm: str = "train",
    **timm_options: Any,
) -> Classifier:
    """A timm model by name with a head for `num_classes` categories.

    head: "linear"; "mlp": linear, ReLU, dropout, linear; or another of `gpu_logicmix.methods`.
    weights: a file (.safetensors, .pth or .pt) with a state dict of the timm model or of a `Classifier` as made here.
        Its classifier is taken over if it has the size of ours, else left out, as `.messages` then says.
    pretrained: weights from timm's hub.
    head_options: the head's own, each "NAME=VALUE".
    normalisation: "none": the network sees [0, 1], as in the paper; "backbone": mean and std the backbone was trained
        with; "auto": "backbone" if it comes with weights (what the file says, if it is one of ours), else "none".
    hidden: width of the MLP head's hidden layer; that of the features if None.
    dropout: before the last linear layer.
    image_size: for networks that are made for one size, such as plain transformers; the others take any.
    freeze: the first stages not to train, see `Classifier.freeze`.
    batch_norm: "train", or "eval": batch norms keep the statistics they came with, also where they are trained. For few
        images or small batches, whose own statistics are poor.
    timm_options: go to `timm.create_model`, e.g. `drop_path_rate`, or `in_chans` for images of other than 3 channels.
    """
    if batch_norm not in ("train", "eval"):
        raise ValueError(f"batch_norm={batch_norm!r}: must be train or eval")
    if normalisation not in NORMALISATIONS:
        raise ValueError(f"normalisation={normalisation!r}: must be one of {', '.join(NORMALISATIONS)}")
    if weights is not None and pretrained:
        raise ValueError(f"weights={str(weights)!r} and pretrained=True: choose one")
    options = _head_options(head, num_classes, head_options, hidden, dropout)
    state = None if weights is None else read_weights(weights)

    backbone = _backbone(name, pretrained, image_size, timm_options)
    channels = timm_options.get("in_chans", 3)
    mean, std = _mean_and_std(backbone, normalisation, pretrained, state, channels)
    model = Classifier(backbone, HEADS.make(head, options, _width(backbone, head), num_classes), mean, std, channels)
    ours = state is not None and is_ours(state)
    if ours:
        model.head.adapt(backbone)
    if state is not None:
        load_weights(model, state, name, weights)
    if not ours:
        model.head.adapt(backbone)
    model.fixed_batch_norm = batch_norm == "eval"
    return model.freeze(freeze) if freeze else model.train()


def _head_options(head: str, num_classes: int, options: Sequence[str], hidden: int | None, dropout: float) -> list[str]:
    """`hidden` and `dropout` among the others, where they are given."""
    for name, number in (("num_classes", num_classes), ("hidden", hidden)):
        if number is not None and number < 1:
            raise ValueError(f"{name}={number!r}: must be 1 or more")
    known = HEADS.options(head)
    both = [*options]
    for name, value in (("hidden", hidden), ("dropout", dropout or None)):
        if value is not None:
            if name not in known:
                raise ValueError(f"{name}={value!r}: head {head} has no such option")
            both.append(f"{name}={value!r}")
    return both


def _mean_and_std(
    backbone: nn.Module, normalisation: str, pretrained: bool, state: dict[str, Tensor] | None, channels: int
) -> tuple[Tensor | None, Tensor | None]:
    if normalisation == "auto" and state is not None and is_ours(state):
        if state["mean"].any() or (state["std"] != 1).any():
            return state["mean"], state["std"]
    elif normalisation == "backbone" or (normalisation == "auto" and (pretrained or state is not None)):
        mean, std = (torch.tensor(backbone.pretrained_cfg[key]).view(-1, 1, 1) for key in ("mean", "std"))
        if len(mean) != channels:  # one number for all, as timm's loader does
            mean, std = (values.mean(0, keepdim=True).repeat(channels, 1, 1) for values in (mean, std))
        return mean, std
    return None, None


def _backbone(name: str, pretrained: bool, image_size: int | None, options: dict) -> nn.Module:
    if ":" not in name and not timm.is_model(name):  # "hf-hub:..." and the like are for timm to judge
        near = difflib.get_close_matches(timm.models.split_model_name_tag(name)[0], timm.list_models(), 5, 0.5)
        raise ValueError(f"model={name!r}: timm has no such model" + (f"; near are {', '.join(near)}" if near else ""))
    config = timm.models.get_pretrained_cfg(name) if ":" not in name else None
    if image_size is not None and config is not None and config.fixed_input_size:
        options = {"img_size": image_size, **options}
    try:
        return timm.create_model(name, pretrained=pretrained, num_classes=0, **options)
    except TypeError as error:  # an option the model does not have
        raise ValueError(f"model={name!r}: {error}") from error
    except Exception as error:
        if not pretrained:
            raise
        # No network, no such weights, a tag that does not exist: the libraries underneath raise a dozen kinds.
        tags = timm.list_pretrained(f"{timm.models.split_model_name_tag(name)[0]}.*")
        raise ValueError(
            f"model={name!r} with pretrained=True: {str(error).splitlines()[0]}"
            + (f" (timm lists weights as {', '.join(tags)})" if tags else "")
        ) from error


# ---------------------------------------------------------------------------------------------------------- the map
def feature_map(backbone: nn.Module, images: Tensor) -> Tensor:
    """What a timm model has before pooling, as [B, D, h, w]: of transformers the patches, without class tokens."""
    found = backbone.forward_features(images)
    if found.ndim == 4:
        return found.permute(0, 3, 1, 2) if getattr(backbone, "output_fmt", "NCHW") == "NHWC" else found
    if found.ndim == 3:
        tokens = found[:, getattr(backbone, "num_prefix_tokens", 0) :].transpose(1, 2)
        n, (height, width) = tokens.shape[2], images.shape[2:]
        rows = round((n * height / width) ** 0.5)  # patches cover the image, so they are laid out in its proportions
        if rows and n % rows == 0:
            return tokens.unflatten(2, (rows, n // rows))
    raise ValueError(
        f"{type(backbone).__name__} has features {list(found.shape)} before pooling: not a map a head could take"
    )


def _width(backbone: nn.Module, head: str) -> int:
    if HEADS.find(head).takes == "map":
        return backbone.num_features
    return backbone.head_hidden_size if hasattr(backbone, "head_hidden_size") else backbone.num_features


def _behind_the_map(backbone: nn.Module, channels: int) -> frozenset[str]:
    """Names of parameters that the map does not depend on, such as a norm after pooling: seen in a backward pass
    without data."""
    trial = copy.deepcopy(backbone).to("meta").eval()
    height, width = backbone.pretrained_cfg["input_size"][1:]
    if hasattr(backbone, "patch_embed") and getattr(backbone.patch_embed, "img_size", None):
        height, width = backbone.patch_embed.img_size  # one that was made for another size
    feature_map(trial, torch.empty(1, channels, height, width, device="meta")).sum().backward()
    return frozenset(name for name, parameter in trial.named_parameters() if parameter.grad is None)
