"""What a run writes down while it goes: `log.jsonl`, `epochs.csv`, and the lines on the screen."""

from __future__ import annotations

import contextlib
import csv
import io
import json
import math
import sys
from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

from gpu_logicmix.files import open_plain, write_whole
from gpu_logicmix.machine import machine, version_line, versions
from gpu_logicmix.train import inputs
from gpu_logicmix.train.checkpoint import or_say
from gpu_logicmix.train.config import Config
from gpu_logicmix.train.hint import mixing_hint
from gpu_logicmix.train.trackers import open_trackers

KINDS = ("start", "step", "epoch", "curriculum", "bad_images", "cft", "end")


class Log:
    """A line for each logging point, epoch and event. Only the first process writes (`enabled`)."""

    def __init__(
        self,
        folder: Path,
        enabled: bool,
        tensorboard: bool,
        log_to: Sequence[str] = (),
        options: dict[str, Any] | None = None,
    ) -> None:
        self.folder, self.file, self.enabled = folder, folder / "log.jsonl", enabled
        names = [*(["tensorboard"] if tensorboard else []), *log_to]
        self.trackers = open_trackers(names, folder, options or {}) if enabled else []
        self.step = 0  # of the last line that has one: those without are tracked there

    def rewind(self, step: int, closed: int) -> None:
        """Forget what came after the checkpoint that the run resumes from."""
        self.step = step
        if not self.enabled:
            return

        def kept(line: dict) -> bool:
            if line["kind"] == "step":
                return _number(line, "step") <= step
            return line["kind"] == "start" or (_number(line, "epoch") <= closed and line["kind"] != "end")

        lines = [line for line in read_log(self.folder) if kept(line)]
        write_whole(self.file, "".join(json.dumps(line) + "\n" for line in lines))

    def write(self, kind: str, **values: Any) -> None:
        if not self.enabled:
            return
        line = json.dumps({"kind": kind, **no_nan(values)})
        with or_say(self.file):
            with open_plain(self.file, "a") as file:
                file.write(line + "\n")
            if kind == "epoch":
                self._write_csv()
        numbers = {
            f"{kind}/{name}": value
            for name, value in values.items()
            if isinstance(value, (int, float)) and name not in ("step", "epoch")
        }
        self.step = values.get("step", self.step)
        for tracker in self.trackers:
            if numbers and kind != "start":
                tracker.log(numbers, self.step)
            if kind == "end":
                tracker.close()

    def _write_csv(self) -> None:
        epochs = [line for line in read_log(self.folder) if line["kind"] == "epoch"]
        text = io.StringIO()
        columns = dict.fromkeys(key for line in epochs for key in line)  # not every epoch was validated
        writer = csv.DictWriter(text, [key for key in columns if key != "kind"], extrasaction="ignore")
        writer.writeheader()
        writer.writerows(epochs)
        write_whole(self.folder / "epochs.csv", text.getvalue())


def read_log(folder: Path) -> list[dict[str, Any]]:
    """The lines of a run's log. Ignored: half a line that a kill has left, and whatever is not a line of ours."""
    lines = []
    file = folder / "log.jsonl"
    if file.exists():
        for text in file.read_text(encoding="utf-8", errors="replace").splitlines():
            with contextlib.suppress(ValueError, RecursionError):
                line = json.loads(text)
                if isinstance(line, dict) and line.get("kind") in KINDS:
                    lines.append(line)
    return lines


def _number(line: dict[str, Any], name: str) -> float:
    value = line.get(name)
    return value if isinstance(value, (int, float)) else math.inf


def no_nan(value: Any) -> Any:
    """JSON has no NaN."""
    if isinstance(value, dict):
        return {k: no_nan(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [no_nan(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


# --------------------------------------------------------------------------------- lines of a run (a `loop.Training`)
def log_start(run: Any, log: Log, command: str) -> None:
    counts = inputs.label_counts_of(run.train_set)
    count, device = len(run.train_set), run.world.device
    known = float(1 - counts.unknown / run.train_set.labels.size)
    log.write(
        "start",
        time=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        images=count,
        val_images=len(run.val_set),
        categories=run.train_set.categories,
        known=known,
        positives=float(counts.positive / count),
        category_positives=inputs.label_counts_of(run.train_set, 0).positive.tolist(),
        parameters=sum(p.numel() for p in run.model.parameters()),
        trained_parameters=sum(p.numel() for p in run.params),
        device=torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        machine=machine(),
        threads=torch.get_num_threads(),
        processes=run.world.size,
        versions=versions(),
        version_line=version_line(),
        command=command,
        messages=run.model.messages,
    )
    for message in run.model.messages:
        run.say(message)
    for line in dict.fromkeys((*run.train_set.warnings, *run.val_set.warnings)):
        run.say(f"warning: {line}")
    run.say(
        f"{run.train_set.name}: {count:,} training images, {len(run.val_set):,} for validation, "
        f"{len(run.train_set.categories)} categories, {known:.1%} of labels known, "
        f"{counts.positive / count:.2f} known positives per image"
    )
    if run.config.mix != "none":
        run.say(mixing_hint(inputs.label_counts_of(run.train_set, 0).positive))
    run.say(
        f"{run.config.model}, {run.config.mix}: {run.config.epochs} epochs of {run.steps} steps on {device}, "
        f"{torch.get_num_threads()} threads; everything goes to {run.folder}"
    )


def log_step(run: Any, log: Log, step: int, seconds: float, waited: float) -> None:
    """Since `step`, when the clocks stood at `seconds` and `waited`. Syncs."""
    loss, count = run.sums.of_epoch(run.world).tolist()
    took = max(run.seconds - seconds, 1e-9)
    log.write(
        "step",
        step=run.step,
        epoch=round(run.step / run.steps, 4),
        loss=loss / max(count, 1),
        lr=run.optimizer.param_groups[-1]["lr"],
        images_per_second=(run.step - step) * run.config.batch_size * run.world.size / took,
        waiting=(run.waited - waited) / took,
    )


def epoch_line(run: Any, epoch: int, scores: dict[str, float]) -> dict[str, Any]:
    loss, count = run.sums.of_epoch(run.world).tolist()
    images, seconds = run.steps * run.config.batch_size * run.world.size, max(run.seconds, 1e-9)
    return {
        "epoch": epoch,
        "step": run.step,
        "loss": loss / max(count, 1),
        **scores,
        "images_per_second": images / seconds,
        "waiting": run.waited / seconds,
        "seconds": run.seconds,
        "elapsed": run.time(),
        "memory": _peak_memory(),
    }


def epoch_words(config: Config, line: dict[str, Any]) -> str:
    mAP = f"mAP {line['mAP']:6.2%}" if "mAP" in line else "not validated"
    return (
        f"epoch {line['epoch']:>{len(str(config.epochs))}}/{config.epochs}  loss {line['loss']:.4f}  {mAP}  "
        f"{line['images_per_second']:,.0f} images/s, {line['waiting']:.1%} waiting for data"
    )


def log_labels(log: Log, epoch: int, table: Any) -> str:
    """Write down how many pseudo-labels there are, and return it in words."""
    counts = table.counts()._asdict()
    log.write("curriculum", epoch=epoch, **counts)
    words = f"  pseudo-labels +{counts['positives']:,} -{counts['negatives']:,}"
    if counts["positives"] + counts["negatives"] and counts["precision"] is not None:
        words += f" ({counts['precision']:.1%} right)"
    return words


def images_to_do(run: Any) -> tuple[int, int]:
    """In the whole run, and done so far: for the bar."""
    config, sizes = run.config, (len(run.train_set), len(run.val_set))
    total, done = (inputs.images_to_do(config, *sizes, n, run.world.size) for n in (config.epochs, run.closed))
    begun = (run.step - run.closed * run.steps) * config.batch_size * run.world.size
    return total, done + min(begun, len(run.train_set))


def _peak_memory() -> int | None:
    """Bytes; None where the system does not say (Windows)."""
    try:
        import resource
    except ImportError:
        return None
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
