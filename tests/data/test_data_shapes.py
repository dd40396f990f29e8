"""Drawn shapes: always the same, whoever asks and in which order."""

import numpy as np
import pytest
import remembered
import torch

from gpu_logicmix.data import DataError, open_dataset
from gpu_logicmix.data.shapes import CATEGORIES, FREQUENCY, SCENES, ShapesSource, draw_picture


@pytest.fixture(autouse=True)
def _drawn_anew(monkeypatch):
    monkeypatch.setattr(ShapesSource, "read", remembered.draw)


def test_pictures_depend_on_seed_split_and_index_alone():
    dataset = open_dataset("shapes", size=32, count=30)
    again = open_dataset("shapes", size=32, count=50)
    assert np.array_equal(again.labels[:30], dataset.labels)
    backwards = again[list(range(29, -1, -1))][0]
    assert torch.equal(backwards.flip(0), dataset[list(range(30))][0])
    for other in (open_dataset("shapes", "val", 32), open_dataset("shapes", size=32, seed=1)):
        assert not np.array_equal(other.labels[:30], dataset.labels)
        assert not torch.equal(other[0][0], dataset[0][0])
    assert (len(open_dataset("shapes")), len(open_dataset("shapes", "val"))) == (4000, 1000)
    assert open_dataset("shapes").size == 64


def test_frequencies_and_company():
    labels = open_dataset("shapes", count=100_000).labels
    assert np.abs(labels.mean(0) - FREQUENCY).max() < 0.005
    assert np.allclose(SCENES.mean(0), 1)
    assert (FREQUENCY * SCENES).max() < 1
    together = np.corrcoef(labels.T)
    ring, crescent, checks, hexagon, zigzag = (
        CATEGORIES.index(n) for n in ("ring", "crescent", "checks", "hexagon", "zigzag")
    )
    assert together[ring, crescent] > 0.03
    assert together[hexagon, zigzag] > 0.03
    assert together[checks, crescent] < 0


@pytest.mark.parametrize("category", range(len(CATEGORIES)))
def test_each_category_is_to_be_seen(category):
    """The same picture with and without the thing differs in an area worth the name."""
    areas = []
    for seed in range(10):
        without = draw_picture(np.random.default_rng(seed), np.array([], dtype=int), 64).astype(int)
        with_it = draw_picture(np.random.default_rng(seed), np.array([category]), 64).astype(int)
        areas.append((np.abs(with_it - without).max(2) > 30).mean())
    assert np.median(areas) > 0.01


@pytest.mark.parametrize("size", [16, 33, 200])
def test_any_size(size):
    dataset = open_dataset("shapes", size=size, count=3)
    assert dataset[[0, 1, 2]][0].shape == (3, 3, size, size)


def test_mistakes():
    for options, match in (
        ({"count": 0}, "count='0'"),
        ({"count": "many"}, "count='many': must be a whole number"),
        ({"seed": -1}, "seed='-1'"),
        ({"count": "99999999999"}, "count='99999999999': must be a whole number from 1 to 10,000,000"),
        ({"count": "9" * 5000}, "count='9999"),
        ({"seed": 10**30}, "seed="),
        ({"count": "²"}, "must be a whole number"),
        ({"size": 8}, "below 16"),
        ({"split": "all"}, "split='all'"),
    ):
        with pytest.raises(DataError, match=match):
            open_dataset("shapes", **options)
