"""The options of a run: names, defaults, help and limits, in one place.

The command line is made from these fields, `--config FILE.toml` holds the same names, and a run writes the effective
ones into its folder. What is given counts in this order: command line, file, preset, default.

The defaults are the paper's run on COCO (Chong et al., 2024, section 4), with the gammas of the authors' published
code, which are those of the asymmetric loss elsewhere; the paper prints them the other way round.
"""

from __future__ import annotations

import difflib
import json
import math
import sys
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from typing import Any, get_args, get_type_hints

from gpu_logicmix.augment import AUGMENTS, MIXES
from gpu_logicmix.curriculum import SELECTIONS
from gpu_logicmix.files import at_home
from gpu_logicmix.labels import PROTOCOLS
from gpu_logicmix.labels import hide_labels as matrix_hide_labels
from gpu_logicmix.losses.base import LOSSES
from gpu_logicmix.methods.base import HEADS
from gpu_logicmix.train.presets import PRESETS

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


def _option(panel: str, default: Any, help: str, **rules: Any) -> Any:
    """A field. rules: `low`, `high` (limits that are allowed themselves), `above` (a limit that is not), `choices`;
    `free`: a run may resume with another value, since it does not change what is computed."""
    return field(default=default, metadata={"panel": panel, "help": help, **rules})


_data, _mix, _model, _opt, _cl, _run = (
    partial(_option, panel)
    for panel in (
        "Data",
        "Mixing and augmentation",
        "Model",
        "Optimiser",
        "Curriculum labeling and fine-tuning",
        "Run",
    )
)


@dataclass
class Config:
    """Everything a run depends on. `Config(...)` checks the values; one line says what is wrong with them."""

    data: str = _data("shapes", "coco:PATH, voc2007:PATH, vg200:PATH, csv:PATH or shapes.", free=True)
    option: list[str] | None = _data(None, "Option of the dataset, NAME=VALUE; may be repeated.")  # noqa: RUF009
    val: str | None = _data(None, "DATA to validate on, if not the val split of the same.", free=True)
    holdout: float = _data(
        0.0, "Validate on this share of the training images instead: to choose settings by.", low=0, high=0.9
    )
    images: int | None = _data(None, "Train on this many images, drawn at random once and for all.", low=1)
    tune_images: int = _data(
        0,
        "Hold out this many training images to choose the best epoch by; the validation images then only report.",
        low=0,
    )
    size: int = _data(448, "Images become SIZE x SIZE.", low=8, high=8192)
    known: float | None = _data(
        None, "Hide labels first: the share that is kept, as 0.1; with --protocol per-class a number, as 50."
    )
    protocol: str = _data(
        "uniform", "Which labels are hidden; hcp: the mask of the SST and SARB papers.", choices=PROTOCOLS
    )
    on_bad_image: str = _data(
        "raise", "Stop at an image that cannot be read, or skip it.", choices=("raise", "skip"), free=True
    )
    cache: str | None = _data(None, "Folder for decoded images; later epochs and runs read them from there.", free=True)
    workers: int = _data(2, "Processes that decode images (not used with --cache).", low=0, high=256, free=True)

    mix: str = _mix("logicmix", "How samples are mixed.", choices=tuple(MIXES))
    p: float = _mix(0.5, "LogicMix: share of samples that are mixed.", low=0, high=1)
    k_min: int = _mix(2, "LogicMix: minimum number of samples that make one.", low=1)
    k_max: int = _mix(3, "LogicMix: maximum number of samples that make one.", low=1, high=64)
    bank: int = _mix(
        0, "LogicMix: also draw partners from this many samples of earlier batches; for small batches.", low=0
    )
    partners: str = _mix(
        "distinct",
        "LogicMix: K different samples, or drawn with replacement as in the authors' released code.",
        choices=("distinct", "with-replacement"),
    )
    mix_unknown: str = _mix(
        "unknown",
        "LogicMix: what unknown labels count as when mixing. absent: an ablation of the paper.",
        choices=("unknown", "absent"),
    )
    mix_start: int = _mix(1, "First epoch in which samples are mixed.", low=1)
    clean_epochs: int = _mix(0, "Epochs at the end in which nothing is mixed.", low=0)
    crop: str = _mix(
        "none",
        "multi-scale: a random crop of 1, 7/8, 3/4, 5/8 or 1/2 of the side, per image.",
        choices=("none", "multi-scale"),
    )
    flip: bool = _mix(True, "Flip half of the images.")
    randaugment: bool = _mix(True, "RandAugment, drawn per image.")
    augment: str | None = _mix(
        None,
        f"In place of --randaugment: {', '.join(AUGMENTS)} (Kornia draws per batch), or MODULE:FUNCTION that returns "
        "an nn.Module for images in [0, 1], such as a Kornia or torchvision v2 pipeline of your own.",
    )
    ra_n: int = _mix(2, "RandAugment: operations per image.", low=0)
    ra_m: int = _mix(9, "RandAugment: magnitude, from 0 to 30.", low=0, high=30)

    model: str = _model("resnet101", "Any timm model.")
    weights: str = _model("hub", "hub: timm's pretrained weights; none; or a .safetensors or .pth file.", free=True)
    init: str | None = _model(None, "Start from the weights of this finished run (its folder).", free=True)
    head: str = _model("mlp", "The head: a method by name (--help-method lists them), or MODULE:NAME.")
    head_option: list[str] | None = _model(None, "Option of the head, NAME=VALUE; may be repeated.")  # noqa: RUF009
    word_vectors: str | None = _model(
        None, "Word vectors of the categories for heads that use them: .npy in category order, or GloVe's text file."
    )
    normalisation: str = _model(
        "auto",
        "Of the input: none (the paper), the backbone's own, or auto: the latter if it comes with weights.",
        choices=("auto", "none", "backbone"),
    )
    freeze: int = _model(0, "Stages of the backbone not to train, from the image on; -1: all.", low=-1)
    batch_norm: str = _model(
        "train", "eval: keep the statistics of the weights; for few images.", choices=("train", "eval")
    )

    epochs: int = _opt(60, "Passes through the data.", low=1, high=100_000)
    batch_size: int = _opt(32, "Images per step, in each process.", low=1, high=1_000_000)
    accumulate: int = _opt(4, "Steps whose gradients make one update.", low=1)
    optimizer: str = _opt("adamw", "adamw, or adam: weight decay as part of the gradient.", choices=("adamw", "adam"))
    lr: float = _opt(2e-4, "Peak learning rate.", above=0)
    backbone_lr: float | None = _opt(None, "Peak learning rate of the backbone; --lr if not given.", above=0)
    weight_decay: float = _opt(1e-4, "Weight decay; not on biases and norms.", low=0)
    schedule: str = _opt(
        "onecycle",
        "Learning rate schedule. authors: 1cycle as in the LogicMix authors' released code, which runs only its first "
        "1/accumulate; step: a tenth from epoch --lr-step on.",
        choices=("onecycle", "authors", "step", "constant"),
    )
    warmup: float = _opt(0.2, "1cycle: share of the run in which the rate rises.", low=0, high=1)
    lr_step: int = _opt(10, "Schedule step: the epoch after which the rate falls to a tenth.", low=1)
    ema_decay: float = _opt(0.999, "Moving average of the weights; 0: none.", low=0, high=0.99999)
    ema_warmup: bool = _opt(True, "Let the average forget the first steps sooner.")
    loss: str = _opt("asl", "The loss: a name (--help-method lists them), or MODULE:NAME.")
    loss_option: list[str] | None = _opt(None, "Option of the loss, NAME=VALUE; may be repeated.")  # noqa: RUF009

    cl: bool = _cl(True, "Curriculum labeling: pseudo-labels.")
    theta_pos: float = _cl(2.0, "Present where the logit is above.")
    theta_neg: float = _cl(-2.0, "Absent where the logit is below.")
    cl_start: int = _cl(1, "First epoch after which to label.", low=1)
    cl_select: str = _cl("score", "By the thresholds, or the most confident --cl-fraction.", choices=SELECTIONS)
    cl_fraction: float = _cl(0.5, "For top and top-per-category.", low=0, high=1)
    cft: bool = _cl(True, "Category-wise fine-tuning at the end.", free=True)
    cft_epochs: int = _cl(1000, "Category-wise fine-tuning: maximum number of epochs.", low=1, free=True)
    cft_lr: float = _cl(1e-4, "Category-wise fine-tuning: Adam learning rate.", above=0, free=True)
    cft_method: str = _cl(
        "adam",
        "Category-wise fine-tuning: adam, or ga, a genetic algorithm that maximises AP.",
        choices=("adam", "ga"),
        free=True,
    )
    decisions: bool = _cl(True, "A threshold per category and a temperature, from held-out known labels.", free=True)

    seed: int = _run(0, "Seed of everything drawn at random.", low=0, high=2**63 - 1)
    keep: str = _run("best", "The epoch whose weights are the result.", choices=("best", "last"), free=True)
    device: str = _run("auto", "auto, cpu, cuda, cuda:1 ...", free=True)
    threads: int | None = _run(None, "CPU threads; torch's default if not given.", low=1, high=1024, free=True)
    amp: str = _run(
        "auto",
        "Mixed precision; auto: bfloat16 on CUDA (older GPUs: fp16).",
        choices=("auto", "bf16", "fp16", "off"),
    )
    compile: bool = _run(False, "torch.compile the model.", free=True)
    save_every: float = _run(10.0, "Minutes between checkpoints; one after each epoch too.", above=0, free=True)
    eval_every: int = _run(1, "Epochs between two validations; there is one after the last.", low=1)
    log_every: int = _run(50, "Steps between two lines of the log.", low=1, free=True)
    tensorboard: bool = _run(False, "Also write for TensorBoard.", free=True)
    log_to: list[str] | None = _run(  # noqa: RUF009
        None,
        "Also log to tensorboard, wandb or mlflow, offline unless their variables say else; may be repeated.",
        free=True,
    )

    def __post_init__(self) -> None:
        for f in fields(self):
            value = getattr(self, f.name)
            self._check_type(f.name, value)
            _check_rules(f.name, value, f.metadata)
        if self.k_max < self.k_min:
            raise ValueError(f"k_max={self.k_max}: must not be below k_min={self.k_min}")
        if self.clean_epochs >= self.epochs:
            raise ValueError(f"clean_epochs={self.clean_epochs}: must be below epochs={self.epochs}")
        if self.mix_start > self.epochs:
            raise ValueError(f"mix_start={self.mix_start}: must not be above epochs={self.epochs}")
        if self.theta_neg > self.theta_pos:
            raise ValueError(f"theta_neg={self.theta_neg}: must not be above theta_pos={self.theta_pos}")
        if self.known is not None:
            check_known(self.known, self.protocol)
        if self.val is not None and self.holdout:
            raise ValueError(f"val={self.val!r} and holdout={self.holdout:g}: choose one")
        if self.augment is not None and self.augment not in AUGMENTS and ":" not in self.augment:
            raise ValueError(f"augment={self.augment!r}: must be one of {', '.join(AUGMENTS)}, or MODULE:FUNCTION")
        for name in self.log_to or ():
            if name not in ("tensorboard", "wandb", "mlflow"):
                raise ValueError(f"log_to={name!r}: must be one of tensorboard, wandb, mlflow")
        LOSSES.parse(self.loss, self.loss_option)
        HEADS.parse(self.head, self.head_option)

    def _check_type(self, name: str, value: Any) -> None:
        wanted = get_args(OPTION_TYPES[name]) or (OPTION_TYPES[name],)
        if float in wanted and isinstance(value, int) and not isinstance(value, bool):
            setattr(self, name, float(value))  # `lr = 1` in a file
        elif list[str] in wanted and value is not None:
            if not isinstance(value, list) or not all(isinstance(v, str) for v in value):
                raise ValueError(f"{name}={value!r}: must be a list of strings")
        elif not any(type(value) is w for w in wanted):
            names = " or ".join(w.__name__ for w in wanted if w is not type(None))
            raise ValueError(f"{name}={value!r}: must be {names}")


OPTION_TYPES = get_type_hints(Config)
# A run may resume with other values of these; all else is part of what is being computed.
FREE = frozenset(f.name for f in fields(Config) if f.metadata.get("free"))


def _check_rules(name: str, value: Any, rules: Mapping[str, Any]) -> None:
    if value is None:
        return
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{name}={value}: must be finite")
    for rule, holds, words in (
        ("low", lambda limit: value >= limit, "must be at least"),
        ("high", lambda limit: value <= limit, "must be at most"),
        ("above", lambda limit: value > limit, "must be above"),
    ):
        if rule in rules and not holds(rules[rule]):
            raise ValueError(f"{name}={value}: {words} {rules[rule]}")
    if "choices" in rules and value not in rules["choices"]:
        raise ValueError(f"{name}={value!r}: must be one of {', '.join(rules['choices'])}")


# ----------------------------------------------------------------------------------------------------------- from files
def make_config(given: Mapping[str, Any], preset: str | None = None, file: str | Path | None = None) -> Config:
    """Options from a preset, over them those of a TOML file, over them those that are `given`."""
    chosen: dict[str, Any] = {}
    in_file = read_toml(file) if file is not None else {}
    preset = preset or in_file.pop("preset", None)
    in_file.pop("preset", None)
    if preset is not None:
        if preset not in list(PRESETS):  # a list, since a file may have anything there
            raise ValueError(f"preset={preset!r}: must be one of {', '.join(PRESETS)}")
        chosen |= PRESETS[preset]
    for name in in_file:
        if name not in OPTION_TYPES:
            near = difflib.get_close_matches(name, OPTION_TYPES, 1, 0.6)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise ValueError(f"{file}: there is no option {name!r}{hint}")
    return Config(**{**chosen, **in_file, **given})


def read_toml(file: str | Path) -> dict[str, Any]:
    try:
        with open(file, "rb") as f:
            return tomllib.load(f)
    except FileNotFoundError:
        raise ValueError(f"{file}: no such file") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{file}: not TOML: {error}") from None


def to_toml(config: Config) -> str:
    """All options as TOML, in the order of the help; those without a value are left out."""
    lines, panel = [], None
    for f in fields(config):
        value = getattr(config, f.name)
        if f.metadata["panel"] != panel:
            panel = f.metadata["panel"]
            lines += ["", f"# {panel}"]
        if value is not None:
            # JSON's strings, numbers, booleans and lists of strings are TOML's, but for one character.
            text = json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
            lines.append(f"{f.name} = {text}")
    return "\n".join(lines).lstrip() + "\n"


def changed(config: Config) -> dict[str, Any]:
    """The options that differ from the defaults."""
    return {
        f.name: getattr(config, f.name)
        for f in fields(config)
        if f.default is not MISSING and getattr(config, f.name) != f.default
    }


PATH_OPTIONS = ("root", "genome")  # of datasets


def located(config: Config) -> Config:
    """The options with absolute paths, as a run keeps them: it can then be evaluated from any folder."""
    changed: dict[str, Any] = {}
    for name in ("data", "val", "cache", "weights", "init", "word_vectors"):
        value = getattr(config, name)
        scheme, colon, path = ("", "", value) if name not in ("data", "val") else (value or "").partition(":")
        if not path or "://" in path or (name == "weights" and path in ("hub", "none")):
            continue
        changed[name] = f"{scheme}{colon}{at_home(path).absolute()}"
    if config.option is not None:
        parts = [option.partition("=") for option in config.option]
        changed["option"] = [
            name + equals + (str(at_home(value).absolute()) if name in PATH_OPTIONS else value)
            for name, equals, value in parts
        ]
    return replace(config, **changed)


# ------------------------------------------------------------------------------------------------------------- the data
def dataset_options(options: list[str] | None) -> dict[str, str]:
    """NAME=VALUE as names and values."""
    chosen = {}
    for option in options or []:
        name, equals, value = option.partition("=")
        if not equals:
            raise ValueError(f"--option {option!r}: write NAME=VALUE")
        if name in ("spec", "split", "size", "on_bad_image"):
            raise ValueError(f"--option {option!r}: not a dataset option; write --{name.replace('_', '-')} {value}")
        chosen[name] = value
    return chosen


def check_known(known: float, protocol: str) -> None:
    if protocol == "per-class":
        if not math.isfinite(known) or known < 1 or known != int(known):
            raise ValueError(f"known={known:g}: with protocol=per-class it is a number of labels, 1 or more")
    elif not 0 < known <= 1:
        raise ValueError(f"known={known:g}: must be above 0 and at most 1")


def hide(labels: Any, known: float | None, protocol: str, seed: int) -> tuple[Any, str]:
    """The labels that are left, and a few words about it. Labels are a matrix or `data.sparse.SparseLabels`."""
    hide_labels = labels.hide if hasattr(labels, "hide") else partial(matrix_hide_labels, labels)
    if protocol == "single-positive":
        return hide_labels(None, seed=seed, protocol=protocol), "one positive label per image"
    if known is None:
        return labels, "labels as they are"
    check_known(known, protocol)
    if protocol == "per-class":
        return hide_labels(int(known), seed, protocol), f"{known:g} labels of each kind per class (per-class)"
    return hide_labels(known, seed, protocol), f"{known:.0%} of labels known ({protocol})"
