"""`--help-method`: what a loss or a head is, its options and its paper."""

from __future__ import annotations

import difflib
import inspect

import typer

from gpu_logicmix.cli import screen
from gpu_logicmix.errors import printable
from gpu_logicmix.losses.base import LOSSES, Loss
from gpu_logicmix.methods.base import HEADS, Head
from gpu_logicmix.registry import Registry

REGISTRIES = {LOSSES: Loss, HEADS: Head}


def print_method(name: str | None) -> None:
    """The callback of the option: print and exit. A name that is no method's lists all."""
    if name is None:
        return
    found = [registry for registry in REGISTRIES if name in registry.names()]
    if not found and ":" in name:
        found = [registry for registry, base in REGISTRIES.items() if _has(registry, base, name)]
    if found:
        screen.say("\n\n".join(registry.help(name) for registry in found))
        raise typer.Exit
    names = [each for registry in REGISTRIES for each in registry.names()]
    if name not in ("list", ""):
        near = difflib.get_close_matches(name, names, 1, 0.6)
        screen.say(f"unknown method {printable(name)!r}" + (f"; did you mean {near[0]}?" if near else ""), "yellow")
    for registry in REGISTRIES:
        screen.say(f"\n--{registry.kind}:")
        width = max(map(len, registry.names()))
        for each in registry.names():
            screen.say(f"  {each:{width}}  {_first_sentence(registry.find(each))}")
    screen.say("\nDetails: --help-method NAME")
    raise typer.Exit(0 if name in ("list", "") else 2)


def _has(registry: Registry, base: type, name: str) -> bool:
    """Whether MODULE:NAME is of this kind."""
    try:
        return issubclass(registry.find(name), base)
    except ValueError as error:
        if "cannot import" in str(error):
            raise
        return False


def _first_sentence(cls: type) -> str:
    paragraph = " ".join(inspect.cleandoc(cls.__doc__ or "").partition("\n\n")[0].split())
    return paragraph.partition(". ")[0]
