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
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from typing import Any, get_args, get_type_hints

import numpy as np

from gpu_logicmix.labels import PROTOCOLS, hide_labels

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

MIXES = ("logicmix", "mixup", "ormixup", "mlmixup", "mixup-pme", "none")
LOSSES = ("asl", "bce", "focal", "dp-asl")
SELECTIONS = ("score", "positive-score", "top", "top-per-category")

# The rest of each is the default.
PRESETS: dict[str, dict[str, Any]] = {
    "paper-coco": {"normalisation": "none", "ema_warmup": False},
    "paper-voc": {
        "normalisation": "none",
        "ema_warmup": False,
        "k_min": 3,
        "k_max": 4,
        "theta_pos": 2.5,
        "theta_neg": -1.0,
    },
    "paper-vg": {"normalisation": "none", "ema_warmup": False, "theta_neg": -1.0},
}


def _option(panel: str, default: Any, help: str, **rules: Any) -> Any:
    """A field. rules: `low`, `high` (limits that are allowed themselves), `above` (a limit that is not), `choices`."""
    return field(default=default, metadata={"panel": panel, "help": help, **rules})


@dataclass
class Config:
    """Everything a run depends on. `Config(...)` checks the values; one line says what is wrong with them."""

    data: str = _option("Data", "shapes", "coco:PATH, voc2007:PATH, vg200:PATH, csv:PATH or shapes.")
    option: list[str] | None = _option("Data", None, "Option of the dataset, NAME=VALUE; may be repeated.")  # noqa: RUF009
    val: str | None = _option("Data", None, "DATA to validate on, if not the val split of the same.")
    holdout: float = _option(
        "Data", 0.0, "Validate on this share of the training images instead: to choose settings by.", low=0, high=0.9
    )
    images: int | None = _option("Data", None, "Train on so many images, drawn at random once and for all.", low=1)
    tune_images: int = _option(
        "Data",
        0,
        "Hold out this many training images to choose the best epoch by; the validation images then only report.",
        low=0,
    )
    size: int = _option("Data", 448, "Images become SIZE x SIZE.", low=8)
    known: float | None = _option(
        "Data", None, "Hide labels first: the share that is kept, as 0.1; with --protocol per-class a number, as 50."
    )
    protocol: str = _option(
        "Data", "uniform", "Which labels are hidden; hcp: the mask of the SST and SARB papers.", choices=PROTOCOLS
    )
    on_bad_image: str = _option(
        "Data", "raise", "Stop at an image that cannot be read, or go on without it.", choices=("raise", "skip")
    )
    cache: str | None = _option("Data", None, "Folder for decoded images; later epochs and runs read them from there.")
    workers: int = _option("Data", 2, "Processes that decode images (none are needed with --cache).", low=0)

    mix: str = _option("Mixing and augmentation", "logicmix", "How samples are mixed.", choices=MIXES)
    p: float = _option("Mixing and augmentation", 0.5, "LogicMix: share of samples that are mixed.", low=0, high=1)
    k_min: int = _option("Mixing and augmentation", 2, "LogicMix: at least so many samples make one.", low=1)
    k_max: int = _option("Mixing and augmentation", 3, "LogicMix: at most so many.", low=1)
    clean_epochs: int = _option("Mixing and augmentation", 0, "Epochs at the end in which nothing is mixed.", low=0)
    flip: bool = _option("Mixing and augmentation", True, "Flip half of the images.")
    randaugment: bool = _option("Mixing and augmentation", True, "RandAugment, drawn for each sample.")
    ra_n: int = _option("Mixing and augmentation", 2, "RandAugment: operations an image.", low=0)
    ra_m: int = _option("Mixing and augmentation", 9, "RandAugment: magnitude, of 31.", low=0, high=30)

    model: str = _option("Model", "resnet101", "Any model of timm.")
    weights: str = _option("Model", "hub", "hub: timm's pretrained ones; none; or a .safetensors or .pth file.")
    head: str = _option("Model", "mlp", "The classifier on top.", choices=("linear", "mlp"))
    dropout: float = _option("Model", 0.0, "Before the last layer.", low=0, high=0.99)
    normalisation: str = _option(
        "Model",
        "auto",
        "Of the input: none (the paper), the backbone's own, or auto: the latter if it comes with weights.",
        choices=("auto", "none", "backbone"),
    )
    freeze: int = _option("Model", 0, "Stages of the backbone not to train, from the image on; -1: all.", low=-1)

    batch_norm: str = _option(
        "Model", "train", "eval: keep the statistics of the weights; for few images.", choices=("train", "eval")
    )

    epochs: int = _option("Optimiser", 60, "Passes through the data.", low=1)
    batch_size: int = _option("Optimiser", 32, "Images a step, in each process.", low=1)
    accumulate: int = _option("Optimiser", 4, "Steps whose gradients make one update.", low=1)
    lr: float = _option("Optimiser", 2e-4, "Peak learning rate.", above=0)
    backbone_lr: float | None = _option("Optimiser", None, "That of the backbone, if another.", above=0)
    weight_decay: float = _option("Optimiser", 1e-4, "Of AdamW; not on biases and norms.", low=0)
    schedule: str = _option("Optimiser", "onecycle", "Of the learning rate.", choices=("onecycle", "constant"))
    warmup: float = _option("Optimiser", 0.2, "1cycle: share of the run in which the rate rises.", low=0, high=1)
    ema_decay: float = _option("Optimiser", 0.999, "Moving average of the weights; 0: none.", low=0, high=0.99999)
    ema_warmup: bool = _option("Optimiser", True, "Let the average forget the first steps sooner.")
    loss: str = _option(
        "Optimiser", "asl", "asl: asymmetric; dp-asl: another policy for mixed samples.", choices=LOSSES
    )
    gamma_neg: float = _option("Optimiser", 4.0, "asl: focus on hard negatives.", low=0)
    gamma_pos: float = _option("Optimiser", 0.0, "asl: focus on hard positives; focal: on both.", low=0)
    clip: float = _option("Optimiser", 0.05, "asl: negatives below this probability cost nothing.", low=0, high=0.99)
    assume_negative: bool = _option("Optimiser", False, "Take unknown labels as absent.")

    cl: bool = _option("Curriculum labeling and fine-tuning", True, "Curriculum labeling: pseudo-labels.")
    theta_pos: float = _option("Curriculum labeling and fine-tuning", 2.0, "Present where the logit is above.")
    theta_neg: float = _option("Curriculum labeling and fine-tuning", -2.0, "Absent where the logit is below.")
    cl_start: int = _option("Curriculum labeling and fine-tuning", 1, "First epoch after which to label.", low=1)
    cl_select: str = _option(
        "Curriculum labeling and fine-tuning",
        "score",
        "By the thresholds, or the surest --cl-fraction.",
        choices=SELECTIONS,
    )
    cl_fraction: float = _option(
        "Curriculum labeling and fine-tuning", 0.5, "For top and top-per-category.", low=0, high=1
    )
    cft: bool = _option("Curriculum labeling and fine-tuning", True, "Category-wise fine-tuning at the end.")
    cft_epochs: int = _option("Curriculum labeling and fine-tuning", 1000, "At most so many.", low=1)
    cft_lr: float = _option("Curriculum labeling and fine-tuning", 1e-4, "Of Adam.", above=0)
    cft_method: str = _option(
        "Curriculum labeling and fine-tuning", "adam", "ga: a genetic algorithm on AP.", choices=("adam", "ga")
    )

    seed: int = _option("Run", 0, "Of everything drawn at random.", low=0)
    keep: str = _option("Run", "best", "The epoch whose weights are the result.", choices=("best", "last"))
    device: str = _option("Run", "auto", "auto, cpu, cuda, cuda:1 ...")
    threads: int | None = _option("Run", None, "Of the CPU; torch's choice unless given.", low=1)
    amp: str = _option(
        "Run", "auto", "Mixed precision; auto: bfloat16 on CUDA.", choices=("auto", "bf16", "fp16", "off")
    )
    compile: bool = _option("Run", False, "torch.compile the model.")
    save_every: float = _option("Run", 10.0, "Minutes between checkpoints; there is one after each epoch too.", above=0)
    eval_every: int = _option("Run", 1, "Epochs between two validations; there is one after the last.", low=1)
    log_every: int = _option("Run", 50, "Steps between two lines of the log.", low=1)
    tensorboard: bool = _option("Run", False, "Also write for TensorBoard.")

    def __post_init__(self) -> None:
        for f in fields(self):
            value = getattr(self, f.name)
            self._check_type(f.name, value)
            _check_rules(f.name, value, f.metadata)
        if self.k_max < self.k_min:
            raise ValueError(f"k_max={self.k_max}: must not be below k_min={self.k_min}")
        if self.clean_epochs >= self.epochs:
            raise ValueError(f"clean_epochs={self.clean_epochs}: must be below epochs={self.epochs}")
        if self.theta_neg > self.theta_pos:
            raise ValueError(f"theta_neg={self.theta_neg}: must not be above theta_pos={self.theta_pos}")
        if self.known is not None:
            check_known(self.known, self.protocol)
        if self.val is not None and self.holdout:
            raise ValueError("val and holdout: choose one")

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


def _check_rules(name: str, value: Any, rules: Mapping[str, Any]) -> None:
    if value is None:
        return
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{name}={value}: must be a number")
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
            hint = f"; is it {near[0]}?" if near else ""
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


# ------------------------------------------------------------------------------------------------------------- the data
def dataset_options(options: list[str] | None) -> dict[str, str]:
    """NAME=VALUE as names and values."""
    chosen = {}
    for option in options or []:
        name, equals, value = option.partition("=")
        if not equals:
            raise ValueError(f"--option {option!r}: write NAME=VALUE")
        if name in ("spec", "split", "size", "on_bad_image"):
            raise ValueError(f"--option {option!r}: no option of a dataset; write --{name.replace('_', '-')} {value}")
        chosen[name] = value
    return chosen


def check_known(known: float, protocol: str) -> None:
    if protocol == "per-class":
        if known < 1 or known != int(known):
            raise ValueError(f"known={known:g}: with protocol=per-class it is a number of labels, 1 or more")
    elif not 0 < known <= 1:
        raise ValueError(f"known={known:g}: must be above 0 and at most 1")


def hide(labels: np.ndarray, known: float | None, protocol: str, seed: int) -> tuple[np.ndarray, str]:
    """The labels that are left, and a few words about it."""
    if protocol == "single-positive":
        return hide_labels(labels, seed=seed, protocol=protocol), "one positive label a sample"
    if known is None:
        return labels, "labels as they are"
    check_known(known, protocol)
    if protocol == "per-class":
        return hide_labels(labels, int(known), seed, protocol), f"{known:g} labels of each kind a class (per-class)"
    return hide_labels(labels, known, seed, protocol), f"{known:.0%} of labels known ({protocol})"
