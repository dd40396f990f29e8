"""Thresholds and calibration, against slow searches and logistic regression."""

import json
import math
import os

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from cases import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import f1_score, precision_score, recall_score

from gpu_logicmix.decisions import (
    Decisions,
    OtherWeights,
    best_cut,
    fit_calibration,
    fit_decisions,
    read_decisions,
    weights_digest,
)

scores = st.lists(st.tuples(st.integers(-6, 6), st.booleans()), min_size=1, max_size=24)


def outcomes(z, y):
    """(cut, precision, recall, F1) of every way to predict the highest scores, slowly."""
    for cut in sorted(set(z), reverse=True):
        guess = [v >= cut for v in z]
        hits = sum(g and t for g, t in zip(guess, y, strict=True))
        yield cut, hits / sum(guess), hits / sum(y), 2 * hits / (sum(guess) + sum(y))


@settings(max_examples=examples(200), deadline=None)
@given(scores.filter(lambda pairs: any(y for _, y in pairs)))
def test_best_cut_maximises_f1(pairs):
    z, y = zip(*pairs, strict=True)
    cut = best_cut(torch.tensor(z, dtype=torch.float64), torch.tensor(y))
    found = f1_score(y, [v > cut for v in z])
    assert found == pytest.approx(max(f1 for *_, f1 in outcomes(z, y)))
    assert cut not in z  # half-way between two scores


@settings(max_examples=examples(200), deadline=None)
@given(scores.filter(lambda pairs: any(y for _, y in pairs)), st.sampled_from([0.3, 0.5, 0.8, 1.0]))
def test_best_cut_at_a_precision(pairs, floor):
    z, y = zip(*pairs, strict=True)
    cut = best_cut(torch.tensor(z, dtype=torch.float64), torch.tensor(y), floor)
    able = [recall for _, precision, recall, _ in outcomes(z, y) if precision >= floor and recall > 0]
    if not able:
        assert cut == math.inf
        return
    guess = [v > cut for v in z]
    assert precision_score(y, guess) >= floor
    assert recall_score(y, guess) == pytest.approx(max(able))


@pytest.mark.parametrize(("factor", "offset"), [(0.3, 0.0), (1.0, -2.0), (4.0, 3.0)])
def test_calibration_minimises_the_log_loss(factor, offset):
    """It is logistic regression on the logit."""
    generator = torch.Generator().manual_seed(0)
    true = torch.randn(4000, generator=generator, dtype=torch.float64) * 2 - 1
    y = (torch.rand(4000, generator=generator, dtype=torch.float64) < true.sigmoid()).double()
    z = factor * (true + offset)
    temperature, shift = fit_calibration(z, y)
    assert temperature == pytest.approx(factor, rel=0.1)  # what made the labels
    assert shift == pytest.approx(-offset, abs=0.3)
    regression = LogisticRegression(C=np.inf, tol=1e-10, max_iter=1000).fit(z[:, None].numpy(), y.numpy())
    assert 1 / temperature == pytest.approx(regression.coef_.item(), rel=1e-4)
    assert shift == pytest.approx(regression.intercept_.item(), abs=1e-4)


@settings(max_examples=examples(100), deadline=None)
@given(scores.filter(lambda pairs: len({y for _, y in pairs}) == 2), st.floats(-30, 30))
def test_no_other_calibration_is_better(pairs, offset):
    z, y = (torch.tensor(part, dtype=torch.float64) for part in zip(*pairs, strict=True))
    temperature, shift = fit_calibration(z + offset, y)
    assert 0.0999 < temperature < 10.01

    def loss(t, s):
        return F.binary_cross_entropy_with_logits((z + offset) / t + s, y).item()

    best = loss(temperature, shift)
    for t in (0.1, temperature / 1.1, temperature, temperature * 1.1, 10.0):
        for s in np.linspace(-6, 6, 25) + shift:
            if 0.1 <= t <= 10:
                assert best <= loss(t, s) + 1e-9


@pytest.mark.parametrize("sign", [1, -1])
def test_calibration_has_limits(sign):
    """Labels that the logits tell without error ask for 0, those they tell all wrong for infinity."""
    z = torch.tensor([-2.0, -1, 1, 2], dtype=torch.float64)
    temperature, shift = fit_calibration(z, (sign * z > 0).double())
    assert temperature == pytest.approx(10.0**-sign)
    assert shift == pytest.approx(0, abs=1e-9)
    assert fit_calibration(z[:0], z[:0]) == (1, 0)
    assert fit_calibration(z, torch.ones_like(z)) == (1, 0)  # labels of one kind alone say nothing


def sample(images=400, categories=4, seed=0):
    generator = torch.Generator().manual_seed(seed)
    logits = 3 * torch.randn(images, categories, generator=generator) - 1
    targets = (torch.rand(images, categories, generator=generator) < (logits / 3 + 0.5).sigmoid()).to(torch.int8)
    targets[torch.rand(images, categories, generator=generator) < 0.4] = -1
    return logits, targets


def test_only_known_labels_count():
    logits, targets = sample()
    found = fit_decisions(logits, targets, list("abcd"))
    moved = torch.where(targets == -1, torch.randn_like(logits) * 9, logits)
    again = fit_decisions(moved, targets, list("abcd"))
    assert again == found
    for c, category in enumerate(found.categories):
        z, y = (part[targets[:, c] != -1, c] for part in (logits, targets))
        guess = z > category["logit"]
        assert category["f1"] == pytest.approx(f1_score(y, guess))
        assert category["precision"] == pytest.approx(precision_score(y, guess))
        assert category["recall"] == pytest.approx(recall_score(y, guess))
        assert category["f1_at_half"] == pytest.approx(f1_score(y, z > 0))
        assert category["f1"] >= category["f1_at_half"]
        assert (category["positives"], category["negatives"]) == (int((y == 1).sum()), int((y == 0).sum()))


def test_threshold_and_logit_are_the_same_decision():
    logits, targets = sample()
    found = fit_decisions(logits, targets, list("abcd"))
    by_probability = found.probabilities(logits.double()) > found.thresholds
    assert torch.equal(found.decide(logits), by_probability)
    assert found.log_loss[1] <= found.log_loss[0]
    assert found.ece[1] < found.ece[0]  # the labels were drawn at a third of the logits
    for bins in found.reliability.values():
        assert sum(b["count"] for b in bins) == int((targets != -1).sum())
        assert all(b["low"] <= b["confidence"] <= b["high"] for b in bins)


def test_categories_with_too_few_labels_are_listed():
    logits, targets = sample()
    targets[:, 1] = torch.where(targets[:, 1] == 1, -1, targets[:, 1])
    targets[3, 1] = 1
    targets[:, 2] = -1
    found = fit_decisions(logits, targets, list("abcd"), min_labels=3)
    assert found.undecided == ["b", "c"]
    assert "1 positive" in found.categories[1]["reason"]
    assert "3 of each are needed" in found.categories[1]["reason"]
    assert found.thresholds[1:3].tolist() == [0.5, 0.5]
    assert found.categories[2]["f1"] is None


def test_a_precision_that_is_not_reached():
    z = torch.tensor([[3.0], [2], [1], [0], [-1], [-2]])
    y = torch.tensor([[0], [1], [0], [1], [0], [1]])
    found = fit_decisions(z, y, ["a"], precision=0.9, min_labels=1)
    assert found.undecided == ["a"]
    assert found.categories[0]["logit"] is None
    assert found.thresholds.tolist() == [1.0]
    assert not found.decide(z).any()
    assert (found.goal, found.floor) == ("precision", 0.9)


def test_written_and_read(tmp_path):
    logits, targets = sample()
    found = fit_decisions(logits, targets, list("abcd"), weights="cft", fitted_on="some", trained_on=True)
    found.write(tmp_path / "decisions.json")
    assert read_decisions(tmp_path) == found
    assert read_decisions(tmp_path, "cft") == found
    assert read_decisions(tmp_path, "model") is None  # they belong to other weights
    json.loads((tmp_path / "decisions.json").read_text(), parse_constant=pytest.fail)  # no NaN


def write_weights(folder, name, digest=None):
    metadata = {"categories": "[]"} if digest is None else {"categories": "[]", "digest": digest}
    save_file({"a": torch.zeros(2)}, folder / f"{name}.safetensors", metadata=metadata)


def test_thresholds_of_weights_that_were_written_anew_are_not_used(tmp_path, recwarn):
    write_weights(tmp_path, "model", "11")
    write_weights(tmp_path, "cft", "22")
    assert weights_digest(tmp_path / "cft.safetensors") == "22"
    found = fit_decisions(*sample(), list("abcd"), weights="cft", digest="22")
    found.write(tmp_path / "decisions.json")
    write_weights(tmp_path, "model", "33")  # of which they are not
    os.utime(tmp_path / "decisions.json", (1, 1))  # a copied folder has new dates
    assert read_decisions(tmp_path, "cft") == found
    assert read_decisions(tmp_path, "model") is None
    assert not read_decisions(tmp_path).outdated
    assert not recwarn.list
    write_weights(tmp_path, "cft", "44")
    with pytest.warns(OtherWeights, match=f"not used; fit them again: gpu-logicmix decide {tmp_path} --use cft"):
        assert read_decisions(tmp_path, "cft") is None
    assert read_decisions(tmp_path) == found  # for the report, which says so
    assert read_decisions(tmp_path).outdated
    assert "outdated" not in (tmp_path / "decisions.json").read_text()
    for write in (lambda: write_weights(tmp_path, "cft"), lambda: (tmp_path / "cft.safetensors").unlink()):
        write()  # of an exported model, or none: nothing to compare with
        assert read_decisions(tmp_path, "cft") == found


@pytest.mark.parametrize("digest", [None, "11"])
def test_thresholds_of_an_earlier_version_go_by_the_date_of_the_weights(tmp_path, digest):
    write_weights(tmp_path, "model", digest)
    found = fit_decisions(*sample(), list("abcd"))
    found.write(tmp_path / "decisions.json")
    values = json.loads((tmp_path / "decisions.json").read_text())
    del values["digest"]
    (tmp_path / "decisions.json").write_text(json.dumps(values))
    os.utime(tmp_path / "model.safetensors", (1000, 1000))
    os.utime(tmp_path / "decisions.json", (1000, 1000))
    assert read_decisions(tmp_path, "model") == found
    os.utime(tmp_path / "model.safetensors", (1001, 1001))
    with pytest.warns(OtherWeights):
        assert read_decisions(tmp_path, "model") is None
    (tmp_path / "model.safetensors").unlink()
    assert read_decisions(tmp_path, "model") == found


@pytest.mark.parametrize("weights", ["../model", 3, None, ["cft"]])
def test_weights_of_another_name_are_not_looked_for(tmp_path, weights):
    (tmp_path / "run").mkdir()
    for folder in (tmp_path, tmp_path / "run"):
        write_weights(folder, "model", "11")
    found = fit_decisions(*sample(), list("abcd"), weights=weights, digest="22")
    found.write(tmp_path / "run" / "decisions.json")
    assert not read_decisions(tmp_path / "run").outdated


def test_damaged_weights_have_no_checksum(tmp_path):
    (tmp_path / "model.safetensors").write_bytes(b"nothing")
    (tmp_path / "cft.safetensors").mkdir()
    for name in ("model", "cft", "nowhere"):
        assert weights_digest(tmp_path / f"{name}.safetensors") == ""


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"format": 2}', '{"format": 1}', '{"format": 1, "temperature": "x"}']
)
def test_files_of_others_are_ignored(tmp_path, text):
    (tmp_path / "decisions.json").write_text(text)
    assert read_decisions(tmp_path) is None
    assert read_decisions(tmp_path / "nowhere") is None


def test_wrong_values():
    logits, targets = sample()
    for options, words in (({"precision": 0}, "precision=0"), ({"min_labels": 0}, "min_labels=0")):
        with pytest.raises(ValueError, match=words):
            fit_decisions(logits, targets, list("abcd"), **options)
    with pytest.raises(ValueError, match="must both be"):
        fit_decisions(logits, targets, list("abc"))
    with pytest.raises(ValueError, match=r"targets\[0, 0\] is 2.0: must be 1, 0 or -1"):
        fit_decisions(logits, torch.full_like(logits, 2), list("abcd"))
    with_nan = torch.where(targets == -1, math.nan, targets.double())
    assert fit_decisions(logits, with_nan, list("abcd")) == fit_decisions(logits, targets, list("abcd"))
    with pytest.raises(ValueError, match="non-finite"):
        fit_decisions(logits * math.inf, targets, list("abcd"))
    assert Decisions(1.0, []).undecided == []
