"""The command that trains: fit. Its options are the fields of `Config`."""

from __future__ import annotations

import inspect
import shlex
import signal
import sys
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from gpu_logicmix.cli import runs, screen
from gpu_logicmix.cli.methods import print_method
from gpu_logicmix.errors import printable
from gpu_logicmix.train.checkpoint import read_config
from gpu_logicmix.train.config import OPTION_TYPES, PRESETS, Config, make_config

NEEDS_DATA = (
    "fit needs DATA: csv:PATH (your own images), coco:PATH, voc2007:PATH, vg200:PATH or shapes (drawn, to try it out); "
    "to continue a run: --out FOLDER --resume"
)


def _with_options(command: Callable) -> Callable:
    """Give a command an option for each field of `Config`. Those that are not given do not reach it."""

    def call(**values: Any) -> None:
        options = {name: values.pop(name) for name in OPTION_TYPES}
        command({name: value for name, value in options.items() if value not in (None, [])}, **values)

    signature = inspect.signature(command, eval_str=True)
    parameters = [p for p in signature.parameters.values() if p.name != "given"]
    for f in fields(Config):
        kind = Literal[tuple(f.metadata["choices"])] if "choices" in f.metadata else OPTION_TYPES[f.name]
        annotation = Annotated[kind | None, _option_of(f)]
        parameters.append(
            inspect.Parameter(f.name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)
        )
    parameters.sort(key=lambda p: p.name != "data")
    call.__signature__ = signature.replace(
        parameters=[p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in parameters]
    )
    call.__annotations__ = {p.name: p.annotation for p in parameters}
    call.__name__, call.__doc__ = command.__name__, command.__doc__
    return call


def _option_of(f: Any) -> Any:
    """A field of `Config` as an option, or as the argument DATA."""
    if f.name == "data":
        return typer.Argument(metavar="DATA", help=f.metadata["help"], show_default=False)
    flag = f"--{f.name.replace('_', '-')}"
    is_switch = OPTION_TYPES[f.name] is bool
    names = (f"{flag}/--no-{flag[2:]}",) if is_switch else ("-o", flag) if f.name == "option" else (flag,)
    # The option itself has no default, so that it does not override the value of a file or preset.
    default = "" if f.default is None else rf" [dim]\[{_shown(f.default)}][/]"
    return typer.Option(
        *names, help=f.metadata["help"] + default, rich_help_panel=f.metadata["panel"], show_default=False
    )


def _shown(default: Any) -> str:
    if isinstance(default, bool):
        return "on" if default else "off"
    return f"{default:g}" if isinstance(default, float) else str(default)


@_with_options
def fit(
    given: dict,
    out: Annotated[Path | None, typer.Option(help="Folder of the run; runs/DATA-KNOWN-MIX-SEED unless given.")] = None,
    resume: Annotated[
        Literal["never", "must", "auto"],
        typer.Option(
            help="--resume alone (must): continue the run in --out with its options; auto: continue it if there is one."
        ),
    ] = "never",
    config: Annotated[Path | None, typer.Option(metavar="FILE.toml", help="Options from a file: name = value.")] = None,
    preset: Annotated[Literal[tuple(PRESETS)] | None, typer.Option(help="The paper's settings.")] = None,  # type: ignore[valid-type]
    help_method: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", callback=print_method, is_eager=True, help="Explain a loss or a head; alone: list them."
        ),
    ] = None,
) -> None:
    """Train a model, evaluate it after each epoch, and write a report.

    The defaults (in brackets) are the paper's run on COCO: ResNet-101 at 448 x 448, asymmetric loss, RandAugment,
    LogicMix, curriculum labeling, category-wise fine-tuning. Everything is written to the run folder. A run can be
    killed at any time: --resume continues from its last checkpoint.

    Try it, no download:

        gpu-logicmix fit shapes -o count=200 --size 32 --model test_resnet --weights none --epochs 2 --out runs/try

    Your own images, a fifth of them held out for validation:

        gpu-logicmix fit csv:photos/labels.csv --holdout 0.2 --model resnet50 --size 224 --out runs/photos

    The paper's run with 10 % known labels, decoded images cached:

        gpu-logicmix fit coco:/data/coco --known 0.1 --cache /scratch --out runs/coco-10

    Four GPUs:

        torchrun --nproc_per_node 4 train.py fit coco:/data/coco --known 0.1 --out runs/coco-10
    """
    chosen = _chosen(given, preset, config, resume, out)
    # After the options: what is wrong with them need not wait for timm.
    from gpu_logicmix.train.loop import fit as train
    from gpu_logicmix.train.predict import default_name
    from gpu_logicmix.train.signals import Interrupted

    folder = out or Path("runs") / default_name(chosen)
    command = f"gpu-logicmix {shlex.join(sys.argv[1:])}"
    try:
        train(chosen, folder, resume=resume, command=command, console=screen.console)
    except Interrupted as stopped:
        screen.say(printable(stopped), "yellow")
        fine = stopped.saved and stopped.signum != signal.SIGINT
        raise typer.Exit(0 if fine else 128 + stopped.signum) from None
    runs.write_report(folder)


def _has_run(folder: Path) -> bool:
    return any((folder / name).exists() for name in ("config.toml", "last.pt", "previous.pt"))


def _chosen(given: dict[str, Any], preset: str | None, file: Path | None, resume: str, out: Path | None) -> Config:
    """The options of the run: of the one to resume, or from defaults, preset, file and command line."""
    if resume != "never" and file is None:
        if out is None:
            raise ValueError("--resume: which run? Add --out FOLDER")
        if _has_run(out):
            if preset is not None:
                raise ValueError(f"--preset {preset}: {out} has a run with its own options; leave --preset out")
            return replace(read_config(out), **given)
        if resume == "must":
            raise ValueError(f"{out}: no run to resume; start one without --resume")
    if "data" not in given and file is None:
        raise ValueError(NEEDS_DATA)
    try:
        return make_config(given, preset, file)
    except ValueError as error:
        # A value of the file: say so, since the same name would be an option otherwise.
        name = str(error).partition("=")[0]
        if file is None or name in given or name not in OPTION_TYPES:
            raise
        raise ValueError(f"{file}: {error}") from None
