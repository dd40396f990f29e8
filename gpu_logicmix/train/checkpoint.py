"""What a run leaves in its folder, and how it is read again: checkpoints, weights, predictions.

Nothing here is ever half there: files are written aside and renamed, a checkpoint is read only if every byte of it has
the right checksum, and weights are taken only if they have the checksum that was noted with them.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import platform
import warnings
import zipfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save as to_safetensors
from torch import Tensor, nn

from gpu_logicmix.data import ImageDataset
from gpu_logicmix.data.images import what_changed
from gpu_logicmix.errors import RunError
from gpu_logicmix.files import open_plain, written_whole
from gpu_logicmix.train.config import FREE, PATH_OPTIONS, Config, make_config

FORMAT = 2  # of a checkpoint; those of another are refused


# ---------------------------------------------------------------------------------------------------------- checkpoints
def read_config(folder: Path) -> Config:
    """The options of the run that is in a folder: of its config.toml, or of its checkpoint where that file is lost."""
    file = folder / "config.toml"
    if file.is_file() and file.stat().st_size:
        return make_config({}, file=file)
    if not any((folder / name).exists() for name in ("last.pt", "previous.pt")):
        raise RunError(f"{folder}: not a run (it has no config.toml)")
    state = read_last(folder, lambda text: None)
    if not isinstance(state.get("config"), dict):
        raise RunError(f"{folder}: its last.pt is not a checkpoint to resume from")
    names = {f.name for f in fields(Config)}
    return make_config({name: value for name, value in state["config"].items() if name in names})


def save_checkpoint(folder: Path, state: dict[str, Any]) -> None:
    """Write `last.pt`, with the one before kept as `previous.pt`. At any moment at least one of them is whole."""
    last = folder / "last.pt"
    aside = folder / "next.pt"
    write_checkpoint(aside, state)
    if last.exists():
        os.replace(last, folder / "previous.pt")
    os.replace(aside, last)


def write_checkpoint(path: Path, state: dict[str, Any]) -> None:
    with or_say(path), written_whole(path, "wb") as file:
        torch.save(state, file)


@contextlib.contextmanager
def or_say(path: Path) -> Iterator[None]:
    """A full disk, in one line that names the file."""
    try:
        yield
    except (OSError, RuntimeError) as error:
        cause: BaseException = error
        while cause.__context__ is not None and not isinstance(cause, OSError):
            cause = cause.__context__  # torch has an error of its own on top
        reason = getattr(cause, "strerror", None) or str(error).splitlines()[0]
        way_out = "use --resume" if (path.parent / "last.pt").exists() else "start again"
        raise RunError(
            f"{path}: cannot be written ({reason}); what was saved before is whole. Make room, then {way_out}"
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
            raise ValueError("not a checkpoint of a run")
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
            warn(f"{line}; resuming from {folder / name}, step {state['step']}")
        return state
    if damaged:
        raise RunError(f"{damaged[0]}, and there is no other; start again in another folder")
    return None


def state_of(run: Any) -> dict[str, Any]:
    """All that a run needs to resume exactly: how far it is, and whatever learns. `run` is a `loop.Training`. Every
    process calls it; what the first one gets is what to save."""
    state = {name: getattr(run, name) for name in PLACES}
    mix = {} if run.augment.mix is None else run.augment.mix.state_dict()
    return state | {
        "mixes": run.world.gathered({name: value.cpu() for name, value in mix.items()}),  # each has a bank of its own
        "format": FORMAT,
        "elapsed": run.time(),
        "steps": run.steps,
        "processes": run.world.size,
        "fingerprint": run.fingerprint,
        "judged_by": run.judged_by,
        "config": asdict(run.config),
        "ema": None if run.ema is None else run.ema.module.state_dict(),
        **{name: None if part is None else part.state_dict() for name, part in _parts(run).items()},
    }


# Where a run stands.
PLACES = ("step", "updates", "closed", "best", "best_epoch", "best_digest", "seconds", "waited")


def _parts(run: Any) -> dict[str, Any]:
    parts = ("model", "optimizer", "scheduler", "scaler", "loss")
    return {name: getattr(run, name) for name in parts} | {"curriculum": run.table}


def restore(run: Any, state: dict[str, Any]) -> None:
    """Resume from a checkpoint, after making sure that it is one of this very run."""
    _check_same_run(run, state)
    if run.ema is not None:
        run.ema.module.load_state_dict(state["ema"])
    load_optimizer(run.optimizer, state["optimizer"])
    for name, part in _parts(run).items():
        # A device that computed in another type than float16 has left no scale.
        idle = name == "optimizer" or (name == "scaler" and not state[name])
        if part is not None and not idle and not (name == "scheduler" and state["processes"] != run.world.size):
            part.load_state_dict(state[name])
    if run.augment.mix is not None:
        # Of other numbers of processes, and of earlier versions, there is that of the first.
        mixes = state["mixes"] if "mixes" in state else [state["mix"]]
        run.augment.mix.load_state_dict(mixes[run.world.rank] if len(mixes) == run.world.size else mixes[0])
    for name in (*PLACES, "elapsed"):
        setattr(run, name, state[name])
    # The sum over all processes goes to the first one alone.
    run.sums.totals = state["totals"].to(run.world.device) * run.world.main
    if state["processes"] != run.world.size:
        _rescale(run, state)


def load_optimizer(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """With `fused` as this device has it, not the one of the checkpoint: by it the counters of steps find their device
    while they are read."""
    pairs = zip(state["param_groups"], optimizer.param_groups, strict=True)
    optimizer.load_state_dict({**state, "param_groups": [{**saved, "fused": own["fused"]} for saved, own in pairs]})


def _rescale(run: Any, state: dict[str, Any]) -> None:
    """With another number of processes an epoch has another number of steps: take the place in the epoch and in the
    schedule that comes closest. What follows is no longer the run that it would have been, and the user is told."""
    accumulate, size = run.config.accumulate, run.world.size
    inside = run.step - run.closed * state["steps"]
    whole = inside >= state["steps"]
    inside = run.steps if whole else min(inside * state["processes"] // size // accumulate * accumulate, run.steps)
    run.step = run.closed * run.steps + inside
    run.updates = run.closed * -(-run.steps // accumulate) + -(-inside // accumulate)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # no update of the weights comes before these steps: they repeat the past
        for _ in range(run.updates):
            run.scheduler.step()
    processes = f"{size} process{'es' if size > 1 else ''}"
    run.say(
        f"resuming with {processes} in place of {state['processes']}: from here on the batches are others "
        "than they would have been"
    )


def _check_same_run(run: Any, state: dict[str, Any]) -> None:
    folder, config = run.folder, asdict(run.config)
    if state.get("format") != FORMAT:
        raise RunError(
            f"{folder}: its checkpoint was made by an earlier version of gpu-logicmix and cannot be resumed; finish it "
            "with that version, or choose another --out"
        )
    model = ("model", "head", "head_option")
    before = {**state["config"], "option": _without_paths(state["config"]["option"])}
    now = {**config, "option": _without_paths(config["option"])}
    others = [k for k, v in before.items() if k in now and k not in FREE and now[k] != v]
    for name in sorted(others, key=lambda name: name not in model):
        raise RunError(
            f"{folder}: its checkpoint was made with {name}={state['config'][name]!r}, not {config[name]!r}; "
            "give the same options (--resume alone takes them from the folder), or choose another --out"
        )
    for name in ("mean", "std"):  # --weights and --init may be others, but the images have to be normalised as before
        if not torch.equal(state["model"][name], getattr(run.model, name).cpu()):
            raise RunError(
                f"{folder}: its checkpoint was made with images normalised otherwise; give its options "
                f"weights={state['config']['weights']!r} and init={state['config']['init']!r}, or choose another --out"
            )
    _check_same_data(run, state)


def _without_paths(options: list[str] | None) -> list[str]:
    """Images may have been moved: whether they are the same, their fingerprint says."""
    return [option for option in options or [] if option.partition("=")[0] not in PATH_OPTIONS]


def _check_same_data(run: Any, state: dict[str, Any]) -> None:
    before, now = state["config"]["data"], run.config.data
    changed = what_changed(state["fingerprint"], run.fingerprint)
    if changed == ["file dates"] and before != now:
        run.say(f"warning: the files of {now} have other dates than those of {before}: taken for a copy of them")
    elif changed == ["file dates"]:
        raise RunError(
            f"{now}: image files were written to since {run.folder} was started (their dates changed); put the "
            "earlier ones back, or choose another --out. If they are copies of the same images, give their folder "
            "another name (a symbolic link will do), and resume with that"
        )
    elif changed:
        raise RunError(
            f"{run.folder}: its checkpoint belongs to another dataset ({before}): {', '.join(changed)} of {now} "
            "differ; choose another --out"
        )
    _check_same_judges(run, state)


def _check_same_judges(run: Any, state: dict[str, Any]) -> None:
    """The images that a run is validated on, and those that choose its best epoch."""
    names = [run.config.val or run.config.data, f"tune_images={run.config.tune_images}"]
    moved = any(state["config"][name] != getattr(run.config, name) for name in ("data", "val"))
    for name, before, now in zip(names, state.get("judged_by", []), run.judged_by, strict=False):
        changed = [part for part in what_changed(before, now) if part != "file dates" or not moved]
        if changed and moved:
            run.say(f"warning: {name}: not the images that were validated on before; mAP of earlier epochs is of those")
        elif changed:
            raise RunError(
                f"{name}: {', '.join(changed)} of the images to validate on changed since {run.folder} was started; "
                "put the earlier ones back, or choose another --out"
            )


def read_best(folder: Path, digest: str) -> dict[str, Tensor]:
    """The weights of the best epoch, which must be those that the last checkpoint speaks of."""
    path = folder / "best.pt"
    way_out = "with --keep last the run ends without it: gpu-logicmix fit --out {} --resume --keep last"
    try:
        weights = read_checkpoint(path)["ema"]
    except (RunError, FileNotFoundError) as error:
        reason = str(error) if isinstance(error, RunError) else f"{path}: no such file"
        raise RunError(f"{reason}; {way_out.format(folder)}") from error
    if state_digest(weights) != digest:
        raise RunError(f"{path}: not the weights that this run wrote; {way_out.format(folder)}")
    return weights


def state_digest(state: Mapping[str, Tensor]) -> str:
    """A checksum of names and values."""
    digest = hashlib.blake2b(digest_size=8)
    for name, tensor in sorted(state.items()):
        digest.update(name.encode())
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
    return digest.hexdigest()


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
    with open_plain(folder / "lock", "a+") as file:
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
    metadata = {"categories": json.dumps(categories), "digest": state_digest(tensors)}
    with or_say(path), written_whole(path, "wb") as file:
        file.write(to_safetensors(tensors, metadata=metadata))


def read_categories(path: Path) -> list[str]:
    """The categories that a weights file is for, after checking its tensors against the checksum in its header."""
    try:
        with safe_open(path, "pt") as opened:
            metadata = opened.metadata() or {}
            categories = json.loads(metadata["categories"])
            digest, names = metadata.get("digest"), list(opened.keys())
            if digest is not None and state_digest({name: opened.get_tensor(name) for name in names}) != digest:
                raise ValueError("its tensors have another checksum than its header says")
        if not isinstance(categories, list) or not all(isinstance(name, str) for name in categories):
            raise ValueError("its header has no list of categories")
    except Exception as error:  # safetensors has an exception class of its own for a damaged file
        raise RunError(f"{path}: damaged ({(str(error) or type(error).__name__).splitlines()[0]})") from error
    return categories


def write_predictions(path: Path, logits: Tensor, rows: np.ndarray, dataset: ImageDataset) -> None:
    with or_say(path), written_whole(path, "wb") as file:
        np.savez_compressed(
            file,
            logits=logits[rows].numpy(),
            targets=dataset.labels_of(rows),
            index=rows,
            ids=np.array([str(dataset.ids[row]) for row in rows]),
            categories=np.array(dataset.categories),
        )
