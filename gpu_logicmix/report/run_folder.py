"""What the folder of a run says, for its report: options, log, predictions, fine-tuning, decisions.

Whatever is missing or damaged is left out; what is damaged is noted. The log is read by the training side's own reader.
"""

from __future__ import annotations

import json
import zipfile
import zlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from gpu_logicmix.decisions import Decisions, read_decisions
from gpu_logicmix.report.words import finite
from gpu_logicmix.train.config import read_toml
from gpu_logicmix.train.runlog import read_log


class Predictions(NamedTuple):
    logits: np.ndarray  # float [N, C]
    targets: np.ndarray  # int8 [N, C]
    index: np.ndarray  # [N] row in the validation dataset
    ids: list[str]
    categories: list[str]


@dataclass
class Run:
    """What the folder of a run says. Lists are empty and the rest is None where there is nothing (yet)."""

    folder: Path
    config: dict[str, Any] = field(default_factory=dict)
    starts: list[dict[str, Any]] = field(default_factory=list)  # more than one if it was resumed
    steps: list[dict[str, Any]] = field(default_factory=list)
    epochs: list[dict[str, Any]] = field(default_factory=list)
    curriculum: list[dict[str, Any]] = field(default_factory=list)
    bad_images: dict[str, Any] | None = None  # the last line about images that were skipped
    fine_tuned: dict[str, Any] | None = None  # the log's line about fine-tuning: which weights are kept
    end: dict[str, Any] | None = None
    predictions: Predictions | None = None
    cft: dict[str, Any] | None = None
    decisions: Decisions | None = None
    notes: list[str] = field(default_factory=list)  # what could not be read, in words

    @property
    def start(self) -> dict[str, Any]:
        return self.starts[-1] if self.starts else {}

    @property
    def categories(self) -> list[str]:
        names = self.start.get("categories") or (self.predictions.categories if self.predictions else [])
        return [str(name) for name in names] if isinstance(names, list) else []

    @property
    def data(self) -> str:
        """The dataset, without the folders it is in."""
        kind, _, path = str(self.config.get("data", self.folder.name)).partition(":")
        return f"{kind} · {Path(path).name}" if path else kind

    @property
    def kept(self) -> dict[str, Any]:
        """The epoch whose weights were kept; of a run that goes on, the best so far; {} if there is none."""
        if self.end is not None:
            return next((e for e in self.epochs if e["epoch"] == self.end.get("epoch")), {})
        judged = [e for e in self.epochs if finite(e.get("mAP")) is not None]
        return max(judged, key=lambda e: e["mAP"], default={})


def read_run(folder: Path) -> Run:
    """Read the files of a run folder. Those that are missing or damaged are left out; the latter are noted."""
    run = Run(folder)
    if not ((folder / "config.toml").exists() or (folder / "log.jsonl").exists()):
        raise FileNotFoundError(f"{folder}: no run here, neither config.toml nor log.jsonl")
    readers = {
        "config.toml": ("config", read_toml),
        "predictions.npz": ("predictions", _read_predictions),
        "cft.json": ("cft", _read_object),
    }
    for name, (attribute, read) in readers.items():
        if (folder / name).exists():
            try:
                setattr(run, attribute, read(folder / name))
            except (OSError, ValueError, KeyError, EOFError, MemoryError, RecursionError,
                    zipfile.BadZipFile, zlib.error) as error:  # fmt: skip
                run.notes.append(f"{name} cannot be read: {error}")
    run.decisions = read_decisions(folder)
    if run.decisions is None and (folder / "decisions.json").exists():
        run.notes.append("decisions.json cannot be read")
    _read_lines(run)
    return run


def _read_object(path: Path) -> dict[str, Any]:
    value = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(value, dict):
        raise ValueError("not a JSON object")
    return value


def _read_predictions(path: Path) -> Predictions:
    with np.load(path) as file:
        logits, targets, index = file["logits"], file["targets"], file["index"]
        ids, categories = file["ids"].astype(str).tolist(), file["categories"].astype(str).tolist()
    if logits.shape != targets.shape or logits.shape != (len(ids), len(categories)) or len(index) != len(ids):
        raise ValueError(
            f"logits {logits.shape}, targets {targets.shape}, {len(ids)} ids, {len(categories)} categories"
        )
    return Predictions(logits, targets, index, ids, categories)


def _read_lines(run: Run) -> None:
    """Sort the lines of the log by their kind."""
    counters = {"step": (run.steps, "step"), "epoch": (run.epochs, "epoch"), "curriculum": (run.curriculum, "epoch")}
    try:
        lines = read_log(run.folder)
    except (OSError, ValueError) as error:
        run.notes.append(f"log.jsonl cannot be read: {error}")
        return
    damaged = _lines_in(run.folder / "log.jsonl") - len(lines)
    for line in lines:
        kind = line.get("kind") if isinstance(line, dict) else None
        if kind == "start":
            run.starts.append(line)
            run.end = None
        elif kind == "end":
            run.end = line
        elif kind == "bad_images":
            run.bad_images = line
        elif kind == "cft":
            run.fine_tuned = line
        elif kind in counters:
            part, counter = counters[kind]
            if finite(line.get(counter)) is None:
                damaged += 1
                continue
            # A resumed run continues from its last checkpoint and logs what came after it once more.
            while part and part[-1][counter] >= line[counter]:
                part.pop()
            part.append(line)
        elif kind is None:
            damaged += 1
    if damaged > 0:
        run.notes.append(f"log.jsonl: {damaged} damaged line{'s' if damaged > 1 else ''} left out")


def _lines_in(path: Path) -> int:
    if not path.exists():
        return 0
    with open(path, "rb") as file:
        return sum(1 for line in file if line.strip())
