"""Pictures and plots: sizes, colours, and text that fits."""

import numpy as np
import pytest
import torch

from gpu_logicmix import GPULogicMix, label_counts
from gpu_logicmix.report import (
    PRESENT_TEXT,
    UNKNOWN_TEXT,
    Share,
    Step,
    _font,
    _label_lines,
    _wrap,
    mixed_labels,
    preview_picture,
    stats_figure,
)

NAMES = [f"category {c}" for c in range(12)]


def has_colour(picture, colour):
    rgb = tuple(int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return (np.asarray(picture) == rgb).all(-1).sum() > 20


def test_preview_shows_images_and_labels():
    images = torch.randint(0, 256, (3, 3, 20, 20), dtype=torch.uint8)
    targets = torch.full((3, 12), -1, dtype=torch.int8)
    targets[:, 0], targets[:, 1] = 1, 0
    steps = [
        Step("original", images, targets, ["1", "2", "3"]),
        Step("after", images.float() / 255, targets, ["", "x", ""]),
    ]
    picture = preview_picture(steps, NAMES, cell=100)
    assert picture.width == 2 * 20 + 3 * 100 + 2 * 14
    assert has_colour(picture, PRESENT_TEXT)
    assert has_colour(picture, UNKNOWN_TEXT)
    plain = preview_picture([Step("original", images, targets[:, :0], ["a"] * 3)], [])
    assert plain.width > 0


def test_label_lines():
    targets = torch.tensor([1, 0, -1, -1, 1, 0, 0, 0, 0, 0, 0, 0])
    lines = _label_lines(targets, NAMES, "1: a.jpg", 400)
    assert lines == [
        ("1: a.jpg", "black"),
        ("category 0, category 4", PRESENT_TEXT),
        ("2 unknown: category 2, category 3", UNKNOWN_TEXT),
        ("8 absent", lines[-1][1]),
    ]


@pytest.mark.parametrize("count", [1, 2, 5, 80])
@pytest.mark.parametrize("most", [1, 3])
def test_text_fits_and_nothing_is_lost(count, most):
    words = [f"name{i}" for i in range(count)]
    lines = _wrap(words, f"{count} unknown: ", _font(14), 190, most)
    assert len(lines) <= most
    assert all(_font(14).getlength(line) <= 190 for line in lines)
    text = " ".join(lines)
    shown = sum(f"name{i}" in text.replace(",", " ").split() for i in range(count))
    hidden = int(text.rsplit("+", 1)[1]) if "+" in text else 0
    assert shown + hidden == count


def test_long_names_are_shortened():
    (line,) = _wrap(["12: a/very/long/path/to/a/photo/of/something_000000123456.jpg"], "", _font(14), 190, 2)
    assert _font(14).getlength(line) <= 190
    assert line.startswith("12: …")
    assert line.endswith("123456.jpg")


def test_mixed_labels_are_what_the_mix_makes_of_them():
    labels = np.random.default_rng(0).integers(-1, 2, (200, 12)).astype(np.int8)
    assert sorted(map(tuple, mixed_labels(labels, GPULogicMix(0.0), 32))) == sorted(map(tuple, labels))
    mixed = mixed_labels(labels, GPULogicMix(1.0, 3, 3), 32, seed=1)
    assert mixed.shape == labels.shape
    assert label_counts(mixed).positive > label_counts(labels).positive
    assert np.array_equal(mixed, mixed_labels(labels, GPULogicMix(1.0, 3, 3), 32, seed=1))


def test_paper_figures_at_30_percent_known(shared):
    """Section 2.3: 0.88 positives and 23.1 negatives a sample; mixed with K 2-3: 2.11 and 4.32.

    The paper also counts the 702 images without any object, which are not in this file.
    """
    from gpu_logicmix import hide_labels

    npz = np.load(shared / "data" / "coco2014_labels.npz")
    labels = hide_labels(npz["labels"][npz["split"] == "train"].astype(np.int8), 0.3)
    mixed = mixed_labels(labels, GPULogicMix(1.0, 2, 3), 32)
    for values, positive, negative in ((labels, 0.88, 23.1), (mixed, 2.11, 4.32)):
        counts = label_counts(values)
        assert abs(counts.positive / (len(values) + 702) - positive) < 0.02
        assert abs(counts.negative / len(values) - negative) < 0.1


@pytest.mark.parametrize("count", [1, 12, 80])
def test_stats_figure(tmp_path, count):
    labels = np.random.default_rng(0).integers(-1, 2, (50, count)).astype(np.int8)
    labels[:, 0] = -1
    shares = [Share("before", labels), Share("after", labels)]
    stats_figure(shares, [f"c{c}" for c in range(count)], "title").savefig(tmp_path / "a.png")
    assert (tmp_path / "a.png").stat().st_size > 5000
