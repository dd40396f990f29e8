"""Losses and heads by name: a file registers its class, and that is all it takes to use it from the command line.

    LOSSES = Registry("loss", "gpu_logicmix.losses", given=("reduction", "unknown"))

    @LOSSES.register("my-loss")
    class MyLoss(Loss):
        '''What `--help-method my-loss` prints.'''

        def __init__(self, gamma: float = 2.0): ...      # `--loss my-loss --loss-option gamma=1`

A class of one's own need not be in this package: `--loss my_module:my-loss`, or `my_module:MyLoss`, imports the module.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
import pkgutil
import types
import typing
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, TypeVar, Union

from torch import nn

Class = TypeVar("Class", bound=type)
_SWITCH = {"true": True, "on": True, "yes": True, "1": True, "false": False, "off": False, "no": False, "0": False}


def imported(option: str, name: str) -> Any:
    """What MODULE:NAME names; None if the module has no such thing. option: what to call it in an error."""
    module, _, own = name.rpartition(":")
    try:
        return getattr(importlib.import_module(module), own, None)
    except ImportError as error:
        raise ValueError(
            f"{option}={name!r}: cannot import {module!r} ({error}); its folder must be on PYTHONPATH"
        ) from None


class Registry:
    """Classes of one kind by name.

    kind: what they are called in messages, which is also the name of their option.
    package: whose modules register themselves when they are imported.
    given: arguments of `__init__` that the run sets, not the user.
    """

    def __init__(self, kind: str, package: str, given: Sequence[str] = ()) -> None:
        self.kind, self.package, self.given = kind, package, frozenset(given)
        self._classes: dict[str, type] = {}

    def register(self, name: str) -> Callable[[Class], Class]:
        def keep(cls: Class) -> Class:
            before = self._classes.get(name)
            if (
                before is not None
                and f"{before.__module__}.{before.__qualname__}" != f"{cls.__module__}.{cls.__qualname__}"
            ):
                raise ValueError(f"{self.kind} {name!r}: both {before.__module__} and {cls.__module__} register it")
            self._classes[name] = cls
            return cls

        return keep

    def names(self) -> list[str]:
        """All that the package has."""
        package = importlib.import_module(self.package)
        for module in pkgutil.iter_modules(package.__path__):
            importlib.import_module(f"{self.package}.{module.name}")
        return sorted(self._classes)

    def find(self, name: str) -> type:
        """The class of that name, or of `module:name`."""
        if ":" in name:
            found = imported(self.kind, name)  # registers its methods
            found = self._classes.get(name.rpartition(":")[2]) or found
            # Checked before it is called: the name may come from the config.toml of somebody else's run.
            if not isinstance(found, type) or not issubclass(found, nn.Module):
                module, _, own = name.rpartition(":")
                raise ValueError(f"{self.kind}={name!r}: {module} has no {self.kind} {own!r}")
            return found
        names = self.names()
        if name not in names:
            near = difflib.get_close_matches(name, names, 1, 0.6)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise ValueError(f"{self.kind}={name!r}: must be one of {', '.join(names)}, or MODULE:NAME{hint}")
        return self._classes[name]

    def options(self, name: str) -> dict[str, tuple[Any, Any]]:
        """What can be set of a method: name -> (type, default)."""
        return _keywords(self.find(name), self.given)

    def parse(self, name: str, given: Iterable[str] | None) -> dict[str, Any]:
        """NAME=VALUE strings as keyword arguments, checked against the signature."""
        known, out = self.options(name), {}
        for text in given or ():
            key, equals, value = text.partition("=")
            key = key.strip().replace("-", "_")
            where = f"{self.kind}_option={text!r}"
            if not equals:
                raise ValueError(f"{where}: write NAME=VALUE")
            if key not in known:
                takes = f"takes {', '.join(known)}" if known else "has no options"
                raise ValueError(f"{where}: {self.kind} {name} {takes}")
            try:
                out[key] = _value(value.strip(), known[key][0])
            except ValueError as error:
                raise ValueError(f"{where}: must be {error}") from None
        return out

    def make(self, name: str, options: Iterable[str] | None, *arguments: Any, **given: Any) -> Any:
        """An instance. `arguments` and `given` are what the run sets; of `given`, what the class takes."""
        cls = self.find(name)
        taken = _keywords(cls, ())
        return cls(*arguments, **{k: v for k, v in given.items() if k in taken}, **self.parse(name, options))

    def help(self, name: str) -> str:
        """Docstring, options with defaults, and where the method is written."""
        cls = self.find(name)
        text = inspect.cleandoc(cls.__doc__ or "").rstrip()
        paper = inspect.cleandoc(inspect.getmodule(cls).__doc__ or "").rstrip()
        lines = [f"{self.kind} {name}", "", text, "", f"Options (--{self.kind}-option NAME=VALUE):"]
        options = self.options(name)
        lines += [f"  {key}={default}" for key, (_, default) in options.items()] or ["  none"]
        return "\n".join([*lines, "", f"From {cls.__module__}:", "", paper])


def _keywords(cls: type, left_out: Iterable[str]) -> dict[str, tuple[Any, Any]]:
    """Arguments of `__init__` that have a default; through `**keywords`, those of the classes above it too."""
    found: dict[str, tuple[Any, Any]] = {}
    for base in cls.__mro__:
        if "__init__" not in vars(base) or base.__module__.partition(".")[0] in ("torch", "builtins"):
            continue
        parameters = inspect.signature(base.__init__).parameters
        hints = typing.get_type_hints(base.__init__)
        for name, parameter in parameters.items():
            if parameter.default is not parameter.empty and name not in left_out:
                found.setdefault(name, (hints.get(name, str), parameter.default))
        if not any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
            break
    return found


def _value(text: str, kind: Any) -> Any:
    """A string as a value of a type. Raises ValueError with what it must be."""
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if origin in (Union, types.UnionType):
        wanted = []
        for choice in sorted(inner, key=lambda choice: (choice is str, choice is float)):
            if choice is type(None):
                if text.lower() == "none":
                    return None
                wanted.append("none")
                continue
            try:
                return _value(text, choice)
            except ValueError as error:
                wanted.append(str(error))
        raise ValueError(" or ".join(wanted))
    if origin is Literal:
        for choice in inner:
            if text == str(choice):
                return choice
        raise ValueError(f"one of {', '.join(map(str, inner))}")
    if origin is tuple:
        kinds = inner[:1] * len(text.split(",")) if inner[-1] is Ellipsis else inner
        parts = text.split(",")
        if len(parts) != len(kinds):
            raise ValueError(f"{len(kinds)} values with commas between them")
        return tuple(_value(part.strip(), each) for part, each in zip(parts, kinds, strict=True))
    if kind is bool:
        if text.lower() not in _SWITCH:
            raise ValueError("true or false")
        return _SWITCH[text.lower()]
    if kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            raise ValueError("a whole number" if kind is int else "a number") from None
    return text
