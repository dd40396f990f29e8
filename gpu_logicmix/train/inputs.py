"""The images and labels of a run: which it trains on, validates on and tunes by."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from gpu_logicmix.data import DataError, ImageDataset, cache_dataset, open_dataset
from gpu_logicmix.data.sparse import SparseLabels
from gpu_logicmix.errors import RunError
from gpu_logicmix.labels import LabelCounts, label_counts
from gpu_logicmix.train.config import Config, dataset_options, hide

MATRIX_LIMIT = 2 * 10**9  # labels, of a byte each


def open_labeled(config: Config, spec: str, split: str) -> ImageDataset:
    """A dataset as the run wants it: size, options, cache. It must have images and labels."""
    options = dataset_options(config.option)
    if spec.partition(":")[0] != config.data.partition(":")[0]:
        options = {}  # they are those of another format
    dataset = open_dataset(spec, split, config.size, on_bad_image=config.on_bad_image, **options)
    if not len(dataset):
        raise DataError(f"{spec} {split}: has no images")
    if not dataset.categories:
        raise DataError(f"{spec}: has no labels to train with")
    return cache_dataset(dataset, config.cache) if config.cache else dataset


class Rows(NamedTuple):
    """Of the training set: to train on, to validate on in place of the val split, to choose the best epoch by."""

    train: np.ndarray
    held_out: np.ndarray
    tune: np.ndarray


def _rows(config: Config, count: int) -> Rows:
    """None of them depends on the seed of the run. Images to tune by come from the end of the order: with
    `images=20_000` of 40,000 the training images are the same with and without them."""
    order = torch.randperm(count, generator=torch.Generator().manual_seed(0)).numpy()
    held = round(count * config.holdout)
    if config.holdout and not 0 < held < count:
        raise DataError(f"holdout={config.holdout:g}: of {count} images that are {held}; both parts need some")
    left = count - held - config.tune_images
    if left < 1:
        raise DataError(f"tune_images={config.tune_images}: {count - held} training images leave none to train on")
    return Rows(
        np.sort(order[held : held + left][: config.images]), np.sort(order[:held]), np.sort(order[held + left :])
    )


def label_counts_of(dataset: ImageDataset, dim: int | None = None) -> LabelCounts:
    """`label_counts`, however the labels are stored."""
    labels = dataset.labels
    return labels.counts(dim) if isinstance(labels, SparseLabels) else label_counts(labels, dim)


def matrix_of(labels: np.ndarray | SparseLabels, what: str) -> np.ndarray:
    """Labels as a matrix, for what needs one: if it fits."""
    if not isinstance(labels, SparseLabels):
        return labels
    if labels.size > MATRIX_LIMIT:
        raise RunError(
            f"{what} needs all labels as a matrix, which {len(labels):,} x {labels.shape[1]:,} is too large for"
        )
    return labels.dense()


def open_train(config: Config) -> tuple[ImageDataset, np.ndarray | SparseLabels]:
    """The training images with the labels that are known, and all their labels. Which labels are hidden does not depend
    on how many images are used."""
    dataset = open_labeled(config, config.data, "train")
    full = dataset.labels
    dataset.labels, _ = hide(full, config.known, config.protocol, config.seed)
    rows = _rows(config, len(dataset)).train
    if len(rows) < len(dataset):
        dataset, full = dataset.take(rows), full.take(rows) if isinstance(full, SparseLabels) else full[rows]
    if not label_counts_of(dataset).positive:
        raise DataError(
            f"{config.data}: of the labels of {len(dataset):,} images none is known to be present, there is nothing to "
            "learn from; a larger --known or more images may help"
        )
    return dataset, full


def open_val(config: Config) -> ImageDataset:
    """The images to validate on, with all their labels."""
    if config.holdout:
        dataset = open_labeled(config, config.data, "train")
        return dataset.take(_rows(config, len(dataset)).held_out)
    return open_labeled(config, config.val or config.data, "val")


def open_tune(config: Config) -> ImageDataset | None:
    """The training images to choose the best epoch by, with the labels of theirs that are known; None if there are
    none."""
    if not config.tune_images:
        return None
    dataset = open_labeled(config, config.data, "train")
    dataset.labels, _ = hide(dataset.labels, config.known, config.protocol, config.seed)
    return dataset.take(_rows(config, len(dataset)).tune)


def images_to_do(config: Config, train: int, val: int, epochs: int, world: int = 1) -> int:
    """Images that `epochs` epochs of a run work through: to train on, to validate, to label. For progress bars."""
    size = config.batch_size * world
    trained = train // size * size if train >= size else train
    judged = epochs // config.eval_every + (epochs == config.epochs and epochs % config.eval_every > 0)
    labelled = max(0, min(epochs, config.epochs - 1) - config.cl_start + 1) if config.cl else 0
    return epochs * trained + judged * (val + config.tune_images) + labelled * train
