"""What a run is made of, each part from the options: model, loss, optimiser, schedule, pseudo-labels."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from gpu_logicmix.curriculum import CurriculumLabels
from gpu_logicmix.data import ImageDataset, make_loader
from gpu_logicmix.data.sparse import SparseLabels
from gpu_logicmix.errors import RunError
from gpu_logicmix.losses.base import LOSSES, Loss
from gpu_logicmix.methods.base import Head
from gpu_logicmix.models.classifier import Classifier, build_model
from gpu_logicmix.train import inputs
from gpu_logicmix.train.batch import Augment
from gpu_logicmix.train.config import Config
from gpu_logicmix.train.distributed import World
from gpu_logicmix.train.inputs import matrix_of
from gpu_logicmix.train.pseudo import SELECTIONS, SparseCurriculum


def make_model(config: Config, categories: int, weights: str | Path | None = None) -> Classifier:
    """The model of a run; with `weights` as they are in that file."""
    if weights is None and config.init is not None:
        weights = Path(config.init) / "model.safetensors"
        if not weights.exists():
            raise RunError(f"init={config.init!r}: not a finished run (it has no model.safetensors)")
    if weights is None and config.weights not in ("hub", "none"):
        weights = config.weights
    return build_model(
        config.model,
        categories,
        head=config.head,
        head_options=config.head_option or (),
        weights=weights,
        pretrained=weights is None and config.weights == "hub",
        normalisation=config.normalisation,
        image_size=config.size,
        freeze=config.freeze,
        batch_norm=config.batch_norm,
    )


def make_loss(config: Config, reduction: str = "mean") -> Loss:
    return LOSSES.make(config.loss, config.loss_option, reduction=reduction)


def make_table(
    config: Config, train_set: ImageDataset, full: Any, device: torch.device, *methods: Any
) -> CurriculumLabels | SparseCurriculum | None:
    """The pseudo-labels of a run, where curriculum labeling or a method of the run writes any."""
    writers = [method for method in methods if method.writes_labels]
    if not config.cl and not writers:
        return None
    simulated = config.known is not None or config.protocol == "single-positive"
    large = isinstance(train_set.labels, SparseLabels) and train_set.labels.size > inputs.MATRIX_LIMIT
    if large and not writers and config.cl_select in SELECTIONS:
        options = {"select": config.cl_select, "full": full if simulated else None}
        return SparseCurriculum(train_set.labels, config.theta_pos, config.theta_neg, **options).to(device)
    what = "curriculum labeling" if config.cl else f"loss {config.loss} or head {config.head}"
    table = CurriculumLabels(
        matrix_of(train_set.labels, f"{what} (--no-cl trains without it, --cl-select score needs none)"),
        config.theta_pos,
        config.theta_neg,
        select=config.cl_select,
        fraction=config.cl_fraction,
        full=matrix_of(full, what) if simulated else None,
    )
    table = table.to(device)
    for method in writers:
        method.__dict__["table"] = table  # not `method.table =`: it would become a submodule, behind the class's None
    return table


def make_optimizer(config: Config, model: Classifier, device: torch.device) -> torch.optim.Optimizer:
    groups = model.param_groups(config.lr, config.backbone_lr, config.weight_decay)
    kind = torch.optim.Adam if config.optimizer == "adam" else torch.optim.AdamW
    return kind(groups, fused=True if device.type == "cuda" else None)


def make_scheduler(
    config: Config, optimizer: torch.optim.Optimizer, steps: int
) -> torch.optim.lr_scheduler.LRScheduler:
    """steps: batches in an epoch. One step of the scheduler is one update of the weights."""
    updates = config.epochs * -(-steps // config.accumulate)
    if config.schedule in ("onecycle", "authors"):
        # The authors' released code builds 1cycle for one step a batch and takes one an update: of the cycle only the
        # first 1/accumulate runs, and the rate hardly falls.
        length = config.epochs * steps if config.schedule == "authors" else updates
        rates = [group["lr"] for group in optimizer.param_groups]
        # One more than there are updates, so that the last one has a rate above 0; theirs never gets there.
        total = max(length, 2) + (config.schedule == "onecycle")
        # 1cycle divides by the length of both its phases, counted in updates less one.
        rise = min(max(config.warmup, 1.5 / total), 1 - 1.5 / total)
        return torch.optim.lr_scheduler.OneCycleLR(optimizer, rates, total_steps=total, pct_start=rise)
    if config.schedule == "step":
        per_epoch = -(-steps // config.accumulate)
        fall = config.lr_step * per_epoch
        return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda update: 0.1 if update >= fall else 1.0)
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda update: 1.0)


def amp_dtype(config: Config, device: torch.device) -> torch.dtype:
    """What convolutions and linear layers compute in."""
    if config.amp == "auto" and device.type == "cuda":
        # GPUs before Ampere emulate bfloat16, slowly.
        return torch.bfloat16 if torch.cuda.is_bf16_supported(including_emulation=False) else torch.float16
    return {"bf16": torch.bfloat16, "fp16": torch.float16}.get(config.amp, torch.float32)


def make_augment(config: Config, model: Classifier, device: torch.device, one_pass: bool | None = None) -> Augment:
    """On CUDA (or with `one_pass`) the last pass of the augmentation normalises and casts, and the model no longer does
    in training."""
    model.normalised_in_training = device.type == "cuda" if one_pass is None else one_pass
    finish = None
    if model.normalised_in_training:
        normalize = tuple(part.flatten().tolist() for part in (model.mean, model.std)) if model.normalises else None
        # A head with a step of its own may compute with the images.
        plain = type(model.head).training_step is Head.training_step
        finish = {"normalize": normalize, "out_dtype": amp_dtype(config, device) if plain else torch.float32}
    return Augment(config, model.head.views, finish).to(device)


def prepare_methods(config: Config, model: Classifier, loss: Loss, train_set: ImageDataset) -> Loss:
    """Let loss and head see the known labels before the first step: priors, graphs. Returns a copy of the loss as it is
    then, for validation: what a loss learns in training would make its values incomparable."""
    loss.together = True  # one step of all processes is one call on each
    if type(loss).prepare is not Loss.prepare:
        loss.prepare(matrix_of(train_set.labels, f"loss {config.loss}"), train_set.categories)
    vectors = None
    if config.word_vectors is not None and model.head.uses_word_vectors:
        from gpu_logicmix.models.word_vectors import read_word_vectors

        vectors = read_word_vectors(config.word_vectors, train_set.categories)
    if type(model.head).prepare is not Head.prepare:
        model.head.prepare(matrix_of(train_set.labels, f"head {config.head}"), train_set.categories, vectors)
    model.messages += getattr(model.head, "messages", [])
    unused = copy.deepcopy(loss)
    unused.together = False  # each process has all of the validation set
    return unused


def make_train_loader(config: Config, train_set: ImageDataset, world: World) -> Any:
    """A short last batch is dropped: it would weigh each of its samples more, and may be too short for batch norm."""
    return make_loader(
        train_set,
        config.batch_size,
        shuffle=True,
        seed=config.seed,
        drop_last=len(train_set) >= config.batch_size * world.size,
        workers=config.workers,
        rank=world.rank,
        world=world.size,
    )


def make_net(config: Config, model: Classifier, world: World) -> nn.Module:
    """The model as a step calls it: compiled, and with its gradients averaged over the processes."""
    net = torch.compile(model) if config.compile else model
    if world.size == 1:
        return net
    ids = [world.device] if world.device.type == "cuda" else None
    unused = model.head.leaves_parameters_unused
    return DistributedDataParallel(net, device_ids=ids, find_unused_parameters=unused)
