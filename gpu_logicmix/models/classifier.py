"""A timm backbone and a head for [B, C] logits.

    model = build_model("resnet101", 80, head="mlp", pretrained=True)
    logits = model(images)                          # images: float in [0, 1], [B, 3, H, W]
    features = model.features(images)               # [B, D], what the head sees
    logits = model.head(features)
    embedding = model.embed(images)                 # [B, D'], what the last linear layer sees
    logits = model.classifier(embedding)            # that layer: .weight [C, D'], .bias [C]

timm: Wightman, "PyTorch Image Models", https://github.com/huggingface/pytorch-image-models
"""

from __future__ import annotations

import difflib
import os
import sys
from pathlib import Path

import timm
import torch
from safetensors.torch import load_file
from timm.models import clean_state_dict, group_parameters
from torch import Tensor, nn

HEADS = ("linear", "mlp")
NORMALISATIONS = ("auto", "none", "backbone")


class Classifier(nn.Module):
    """What `build_model` makes: normalisation, backbone, head.

    messages: what was done on the way that one should know of, such as a classifier left out of a weights file.
    num_stages: how many stages `freeze` knows.
    """

    def __init__(self, backbone: nn.Module, head: nn.Sequential, mean: Tensor | None = None, std: Tensor | None = None):
        super().__init__()
        self.backbone = backbone
        self.head = head
        self.messages: list[str] = []
        # By name: a copy of the model, or one with its batch norms exchanged for synchronised ones, has its own.
        self._always_eval: list[str] = []
        self.fixed_batch_norm = False
        self.normalises = mean is not None
        # In the state dict even where they do nothing: a checkpoint says how its images were normalised.
        self.register_buffer("mean", torch.zeros(3, 1, 1) if mean is None else mean)
        self.register_buffer("std", torch.ones(3, 1, 1) if std is None else std)

    def features(self, images: Tensor) -> Tensor:
        """Pooled features of the backbone, [B, D]."""
        if not images.is_floating_point():
            raise ValueError(f"images must be of a floating-point type with values in [0, 1], not {images.dtype}")
        if self.normalises:
            images = (images - self.mean.to(images.dtype)) / self.std.to(images.dtype)
        return self.backbone(images)

    def embed(self, images: Tensor) -> Tensor:
        """The input of the last linear layer, [B, D']: the features, or the hidden layer of an MLP head."""
        return self.head[:-1](self.features(images))

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.features(images))

    @property
    def classifier(self) -> nn.Linear:
        """The last linear layer."""
        return self.head[-1]

    @torch.no_grad()
    def set_classifier(self, weight: Tensor, bias: Tensor) -> None:
        """Replace weight [C, D'] and bias [C] of the last linear layer, in place."""
        for name, new, old in (("weight", weight, self.classifier.weight), ("bias", bias, self.classifier.bias)):
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
        for name, parameter in self.backbone.named_parameters():
            parameter.requires_grad_(not (whole or name in frozen))
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
    normalisation: str = "auto",
    hidden: int | None = None,
    dropout: float = 0.0,
    image_size: int | None = None,
    freeze: int = 0,
    batch_norm: str = "train",
    **timm_options,
) -> Classifier:
    """A timm model by name with a head for `num_classes` categories.

    head: "linear", or "mlp": linear, ReLU, dropout, linear.
    weights: a file (.safetensors, .pth or .pt) with a state dict of the timm model or of a `Classifier` as made here.
        Its classifier is taken over if it has the size of ours, else left out, as `.messages` then says.
    pretrained: weights from timm's hub.
    normalisation: "none": the network sees [0, 1], as in the paper; "backbone": mean and std the backbone was trained
        with; "auto": "backbone" if it comes with weights (what the file says, if it is one of ours), else "none".
    hidden: width of the MLP head's hidden layer; that of the features if None.
    dropout: before the last linear layer.
    image_size: for networks that are made for one size, such as plain transformers; the others take any.
    freeze: the first stages not to train, see `Classifier.freeze`.
    batch_norm: "train", or "eval": batch norms keep the statistics they came with, also where they are trained. For few
        images or small batches, whose own statistics are poor.
    timm_options: go to `timm.create_model`, e.g. `drop_path_rate`.
    """
    if head not in HEADS:
        raise ValueError(f"head={head!r}: must be one of {', '.join(HEADS)}")
    if batch_norm not in ("train", "eval"):
        raise ValueError(f"batch_norm={batch_norm!r}: must be train or eval")
    if normalisation not in NORMALISATIONS:
        raise ValueError(f"normalisation={normalisation!r}: must be one of {', '.join(NORMALISATIONS)}")
    for option, number in (("num_classes", num_classes), ("hidden", hidden)):
        if number is not None and number < 1:
            raise ValueError(f"{option}={number!r}: must be 1 or more")
    if weights is not None and pretrained:
        raise ValueError(f"weights={str(weights)!r} and pretrained=True: choose one")
    state = None if weights is None else read_weights(weights)

    backbone = _backbone(name, pretrained, image_size, timm_options)
    width = backbone.head_hidden_size if hasattr(backbone, "head_hidden_size") else backbone.num_features
    layers: list[nn.Module] = []
    if head == "mlp":
        layers = [nn.Linear(width, hidden or width), nn.ReLU()]
        width = hidden or width
    if dropout > 0:
        layers.append(nn.Dropout(dropout))
    layers.append(nn.Linear(width, num_classes))

    ours = state is not None and "mean" in state and any(key.startswith("backbone.") for key in state)
    mean = std = None
    if normalisation == "auto" and ours:
        if state["mean"].any() or (state["std"] != 1).any():
            mean, std = state["mean"], state["std"]
    elif normalisation == "backbone" or (normalisation == "auto" and (pretrained or state is not None)):
        mean, std = (torch.tensor(backbone.pretrained_cfg[key]).view(3, 1, 1) for key in ("mean", "std"))

    model = Classifier(backbone, nn.Sequential(*layers), mean, std)
    if state is not None:
        (_load_ours if ours else _load_timm)(model, state, name, weights)
    model.fixed_batch_norm = batch_norm == "eval"
    return model.freeze(freeze) if freeze else model.train()


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


# ------------------------------------------------------------------------------------------------------------- weights
def read_weights(path: str | os.PathLike) -> dict[str, Tensor]:
    """The state dict in a .safetensors, .pth or .pt file. Nothing in it is executed. Of a training checkpoint, the EMA
    weights if there are any."""
    path = Path(path)
    if not path.is_file():
        raise ValueError(f"weights={str(path)!r}: no such file")
    if path.suffix not in (".safetensors", ".pth", ".pt"):
        raise ValueError(f"weights={str(path)!r}: must be a .safetensors, .pth or .pt file")
    try:
        if path.suffix == ".safetensors":
            state = load_file(path)
        else:
            state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # damaged pickles raise anything, even IndexError
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise ValueError(f"weights={str(path)!r} cannot be read: {reason}") from error
    for key in ("state_dict_ema", "model_ema", "ema", "state_dict", "model"):
        if isinstance(state, dict) and isinstance(state.get(key), dict):
            state = state[key]
            break
    tensors = isinstance(state, dict) and {k: v for k, v in state.items() if isinstance(v, Tensor)}
    if not tensors:
        raise ValueError(f"weights={str(path)!r} holds no state dict (names and tensors)")
    return clean_state_dict(tensors)


def _load_timm(model: Classifier, state: dict[str, Tensor], name: str, path: str | os.PathLike) -> None:
    """Weights of a timm model: into the backbone, and its classifier into a linear head of the same size."""
    names = model.backbone.pretrained_cfg.get("classifier") or ()
    names = (names,) if isinstance(names, str) else tuple(names)

    # "head.fc" may be all of "head", or share it with a norm that stays: the model without classifier tells.
    kept = {key.split(".")[0] for key in model.backbone.state_dict()}
    prefixes = tuple(f"{n if n.split('.')[0] in kept else n.split('.')[0]}." for n in names)

    def split(state: dict[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        head = {k: v for k, v in state.items() if k.startswith(prefixes)}
        return head, {k: v for k, v in state.items() if k not in head}

    classifier, body = split(state)
    if _misfits(model.backbone, body):
        # Weights as first published, or for another image size: timm may know how to translate them.
        translate = getattr(sys.modules[type(model.backbone).__module__], "checkpoint_filter_fn", None)
        if translate is not None:
            try:
                classifier, body = split(translate(dict(state), model.backbone))
            except Exception:  # it was not written for this file: the check below says what does not fit
                classifier, body = split(state)
    if misfits := _misfits(model.backbone, body):
        raise ValueError(f"weights={str(path)!r} do not fit {name}: {misfits}")
    model.backbone.load_state_dict(body, strict=False)

    weight = classifier.get(f"{names[0]}.weight") if names else None
    bias = classifier.get(f"{names[0]}.bias") if names else None
    if weight is None or bias is None:
        return
    # One with a second head or a norm of its own (DeiT, LeViT) would not be the same as a linear layer of ours.
    linear = len(classifier) == 2 and len(model.head) == 1
    if linear and weight.shape == model.classifier.weight.shape:
        model.set_classifier(weight, bias)
    else:
        _say_left_out(model, path, len(weight))


def _load_ours(model: Classifier, state: dict[str, Tensor], name: str, path: str | os.PathLike) -> None:
    """Weights of a `Classifier`: backbone and head, but for a last layer of another size."""
    state = {k: v for k, v in state.items() if k not in ("mean", "std")}
    last = f"head.{len(model.head) - 1}."
    weight = state.get(f"{last}weight")
    left_out = weight is not None and weight.ndim == 2 and len(weight) != model.classifier.out_features
    if left_out:
        state = {k: v for k, v in state.items() if not k.startswith(last)}
    optional = (last, "mean", "std") if left_out else ("mean", "std")
    if misfits := _misfits(model, state, optional):
        raise ValueError(f"weights={str(path)!r} do not fit {name}: {misfits}")
    model.load_state_dict(state, strict=False)
    if left_out:
        _say_left_out(model, path, len(weight))


def _say_left_out(model: Classifier, path: str | os.PathLike, categories: int) -> None:
    model.messages.append(
        f"{path}: its classifier for {categories} categories is left out; "
        f"ours for {model.classifier.out_features} starts from random weights"
    )


def _misfits(module: nn.Module, state: dict[str, Tensor], optional: tuple[str, ...] = ()) -> str:
    """In what a state dict differs from that of the module, in words; empty if in nothing."""
    wanted = module.state_dict()
    # Files of before torch 0.4.1 lack the counters of batch norms, which nothing depends on.
    missing = [
        k for k in wanted if k not in state and not k.endswith("num_batches_tracked") and not k.startswith(optional)
    ]
    surplus = [k for k in state if k not in wanted]
    other = [
        f"{k} ({list(v.shape)}, not {list(wanted[k].shape)})"
        for k, v in state.items()
        if k in wanted and v.shape != wanted[k].shape
    ]
    kinds = ((missing, "missing"), (surplus, "unknown to the model"), (other, "of another shape"))
    return "; ".join(f"{len(keys)} {what}, first {', '.join(keys[:3])}" for keys, what in kinds if keys)
