"""One run, from start to end: open, build, train epoch by epoch, evaluate, label, save.

    gpu-logicmix fit coco:/data/coco --known 0.1 --out runs/coco-10
    gpu-logicmix fit --out runs/coco-10 --resume
    torchrun --nproc_per_node 4 train.py fit coco:/data/coco --known 0.1 --out runs/coco-10

From Python: `fit(Config(data="coco:/data/coco", known=0.1), "runs/coco-10")`.

How a run can resume at the exact step after a kill: everything drawn at random in a step comes from a generator seeded
with (seed, step, rank), and the order of the samples is a function of (seed, epoch). So the number of steps taken *is*
the state of all random streams and of the sampler. A checkpoint is that number, and whatever learns: weights, their
moving average, optimiser, scheduler, scaler, pseudo-labels, the states of loss and mix.

How several processes give what one would: each rank takes its share of the same global batch, the loss is a sum, and
the gradient is divided by what was counted in the whole update, over all ranks and accumulated steps.

No step makes the host wait for the device. Sums are kept there and read at logging points; a non-finite loss is noted
there too, with its step, and looked for at logging points and before anything is saved.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor

from gpu_logicmix.errors import DataError, shown
from gpu_logicmix.files import write_whole
from gpu_logicmix.losses.base import Batch, LossSum
from gpu_logicmix.models.classifier import Classifier
from gpu_logicmix.progress import progress_bar
from gpu_logicmix.train import runlog
from gpu_logicmix.train.average import WeightAverage
from gpu_logicmix.train.batch import moved, padded, seed_step
from gpu_logicmix.train.build import (
    amp_dtype,
    make_augment,
    make_loss,
    make_model,
    make_net,
    make_optimizer,
    make_scheduler,
    make_table,
    make_train_loader,
    prepare_methods,
)
from gpu_logicmix.train.checkpoint import restore, save_checkpoint, state_digest, state_of, write_checkpoint
from gpu_logicmix.train.config import Config, changed, located, to_toml
from gpu_logicmix.train.distributed import World, joined_world
from gpu_logicmix.train.finish import close_run, opened_folder
from gpu_logicmix.train.inputs import open_train, open_tune, open_val
from gpu_logicmix.train.predict import PlainLoaders, autocast, evaluate_on, plain_samples, predicted, val_loss
from gpu_logicmix.train.signals import StopSignals, unbreakable
from gpu_logicmix.train.sums import Sums, check_finite

Tick = Callable[[int], None]  # told of images that were worked through


def fit(
    config: Config,
    folder: str | Path,
    *,
    resume: str = "never",
    command: str = "",
    console: Console | None = None,
    tick: Tick | None = None,
) -> dict[str, Any]:
    """Train, evaluate each epoch, keep the best or last, fine-tune the heads. Returns the last line of the log.

    folder: of the run. Everything goes there.
    resume: "never": the folder must not have a run; "must": resume the one that is there; "auto": resume, or start.
    tick: is told of images that were worked through, in place of a progress bar of its own.
    """
    folder, config = Path(folder), located(config)
    with contextlib.ExitStack() as stack:
        world = stack.enter_context(joined_world(config.device, config.threads))
        stop = stack.enter_context(StopSignals(folder))
        console = (console or Console()) if world.main else Console(quiet=True)
        stack.enter_context(unbreakable(console))

        def say(text: str) -> None:
            console.print(shown(text), highlight=False, soft_wrap=True)

        state, end = stack.enter_context(opened_folder(folder, config, world, resume, say))
        if end is not None:
            say(f"{folder}: this run has ended")
            return end
        with console.status("opening the data and building the model …"):
            training = Training(config, folder, world, say)
        log = runlog.Log(folder, world.main, config.tensorboard, config.log_to or (), changed(config))
        if state is not None:
            restore(training, state)
            log.rewind(training.step, training.closed)
            epoch = training.step // training.steps + 1
            words = f"epoch {epoch} of {config.epochs}" if epoch <= config.epochs else "after the last epoch"
            say(f"resuming at step {training.step} ({words})")
        if world.main:
            write_whole(folder / "config.toml", to_toml(config))
        runlog.log_start(training, log, command)
        total, done = runlog.images_to_do(training)
        own = progress_bar(total, "training", done=done, console=console) if tick is None else None
        with own or contextlib.nullcontext(tick) as bar:
            stop.patient = True
            while training.closed < config.epochs:
                if training.step < (training.closed + 1) * training.steps:
                    training.train_epoch(log, bar, stop)
                training.close_epoch(log, bar, stop)
                if signum := world.maximum(stop.signum):
                    stop.stop(signum, f"stopped after epoch {training.closed}", saved=True)
            stop.patient = False
        return close_run(training, log, console)


class Training:
    """A model in training: what it consists of, and where it stands (`step`, `closed`)."""

    def __init__(self, config: Config, folder: Path, world: World, say: Callable[[str], None]) -> None:
        self.config, self.folder, self.world, self.say = config, folder, world, say
        device = world.device
        self.train_set, full = open_train(config)
        self.val_set, self.tune_set = open_val(config), open_tune(config)
        if self.val_set.categories != self.train_set.categories:
            raise DataError(f"{config.val or config.data}: its categories are not those of {config.data} to train on")
        self.fingerprint = self.train_set.fingerprint()
        self.judged_by = [part.fingerprint() for part in (self.val_set, self.tune_set) if part is not None]
        torch.manual_seed(config.seed)
        self.model = make_model(config, len(self.train_set.categories))
        self.loss = make_loss(config)
        self.unused_loss = prepare_methods(config, self.model, self.loss, self.train_set)
        self.model = self.model.to(device, memory_format=torch.channels_last)
        self.loss = self.loss.to(device)
        self.ema = WeightAverage(self.model, config.ema_decay, warmup=config.ema_warmup) if config.ema_decay else None
        self.augment = make_augment(config, self.model, device)
        self.table = make_table(config, self.train_set, full, device, self.loss, self.model.head)
        self.loader = make_train_loader(config, self.train_set, world)
        self.plain = PlainLoaders(config, world)
        self.steps = len(self.loader.sampler)  # in an epoch
        self.optimizer = make_optimizer(config, self.model, device)
        self.scheduler = make_scheduler(config, self.optimizer, self.steps)
        self.scaler = torch.amp.GradScaler(device.type, enabled=amp_dtype(config, device) is torch.float16)
        self.net = make_net(config, self.model, world)
        self.params = [p for p in self.model.parameters() if p.requires_grad]

        self.step = 0  # batches trained on
        self.updates = 0  # of the weights
        self.closed = 0  # epochs that are over, with all that is done at their end
        self.best, self.best_epoch, self.best_digest = -math.inf, 0, ""
        self.seconds = self.waited = 0.0  # of training in this epoch, and of these waiting for data
        self.elapsed, self.started = 0.0, time.perf_counter()  # before this process began, and when it did
        self.latest: tuple | None = None  # epoch, metrics, logits and rows of the last evaluation
        self.sums = Sums(device)
        self.scale = float(config.batch_size * len(self.train_set.categories))

    @property
    def shown(self) -> Classifier:
        """The model that is evaluated: the moving average."""
        return self.model if self.ema is None else self.ema.module

    def time(self) -> float:
        return self.elapsed + time.perf_counter() - self.started

    # --------------------------------------------------------------------------------------------------------- training
    def train_epoch(self, log: runlog.Log, tick: Tick, stop: StopSignals) -> None:
        config, world = self.config, self.world
        epoch, start = divmod(self.step, self.steps)
        self.loader.sampler.set_epoch(epoch, start)
        self.augment.set_epoch(epoch)
        self.loss.set_epoch(epoch, config.epochs)
        if start == 0:
            self.model.head.begin_epoch(epoch, config.epochs, lambda: plain_samples(self))
        self.model.train()
        batches = moved(self.loader, world.device)
        mark = self.step, self.seconds, self.waited
        saved = time.perf_counter()
        for at in range(start + 1, self.steps + 1):
            began = time.perf_counter()
            images, targets, index = next(batches)
            self.waited += time.perf_counter() - began
            update = at % config.accumulate == 0 or at == self.steps
            self.batch(images, targets, index, update=update)
            tick(len(images) * world.size)
            logged = self.step % config.log_every == 0 or at == self.steps
            if logged:
                check_finite(self, weights=at == self.steps)  # waits for the device, which counts
            self.seconds += time.perf_counter() - began
            if logged:
                runlog.log_step(self, log, *mark)
                mark = self.step, self.seconds, self.waited
            if not update:
                continue
            # Whether to stop or save: all processes have to agree.
            due = time.perf_counter() - saved > config.save_every * 60 and at < self.steps
            if wanted := world.maximum(2 * stop.signum + due):
                check_finite(self, weights=True)
                self.save()
                saved = time.perf_counter()
                if wanted > 1:
                    stop.stop(wanted // 2, f"stopped at step {self.step}", saved=True)

    def batch(self, images: Tensor, targets: Tensor, index: Tensor, *, update: bool) -> None:
        """One step: augment, forward, backward, and the update of the weights if it is due. No host sync."""
        seed_step(self.config.seed, self.step, self.world.rank)
        mixed, views = None, [images]
        if len(images):
            if self.table is not None:
                targets = self.table.lookup(index)
            views, targets, mixed = self.augment(images, targets)
        views, parts, share = padded(views, (targets, index, mixed))
        batch = Batch(*parts, self.step // self.steps)
        together = contextlib.nullcontext() if update or self.world.size == 1 else self.net.no_sync()
        with together:
            with autocast(self.config, self.world.device):
                loss = self.model.head.training_step(self.net, views, batch, self.loss)
            if share != 1:
                loss = LossSum(loss.total * share, loss.count * share)
            self.scaler.scale(loss.total / self.scale).backward()
        self.step += 1
        self.sums.add(loss, self.step)
        if update:
            self._update()

    def _update(self) -> None:
        self.scaler.unscale_(self.optimizer)
        # DDP gives the mean over the processes of the gradient of (sum / scale).
        factor = self.scale * self.world.size / self.world.sum_(self.sums.counted).clamp(min=1)
        torch._foreach_mul_([p.grad for p in self.params if p.grad is not None], factor)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()
        self.scheduler.step()
        self.updates += 1
        self.sums.begin_update()
        if self.ema is not None:
            self.ema.update(self.model, self.updates)

    # ------------------------------------------------------------------------------------------------- end of an epoch
    def close_epoch(self, log: runlog.Log, tick: Tick, stop: StopSignals) -> None:
        """Evaluate, label, note what came of it, save."""
        epoch = self.closed + 1

        def tick_or_stop(images: int) -> None:
            tick(images * self.world.size)
            if stop.signum and self.world.size == 1:
                self.save()  # `closed` says that the end of this epoch is still to be worked through
                stop.stop(stop.signum, f"stopped at step {self.step}", saved=True)

        self.world.share_buffers(self.shown)  # each process has seen other images
        due = epoch % self.config.eval_every == 0 or epoch == self.config.epochs
        scores = self._scores(tick_or_stop) if due else {}
        line = runlog.epoch_line(self, epoch, scores)
        labelled = ""
        if self.config.cl and self.config.cl_start <= epoch < self.config.epochs:
            labelled = self._label(log, epoch, tick_or_stop)
        log.write("epoch", **line)
        if due:
            self._keep_best(epoch, scores.get("tune_mAP", scores["mAP"]))
        self.closed, self.seconds, self.waited = epoch, 0.0, 0.0
        self.sums.begin_epoch()
        self.save()
        self.say(runlog.epoch_words(self.config, line) + labelled)

    def _scores(self, tick: Tick) -> dict[str, float]:
        """For the log. What they come from is kept, in case these are the weights that will be."""
        self.latest = self.closed + 1, *evaluate_on(self, self.shown, self.val_set, tick)
        _, metrics, logits, rows = self.latest
        scores = {"val_loss": val_loss(self, logits, rows), **metrics.as_dict()}
        if self.tune_set is not None:
            scores["tune_mAP"] = evaluate_on(self, self.shown, self.tune_set, tick)[0].mAP
        return scores

    def _label(self, log: runlog.Log, epoch: int, tick: Tick) -> str:
        """New pseudo-labels from un-augmented images. Each process predicts its share, straight into the table."""
        self.table.begin_update()
        self.shown.eval()
        loader = self.plain.of(self.train_set)
        for index, logits in predicted(self.shown, self.train_set, self.config, self.world, loader):
            self.table.update(index, logits)
            tick(len(index))
        self.table.end_update()
        return runlog.log_labels(log, epoch, self.table)

    def _keep_best(self, epoch: int, score: float) -> None:
        # The last is as good as any where there is nothing to compare by: no category has a known positive.
        if score <= self.best:
            return
        weights = self.shown.state_dict()
        self.best, self.best_epoch, self.best_digest = score, epoch, state_digest(weights)
        if self.world.main:
            best = {"ema": weights, "step": self.step, "epoch": epoch, "mAP": self.best}
            write_checkpoint(self.folder / "best.pt", best)

    def save(self) -> None:
        totals = self.sums.of_epoch(self.world)
        if self.table is not None:
            self.table.synchronize()  # what other processes have marked in this epoch
        state = state_of(self) | {"totals": totals}
        if self.world.main:
            save_checkpoint(self.folder, state)
