"""A model that leaves: ONNX, torch.export, a timm checkpoint, the Hugging Face layout. Each is loaded and compared.

    exported = export_model(model, "onnx", "photos.onnx", Card(categories, size=448, architecture="resnet50"))
    exported.difference                                      # the largest, of logits, against the model itself

ONNX and torch.export hold everything: normalisation, backbone, head, the sigmoid. They take images [B, 3, SIZE, SIZE]
in [0, 1] (with as many channels as the model has) and give logits and probabilities [B, C]. timm and Hugging Face know
a backbone with one linear layer, so they take runs with the head `linear` alone, and images that the user normalises
(`mean` and `std` are in the files).
"""

from __future__ import annotations

import copy
import io
import json
import os
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import timm
import torch
from safetensors.torch import save
from torch import Tensor, nn

from gpu_logicmix.decisions import Decisions
from gpu_logicmix.errors import RunError
from gpu_logicmix.files import sync_folder, write_whole, written_whole
from gpu_logicmix.models.classifier import Classifier

FORMATS = {"onnx": "model.onnx", "torch-export": "model.pt2", "timm": "timm.safetensors", "hf": "hf"}
OF_A_RUN = {"last.pt", "previous.pt", "best.pt", "cft.json", "decisions.json", "config.toml", "log.jsonl"}
TOLERANCE = 1e-3  # of logits, relative to their spread


@dataclass
class Card:
    """What belongs to a model and is not in its weights."""

    categories: list[str]
    size: int
    architecture: str  # timm's name
    decisions: Decisions | None = None
    about: dict[str, Any] = field(default_factory=dict)  # for the model card: data, known share, metrics ...
    license: str = "other"


class Exported(NamedTuple):
    path: Path
    difference: float  # the largest of a logit, against the model
    load: str  # a line of Python


class Shipped(nn.Module):
    """Images in [0, 1] -> logits and probabilities."""

    def __init__(self, model: Classifier, decisions: Decisions | None) -> None:
        super().__init__()
        self.model = model
        self.temperature, self.shift = (decisions.temperature, decisions.shift) if decisions else (1.0, 0.0)

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.model(images)
        return logits, torch.sigmoid(logits / self.temperature + self.shift)


def export_model(model: Classifier, to: str, path: str | Path, card: Card) -> Exported:
    """Write a model to `path` as one of `FORMATS`, load it again and compare it with the model. A file that gives other
    logits is an error."""
    if to not in FORMATS:
        raise ValueError(f"to={to!r}: must be one of {', '.join(FORMATS)}")
    path = Path(path)
    if path.exists() and path.is_dir() != (to == "hf"):
        raise ValueError(f"{path}: is {'a folder' if path.is_dir() else 'a file'}, {to} writes the other")
    _check_no_run(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    model = copy.deepcopy(model).cpu().eval().requires_grad_(False)  # the caller's may be in the middle of its training
    write, read, load = {
        "onnx": (_write_onnx, _read_onnx, "onnxruntime.InferenceSession({!r})"),
        "torch-export": (_write_torch_export, _read_torch_export, "torch.export.load({!r}).module()"),
        "timm": (_write_timm, _read_timm, None),
        "hf": (_write_hf, _read_hf, "timm.create_model({!r}, pretrained=True)"),
    }[to]
    try:
        # Made and checked aside: until then, an earlier export stays.
        with tempfile.TemporaryDirectory(prefix=f".{path.name}.", dir=path.parent) as aside:
            made = Path(aside) / path.name
            write(model, made, card)
            difference = _difference(model, read(made, card), card.size)
            _put_in_place(made, path)
    except OSError as error:
        raise RunError(
            f"{path}: cannot be written ({error.strerror or error}); make room, or choose another"
        ) from error
    load = (load or _timm_line(model, card)).format(f"local-dir:{path}" if to == "hf" else str(path))
    return Exported(path, difference, load)


def _check_no_run(path: Path) -> None:
    """A run's own files are not written over."""
    if (path / "log.jsonl").exists() or (path / "last.pt").exists():
        raise ValueError(f"{path}: is the folder of a run; choose another")
    weights = path.suffix == ".safetensors"
    names = {path.name, *([path.with_suffix(".json").name] if weights else [])}  # timm's format writes both
    if (path.parent / "log.jsonl").exists() and ((weights and path.exists()) or names & OF_A_RUN):
        raise ValueError(f"{path}: is a file of the run in {path.parent}; choose another")


def _put_in_place(made: Path, path: Path) -> None:
    """A folder's files into the folder; a file with what was written beside it."""
    target = path if made.is_dir() else path.parent
    target.mkdir(exist_ok=True)
    for file in sorted((made if made.is_dir() else made.parent).iterdir()):
        os.replace(file, target / file.name)
    sync_folder(target)


def _difference(model: Classifier, again: Any, size: int) -> float:
    """The largest difference of a logit, on noise and flat images in batches of two sizes."""
    generator = torch.Generator().manual_seed(0)
    images = torch.rand(5, len(model.mean), size, size, generator=generator)
    images[3:] = images[3:, :, :1, :1]
    with torch.no_grad():
        wanted = model(images)
        got = torch.cat([again(images[:1]), again(images[1:])])
    difference = (got - wanted).abs().max().item()
    if not difference <= TOLERANCE * (1 + wanted.abs().max().item()):
        raise RunError(f"the exported model gives other logits than the model itself, by up to {difference:g}")
    return difference


def metadata(model: Classifier, card: Card) -> dict[str, Any]:
    """For whoever has only the file: what to do with an image, and what the numbers that come out mean."""
    d = card.decisions
    return {
        "categories": card.categories,
        "architecture": card.architecture,
        "input": {
            "size": [card.size, card.size],
            "resize": "to this size without keeping the aspect ratio, bilinear with antialiasing",
            "channels": "RGB" if len(model.mean) == 3 else len(model.mean),
            "range": [0.0, 1.0],
            "mean": model.mean.flatten().tolist(),
            "std": model.std.flatten().tolist(),
        },
        "temperature": d.temperature if d else 1.0,
        "shift": d.shift if d else 0.0,
        "thresholds": d.thresholds.tolist() if d else [0.5] * len(card.categories),
        "undecided": d.undecided if d else card.categories,
    }


# ------------------------------------------------------------------------------------------------------- whole models
def _shipped(model: Classifier, card: Card) -> tuple[Shipped, tuple[Tensor], dict[str, Any]]:
    shipped = Shipped(model, card.decisions).eval()
    example = torch.rand(2, len(model.mean), card.size, card.size)
    return shipped, (example,), {"images": {0: torch.export.Dim("batch", min=1)}}


def _write_onnx(model: Classifier, path: Path, card: Card) -> None:
    try:
        import onnx
        import onnxruntime
        import onnxscript
    except ImportError as error:
        raise RunError(f"{error.name} is not installed: pip install onnx onnxruntime onnxscript") from None
    del onnxruntime, onnxscript
    shipped, example, batch = _shipped(model, card)
    program = torch.onnx.export(
        shipped,
        example,
        dynamo=True,
        dynamic_shapes=batch,
        input_names=["images"],
        output_names=["logits", "probabilities"],
        verbose=False,
    )
    found = program.model_proto
    about = {**metadata(model, card), "note": "normalisation by mean and std is part of the model"}
    onnx.helper.set_model_props(found, {key: json.dumps(value, ensure_ascii=False) for key, value in about.items()})
    onnx.save(found, path)  # one file: over 2 GB protobuf refuses, and no timm classifier is that large
    onnx.checker.check_model(str(path))


def _read_onnx(path: Path, card: Card) -> Any:
    import onnxruntime

    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    return lambda images: torch.from_numpy(session.run(["logits"], {"images": images.numpy()})[0])


def _write_torch_export(model: Classifier, path: Path, card: Card) -> None:
    shipped, example, batch = _shipped(model, card)
    program = torch.export.export(shipped, example, dynamic_shapes=batch)
    about = json.dumps(metadata(model, card), ensure_ascii=False)
    buffer = io.BytesIO()  # on a full disk, torch's own writer ends the process
    torch.export.save(program, buffer, extra_files={"metadata.json": about})
    path.write_bytes(buffer.getvalue())


def _read_torch_export(path: Path, card: Card) -> Any:
    program = torch.export.load(path).module()
    return lambda images: program(images)[0]


# ------------------------------------------------------------------------------------------- backbones with one layer
def timm_state(model: Classifier) -> dict[str, Tensor]:
    """The weights under timm's names. Raises RunError where timm has no place for the head."""
    names = model.backbone.pretrained_cfg.get("classifier")
    linear = [key for key in model.head.state_dict() if key.endswith(("weight", "bias"))]
    if len(linear) != 2 or model.classifier is None or not isinstance(names, str):
        raise RunError(
            f"{type(model.head).__name__}: timm and the Hugging Face layout have one linear layer for a head; export "
            "to onnx or torch-export, or train with --head linear"
        )
    layer = model.classifier
    body = {key: value.contiguous() for key, value in model.backbone.state_dict().items()}
    return {**body, f"{names}.weight": layer.weight.contiguous(), f"{names}.bias": layer.bias.contiguous()}


def _model_args(model: Classifier, card: Card) -> dict[str, Any]:
    """What `timm.create_model` must be told besides: of a network that is made for one size, the size; of images that
    are not RGB, their channels."""
    size = {"img_size": card.size} if model.backbone.pretrained_cfg.get("fixed_input_size") else {}
    return size if len(model.mean) == 3 else {**size, "in_chans": len(model.mean)}


def _write_weights(state: dict[str, Tensor], path: Path) -> None:
    """Readable by whom other files are: safetensors' own function gives them to their owner alone."""
    with written_whole(path, "wb") as file:
        file.write(save(state, metadata={"format": "pt"}))


def _write_timm(model: Classifier, path: Path, card: Card) -> None:
    if path.suffix != ".safetensors":
        raise ValueError(f"{path}: must end in .safetensors")
    _write_weights(timm_state(model), path)
    about = {**metadata(model, card), "num_classes": len(card.categories), "model_args": _model_args(model, card)}
    write_whole(path.with_suffix(".json"), json.dumps(about, indent=1, ensure_ascii=False) + "\n")


def _timm_line(model: Classifier, card: Card) -> str:
    name = json.dumps(card.architecture)
    options = {"num_classes": len(card.categories), **_model_args(model, card)}
    told = ", ".join(f"{key}={value!r}" for key, value in options.items())
    return f"timm.create_model({name}, checkpoint_path={{!r}}, {told})"


def _read_timm(path: Path, card: Card) -> Any:
    about = json.loads(path.with_suffix(".json").read_text(encoding="utf-8"))
    loaded = timm.create_model(
        card.architecture, checkpoint_path=str(path), num_classes=len(card.categories), **about["model_args"]
    )
    return _normalised(loaded, about["input"]["mean"], about["input"]["std"])


def _normalised(loaded: nn.Module, mean: list[float], std: list[float]) -> Any:
    loaded = loaded.eval()
    mean, std = (torch.tensor(values).view(-1, 1, 1) for values in (mean, std))
    return lambda images: loaded((images - mean) / std)


def _write_hf(model: Classifier, path: Path, card: Card) -> None:
    state = timm_state(model)
    path.mkdir(parents=True, exist_ok=True)
    _write_weights(state, path / "model.safetensors")
    about, given = metadata(model, card), model.backbone.pretrained_cfg
    config = {
        "architecture": given["architecture"],
        "num_classes": len(card.categories),
        "num_features": model.backbone.num_features,
        "model_args": _model_args(model, card),
        "label_names": card.categories,
        "problem_type": "multi_label_classification",
        "thresholds": about["thresholds"],
        "temperature": about["temperature"],
        "shift": about["shift"],
        "pretrained_cfg": {
            "tag": "gpu_logicmix",
            "custom_load": False,
            "input_size": [len(model.mean), card.size, card.size],
            "fixed_input_size": bool(given.get("fixed_input_size")),
            "interpolation": "bilinear",
            "crop_pct": 1.0,
            "crop_mode": "squash",  # both sides to the size, as in training
            "mean": about["input"]["mean"],
            "std": about["input"]["std"],
            "num_classes": len(card.categories),
            "pool_size": None,
            "first_conv": given.get("first_conv"),
            "classifier": given["classifier"],
            "license": card.license,
        },
    }
    write_whole(path / "config.json", json.dumps(config, indent=1, ensure_ascii=False) + "\n")
    write_whole(path / "README.md", model_card(card))
    if card.decisions is not None:
        card.decisions.write(path / "decisions.json")


def _read_hf(path: Path, card: Card) -> Any:
    loaded = timm.create_model(f"local-dir:{path}", pretrained=True)
    return _normalised(loaded, loaded.pretrained_cfg["mean"], loaded.pretrained_cfg["std"])


def model_card(card: Card) -> str:
    """README.md of a Hugging Face folder. The names come from data: in the header as JSON, which is YAML; in the text
    as code."""
    rows = "\n".join(f"| {name} | {_as_code(value)} |" for name, value in card.about.items())
    named = ", ".join(_as_code(name) for name in card.categories)
    undecided = card.decisions.undecided if card.decisions else []
    few = f"\nToo few known labels for a threshold: {', '.join(map(_as_code, undecided))}.\n" if undecided else ""
    return f"""---
library_name: timm
pipeline_tag: image-classification
license: {json.dumps(card.license)}
tags: [image-classification, multi-label, timm, gpu-logicmix]
---

# {card.architecture}, {len(card.categories)} categories

A multi-label classifier, trained with gpu-logicmix.

| | |
|---|---|
{rows}

```python
model = timm.create_model("hf-hub:OWNER/NAME", pretrained=True).eval()
probabilities = model(images).sigmoid()   # one for each category; any number of them may be high
```

Images are resized to {card.size} x {card.size} without keeping the aspect ratio and normalised as `config.json` says.
It also holds `temperature` and `shift` (a calibrated probability is sigmoid(logit / temperature + shift)) and the
threshold of each category.

Categories: {named}.
{few}"""


def _as_code(value: Any) -> str:
    return "`" + " ".join(str(value).replace("`", "'").replace("|", "/").split()) + "`"
