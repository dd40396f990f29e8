"""How a run begins and ends in its folder: may it start there, and what it leaves behind."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console

from gpu_logicmix.decisions import weights_digest
from gpu_logicmix.errors import RunError
from gpu_logicmix.train.checkpoint import (
    locked,
    read_best,
    read_config,
    read_last,
    state_digest,
    write_model,
    write_predictions,
)
from gpu_logicmix.train.config import FREE, Config
from gpu_logicmix.train.decide import decide, say_decisions
from gpu_logicmix.train.distributed import World
from gpu_logicmix.train.finetune import fine_tune
from gpu_logicmix.train.predict import evaluate_on
from gpu_logicmix.train.runlog import Log, read_log

WEIGHTS = "model.safetensors"
# Options that matter after the last epoch alone: with others, the end of a run is done again.
ENDING = ("keep", "cft", "cft_epochs", "cft_lr", "cft_method", "decisions")


@contextlib.contextmanager
def opened_folder(
    folder: Path, config: Config, world: World, resume: str, say: Callable[[str], None]
) -> Iterator[tuple[dict[str, Any] | None, dict[str, Any] | None]]:
    """The folder of a run, locked: the state to resume from, if any, and the last line of its log if it has ended.

    A start that fails leaves nothing behind.
    """
    if world.restarted and resume == "never":
        resume = "auto"  # torchrun has started us again after a failure
    new = not folder.exists()
    with contextlib.ExitStack() as stack:
        if world.main:
            folder.mkdir(parents=True, exist_ok=True)
            stack.enter_context(locked(folder))
        try:
            state = _state_to_resume(folder, resume, lambda text: say(f"warning: {text}"))
            end = finished(folder, None if state is None else state["config"], config)
            if state is None and end is None and world.main:
                _check_unused(folder)
                for name in ("log.jsonl", "best.pt"):  # of a run that was killed before its first checkpoint
                    (folder / name).unlink(missing_ok=True)
            yield state, end
        finally:
            if world.main and {path.name for path in folder.iterdir()} <= {"lock"}:
                with contextlib.suppress(OSError):
                    (folder / "lock").unlink(missing_ok=True)
                    if new:
                        folder.rmdir()


def _state_to_resume(folder: Path, resume: str, warn: Callable[[str], None]) -> dict[str, Any] | None:
    if resume == "never":
        if any((folder / name).exists() for name in ("last.pt", "previous.pt", WEIGHTS)):
            raise RunError(f"{folder}: there is a run already; resume it with --resume, or choose another --out")
        return None
    state = read_last(folder, warn)
    if state is None and resume == "must":
        raise RunError(f"{folder}: no run to resume; start one without --resume")
    if state is not None and not isinstance(state.get("config"), dict):  # best.pt under another name, for one
        raise RunError(f"{folder}: its last.pt is not a checkpoint to resume from; choose another --out")
    return state


def _check_unused(folder: Path) -> None:
    if (folder / WEIGHTS).exists():
        raise RunError(
            f"{folder}: has the weights of a run, but no checkpoint to resume from; choose another --out, so that they "
            "are not written over"
        )


def finished(folder: Path, before: dict[str, Any] | None, config: Config) -> dict[str, Any] | None:
    """The last line of a run's log if all of it, with these options, is done.

    before: the options of the checkpoint; None where there is none any more: then those of config.toml. What concerns
    the end alone is compared with the options that the run last ended with.
    """
    lines = read_log(folder) if (folder / WEIGHTS).exists() else []
    if not lines or lines[-1]["kind"] != "end":
        return None
    with contextlib.suppress(RunError, ValueError):
        before = before or asdict(read_config(folder))
        before = {**before, **(lines[-1].get("options") or {})}
        if all(before.get(f) == v for f, v in asdict(config).items() if f not in FREE or f in ("data", "val", *ENDING)):
            return lines[-1]
    return None


def close_run(run: Any, log: Log, console: Console) -> dict[str, Any]:
    """After the last epoch of a `loop.Training`: write the weights that are kept and what they predict, fine-tune the
    heads, find thresholds, say which images were skipped. Returns the last line of the log."""
    end = _write_kept(run)
    _note_bad_images(run, log)
    if run.config.cft and run.model.classifier is not None:
        result = fine_tune(run.folder, world=run.world, console=console, datasets=(run.train_set, run.val_set))
        end["mAP_cft"] = result.get("mAP")
        log.write("cft", **{name: result.get(name) for name in ("kept", "gain", "gain_interval", "mAP")})
    if run.config.decisions:
        datasets = run.train_set, run.tune_set
        say_decisions(decide(run.folder, world=run.world, console=console, datasets=datasets), run.say)
    end["elapsed"] = run.time()
    end["options"] = {name: getattr(run.config, name) for name in ENDING}
    log.write("end", **end)
    return end


def _write_kept(run: Any) -> dict[str, Any]:
    lines = [line for line in read_log(run.folder) if line["kind"] == "epoch"] if run.world.main else []
    model, epoch = run.shown, run.closed
    run.world.wait()
    if run.config.keep == "best":
        model.load_state_dict(read_best(run.folder, run.best_digest))
        epoch = run.best_epoch
    if run.latest is not None and run.latest[0] == epoch:
        _, metrics, logits, rows = run.latest
    else:
        metrics, logits, rows = evaluate_on(run, model, run.val_set)
    if run.world.main:
        if weights_digest(run.folder / WEIGHTS) != state_digest(model.state_dict()):
            for name in ("cft.json", "cft.safetensors", "cft_predictions.npz"):  # of the weights that it ended with
                (run.folder / name).unlink(missing_ok=True)
        write_model(run.folder / WEIGHTS, model, run.train_set.categories)
        write_predictions(run.folder / "predictions.npz", logits, rows, run.val_set)
    run.world.wait()
    f1 = metrics.threshold
    run.say(
        f"kept epoch {epoch} ({run.config.keep}): mAP {metrics.mAP:.2%}, CF1 {f1.CF1:.2%}, OF1 {f1.OF1:.2%} "
        f"on {len(rows):,} images"
    )
    if metrics.left_out:
        names = ", ".join(run.val_set.categories[c] for c in metrics.left_out[:10])
        more = f" and {len(metrics.left_out) - 10} more" if len(metrics.left_out) > 10 else ""
        run.say(f"left out of mAP, no known positive to validate on: {names}{more}")
    last = lines[-1].get("mAP") if lines else None
    last = math.nan if last is None else last
    # On the validation images, whatever the epoch was chosen by.
    best = max((line["mAP"] for line in lines if line.get("mAP") is not None), default=run.best)
    return {"kept": run.config.keep, "epoch": epoch, "mAP": metrics.mAP, "mAP_last": last, "mAP_best": best}


def _note_bad_images(run: Any, log: Log) -> None:
    """What `on_bad_image="skip"` skipped: a count on the screen, the list in the log and the report."""
    lines = [line for part in (run.train_set, run.val_set) for line in part.bad_images()]
    if lines:
        run.say(f"skipped {len(lines):,} images that cannot be read (listed in the report); the first: {lines[0]}")
        log.write("bad_images", count=len(lines), lines=lines[:1000])
