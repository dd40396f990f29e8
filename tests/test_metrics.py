"""metrics.py: against scikit-learn and torchmetrics one category after the other, with ties and unknown labels."""

import math
import warnings

import numpy as np
import pytest
import torch
from cases import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import (
    average_precision_score,
    coverage_error,
    label_ranking_average_precision_score,
    label_ranking_loss,
    precision_score,
    recall_score,
    roc_auc_score,
)
from torchmetrics.functional.classification import (
    binary_average_precision,
    binary_calibration_error,
    multilabel_average_precision,
    multilabel_hamming_distance,
    multilabel_ranking_loss,
)

from gpu_logicmix import average_precision, hide_labels, mean_average_precision, metrics
from gpu_logicmix.metrics import auroc, calibration_error, evaluate, hamming_loss, precision_recall, ranking

NAN = float("nan")
# Few different scores: ties within and between labels of every kind.
score = st.one_of(st.sampled_from([-2.0, -0.5, 0.0, 0.5, 2.0]), st.floats(-30, 30, width=16))
label = st.sampled_from([-1, 0, 1])


@st.composite
def batches(draw):
    shape = draw(st.tuples(st.integers(1, 12), st.integers(1, 5)))
    size = shape[0] * shape[1]
    scores = draw(st.lists(score, min_size=size, max_size=size))
    targets = draw(st.lists(label, min_size=size, max_size=size))
    return torch.tensor(scores).view(shape), torch.tensor(targets).view(shape)


def known_of(scores, targets, c):
    known = targets[:, c] != -1
    return scores[known, c].double().numpy(), targets[known, c].numpy()


def ap_oracle(scores, targets):
    """scikit-learn on the known labels of each category."""
    out = []
    for c in range(scores.shape[1]):
        s, y = known_of(scores, targets, c)
        out.append(average_precision_score(y, s) if (y == 1).any() else NAN)
    return out


def same(a, b):
    np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=1e-12, atol=1e-12, equal_nan=True)


# ------------------------------------------------------------------------------------------------ AP
@settings(max_examples=examples(300), deadline=None)
@given(batches())
def test_average_precision_is_that_of_scikit_learn(batch):
    expected = ap_oracle(*batch)
    same(average_precision(*batch), expected)
    present = [ap for ap in expected if not math.isnan(ap)]
    value = mean_average_precision(*batch)
    assert isinstance(value, float)
    same(value, np.mean(present) if present else NAN)


@settings(max_examples=examples(100), deadline=None)
@given(batches())
def test_average_precision_is_that_of_torchmetrics(batch):
    scores, targets = batch
    probabilities = torch.sigmoid(scores.double())
    ap = average_precision(probabilities, targets)
    for c, value in enumerate(ap.tolist()):
        if not math.isnan(value):
            expected = binary_average_precision(probabilities[:, c], targets[:, c], ignore_index=-1)
            assert value == pytest.approx(expected.item(), abs=1e-6)


def test_on_a_whole_data_set(device):
    generator = torch.Generator().manual_seed(0)
    targets = (torch.rand(4000, 20, generator=generator) < 0.05).long()
    scores = torch.randn(4000, 20, generator=generator) + 2 * targets
    targets = hide_labels(targets, 0.4, seed=1)
    ap = average_precision(scores.to(device), targets.to(device)).cpu()
    same(ap, ap_oracle(scores, targets))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs = multilabel_average_precision(scores, targets, 20, average=None, ignore_index=-1)
    torch.testing.assert_close(ap, theirs.double(), atol=1e-5, rtol=0)
    assert 0.3 < ap.mean() < 0.9  # a case in which something can go wrong


def test_by_hand():
    scores = torch.tensor([[0.9, 0.9], [0.8, 0.8], [0.7, 0.7], [0.6, 0.6]])
    targets = torch.tensor([[1, 0], [0, 0], [-1, -1], [1, 0]])
    ap = average_precision(scores, targets)
    assert ap[0] == pytest.approx((1 / 1 + 2 / 3) / 2)  # the third sample is not there
    assert ap[1].isnan()
    assert mean_average_precision(scores, targets) == ap[0]


def test_large_logits_keep_their_order():
    """In float32, sigmoid is 1 for each of these: the probabilities know no order."""
    scores, targets = torch.tensor([[20.0], [30.0], [40.0]]), torch.tensor([[0], [0], [1]])
    assert average_precision(scores, targets) == 1
    assert average_precision(torch.sigmoid(scores), targets) == pytest.approx(1 / 3)


def test_ties_do_not_depend_on_the_order_of_samples():
    scores = torch.tensor([[1.0], [1.0], [0.0], [0.0], [0.0]])
    targets = torch.tensor([[1], [0], [0], [1], [-1]])
    values = {average_precision(scores[p], targets[p]).item() for p in map(list, [[0, 1, 2, 3, 4], [4, 1, 0, 3, 2]])}
    assert values == {0.5 * (1 / 2) + 0.5 * (2 / 4)}


def test_many_categories_are_done_in_parts(monkeypatch):
    scores = torch.randn(50, 7)
    targets = torch.randint(-1, 2, (50, 7))
    whole = average_precision(scores, targets)
    for labels in (1, 100, 130):
        monkeypatch.setattr(metrics, "CHUNK", labels)
        assert torch.equal(average_precision(scores, targets), whole)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64, torch.int32])
def test_score_types(dtype):
    scores = (torch.randn(40, 6) * 10).to(dtype)
    targets = torch.randint(-1, 2, (40, 6))
    same(average_precision(scores, targets), ap_oracle(scores.double(), targets))
    assert evaluate(scores, targets).threshold == evaluate(scores.double(), targets).threshold


@pytest.mark.parametrize("kind", [torch.int8, torch.float32, "nan", "numpy"])
def test_label_types(kind):
    scores, targets = torch.randn(40, 6), torch.randint(-1, 2, (40, 6))
    expected = evaluate(scores, targets)
    if kind == "nan":
        got = evaluate(scores, targets.float().masked_fill(targets == -1, NAN), unknown=NAN)
    elif kind == "numpy":
        got = evaluate(scores.numpy(), targets.numpy())
    else:
        got = evaluate(scores, targets.to(kind))
    assert got == expected
    full = targets == 1
    assert evaluate(scores, full) == evaluate(scores, full.long())


@pytest.mark.parametrize("shape", [(0, 3), (3, 0)])
def test_nothing_to_measure(shape):
    out = evaluate(torch.empty(shape), torch.empty(shape))
    assert math.isnan(out.mAP)
    assert len(out.AP) == len(out.left_out) == shape[1]
    assert all(math.isnan(v) for v in out.as_dict().values())


def test_all_unknown():
    out = evaluate(torch.randn(5, 4), torch.full((5, 4), -1))
    assert out.left_out == [0, 1, 2, 3]
    assert all(math.isnan(v) for v in [*out.AP, *out.as_dict().values()])


# ------------------------------------------------------------------------------------------------ precision, recall
def precision_recall_oracle(scores, targets, threshold=0.0, top_k=None):
    """Sample after sample, then scikit-learn category by category."""
    predicted = torch.zeros_like(targets)
    for i, row in enumerate(scores.tolist()):
        ranked = sorted(range(len(row)), key=lambda c: (-row[c], c))
        for c in ranked[:top_k]:
            predicted[i, c] = row[c] > threshold
    cp, cr, everything = [], [], ([], [])
    for c in range(scores.shape[1]):
        guess, truth = known_of(predicted, targets, c)
        everything[0].extend(truth.tolist())
        everything[1].extend(guess.tolist())
        if (truth == 1).any():
            cp.append(precision_score(truth, guess, zero_division=0))
            cr.append(recall_score(truth, guess))
    if not cp:
        return [NAN] * 6
    cp, cr = np.mean(cp), np.mean(cr)
    op, or_ = precision_score(*everything, zero_division=0), recall_score(*everything)

    def f1(p, r):
        return 2 * p * r / (p + r) if p + r else 0

    return [cp, cr, f1(cp, cr), op, or_, f1(op, or_)]


@settings(max_examples=examples(100), deadline=None)
@given(batches(), st.sampled_from([None, 1, 3]))
def test_precision_and_recall_are_those_of_scikit_learn(batch, top_k):
    scores, targets = batch
    same(precision_recall(scores, targets, top_k=top_k), precision_recall_oracle(scores, targets, top_k=top_k))
    probabilities = torch.sigmoid(scores.double())
    by_probability = precision_recall(probabilities, targets, top_k=top_k, logits=False)
    same(by_probability, precision_recall_oracle(probabilities, targets, 0.5, top_k))


def test_other_thresholds():
    scores, targets = torch.randn(60, 5), torch.randint(-1, 2, (60, 5))
    same(precision_recall(scores, targets, 0.8), precision_recall_oracle(scores, targets, math.log(0.8 / 0.2)))
    everything = precision_recall(scores, targets, 0)
    same(everything, precision_recall_oracle(scores, targets, -math.inf))
    assert everything.CR == everything.OR == 1
    assert precision_recall(scores, targets, 0, logits=True) == precision_recall(
        torch.sigmoid(scores), targets, 0, logits=False
    )
    same(precision_recall(scores, targets, 0, 3), precision_recall_oracle(scores, targets, -math.inf, 3))
    assert precision_recall(scores, targets, 1) == (0,) * 6


def test_precision_and_recall_by_hand():
    #                        a     b     c     d
    scores = torch.tensor([[2.0, 1.0, 3.0, 4.0], [1.0, -1.0, -2.0, 5.0]])
    targets = torch.tensor([[1, 1, 0, 0], [0, 1, -1, 0]])
    out = evaluate(scores, targets)
    assert out.left_out == [2, 3]
    assert out.threshold == pytest.approx((0.75, 0.75, 0.75, 2 / 6, 2 / 3, 4 / 9))
    # b is the fourth of the first sample
    assert out.top3 == pytest.approx((0.25, 0.5, 1 / 3, 1 / 5, 1 / 3, 1 / 4))
    assert out.mAP == pytest.approx(1.0)
    assert list(out.as_dict()) == [
        *("mAP", "CP", "CR", "CF1", "OP", "OR", "OF1"),
        *("CP_top3", "CR_top3", "CF1_top3", "OP_top3", "OR_top3", "OF1_top3"),
        *("mAP_envelope", "AUROC", "hamming", "ECE", "ranking_loss", "ranking_ap", "coverage"),
    ]
    assert out.as_dict()["OR_top3"] == out.top3.OR


def test_of_equal_scores_the_lower_index_is_among_the_top():
    targets = torch.zeros(200, 30, dtype=torch.long)
    targets[:, :3] = 1
    assert precision_recall(torch.ones(200, 30), targets, top_k=3).OF1 == 1


# ------------------------------------------------------------------------------------------------ the others
def voc_ap(truth):
    """The VOC 2012 development kit's, from labels in the order of falling scores."""
    truth = np.asarray(truth)
    hits = np.cumsum(truth)
    recall = np.concatenate([[0], hits / truth.sum(), [1]])
    precision = np.concatenate([[0], hits / np.arange(1, len(truth) + 1), [0]])
    for i in range(len(precision) - 2, -1, -1):
        precision[i] = max(precision[i], precision[i + 1])
    return sum((recall[i] - recall[i - 1]) * precision[i] for i in range(1, len(recall)))


@pytest.mark.parametrize(("truth", "step", "envelope"), [([0, 1, 1], 0.5833, 0.6667), ([1, 0, 1], 0.8333, 0.8333)])
def test_both_kinds_of_ap_by_hand(truth, step, envelope):
    scores, targets = torch.tensor([[3.0], [2.0], [1.0]]), torch.tensor(truth)[:, None]
    assert average_precision(scores, targets).item() == pytest.approx(step, abs=5e-5)
    assert average_precision(scores, targets, kind="envelope").item() == pytest.approx(envelope, abs=5e-5)


@settings(max_examples=examples(100), deadline=None)
@given(batches(), st.randoms(use_true_random=False))
def test_envelope_ap_is_that_of_voc(batch, random):
    """Without ties, in which the VOC kit's depends on the order of the samples."""
    scores, targets = batch
    n = scores.shape[0]
    scores = torch.tensor([random.sample(range(n), n) for _ in range(scores.shape[1])]).T.contiguous()
    found = average_precision(scores, targets, kind="envelope").tolist()
    for c, value in enumerate(found):
        s, y = known_of(scores, targets, c)
        same(value, voc_ap(y[np.argsort(-s)]) if (y == 1).any() else NAN)
    step = average_precision(scores, targets)
    assert (average_precision(scores, targets, kind="envelope") >= step - 1e-12)[~step.isnan()].all()


@settings(max_examples=examples(200), deadline=None)
@given(batches())
def test_auroc_and_hamming_are_those_of_scikit_learn(batch):
    scores, targets = batch
    expected = []
    for c in range(scores.shape[1]):
        s, y = known_of(scores, targets, c)
        expected.append(roc_auc_score(y, s) if len(set(y.tolist())) == 2 else NAN)
    same(auroc(scores, targets), expected)
    known = targets != -1
    wrong = ((scores > 0) != (targets == 1))[known]
    same(hamming_loss(scores, targets), wrong.double().mean().item() if len(wrong) else NAN)


@settings(max_examples=examples(200), deadline=None)
@given(batches())
def test_ranking_is_that_of_scikit_learn_on_the_known_labels(batch):
    scores, targets = batch
    rows = []
    for s, y in zip(scores.double().numpy(), targets.numpy(), strict=True):
        s, y = s[None, y != -1], y[None, y != -1]
        if y.shape[1] == 1:  # not a ranking for scikit-learn; its definitions say this
            rows.append((0.0, 1.0, float(y.sum())))
        elif y.shape[1]:
            functions = (label_ranking_loss, label_ranking_average_precision_score, coverage_error)
            rows.append([f(y, s) for f in functions])
    same(ranking(scores, targets), np.mean(rows, axis=0) if rows else [NAN] * 3)


def test_everything_on_full_labels():
    """Against scikit-learn and torchmetrics as they are called with all labels known."""
    generator = torch.Generator().manual_seed(0)
    targets = (torch.rand(300, 12, generator=generator) < 0.2).long()
    scores = torch.randn(300, 12, generator=generator) + 2 * targets
    p = scores.sigmoid()
    out = evaluate(scores, targets)
    y, s = targets.numpy(), scores.double().numpy()
    assert out.ranking.loss == pytest.approx(label_ranking_loss(y, s))
    assert out.ranking.ap == pytest.approx(label_ranking_average_precision_score(y, s))
    assert out.ranking.coverage == pytest.approx(coverage_error(y, s))
    assert pytest.approx(roc_auc_score(y, s)) == out.AUROC
    assert out.hamming == pytest.approx(multilabel_hamming_distance(p, targets, 12).item())
    errors = [binary_calibration_error(p[:, c], targets[:, c], n_bins=15).item() for c in range(12)]
    assert calibration_error(scores, targets).tolist() == pytest.approx(errors, abs=1e-6)
    assert pytest.approx(np.mean(errors), abs=1e-6) == out.ECE
    tm = multilabel_ranking_loss(p.double(), targets, 12).item()
    assert out.ranking.loss == pytest.approx(tm, abs=1e-6)


@settings(max_examples=examples(100), deadline=None)
@given(batches(), st.integers(1, 4))
def test_calibration_error_bin_by_bin(batch, bins):
    scores, targets = batch
    expected = []
    for c in range(scores.shape[1]):
        s, y = known_of(scores, targets, c)
        gaps = [[] for _ in range(bins)]
        for z, label in zip(s, y, strict=True):
            p = 1 / (1 + math.exp(-z))
            gaps[min(bins - 1, math.floor(p * bins))].append(p - label)
        expected.append(sum(abs(sum(gap)) for gap in gaps) / len(s) if len(s) else NAN)
    same(calibration_error(scores.double(), targets, bins), expected)


def test_nan_labels_are_unknown():
    scores, targets = torch.randn(40, 6), torch.randint(-1, 2, (40, 6))
    assert evaluate(scores, targets.float().masked_fill(targets == -1, NAN)) == evaluate(scores, targets)


def test_blocks_make_no_difference(monkeypatch):
    scores, targets = torch.randn(50, 7), torch.randint(-1, 2, (50, 7))
    whole = evaluate(scores, targets)
    for labels in (1, 20, 130):
        monkeypatch.setattr(metrics, "CHUNK", labels)
        parts = evaluate(scores, targets)
        same([*parts.as_dict().values(), *parts.AP], [*whole.as_dict().values(), *whole.AP])


# ------------------------------------------------------------------------------------------------ bad input
@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda s, t: average_precision(s[:, :2], t), r"scores \[4, 2\] and targets \[4, 3\]"),
        (lambda s, t: average_precision(s[0], t[0]), r"scores \[3\] and targets \[3\]"),
        (lambda s, t: mean_average_precision(s, t + 1), "targets.* is 2: must be 1, 0 or -1"),
        (lambda s, t: evaluate(s, t.float() * 0.5), "targets.* is 0.5"),
        (lambda s, t: precision_recall(s, t, 1.5), "threshold=1.5: must be a probability"),
        (lambda s, t: hamming_loss(s, t, 7), "threshold=7: must be a probability, from 0 to 1"),
        (lambda s, t: hamming_loss(s, t, NAN), "threshold=nan: must be a probability"),
        (lambda s, t: precision_recall(s, t, top_k=0), "top_k=0: must be 1 or more"),
        (lambda s, t: average_precision(s, t, kind="voc"), "kind='voc': must be one of step, envelope"),
        (lambda s, t: calibration_error(s, t, bins=0), "bins=0: must be 1 or more"),
        (lambda s, t: calibration_error(s, t, logits=False), "scores go from -1 to 1: with logits=False"),
        (lambda s, t: precision_recall(s, t, logits=False), "scores go from -1 to 1: with logits=False"),
    ],
)
def test_bad_input_is_named(call, message):
    scores = torch.linspace(-1, 1, 12).view(4, 3)
    with pytest.raises(ValueError, match=message):
        call(scores, torch.ones(4, 3, dtype=torch.long))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_nan_scores_raise(dtype):
    scores = torch.randn(4, 3).to(dtype)
    scores[2, 1] = scores[3, 0] = NAN
    with pytest.raises(ValueError, match=r"scores\[2, 1\] is NaN, as are 1 more"):
        mean_average_precision(scores, torch.ones(4, 3))
