"""From an exception to one line and an exit code. The library names arguments, the command line names options."""

from __future__ import annotations

import ast
import os
import re
import shlex
from collections.abc import Iterable
from typing import Any

from gpu_logicmix.errors import printable
from gpu_logicmix.machine import version_line

MISTAKE, BUG, INTERRUPTED = 1, 70, 130

_VALUE = r"""'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*"|\[[^\]]*\]|[^\s,;:()]+"""

_LOST = re.compile(r"Connection (reset|closed) by peer|Connection refused|Broken pipe|Timed out waiting", re.IGNORECASE)


def explain(error: BaseException, parameters: Iterable[Any] = ()) -> tuple[str, int]:
    """The line to print, and the exit code. parameters: of the command that was running."""
    text = printable(" ".join(str(error).split()))
    if _is_out_of_memory(error):
        hint = "a smaller --size or --batch-size, or fewer images, need less"
        return f"out of memory ({_first_sentence(text) or type(error).__name__}); {hint}", MISTAKE
    if isinstance(error, ModuleNotFoundError) and not (error.name or "").startswith("gpu_logicmix"):
        return f'{text}; the commands need: pip install ".[train]" in a clone', MISTAKE
    if isinstance(error, OSError) and error.strerror:
        place = "" if error.filename is None else f"{printable(error.filename)}: "
        return f"{place}{error.strerror}", MISTAKE
    if _is_lost_process(error):
        resumes = any(parameter.name == "resume" for parameter in parameters)
        hint = "--resume continues it" if resumes else "run the command again"
        return f"another process of the run was lost ({_first_sentence(text)}); {hint}", MISTAKE
    if isinstance(error, (ValueError, OSError)):
        return in_options(text, parameters), MISTAKE
    what = f"{type(error).__name__}: {text}" if text else type(error).__name__
    return f"{what} (this is a bug; GPU_LOGICMIX_DEBUG=1 shows where; {version_line()})", BUG


def in_options(text: str, parameters: Iterable[Any]) -> str:
    """`on_bad_image='skip'` as `--on-bad-image skip`, for the options that a command has.

    A message that starts with a TOML file keeps the names: there they are right.
    """
    by_name = {parameter.name: parameter for parameter in parameters}
    if not by_name or re.match(r"\S+\.toml\b", text):
        return text
    names = "|".join(sorted(map(re.escape, by_name), key=len, reverse=True))

    def option(match: re.Match) -> str:
        parameter = by_name[match[1]]
        try:
            value = ast.literal_eval(match[2])
        except (ValueError, SyntaxError):
            value = match[2]
        return _as_typed(parameter, value if isinstance(value, (bool, list, str)) else match[2])

    text = re.sub(rf"(?<![\w/.=\-\['\"])({names})=({_VALUE})", option, text)
    if "pretrained=True" in text:  # what `--weights hub` becomes in Python
        text = text.replace("pretrained=True", "--weights hub")
        text += "; without network access: --weights FILE.safetensors, or --weights none"
    return text


def _as_typed(parameter: Any, value: Any) -> str:
    """An option and its value as one would type them."""
    if parameter.param_type_name == "argument":
        return shlex.quote(str(value))
    flag = max(parameter.opts, key=len)
    if isinstance(value, bool) and parameter.secondary_opts:
        return flag if value else max(parameter.secondary_opts, key=len)
    values = value if isinstance(value, list) else [value]
    return " ".join(f"{flag} {shlex.quote(str(each))}" for each in values)


def _is_out_of_memory(error: BaseException) -> bool:
    names = {cls.__name__ for cls in type(error).__mro__}  # by name: torch need not be loaded
    return bool(names & {"MemoryError", "OutOfMemoryError"}) or (
        isinstance(error, RuntimeError) and "can't allocate memory" in str(error)
    )


def _is_lost_process(error: BaseException) -> bool:
    """Of several processes one has died, and this one has noticed: the error to look at is that of the other."""
    if not os.environ.get("WORLD_SIZE", "1").isdecimal() or int(os.environ.get("WORLD_SIZE", "1")) < 2:
        return False
    names = {cls.__name__ for cls in type(error).__mro__}
    return bool(names & {"DistBackendError", "DistNetworkError", "DistStoreError"}) or (
        isinstance(error, RuntimeError) and _LOST.search(str(error)) is not None  # gloo has no class for it
    )


def _first_sentence(text: str) -> str:
    return text.partition(". ")[0][:200]
