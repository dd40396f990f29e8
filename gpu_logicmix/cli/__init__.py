"""The command line: `gpu-logicmix`, or `python train.py`.

`COMMANDS` lists the commands; the module of a command is imported when the command is called, so that `--help` and
`--version` need not wait for torch.
"""

from __future__ import annotations

import inspect
import os
import sys
from importlib import import_module
from typing import Annotated, Any, NamedTuple

import typer
from typer.core import TyperCommand, TyperGroup
from typer.main import get_command

from gpu_logicmix.cli import screen
from gpu_logicmix.cli.errors import INTERRUPTED, explain
from gpu_logicmix.errors import shown
from gpu_logicmix.machine import keep_memory, version_line


class Entry(NamedTuple):
    module: str  # in this folder; its function has the name of the command
    panel: str
    help: str  # the first line of that function's docstring


COMMANDS = {
    "demo": Entry("compare", "Start", "Plain training against LogicMix where the former overfits, on drawn shapes."),
    "stats": Entry(
        "data", "Look at data", "Count known labels per sample and per category, before and after LogicMix."
    ),
    "preview": Entry("data", "Look at data", "Draw a batch before and after each augmentation, with its labels."),
    "cache": Entry("data", "Look at data", "Decode and resize all images once, for faster epochs."),
    "pack": Entry("data", "Look at data", "Write a dataset as shards that tar:PATH reads, also over a network."),
    "fit": Entry("fit", "Train", "Train a model, evaluate it after each epoch, and write a report."),
    "cft": Entry("runs", "Train", "Category-wise fine-tuning of a finished run."),
    "decide": Entry("runs", "Train", "Fit a threshold per category and a temperature on held-out known labels."),
    "prior": Entry("runs", "Train", "Estimate how often each category is present, for --loss csl."),
    "evaluate": Entry("runs", "Use a run", "Evaluate a finished run: mAP, AP per category, precision, recall, F1."),
    "predict": Entry("predict", "Use a run", "Predict the categories of images with a finished run."),
    "export": Entry("export", "Use a run", "Export the model of a finished run, and check the result against it."),
    "report": Entry("runs", "Use a run", "Write the report of a run again."),
    "study": Entry("compare", "Compare", "Do the runs of a study, and compare them in tables and plots."),
    "check": Entry("check", "Compare", "Check the kernels and the mixes on a device against the CPU, and time them."),
    "bench": Entry("bench", "Compare", "Measure what augmentation and mixing add to the training step of a model."),
}


class Commands(TyperGroup):
    """Loads a command when it is called. Until then it has a name and a line of help."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        for name, entry in COMMANDS.items():
            self.commands[name] = TyperCommand(name, help=entry.help, rich_help_panel=entry.panel)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args[0] in COMMANDS:
            self.commands[args[0]] = load_command(args[0])
        return super().resolve_command(ctx, args)


def load_command(name: str) -> Any:
    """A command with its options."""
    function = getattr(import_module(f"gpu_logicmix.cli.{COMMANDS[name].module}"), name)
    alone = typer.Typer(add_completion=False, rich_markup_mode="rich")
    alone.command(name, help=_help_of(function))(function)
    return get_command(alone)


def _help_of(function: Any) -> str:
    """The docstring for a terminal of any width: paragraphs joined to one line each, indented examples as they are."""
    paragraphs = inspect.cleandoc(function.__doc__).split("\n\n")
    return "\n\n".join(
        f"[cyan]{shown(p)}[/]" if p.startswith("    ") else " ".join(p.split()).replace("[", r"\[") for p in paragraphs
    )


app = typer.Typer(
    cls=Commands,
    name="gpu-logicmix",
    help="Train multi-label image classifiers when many labels are missing.\n\n"
    "DATA is csv:PATH, coco:PATH, voc2007:PATH, vg200:PATH or shapes (drawn on the fly, nothing to download). "
    "Without a command: the demo.",
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)


def _print_version(wanted: bool) -> None:
    if wanted:
        screen.say(version_line())
        raise typer.Exit


def _print_method(name: str | None) -> None:
    if name is not None:
        from gpu_logicmix.cli.methods import print_method

        print_method(name)


@app.callback(invoke_without_command=True)
def _start(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print versions and exit.")
    ] = False,
    help_method: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", callback=_print_method, is_eager=True, help="Explain a loss or a head; alone: list them."
        ),
    ] = None,
) -> None:
    if context.invoked_subcommand is None:
        screen.say("running the demo; --help lists all commands")
        from gpu_logicmix.cli.compare import demo

        demo()


def main(arguments: list[str] | None = None) -> None:
    """Run the command line. An error ends in one line; GPU_LOGICMIX_DEBUG=1 shows where it came from."""
    keep_memory()
    command = get_command(app)
    try:
        command.main(_with_value(sys.argv[1:] if arguments is None else arguments), prog_name="gpu-logicmix")
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
    except Exception as error:
        if os.environ.get("GPU_LOGICMIX_DEBUG"):
            raise
        called = [c for c in command.commands.values() if c.callback is not None]
        text, code = explain(error, called[0].params if called else ())
        screen.error(text)
        sys.exit(code)
    finally:
        screen.settle_output()


def _with_value(arguments: list[str]) -> list[str]:
    """`--resume` and `--help-method` may stand alone, which the option parser does not support."""
    out = []
    for argument, following in zip(arguments, [*arguments[1:], "-"], strict=False):
        out.append(argument)
        if argument == "--resume" and following not in ("never", "must", "auto"):
            out.append("must")
        elif argument == "--help-method" and following.startswith("-"):
            out.append("list")
    return out
