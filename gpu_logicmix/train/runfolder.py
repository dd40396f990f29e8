"""What a run leaves in its folder, and how it is read again: checkpoints, the log, weights, predictions.

Nothing here is ever half there: files are written aside and renamed, a checkpoint is read only if every byte of it has
the right checksum, and of the log a half line at the end does not count.
"""

from __future__ import annotations

import contextlib
import csv
import io
import json
import math
import os
import platform
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save as to_safetensors
from torch import Tensor, nn

from gpu_logicmix.data import ImageDataset
from gpu_logicmix.errors import RunError
from gpu_logicmix.files import write_whole, written_whole
from gpu_logicmix.machine import machine, versions  # noqa: F401  (others import them from here)
from gpu_logicmix.train.config import Config, make_config


# ---------------------------------------------------------------------------------------------------------- checkpoints
def read_config(folder: Path) -> Config:
    """The options of the run that is in a folder."""
    if not (folder / "config.toml").exists():
        raise RunError(f"{folder}: no run (it has no config.toml)")
    return make_config({}, file=folder / "config.toml")


def save_checkpoint(folder: Path, state: dict[str, Any]) -> None:
    """Write `last.pt`, with the one before kept as `previous.pt`. At any moment at least one of them is whole."""
    last = folder / "last.pt"
    aside = folder / "next.pt"
    write_checkpoint(aside, state)
    if last.exists():
        os.replace(last, folder / "previous.pt")
    os.replace(aside, last)


def write_checkpoint(path: Path, state: dict[str, Any]) -> None:
    with _or_say(path), written_whole(path, "wb") as file:
        torch.save(state, file)


@contextlib.contextmanager
def _or_say(path: Path) -> Iterator[None]:
    """A full disk, in one line that names the file."""
    try:
        yield
    except (OSError, RuntimeError) as error:
        cause: BaseException = error
        while cause.__context__ is not None and not isinstance(cause, OSError):
            cause = cause.__context__  # torch has an error of its own on top
        reason = getattr(cause, "strerror", None) or str(error).splitlines()[0]
        raise RunError(
            f"{path}: cannot be written ({reason}); what was saved before is whole. Make room, then go on with --resume"
        ) from error


def read_checkpoint(path: Path) -> dict[str, Any]:
    """The state in a checkpoint, every byte of it checked. Nothing in it is executed."""
    try:
        with zipfile.ZipFile(path) as archive:
            damaged = archive.testzip()
        if damaged is not None:
            raise ValueError(f"{damaged} has another checksum")
        state = torch.load(path, map_location="cpu", weights_only=True)
        if not isinstance(state, dict) or "step" not in state:
            raise ValueError("it is no checkpoint of a run")
        return state
    except FileNotFoundError:
        raise
    except Exception as error:  # damaged archives and pickles raise anything
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise RunError(f"{path}: damaged ({reason})") from error


def read_last(folder: Path, warn: Callable[[str], None]) -> dict[str, Any] | None:
    """The newest whole checkpoint of a run; None if it has none at all."""
    damaged = []
    for name in ("last.pt", "previous.pt"):
        try:
            state = read_checkpoint(folder / name)
        except FileNotFoundError:
            continue
        except RunError as error:
            damaged.append(str(error))
            continue
        for line in damaged:
            warn(f"{line}; going on from {folder / name}, step {state['step']}")
        return state
    if damaged:
        raise RunError(f"{damaged[0]}, and there is no other; start anew in another folder")
    return None


_locked_here: set[Path] = set()  # a POSIX lock does not keep out the process that has it


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """One run at a time works in the folder. The system lets go of the lock when the process dies, however it dies; and
    that at once: the processes that decode for it, which may live for seconds more, do not inherit POSIX locks."""
    try:
        import fcntl
    except ImportError:  # Windows: it is up to the user
        yield
        return

    def in_use(owner: str) -> RunError:
        return RunError(f"{folder}: in use by another process ({owner}); wait for it, or choose another --out")

    me, place = f"{platform.node()}, process {os.getpid()}", folder.resolve()
    if place in _locked_here:
        raise in_use(me)
    with open(folder / "lock", "a+") as file:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            file.seek(0)
            raise in_use(file.read().strip() or "unknown") from None
        file.truncate(0)
        file.write(me)
        file.flush()
        _locked_here.add(place)
        try:
            yield
        finally:
            _locked_here.remove(place)


# ------------------------------------------------------------------------------------------------- weights, predictions
def write_model(path: Path, model: nn.Module, categories: list[str]) -> None:
    """Weights as safetensors, with the names of the categories in its header."""
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in model.state_dict().items()}
    with _or_say(path), written_whole(path, "wb") as file:
        file.write(to_safetensors(tensors, metadata={"categories": json.dumps(categories)}))


def write_predictions(path: Path, logits: Tensor, rows: np.ndarray, dataset: ImageDataset) -> None:
    with _or_say(path), written_whole(path, "wb") as file:
        np.savez_compressed(
            file,
            logits=logits[rows].numpy(),
            targets=dataset.labels[rows],
            index=rows,
            ids=np.array([str(dataset.ids[row]) for row in rows]),
            categories=np.array(dataset.categories),
        )


# ------------------------------------------------------------------------------------------------------------------ log
class Log:
    """`log.jsonl`: a line for each logging point, epoch and event; and `epochs.csv`, the epochs as a table."""

    def __init__(self, folder: Path, enabled: bool, tensorboard: bool) -> None:
        self.folder, self.file, self.enabled = folder, folder / "log.jsonl", enabled
        self.board = None
        if enabled and tensorboard:
            try:
                from torch.utils.tensorboard import SummaryWriter
            except ImportError:
                raise RunError("tensorboard is not installed: pip install 'gpu-logicmix[tensorboard]'") from None
            self.board = SummaryWriter(str(folder / "tensorboard"))

    def rewind(self, step: int, closed: int) -> None:
        """Forget what came after the checkpoint that the run goes on from."""
        if not self.enabled:
            return

        def kept(line: dict) -> bool:
            if line["kind"] == "step":
                return line["step"] <= step
            return line["kind"] == "start" or (line.get("epoch", math.inf) <= closed and line["kind"] != "end")

        lines = [line for line in read_log(self.folder) if kept(line)]
        write_whole(self.file, "".join(json.dumps(line) + "\n" for line in lines))

    def write(self, kind: str, **values: Any) -> None:
        if not self.enabled:
            return
        line = json.dumps({"kind": kind, **no_nan(values)})
        with _or_say(self.file):
            with open(self.file, "a", encoding="utf-8") as file:
                file.write(line + "\n")
            if kind == "epoch":
                self._write_csv()
        if self.board is not None and "step" in values:
            for name, value in values.items():
                if isinstance(value, (int, float)) and name not in ("step", "epoch"):
                    self.board.add_scalar(f"{kind}/{name}", value, values["step"])
            self.board.flush()

    def _write_csv(self) -> None:
        epochs = [line for line in read_log(self.folder) if line["kind"] == "epoch"]
        text = io.StringIO()
        columns = dict.fromkeys(key for line in epochs for key in line)  # not every epoch was validated
        writer = csv.DictWriter(text, [key for key in columns if key != "kind"], extrasaction="ignore")
        writer.writeheader()
        writer.writerows(epochs)
        write_whole(self.folder / "epochs.csv", text.getvalue())


def read_log(folder: Path) -> list[dict[str, Any]]:
    """The lines of a run's log; a half line that a kill has left is not one."""
    lines = []
    file = folder / "log.jsonl"
    if file.exists():
        for line in file.read_text(encoding="utf-8").splitlines():
            with contextlib.suppress(json.JSONDecodeError):
                lines.append(json.loads(line))
    return lines


def no_nan(value: Any) -> Any:
    """JSON has no NaN."""
    if isinstance(value, dict):
        return {k: no_nan(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [no_nan(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
