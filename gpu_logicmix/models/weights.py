"""Weights from files: reading them, and fitting them to a model that may have another head."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors.torch import load_file
from timm.models import clean_state_dict
from torch import Tensor, nn

if TYPE_CHECKING:
    from gpu_logicmix.models.classifier import Classifier


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


def is_ours(state: dict[str, Tensor]) -> bool:
    """Whether a state dict is that of a `Classifier`, not of a timm model alone."""
    return "mean" in state and any(key.startswith("backbone.") for key in state)


def load_weights(model: Classifier, state: dict[str, Tensor], name: str, path: str | os.PathLike) -> None:
    """Into a model made for `name`, from a file that `read_weights` read."""
    (_load_ours if is_ours(state) else _load_timm)(model, state, name, path)


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
    linear = len(classifier) == 2 and list(model.head.state_dict()) == ["0.weight", "0.bias"]
    if linear and weight.shape == model.classifier.weight.shape:
        model.set_classifier(weight, bias)
    else:
        _say_left_out(model, path, len(weight))


def _load_ours(model: Classifier, state: dict[str, Tensor], name: str, path: str | os.PathLike) -> None:
    """Weights of a `Classifier`: backbone and head, but for a last layer of another size."""
    state = {k: v for k, v in state.items() if k not in ("mean", "std")}
    last = next((f"{key}." for key, module in model.named_modules() if module is model.classifier), "")
    weight = state.get(f"{last}weight") if last else None
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
    layer = model.classifier
    model.messages.append(
        f"{path}: its classifier for {categories} categories is left out; "
        + (
            f"ours for {layer.out_features} starts from random weights"
            if layer
            else "the head starts from random weights"
        )
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
