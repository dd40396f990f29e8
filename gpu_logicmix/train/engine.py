"""One run: train, evaluate, predict; checkpoint and resume; one process or many.

    gpu-logicmix fit coco:/data/coco --known 0.1 --out runs/coco-10
    gpu-logicmix fit --out runs/coco-10 --resume
    torchrun --nproc_per_node 4 train.py fit coco:/data/coco --known 0.1 --out runs/coco-10

From Python: `fit(Config(data="coco:/data/coco", known=0.1), "runs/coco-10")`.

How a run can go on at the exact step after a kill: everything drawn at random in a step comes from a generator seeded
with (seed, step, rank), and the order of the samples is a function of (seed, epoch). So the number of steps taken *is*
the state of all random streams and of the sampler. A checkpoint is that number, and whatever learns: weights, their
moving average, optimiser, scheduler, scaler, pseudo-labels.

How several processes give what one would: each rank takes its share of the same global batch, the loss is summed, and
the gradient is divided by the number of known labels in the whole update, over all ranks and accumulated steps.

No step waits for the device. Sums are kept there and read at logging points; a loss that is no number is noted there
too, with its step, and looked for at logging points and before anything is saved.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from safetensors import safe_open
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from gpu_logicmix.cft import category_wise_fine_tune
from gpu_logicmix.curriculum import CurriculumLabels
from gpu_logicmix.data import DataError, ImageDataset, make_loader
from gpu_logicmix.data.folder import list_folder
from gpu_logicmix.data.images import FileSource
from gpu_logicmix.files import write_whole
from gpu_logicmix.labels import label_counts
from gpu_logicmix.metrics import Metrics, evaluate
from gpu_logicmix.models.classifier import Classifier, build_model
from gpu_logicmix.train.average import WeightAverage
from gpu_logicmix.train.config import Config, to_toml
from gpu_logicmix.train.runfolder import (
    Log,
    RunError,
    locked,
    machine,
    no_nan,
    read_checkpoint,
    read_config,
    read_last,
    read_log,
    save_checkpoint,
    versions,
    write_checkpoint,
    write_model,
    write_predictions,
)
from gpu_logicmix.train.step import (
    Augment,
    World,
    autocast,
    fingerprint,
    images_to_do,
    joined_world,
    make_loss,
    moved,
    open_labeled,
    open_train,
    open_tune,
    open_val,
    predict_rows,
    predicted,
    seed_step,
)

# A run may go on with other values of these; all else is part of what is being computed.
FREE = {
    "data", "val", "cache", "workers", "on_bad_image", "device", "threads", "compile", "save_every", "log_every",
    "tensorboard", "keep", "cft", "cft_epochs", "cft_lr", "cft_method", "weights",
}  # fmt: skip


class Interrupted(BaseException):
    """The run was asked to stop. No Exception, as KeyboardInterrupt is none: it may come anywhere."""

    def __init__(self, signum: int, words: str) -> None:
        super().__init__(words)
        self.signum = signum


# -------------------------------------------------------------------------------------------------------------- signals
class StopSignals:
    """SIGTERM and Ctrl-C. While `patient` they are noted, and acted upon when there is something to save; a second one
    is not waited for. At other times they end the run at once: what there is to save has been saved."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.signum, self.patient = folder, 0, False

    def __enter__(self) -> StopSignals:
        self.before = {}
        if threading.current_thread() is threading.main_thread():
            for signum in (signal.SIGINT, signal.SIGTERM):
                self.before[signum] = signal.signal(signum, self._note)
        return self

    def __exit__(self, *_) -> None:
        for signum, handler in self.before.items():
            signal.signal(signum, handler)

    def _note(self, signum: int, frame) -> None:
        if self.signum or not self.patient:
            self.stop(signum, "stopped")
        self.signum = signum

    def stop(self, signum: int, words: str) -> None:
        saved = (self.folder / "last.pt").exists()
        go_on = f"; go on with: gpu-logicmix fit --out {self.folder} --resume"
        raise Interrupted(signum, words + (go_on if saved else " before the first checkpoint"))


# -------------------------------------------------------------------------------------------------------------- the run
class Run:
    """A model in training: what it consists of, and where it stands (`step`, `closed`)."""

    def __init__(self, config: Config, folder: Path, world: World, say: Callable[[str], None]) -> None:
        self.config, self.folder, self.world, self.say = config, folder, world, say
        device = world.device
        self.train_set, full = open_train(config)
        self.val_set, self.tune_set = open_val(config), open_tune(config)
        if self.val_set.categories != self.train_set.categories:
            raise DataError(f"{config.val or config.data}: its categories are not those of {config.data} to train on")
        self.fingerprint = fingerprint(self.train_set)
        torch.manual_seed(config.seed)
        self.model = make_model(config, len(self.train_set.categories)).to(device, memory_format=torch.channels_last)
        self.ema = WeightAverage(self.model, config.ema_decay, warmup=config.ema_warmup) if config.ema_decay else None
        self.loss = make_loss(config)
        self.augment = Augment(config).to(device)
        self.curriculum = None
        if config.cl:
            self.curriculum = CurriculumLabels(
                self.train_set.labels,
                config.theta_pos,
                config.theta_neg,
                select=config.cl_select,
                fraction=config.cl_fraction,
                full=full if config.known is not None or config.protocol == "single-positive" else None,
            ).to(device)

        # A short last batch is dropped: it would weigh each of its samples more, and may be too short for batch norm.
        self.loader = make_loader(
            self.train_set,
            config.batch_size,
            shuffle=True,
            seed=config.seed,
            drop_last=len(self.train_set) >= config.batch_size * world.size,
            workers=config.workers,
            rank=world.rank,
            world=world.size,
        )
        self.steps = len(self.loader.sampler)  # in an epoch
        self.optimizer = torch.optim.AdamW(
            self.model.param_groups(config.lr, config.backbone_lr, config.weight_decay),
            fused=True if device.type == "cuda" else None,
        )
        updates = config.epochs * -(-self.steps // config.accumulate)
        if config.schedule == "onecycle":
            rates = [group["lr"] for group in self.optimizer.param_groups]
            total = max(updates, 2) + 1
            # 1cycle divides by the length of both its phases, counted in updates less one.
            rise = min(max(config.warmup, 1.5 / total), 1 - 1.5 / total)
            self.scheduler = torch.optim.lr_scheduler.OneCycleLR(
                self.optimizer, rates, total_steps=total, pct_start=rise
            )
        else:
            self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda update: 1.0)
        self.scaler = torch.amp.GradScaler(device.type, enabled=config.amp == "fp16")
        net = torch.compile(self.model) if config.compile else self.model
        ids = [device] if device.type == "cuda" else None
        self.net = DistributedDataParallel(net, device_ids=ids) if world.size > 1 else net

        self.step = 0  # batches trained on
        self.updates = 0  # of the weights
        self.closed = 0  # epochs that are over, with all that is done at their end
        self.best, self.best_epoch = -math.inf, 0
        self.seconds = self.waited = 0.0  # of training in this epoch, and of these waiting for data
        self.elapsed, self.started = 0.0, time.perf_counter()  # before this process began, and when it did
        self.latest: tuple | None = None  # epoch, metrics, logits and rows of the last evaluation
        # Since the epoch began: loss, known labels; since the last update: known labels.
        self.totals = torch.zeros(2, dtype=torch.float64, device=device)
        self.counted = torch.zeros((), device=device)
        self.first_bad = torch.full((), -1, dtype=torch.int64, device=device)
        self.scale = float(config.batch_size * len(self.train_set.categories))
        self.params = [p for p in self.model.parameters() if p.requires_grad]

    @property
    def shown(self) -> Classifier:
        """The model that is evaluated: the moving average."""
        return self.model if self.ema is None else self.ema.module

    # --------------------------------------------------------------------------------------------------------- training
    def batch(self, images: Tensor, targets: Tensor, index: Tensor, *, update: bool) -> None:
        """One step: augment, forward, backward, and the update of the weights if it is due. Waits for nothing."""
        config = self.config
        seed_step(config.seed, self.step, self.world.rank)
        mixed = None
        if len(images):
            if self.curriculum is not None:
                targets = self.curriculum.lookup(index)
            images, targets, mixed = self.augment(images, targets)
        # Batch norm needs two images, and the processes must stay in step where one of them could read none: there are
        # always two, and the loss sees those that are real.
        shown = images
        if len(images) < 2:
            shown = torch.cat((images, images)) if len(images) else images.new_zeros(2, *images.shape[1:]).float()
        together = contextlib.nullcontext() if update or self.world.size == 1 else self.net.no_sync()
        with together:
            with autocast(config, self.world.device):
                logits = self.net(shown)[: len(images)]
            extra = (mixed,) if config.loss == "dp-asl" else ()
            loss = self.loss(logits, targets, *extra)
            self.scaler.scale(loss / self.scale).backward()
        count = self.loss.count(targets)
        self.counted += count
        self.totals += torch.stack((loss.detach().double(), count.double()))
        fine = torch.isfinite(loss.detach()) | (self.first_bad >= 0)
        self.first_bad = torch.where(fine, self.first_bad, self.step + 1)
        self.step += 1
        if update:
            self._update()

    def _update(self) -> None:
        self.scaler.unscale_(self.optimizer)
        # DDP gives the mean over the processes of the gradient of (sum / scale).
        factor = self.scale * self.world.size / self.world.sum_(self.counted).clamp(min=1)
        torch._foreach_mul_([p.grad for p in self.params if p.grad is not None], factor)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()
        self.scheduler.step()
        self.updates += 1
        self.counted.zero_()
        if self.ema is not None:
            self.ema.update(self.model, self.updates)

    def check_finite(self, *, weights: bool = False) -> None:
        """Stop if the loss was no number in some step, or a weight is none now. Waits for the device."""
        bad, what = self.world.any(int(self.first_bad)), "loss"
        if bad < 0 and weights:
            largest = torch.stack(torch._foreach_norm([p.detach() for p in self.params], math.inf)).max()
            bad, what = (-1 if math.isfinite(largest) else self.step), "largest weight"
        if bad >= 0:
            saved = (self.folder / "last.pt").exists()
            before = f"the last checkpoint in {self.folder} is from before" if saved else "there is no checkpoint yet"
            raise RunError(
                f"the {what} is no number any more in step {bad} (epoch {(bad - 1) // self.steps + 1}); {before}. "
                "A smaller --lr or --amp off may help"
            )

    def train_epoch(self, log: Log, tick: Callable[..., None], stop: StopSignals) -> None:
        config, world = self.config, self.world
        epoch, start = divmod(self.step, self.steps)
        self.loader.sampler.set_epoch(epoch, start)
        self.augment.set_epoch(epoch)
        self.model.train()
        batches = moved(self.loader, world.device)
        mark = self.step, self.seconds, self.waited
        saved, asked, due = time.perf_counter(), 0, 0
        for at in range(start + 1, self.steps + 1):
            began = time.perf_counter()
            batch = next(batches)
            self.waited += time.perf_counter() - began
            update = at % config.accumulate == 0 or at == self.steps
            self.batch(*batch, update=update)
            tick(len(batch[0]) * world.size)
            self.seconds += time.perf_counter() - began
            point = self.step % config.log_every == 0 or at == self.steps
            if point:
                self.check_finite(weights=at == self.steps)
                self._log_step(log, *mark)
                mark = self.step, self.seconds, self.waited
            # Whether to stop or save: one process may decide at any step; several have to agree, at logging points.
            if point or world.size == 1:
                asked = world.any(stop.signum)
                due = world.any(time.perf_counter() - saved > config.save_every * 60 and at < self.steps)
            if update and (asked or due):
                self.check_finite(weights=True)
                self.save()
                saved, due = time.perf_counter(), 0
                if asked:
                    stop.stop(asked, f"stopped at step {self.step}")

    def _log_step(self, log: Log, step: int, seconds: float, waited: float) -> None:
        """Since `step`, when the clocks stood at `seconds` and `waited`. Waits for the device."""
        loss, count = self.world.sum_(self.totals.clone()).tolist()
        took = max(self.seconds - seconds, 1e-9)
        log.write(
            "step",
            step=self.step,
            epoch=round(self.step / self.steps, 4),
            loss=loss / max(count, 1),
            lr=self.optimizer.param_groups[-1]["lr"],
            images_per_second=(self.step - step) * self.config.batch_size * self.world.size / took,
            waiting=(self.waited - waited) / took,
        )

    # ------------------------------------------------------------------------------------------------- end of an epoch
    def evaluate(
        self,
        model: nn.Module,
        tick: Callable[[int], None] = lambda images: None,
        dataset: ImageDataset | None = None,
    ) -> tuple[Metrics, Tensor, np.ndarray]:
        """Metrics on the validation set (or another), logits, and the rows that could be read."""
        model.eval()
        dataset = self.val_set if dataset is None else dataset
        logits, rows = predict_rows(model, dataset, self.config, self.world, tick)
        if not torch.isfinite(logits).all():
            raise RunError(
                f"the model gives logits that are no numbers (epoch {self.closed + 1}); the last checkpoint in "
                f"{self.folder} is from before. A smaller --lr or --amp off may help"
            )
        targets = torch.from_numpy(dataset.labels)
        return evaluate(logits[rows], targets[rows]), logits, rows

    def close_epoch(self, log: Log, tick: Callable[..., None], stop: StopSignals) -> None:
        epoch = self.closed + 1

        def tick_or_stop(images: int) -> None:
            tick(images * self.world.size)
            if stop.signum and self.world.size == 1:
                self.save()  # `closed` says that the end of this epoch is still to be worked through
                stop.stop(stop.signum, f"stopped at step {self.step}")

        if self.world.size > 1 and self.ema is not None:
            for buffer in self.ema.module.buffers():  # those of batch norms have seen each rank's own samples
                dist.broadcast(buffer, 0)
        due = epoch % self.config.eval_every == 0 or epoch == self.config.epochs
        scores = self._scores(tick_or_stop) if due else {}
        loss, count = self.world.sum_(self.totals.clone()).tolist()
        images = self.steps * self.config.batch_size * self.world.size
        waiting = self.waited / max(self.seconds, 1e-9)
        line = {
            "epoch": epoch,
            "step": self.step,
            "loss": loss / max(count, 1),
            **scores,
            "images_per_second": images / max(self.seconds, 1e-9),
            "waiting": waiting,
            "seconds": self.seconds,
            "elapsed": self.time(),
            "memory": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024),
        }
        words = ""
        if self.curriculum is not None and epoch >= self.config.cl_start and epoch < self.config.epochs:
            self.curriculum.begin_update()
            self.shown.eval()
            self._label(tick_or_stop)
            self.curriculum.end_update()
            counts = self.curriculum.counts()._asdict()
            log.write("curriculum", epoch=epoch, **counts)
            words = f"  pseudo-labels +{counts['positives']:,} -{counts['negatives']:,}"
            if counts["positives"] + counts["negatives"] and counts["precision"] is not None:
                words += f" ({counts['precision']:.1%} right)"
        log.write("epoch", **line)
        # The last is as good as any where there is nothing to compare by: no category has a known positive.
        score = scores.get("tune_mAP", scores.get("mAP"))
        if due and not score <= self.best:
            self.best, self.best_epoch = score, epoch
            if self.world.main:
                best = {"ema": self.shown.state_dict(), "step": self.step, "epoch": epoch, "mAP": self.best}
                write_checkpoint(self.folder / "best.pt", best)
        mAP = f"mAP {scores['mAP']:6.2%}" if due else "not validated"
        self.say(
            f"epoch {epoch:>{len(str(self.config.epochs))}}/{self.config.epochs}  loss {line['loss']:.4f}  "
            f"{mAP}  {line['images_per_second']:,.0f} images/s, {waiting:.1%} waiting for data{words}"
        )
        self.closed, self.seconds, self.waited = epoch, 0.0, 0.0
        self.totals.zero_()
        self.save()

    def _scores(self, tick: Callable[[int], None]) -> dict[str, float]:
        """For the log. What they come from is kept, in case these are the weights that will be."""
        self.latest = self.closed + 1, *self.evaluate(self.shown, tick)
        _, metrics, logits, rows = self.latest
        loss = make_loss(self.config, "mean")(logits[rows], torch.from_numpy(self.val_set.labels)[rows])
        tune = {} if self.tune_set is None else {"tune_mAP": self.evaluate(self.shown, tick, self.tune_set)[0].mAP}
        return {"val_loss": loss.item(), **metrics.as_dict(), **tune}

    @torch.inference_mode()
    def _label(self, tick: Callable[[int], None]) -> None:
        """New pseudo-labels from un-augmented images. Each process predicts its share, straight into the table."""
        for index, logits in predicted(self.shown, self.train_set, self.config, self.world):
            self.curriculum.update(index, logits)
            tick(len(index))

    # ----------------------------------------------------------------------------------------------------- saved states
    def time(self) -> float:
        return self.elapsed + time.perf_counter() - self.started

    def save(self) -> None:
        totals = self.world.sum_(self.totals.clone())
        if not self.world.main:
            return
        state = {
            "step": self.step,
            "updates": self.updates,
            "closed": self.closed,
            "best": self.best,
            "best_epoch": self.best_epoch,
            "seconds": self.seconds,
            "waited": self.waited,
            "elapsed": self.time(),
            "totals": totals,
            "steps": self.steps,
            "fingerprint": self.fingerprint,
            "config": asdict(self.config),
            "model": self.model.state_dict(),
            "ema": None if self.ema is None else self.ema.module.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scheduler": self.scheduler.state_dict(),
            "scaler": self.scaler.state_dict(),
            "curriculum": None if self.curriculum is None else self.curriculum.state_dict(),
        }
        save_checkpoint(self.folder, state)

    def load(self, state: dict[str, Any]) -> None:
        """Go on from a checkpoint, after making sure that it is one of this very run."""
        config = asdict(self.config)
        model = ("model", "head", "dropout")
        others = [k for k, v in state["config"].items() if k in config and k not in FREE and config[k] != v]
        for name in sorted(others, key=lambda name: name not in model):
            raise RunError(
                f"{self.folder}: its checkpoint was made with {name}={state['config'][name]!r}, not {config[name]!r}; "
                "give the same options (--resume alone takes them from the folder), or choose another --out"
            )
        if state["fingerprint"] != self.fingerprint:
            raise RunError(
                f"{self.folder}: its checkpoint belongs to another dataset ({state['config']['data']}: other images, "
                f"categories or known labels than {self.config.data}); choose another --out"
            )
        if state["steps"] != self.steps:
            raise RunError(
                f"{self.folder}: its checkpoint has {state['steps']} steps in an epoch, this run {self.steps}; start "
                "as many processes as before"
            )
        self.model.load_state_dict(state["model"])
        if self.ema is not None:
            self.ema.module.load_state_dict(state["ema"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.scheduler.load_state_dict(state["scheduler"])
        self.scaler.load_state_dict(state["scaler"])
        if self.curriculum is not None:
            self.curriculum.load_state_dict(state["curriculum"])
        for name in ("step", "updates", "closed", "best", "best_epoch", "seconds", "waited", "elapsed"):
            setattr(self, name, state[name])
        # The sum over all processes goes to the first one alone.
        self.totals = state["totals"].to(self.world.device) * self.world.main


def make_model(config: Config, categories: int, weights: str | Path | None = None) -> Classifier:
    """The model of a run; with `weights` as they are in that file."""
    if weights is None and config.weights not in ("hub", "none"):
        weights = config.weights
    return build_model(
        config.model,
        categories,
        head=config.head,
        weights=weights,
        pretrained=weights is None and config.weights == "hub",
        normalisation=config.normalisation,
        dropout=config.dropout,
        image_size=config.size,
        freeze=config.freeze,
        batch_norm=config.batch_norm,
    )


# ---------------------------------------------------------------------------------------------------- from start to end
@contextlib.contextmanager
def progress_bar(console: Console, total: int, what: str = "images", done: int = 0) -> Iterator[Callable[..., None]]:
    """A bar with images/s and time left. Yields `tick(images)`."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=None),
        TextColumn("{task.percentage:>3.0f} %"),
        TextColumn("{task.fields[speed]}"),
        TimeRemainingColumn(),
        TextColumn("left"),
    )
    with Progress(*columns, console=console, transient=True, speed_estimate_period=60) as progress:
        task = progress.add_task(what, total=total, completed=done, speed="")

        def tick(images: int) -> None:
            progress.update(task, advance=images, speed=f"{progress.tasks[0].speed or 0:,.0f} images/s")

        yield tick


def fit(
    config: Config,
    folder: str | Path,
    *,
    resume: str = "never",
    command: str = "",
    console: Console | None = None,
    tick: Callable[[int], None] | None = None,
) -> dict[str, Any]:
    """Train, evaluate each epoch, keep the best or last, fine-tune the heads. Returns the last line of the log.

    folder: of the run. Everything goes there.
    resume: "never": the folder must not have a run; "must": go on with the one that is there; "auto": go on, or start.
    tick: is told of images that were worked through, in place of a progress bar of its own.
    """
    folder = Path(folder)
    if int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)) > 0 and resume == "never":
        resume = "auto"  # torchrun has started us again after a failure
    with (
        joined_world(config.device, config.threads) as world,
        StopSignals(folder) as stop,
        contextlib.ExitStack() as stack,
    ):
        console = (console or Console()) if world.main else Console(quiet=True)

        def say(text: str) -> None:
            console.print(escape(text), highlight=False, soft_wrap=True)

        if world.main:
            folder.mkdir(parents=True, exist_ok=True)
            stack.enter_context(locked(folder))
        state = _state_to_go_on_from(folder, resume, lambda text: say(f"warning: {text}"))
        if state is not None and (end := finished(folder, state["config"], config)):
            say(f"{folder}: this run has ended")
            return end
        with console.status("opening the data and building the model …"):
            run = Run(config, folder, world, say)
        log = Log(folder, world.main, config.tensorboard)
        if state is not None:
            run.load(state)
            log.rewind(run.step, run.closed)
            say(f"going on from step {run.step} (epoch {run.step // run.steps + 1} of {config.epochs})")
        elif world.main:
            for name in ("log.jsonl", "best.pt"):  # of a run that was killed before its first checkpoint
                (folder / name).unlink(missing_ok=True)
        if world.main:
            write_whole(folder / "config.toml", to_toml(config))
        run.started = time.perf_counter()
        _log_start(run, log, command)
        total, done = _images_to_do(run)
        own = progress_bar(console, total, "training", done) if tick is None else contextlib.nullcontext(tick)
        with own as bar:
            stop.patient = True
            while run.closed < config.epochs:
                if run.step < (run.closed + 1) * run.steps:
                    run.train_epoch(log, bar, stop)
                run.close_epoch(log, bar, stop)
                if signum := world.any(stop.signum):
                    stop.stop(signum, f"stopped after epoch {run.closed}")
            stop.patient = False
        end = _finish(run)
        if config.cft:
            end["mAP_cft"] = fine_tune(folder, world=world, console=console, run=run).get("mAP")
        end["elapsed"] = run.time()
        log.write("end", **end)
        return end


def _state_to_go_on_from(folder: Path, resume: str, warn: Callable[[str], None]) -> dict[str, Any] | None:
    if resume == "never":
        if any((folder / name).exists() for name in ("last.pt", "previous.pt", "model.safetensors")):
            raise RunError(f"{folder}: there is a run already; go on with it: --resume, or choose another --out")
        return None
    state = read_last(folder, warn)
    if state is None and resume == "must":
        raise RunError(f"{folder}: no run to go on with; start one without --resume")
    return state


def finished(folder: Path, before: dict[str, Any], config: Config) -> dict[str, Any] | None:
    """The last line of a run's log if all of it, with these options, is done."""
    lines = read_log(folder)
    parts = ("data", "val", "keep", "cft", "cft_epochs", "cft_lr", "cft_method")
    same = all(before.get(f) == v for f, v in asdict(config).items() if f not in FREE or f in parts)
    return lines[-1] if same and lines and lines[-1]["kind"] == "end" else None


def _log_start(run: Run, log: Log, command: str) -> None:
    counts = label_counts(run.train_set.labels)
    count = len(run.train_set)
    known = 1 - counts.unknown / run.train_set.labels.size
    device = run.world.device
    log.write(
        "start",
        time=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        images=count,
        val_images=len(run.val_set),
        categories=run.train_set.categories,
        known=float(known),
        positives=float(counts.positive / count),
        category_positives=label_counts(run.train_set.labels, 0).positive.tolist(),
        parameters=sum(p.numel() for p in run.model.parameters()),
        trained_parameters=sum(p.numel() for p in run.params),
        device=torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        machine=machine(),
        threads=torch.get_num_threads(),
        processes=run.world.size,
        versions=versions(),
        command=command,
        messages=run.model.messages,
    )
    for message in run.model.messages:
        run.say(message)
    run.say(
        f"{run.train_set.name}: {count:,} training images, {len(run.val_set):,} for validation, "
        f"{len(run.train_set.categories)} categories, {known:.1%} of labels known, "
        f"{counts.positive / count:.2f} known positives an image"
    )
    run.say(
        f"{run.config.model}, {run.config.mix}: {run.config.epochs} epochs of {run.steps} steps on {device}, "
        f"{torch.get_num_threads()} threads; everything goes to {run.folder}"
    )


def _images_to_do(run: Run) -> tuple[int, int]:
    """In the whole run, and done so far: for the bar."""
    config, sizes = run.config, (len(run.train_set), len(run.val_set))
    total, done = (images_to_do(config, *sizes, epochs, run.world.size) for epochs in (config.epochs, run.closed))
    begun = (run.step - run.closed * run.steps) * config.batch_size * run.world.size
    return total, done + min(begun, len(run.train_set))


def _finish(run: Run) -> dict[str, Any]:
    """Write down the weights that are kept and what they predict."""
    lines = [line for line in read_log(run.folder) if line["kind"] == "epoch"] if run.world.main else []
    model, epoch = run.shown, run.closed
    run.world.wait()
    if run.config.keep == "best":
        model.load_state_dict(read_checkpoint(run.folder / "best.pt")["ema"])
        epoch = run.best_epoch
    if run.latest is not None and run.latest[0] == epoch:
        _, metrics, logits, rows = run.latest
    else:
        metrics, logits, rows = run.evaluate(model)
    if run.world.main:
        write_model(run.folder / "model.safetensors", model, run.train_set.categories)
        write_predictions(run.folder / "predictions.npz", logits, rows, run.val_set)
    run.world.wait()
    last = lines[-1]["mAP"] if lines else math.nan
    f1 = metrics.threshold
    run.say(
        f"kept epoch {epoch} ({run.config.keep}): mAP {metrics.mAP:.2%}, CF1 {f1.CF1:.2%}, OF1 {f1.OF1:.2%} "
        f"on {len(rows):,} images"
    )
    if metrics.left_out:
        names = ", ".join(run.val_set.categories[c] for c in metrics.left_out[:10])
        more = f" and {len(metrics.left_out) - 10} more" if len(metrics.left_out) > 10 else ""
        run.say(f"left out of mAP, no known positive to validate on: {names}{more}")
    return {
        "kept": run.config.keep,
        "epoch": epoch,
        "mAP": metrics.mAP,
        "mAP_last": last,
        "mAP_best": run.best,
    }


# ------------------------------------------------------------------------------------------------------- a finished run
def load_run(
    folder: str | Path, weights: str | None = None, **options: Any
) -> tuple[Config, Classifier, list[str], Path]:
    """Options, model, categories and weights file of a finished run.

    weights: "cft" or "model"; unless given, the fine-tuned ones if there are any.
    options: of `Config`, in place of those of the run.
    """
    folder = Path(folder)
    config = read_config(folder)
    names = [f"{weights}.safetensors"] if weights else ["cft.safetensors", "model.safetensors"]
    file = next((folder / name for name in names if (folder / name).exists()), None)
    if file is None:
        raise RunError(
            f"{folder}: has no {names[-1]}: the run has not ended; go on with: gpu-logicmix fit --out {folder} --resume"
        )
    try:
        with safe_open(file, "pt") as opened:
            categories = json.loads((opened.metadata() or {})["categories"])
    except Exception as error:  # safetensors has an exception class of its own for a damaged file
        raise RunError(f"{file}: damaged ({str(error).splitlines()[0]})") from error
    for name, value in {"freeze": 0, **options}.items():
        setattr(config, name, value)
    return config, make_model(config, len(categories), weights=file).eval(), categories, file


class Evaluation(NamedTuple):
    metrics: Metrics
    categories: list[str]
    images: int
    weights: Path


def evaluate_run(
    folder: str | Path,
    data: str | None = None,
    split: str = "val",
    weights: str | None = None,
    *,
    console: Console | None = None,
    **options: Any,
) -> Evaluation:
    """How good a finished run is on the data it was validated on, or on others with the same categories.

    weights: "model", or "cft": the fine-tuned ones; these, unless given, if there are any.
    options: of `Config` that need not be those of the run (device, threads, batch_size, workers, cache, option ...).
    """
    config, model, categories, file = load_run(folder, weights, **options)
    with joined_world(config.device, config.threads) as world:
        console = (console or Console()) if world.main else Console(quiet=True)
        dataset = open_val(config) if data is None else open_labeled(config, data, split)
        if dataset.categories != categories:
            raise RunError(f"{data or config.data}: its categories are not those that {file} was trained for")
        model = model.to(world.device, memory_format=torch.channels_last)
        with progress_bar(console, len(dataset)) as tick:
            logits, rows = predict_rows(model, dataset, config, world, lambda images: tick(images * world.size))
        metrics = evaluate(logits[rows], torch.from_numpy(dataset.labels)[rows])
    return Evaluation(metrics, categories, len(rows), file)


def predict(
    folder: str | Path,
    paths: Sequence[str | Path],
    weights: str | None = None,
    *,
    console: Console | None = None,
    **options: Any,
) -> tuple[list[str], list[str], Tensor, list[str]]:
    """Probabilities [N, C] that a finished run gives images: names of the images, categories, probabilities, and a line
    for each image that could not be read.

    paths: of image files, and of folders in which all images are taken.
    """
    config, model, categories, _ = load_run(folder, weights, **options)
    files: list[str] = []
    for path in map(Path, paths):
        if path.is_dir():
            listing = list_folder(path, "")
            files += [str(path / name) for name in listing.paths]
        elif path.exists():
            files.append(str(path))
        else:
            raise DataError(f"{path}: no such file or folder")
    source = FileSource(Path(), files, config.size)
    nothing = np.zeros((len(files), 0), dtype=np.int8)
    dataset = ImageDataset("images", "to predict", source, nothing, [], files, "skip")
    with joined_world(config.device, config.threads) as world:
        console = (console or Console()) if world.main else Console(quiet=True)
        model = model.to(world.device, memory_format=torch.channels_last)
        with progress_bar(console, len(files)) as tick:
            logits, rows = predict_rows(model, dataset, config, world, lambda images: tick(images * world.size))
    return [files[row] for row in rows], categories, logits[rows].sigmoid(), dataset.bad_images()


def default_name(config: Config) -> str:
    """Of a run's folder. The same options give the same name, so that a run is found again."""
    known = config.protocol if config.known is None else f"{config.known:g}"
    known = "full" if known == "uniform" else known
    return f"{config.data.partition(':')[0]}-{known}-{config.mix}-{config.seed}"


def fine_tune(
    folder: str | Path,
    *,
    world: World | None = None,
    console: Console | None = None,
    run: Run | None = None,
    options: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Category-wise fine-tuning of the heads of a finished run, on known labels alone. Writes cft.json, the new weights
    and what they predict; the old ones stay. Returns what is in cft.json."""
    folder = Path(folder)
    console = console or Console()
    config, model, categories, _ = load_run(folder, "model", **options or {})
    with contextlib.nullcontext(world) if world else joined_world(config.device, config.threads) as world:
        return _fine_tune(folder, config, model, categories, world, console, run)


def _fine_tune(
    folder: Path,
    config: Config,
    model: Classifier,
    categories: list[str],
    world: World,
    console: Console,
    run: Run | None,
) -> dict[str, Any]:
    train = run.train_set if run is not None else open_train(config)[0]
    val = run.val_set if run is not None else open_val(config)
    model = model.to(world.device, memory_format=torch.channels_last)
    began = time.perf_counter()
    with (
        progress_bar(console, len(train) + len(val), "features")
        if run is None
        else contextlib.nullcontext(lambda n: None) as tick
    ):
        features, rows = predict_rows(model.embed, train, config, world, tick)
        val_features, val_rows = predict_rows(model.embed, val, config, world, tick)
    if not world.main:
        return {}
    head = model.classifier
    with console.status("fine-tuning the heads …"):
        weight, bias, record = category_wise_fine_tune(
            features[rows],
            train.labels[rows],
            head.weight.detach().cpu(),
            head.bias.detach().cpu(),
            method=config.cft_method,
            epochs=config.cft_epochs,
            lr=config.cft_lr,
            seed=config.seed,
            evaluation=(val_features[val_rows], val.labels[val_rows]),
        )
    model.set_classifier(weight, bias)
    write_model(folder / "cft.safetensors", model, categories)
    write_predictions(folder / "cft_predictions.npz", torch.addmm(bias, val_features, weight.t()), val_rows, val)
    s = record.summary()
    result = {
        "summary": s,
        "ap_before": record.ap_before.tolist(),
        "ap_after": record.ap_after.tolist(),
        "evaluation_before": record.evaluation_before.tolist(),
        "evaluation_after": record.evaluation_after.tolist(),
        "best_epoch": record.best_epoch.tolist(),
        "skipped": {str(k): v for k, v in record.skipped.items()},
        "seconds": time.perf_counter() - began,
        "weights": "cft.safetensors",
        "mAP": s["evaluation_map_after"],
    }
    write_whole(folder / "cft.json", json.dumps(no_nan(result)))
    console.print(
        f"fine-tuned {s['changed']} of {s['categories']} heads in {result['seconds']:.0f} s ({s['skipped']} with too "
        f"few known labels left alone): mAP on held-out known labels {s['held_out_map_before']:.2%} → "
        f"{s['held_out_map_after']:.2%}, on validation {s['evaluation_map_before']:.2%} → "
        f"{s['evaluation_map_after']:.2%}",
        highlight=False,
        soft_wrap=True,
    )
    return result
