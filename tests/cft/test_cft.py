"""cft.py: all heads at once against each head alone with torch.optim.Adam and against mlcpl; what must never be."""

import math
import warnings

import numpy as np
import pytest
import torch
from cases import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import average_precision_score
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from gpu_logicmix import CFTRecord, PartialAsymmetricLoss, category_wise_fine_tune, hide_labels
from gpu_logicmix.cft import CFTOptions
from gpu_logicmix.cft.heldout import Judge, _draws, resampled_ap, split_known
from gpu_logicmix.cft.solver import (
    Adam,
    Batch,
    Known,
    _adam_step,
    _batches,
    _gradients,
    _sparse_gradients,
    asymmetric_gradient,
)

FEW, NO_POSITIVE, NO_NEGATIVE = 4, 5, 6  # categories of `problem` that cannot be fitted


def problem(seed=0, samples=300, dtype=torch.float64):
    """Features, partial labels of 9 categories with very different shares known, heads that are somewhat wrong."""
    generator = torch.Generator().manual_seed(seed)
    share = torch.tensor([0.9, 0.2, 0.5, 0.52, 0.5, 0.5, 0.5, 0.9, 0.2])
    features = torch.randn(samples, 12, generator=generator, dtype=dtype)
    true = torch.randn(9, 12, generator=generator, dtype=dtype) * 0.5
    full = (features @ true.t() + torch.randn(samples, 9, generator=generator) > 0.6).to(torch.int8)
    targets = full.masked_fill(torch.rand(samples, 9, generator=generator) > share, -1)
    targets[(targets[:, FEW] == 1).nonzero()[4:, 0], FEW] = -1  # 4 known positives are left
    targets[targets[:, NO_POSITIVE] == 1, NO_POSITIVE] = -1
    targets[targets[:, NO_NEGATIVE] == 0, NO_NEGATIVE] = -1
    weight = true + torch.randn(9, 12, generator=generator, dtype=dtype) * 0.4
    return features, targets, weight, torch.randn(9, generator=generator, dtype=dtype), full


@pytest.fixture(params=["all labels in the product", "unknown labels left out"])
def product(request, monkeypatch):
    """Both ways, whatever the share of known labels; the second with several pieces of the features."""
    monkeypatch.setattr("gpu_logicmix.cft.products.SPARSE", 2 if request.param == "unknown labels left out" else 0)
    monkeypatch.setattr("gpu_logicmix.cft.products.PIECE_CPU", 50 * 12 * 8)


# -------------------------------------------------------------------------------------------------------------- oracles
def loss_oracle(logit, label, gamma_neg=4.0, gamma_pos=0.0, clip=0.05):
    """Asymmetric loss of one label, after Ridnik et al.; the focusing weights have no gradient."""
    p = torch.sigmoid(logit)
    if label == 1:
        return -((1 - p.detach()) ** gamma_pos) * torch.log(p)
    shifted = torch.clamp(1 - p + clip, max=1)
    return -((1 - shifted.detach()) ** gamma_neg) * torch.log(shifted)


def ap_oracle(logits, labels):
    known = [(float(z.detach()), int(y)) for z, y in zip(logits, labels, strict=True) if y != -1]
    return average_precision_score([y for _, y in known], [z for z, _ in known])


def test_every_epoch_is_told():
    features, targets, weight, bias, _ = problem()
    epochs = []
    _, _, record = category_wise_fine_tune(
        features, targets, weight, bias, epochs=15, patience=2, lr=0.01, on_epoch=lambda: epochs.append(1)
    )
    assert len(epochs) == record.epochs.max() > 2


def one_head_alone(features, labels, held, weight, bias, *, epochs, patience, batch_size, lr, schedule, seed):
    """The plain loop: this category's known labels, torch's Adam, the best state by scikit-learn's AP."""
    generator = torch.Generator().manual_seed(seed)
    torch.randperm(len(labels), generator=generator)  # the draw of the held-out labels
    weight, bias = weight.clone().requires_grad_(), bias.clone().requires_grad_()
    mine = {i for i in range(len(labels)) if labels[i] != -1 and not held[i]}
    judged = [i for i in range(len(labels)) if held[i]]
    size = batch_size or len(mine)
    optimiser = torch.optim.Adam([weight, bias], lr=lr)
    total = epochs * math.ceil(len(mine) / size)
    best_ap = ap_oracle((features @ weight + bias)[judged], labels[judged])
    best, best_epoch, step = (weight.detach().clone(), bias.detach().clone()), 0, 0
    for epoch in range(1, epochs + 1):
        order = range(len(labels))
        if batch_size:
            order = torch.randperm(len(labels), generator=generator).tolist()
        order = [i for i in order if i in mine]
        for start in range(0, len(order), size):
            batch = order[start : start + size]
            loss = sum(loss_oracle(features[i] @ weight + bias, labels[i]) for i in batch) / len(batch)
            optimiser.zero_grad()
            loss.backward()
            optimiser.param_groups[0]["lr"] = lr * (0.5 + 0.5 * math.cos(math.pi * step / total)) if schedule else lr
            optimiser.step()
            step += 1
        ap = ap_oracle((features @ weight + bias).detach()[judged], labels[judged])
        if ap > best_ap + 1e-12:  # the same ranking summed in another order is no better
            best_ap, best, best_epoch = ap, (weight.detach().clone(), bias.detach().clone()), epoch
        if epoch - best_epoch >= patience:
            break
    return *best, best_epoch, epoch


# -------------------------------------------------------------------------------------------- the same as one by one
@pytest.mark.parametrize("schedule", ["constant", "cosine"])
@pytest.mark.parametrize("batch_size", [None, 32])
def test_each_head_is_the_head_trained_alone(batch_size, schedule, product):
    features, targets, weight, bias, _ = problem()
    options = {"epochs": 6, "patience": 3, "batch_size": batch_size, "lr": 0.02, "seed": 3}
    new_weight, new_bias, record = category_wise_fine_tune(
        features, targets, weight, bias, schedule=schedule, **options
    )
    seen = set()
    for c in set(range(9)) - set(record.skipped):
        alone = one_head_alone(
            features, targets[:, c], record.held_out[:, c], weight[c], bias[c], schedule=schedule == "cosine", **options
        )
        assert (record.best_epoch[c], record.epochs[c]) == alone[2:]
        torch.testing.assert_close(new_weight[c], alone[0], rtol=0, atol=1e-9)
        torch.testing.assert_close(new_bias[c], alone[1], rtol=0, atol=1e-9)
        seen.add((alone[2] == 0, alone[3] < 6))
    assert len(seen) > 1  # heads that went different ways


@pytest.mark.parametrize("batch_size", [None, 16, 64])
def test_other_categories_make_no_difference(batch_size, product):
    """In float32 and through the same code: some of the categories, in another order, or one alone."""
    features, targets, weight, bias, _ = problem(dtype=torch.float32)
    options = {"epochs": 8, "patience": None, "batch_size": batch_size, "lr": 0.01}
    together = category_wise_fine_tune(features, targets, weight, bias, **options)
    for chosen in ([7, 2, 0], [1], [FEW], [8, FEW]):
        some = category_wise_fine_tune(features, targets[:, chosen], weight[chosen], bias[chosen], **options)
        torch.testing.assert_close(some[0], together[0][chosen], rtol=0, atol=1e-5)
        torch.testing.assert_close(some[1], together[1][chosen], rtol=0, atol=1e-5)
        assert torch.equal(some[2].held_out, together[2].held_out[:, chosen])
        assert torch.equal(some[2].best_epoch, together[2].best_epoch[chosen])


@pytest.mark.filterwarnings("ignore")
def test_full_batch_is_mlcpl(capsys, product):
    """Same held-out labels, loss, optimiser and epochs: the heads of the authors' own package."""
    from mlcpl.cft import BP, CFT
    from mlcpl.losses import PartialAsymmetricWithLogitLoss

    features, targets, weight, bias, _ = problem(dtype=torch.float32)
    new_weight, new_bias, record = category_wise_fine_tune(
        features, targets, weight, bias, epochs=15, patience=4, lr=0.01
    )
    with_nan = targets.float().masked_fill(targets == -1, torch.nan)
    heads = []
    for c in range(9):
        head = torch.nn.Linear(12, 1)
        head.weight.data, head.bias.data = weight[c : c + 1].clone(), bias[c : c + 1].clone()
        heads.append(head)
    optimiser = BP(
        device="cpu",
        loss_fn=PartialAsymmetricWithLogitLoss(gamma_neg=4, gamma_pos=0, clip=0.05),
        optimizer_class=torch.optim.Adam,
        optimizer_kwargs={"lr": 0.01},
    )
    theirs, _ = CFT(
        heads,
        (features, with_nan.masked_fill(record.held_out, torch.nan)),
        (features, with_nan.masked_fill(~record.held_out, torch.nan)),
        optimiser,
        epochs=15,
        early_stopping=4,
        # Not in float32, in which the same AP may come out a little larger in a later epoch.
        validation_metric=lambda logits, y: torch.tensor(
            round(ap_oracle(logits[:, 0], y[:, 0]), 12), dtype=torch.float64
        ),
        device="cpu",
    )
    capsys.readouterr()
    assert len(record.changed) > 3
    for c in set(range(9)) - {FEW}:  # mlcpl takes any number of labels
        torch.testing.assert_close(new_weight[c : c + 1], theirs[c].weight.data, rtol=0, atol=1e-5)
        torch.testing.assert_close(new_bias[c : c + 1], theirs[c].bias.data, rtol=0, atol=1e-5)


def test_a_learning_rate_for_each_head():
    features, targets, weight, bias, _ = problem()
    rates = torch.linspace(0.001, 0.03, 9)
    together = category_wise_fine_tune(features, targets, weight, bias, epochs=5, batch_size=32, lr=rates)
    for c in (0, 3, 8):
        alone = category_wise_fine_tune(features, targets, weight, bias, epochs=5, batch_size=32, lr=rates[c].item())
        torch.testing.assert_close(together[0][c], alone[0][c], rtol=0, atol=1e-9)
        assert not torch.equal(together[0][2], alone[0][2])


@settings(max_examples=examples(100), deadline=None)
@given(st.data())
def test_batches_cut_each_category_by_itself(data):
    n, c, size = (data.draw(st.integers(1, most)) for most in (12, 4, 5))
    rows = st.lists(st.sampled_from([-1, -1, 0, 1]), min_size=c, max_size=c)
    labels = torch.tensor(data.draw(st.lists(rows, min_size=n, max_size=n)), dtype=torch.int8)
    order = data.draw(st.permutations(range(n)))
    wanted = {}
    for category in range(c):
        mine = [(i, labels[i, category].item()) for i in order if labels[i, category] != -1]
        wanted[category] = [dict(mine[k : k + size]) for k in range(0, len(mine), size)]
    for steps in {len(batches) for batches in wanted.values()} - {0}:  # what comes together is of the same pace
        group = [category for category in wanted if len(wanted[category]) == steps]
        found = {category: [] for category in group}
        given = (torch.tensor(order), size, steps)
        for count, samples, values in _batches(labels[:, group], *given):
            for g, category in enumerate(group):
                batch = dict(zip(samples.tolist(), values[:, g].tolist(), strict=True))
                found[category].append({i: y for i, y in batch.items() if y != -1})
                assert count[g] == len(found[category][-1])
        assert found == {category: wanted[category] for category in group}
        found = {category: [] for category in group}
        for batch in Known(torch.zeros(n, 3), labels[:, group]).batches(*given):
            start, heads = batch.pattern.crow_indices().tolist(), batch.pattern.col_indices().tolist()
            values = {category: {} for category in group}
            for i in range(n):
                for k in range(start[i], start[i + 1]):
                    values[group[heads[k]]][i] = batch.labels[k].item()
            for g, category in enumerate(group):
                found[category].append(values[category])
                assert batch.size[g] == len(values[category])
        assert found == {category: wanted[category] for category in group}


# ----------------------------------------------------------------------------------------------------------- the pieces
@pytest.mark.parametrize(
    "options", [(4.0, 0.0, 0.05), (4.0, 1.0, 0.0), (0.0, 0.0, 0.0), (0.0, 2.0, 0.2), (1.5, 0.5, 0.05)]
)
def test_gradient_is_that_of_the_loss(options):
    logits = torch.linspace(-12, 12, 301, dtype=torch.float64, requires_grad=True)
    for label in (0, 1):
        torch.stack([loss_oracle(z, label, *options) for z in logits]).sum().backward()
        found = asymmetric_gradient(logits.detach(), torch.full((301,), label), *options)
        torch.testing.assert_close(found, logits.grad, rtol=1e-8, atol=1e-12)
        logits.grad = None
    assert (asymmetric_gradient(logits.detach(), torch.full((301,), -1), *options) == 0).all()


@pytest.mark.parametrize("options", [(4.0, 0.0, 0.05), (2.0, 1.0, 0.0)])
def test_gradient_is_that_of_the_training_loss(options):
    logits = (torch.randn(50, 7, dtype=torch.float64) * 4).requires_grad_()
    labels = torch.randint(-1, 2, (50, 7))
    PartialAsymmetricLoss(*options, reduction="sum")(logits, labels).backward()
    torch.testing.assert_close(asymmetric_gradient(logits.detach(), labels, *options), logits.grad)


@pytest.mark.parametrize("clip", [0.0, 0.05])
def test_gradient_is_finite_everywhere(clip):
    far = torch.tensor([-1e30, -200.0, -90.0, 90.0, 200.0, 1e30])
    negative, positive = (asymmetric_gradient(far, torch.full((6,), y), 4.0, 0.0, clip) for y in (0, 1))
    assert positive.tolist() == [-1, -1, -1, 0, 0, 0]
    assert negative.tolist() == ([0, 0, 0, 0, 0, 0] if clip else [0, 0, 0, 1, 1, 1])


@pytest.mark.parametrize("batch_size", [None, 32])
def test_features_read_in_pieces(batch_size, monkeypatch):
    """12 numbers of 8 bytes: 5 samples at a time instead of all of them."""
    features, targets, weight, bias, full = problem()
    options = {"epochs": 4, "lr": 0.02, "batch_size": batch_size, "evaluation": (features, full)}
    wanted = category_wise_fine_tune(features, targets, weight, bias, **options)
    monkeypatch.setattr("gpu_logicmix.cft.products.PIECE_CPU", 5 * 12 * 8)
    found = category_wise_fine_tune(features, targets, weight, bias, **options)
    torch.testing.assert_close(found[:2], wanted[:2], rtol=0, atol=1e-10)
    torch.testing.assert_close(found[2].evaluation_after, wanted[2].evaluation_after, rtol=0, atol=1e-12)


@pytest.mark.parametrize("known", [0.02, 0.1, 1.0])
@pytest.mark.parametrize("rows_in_a_piece", [5, 1000])
def test_leaving_out_unknown_labels_is_a_shorter_way_to_the_same(known, rows_in_a_piece, monkeypatch):
    features, _, weight, bias, full = problem()
    labels, order, loss = hide_labels(full, known), torch.randperm(300), (4.0, 0.0, 0.05)
    labels[:, 3] = -1  # a head without labels
    monkeypatch.setattr("gpu_logicmix.cft.products.PIECE_CPU", rows_in_a_piece * 12 * 8)
    table = Batch((labels != -1).sum(0), torch.arange(300), labels)
    pairs = [(table, Known(features, labels).everything())]
    steps = -(-int(table.size[0]) // 4)
    one = labels[:, :1]
    pairs += zip(_batches(one, order, 4, steps), Known(features, one).batches(order, 4, steps), strict=True)
    for table, listed in pairs:
        assert torch.equal(table.size, listed.size)
        heads = (weight[: len(table.size)], bias[: len(table.size), None])
        long, short = _gradients(features, table, *heads, loss), _sparse_gradients(features, listed, *heads, loss)
        torch.testing.assert_close(short, long, rtol=1e-12, atol=1e-14)
    assert len(pairs) > 1
    assert sum(_gradients(features, pairs[0][0], weight, bias[:, None], loss)[0].abs().max(1).values > 0) == 8
    scores = []
    for share in (0, 2):
        monkeypatch.setattr("gpu_logicmix.cft.products.SPARSE", share)
        judge = Judge(features, labels.t(), weight)
        assert (judge.pattern is None) == (share == 0)
        scores.append(judge(weight, bias[:, None]))
    torch.testing.assert_close(*scores, rtol=0, atol=1e-12, equal_nan=True)
    assert scores[0].isfinite().any()


@pytest.mark.parametrize("batch_size", [None, 10])
def test_few_known_labels_are_fitted_without_the_unknown_ones(batch_size, monkeypatch):
    features, _, weight, bias, full = problem()
    shown = torch.rand(300, 9, generator=torch.Generator().manual_seed(0)).argsort(0) < 30
    labels, used = full.masked_fill(~shown, -1), []  # 30 each, so that all heads go at the same pace
    monkeypatch.setattr("gpu_logicmix.cft.solver._sparse_gradients", lambda *a: used.append(1) or _sparse_gradients(*a))
    given = {"epochs": 3, "lr": 0.02, "min_known": 2, "patience": None, "batch_size": batch_size}
    found = category_wise_fine_tune(features, labels, weight, bias, **given)
    assert used
    for other in (features.float(), torch.stack([features, features], 2)[:, :, 0]):  # cannot be read where they are
        used.clear()
        again = category_wise_fine_tune(other, labels, weight, bias, **given)
        assert not used
        torch.testing.assert_close(again[:2], found[:2], rtol=0, atol=1e-5)
    monkeypatch.setattr("gpu_logicmix.cft.products.SPARSE", 0)
    wanted = category_wise_fine_tune(features, labels, weight, bias, **given)
    assert not used
    torch.testing.assert_close(found[:2], wanted[:2], rtol=0, atol=1e-12)
    torch.testing.assert_close(found[2].history, wanted[2].history, rtol=0, atol=1e-12, equal_nan=True)


def test_the_arithmetic_stays_on_the_device():
    with FakeTensorMode():
        weight, bias = torch.zeros(5, 8, device="cuda"), torch.zeros(5, 1, device="cuda")
        labels = torch.zeros(30, 5, dtype=torch.int8, device="cuda")
        batch = Batch(torch.full((5,), 30, device="cuda"), torch.arange(30), labels)
        for features in (torch.zeros(40, 8, device="cuda"), torch.zeros(40, 8, dtype=torch.float16)):
            gradients = _gradients(features, batch, weight, bias, (4.0, 0.0, 0.05))
            assert [(g.device.type, g.shape) for g in gradients] == [("cuda", weight.shape), ("cuda", bias.shape)]
        each = torch.ones(5, dtype=torch.float64, device="cuda")
        _adam_step(gradients[0], weight, weight.clone(), weight.clone(), each, each, (0.9, 0.999), 1e-8)


# ------------------------------------------------------------------------------------------------------ held-out labels
def test_held_out_labels_are_a_share_of_each_kind():
    _, targets, _, _, _ = problem(samples=500)
    fit, held, skipped = split_known(targets.t(), 0.25, 5, torch.Generator().manual_seed(0))
    other = split_known(targets.t(), 0.25, 5, torch.Generator().manual_seed(1))[1]
    assert not torch.equal(held, other)
    for c in range(9):
        for value in (0, 1):
            known = {i for i in range(500) if targets[i, c] == value}
            to_fit, to_judge = ({i for i in range(500) if t[c, i] == value} for t in (fit, held))
            if c in skipped:
                assert not to_fit | to_judge
            else:
                assert to_fit | to_judge == known
                assert not to_fit & to_judge
                assert len(to_judge) == max(1, round(0.25 * len(known)))


def test_held_out_labels_are_a_fair_draw_in_few_samples():
    labels = torch.full((40, 1000), -1, dtype=torch.int8)
    labels[torch.rand(40, 1000, generator=torch.Generator().manual_seed(0)) < 0.3] = 0
    labels[:, ::10] = 1
    rows, where = [], []
    for seed in range(30):
        held = split_known(labels, 0.2, 5, torch.Generator().manual_seed(seed))[1]
        rows.append((held != -1).any(0).sum().item())
        where.append((held[0] == 1).nonzero().float().mean().item())
    assert max(rows) < 400  # 40 independent draws of 0.06 of 1,000 samples would need over 900
    assert abs(np.mean(where) - 495) < 4 * 288 / math.sqrt(20 * 30)


# ------------------------------------------------------------------------------------------------------------- promises
def test_a_bent_head_is_repaired():
    """Category 0 learned to see category 1, as if its pseudo-labels had come from there; the known labels undo it."""
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(3000, 32, generator=generator)
    true = torch.randn(3, 32, generator=generator) * 0.4
    full = (features @ true.t() + 0.3 * torch.randn(3000, 3, generator=generator) > 2).to(torch.int8)
    targets = hide_labels(full[:2000], 0.5)
    weight, bias = true.clone(), torch.full((3,), -2.0)
    weight[0] = 0.3 * true[0] + 1.2 * true[1]
    evaluation = (features[2000:], full[2000:])
    new_weight, _, record = category_wise_fine_tune(
        features[:2000], targets, weight, bias, epochs=500, lr=0.02, evaluation=evaluation
    )
    honest = ap_oracle(evaluation[0] @ true[0], evaluation[1][:, 0])
    assert record.evaluation_before[0] < 0.6 * honest
    assert record.evaluation_after[0] > 0.95 * honest
    cosine = torch.nn.functional.cosine_similarity
    assert cosine(weight[0], true[0], dim=0) < 0.5
    assert cosine(new_weight[0], true[0], dim=0) > 0.9


@pytest.mark.parametrize("options", [{}, {"batch_size": 16}, {"method": "ga", "mutation": 0.05}, {"lr": 10.0}])
@pytest.mark.parametrize("seed", [0, 1])
def test_held_out_ap_never_falls_and_is_what_it_says(options, seed):
    features, targets, weight, bias, _ = problem(seed)
    options = {"epochs": 12, "lr": 0.01, **options}
    new_weight, new_bias, record = category_wise_fine_tune(features, targets, weight, bias, seed=seed, **options)
    usable = [c for c in range(9) if c not in record.skipped]
    assert (record.ap_after >= record.ap_before)[usable].all()
    if options["lr"] < 1:
        assert record.ap_after.nanmean() > record.ap_before.nanmean()
    for c in usable:
        held = record.held_out[:, c]
        assert (targets[held, c] != -1).all()
        for w, b, ap in ((weight, bias, record.ap_before), (new_weight, new_bias, record.ap_after)):
            assert ap_oracle((features @ w[c] + b[c])[held], targets[held, c]) == pytest.approx(ap[c].item(), abs=1e-12)
        history = record.history[: record.epochs[c] + 1, c]
        assert record.ap_after[c] == history[record.best_epoch[c]] > history.max() - 1e-12
        assert (c in record.changed) == (record.best_epoch[c] > 0) == (not torch.equal(new_weight[c], weight[c]))


@pytest.mark.parametrize("options", [{}, {"batch_size": 16}, {"method": "ga"}])
def test_heads_without_enough_of_both_labels_are_left_as_they_were(options):
    features, targets, weight, bias, _ = problem()
    before = [t.clone() for t in (features, targets, weight, bias)]
    new_weight, new_bias, record = category_wise_fine_tune(
        features, targets, weight, bias, epochs=5, lr=0.01, evaluation=(features, targets), **options
    )
    assert set(record.skipped) == {FEW, NO_POSITIVE, NO_NEGATIVE}
    assert record.skipped[FEW] == "4 known positive labels, min_known is 5"
    assert record.skipped[NO_NEGATIVE] == "0 known negative labels, min_known is 5"
    for c in record.skipped:
        assert torch.equal(new_weight[c], weight[c])
        assert torch.equal(new_bias[c], bias[c])
        assert record.ap_before[c].isnan()
        assert (record.epochs[c], record.best_epoch[c]) == (0, 0)
    assert record.summary()["skipped"] == 3
    for tensor, old in zip((features, targets, weight, bias), before, strict=True):
        assert torch.equal(tensor, old)  # nothing is written into what is given
    assert FEW not in category_wise_fine_tune(features, targets, weight, bias, epochs=1, min_known=4)[2].skipped


def test_nothing_to_fit_at_all():
    features, targets, weight, bias, _ = problem()
    for labels in (torch.full_like(targets, -1), targets[:, [NO_POSITIVE] * 9]):
        new_weight, new_bias, record = category_wise_fine_tune(features, labels, weight, bias, epochs=3)
        assert torch.equal(new_weight, weight)
        assert torch.equal(new_bias, bias)
        assert len(record.skipped) == 9
        assert math.isnan(record.summary()["held_out_map_after"])


def test_the_evaluation_set_has_no_say():
    features, targets, weight, bias, full = problem()
    options = {"epochs": 10, "lr": 0.02}
    plain = category_wise_fine_tune(features, targets, weight, bias, **options)
    for labels in (full, 1 - full):
        judged = category_wise_fine_tune(features, targets, weight, bias, evaluation=(features, labels), **options)
        assert torch.equal(plain[0], judged[0])
        assert torch.equal(plain[1], judged[1])
        for w, b, found in ((weight, bias, "before"), (*judged[:2], "after")):
            logits = features @ w.t() + b
            wanted = [ap_oracle(logits[:, c], labels[:, c]) for c in range(9)]
            assert getattr(judged[2], f"evaluation_{found}").tolist() == pytest.approx(wanted, abs=1e-12)
    assert plain[2].evaluation_before is None


def test_an_epoch_that_overflows_is_not_chosen():
    features, targets, weight, bias, _ = problem()
    new_weight, _, record = category_wise_fine_tune(features, targets, weight, bias, epochs=3, lr=1e308)
    assert torch.equal(new_weight, weight)
    assert not record.changed


@pytest.mark.parametrize("method", ["adam", "ga"])
def test_a_non_finite_row_is_ignored_and_counted(method, product):
    features, targets, weight, bias, full = problem()
    options = {"epochs": 5, "lr": 0.02, "method": method, "mutation": 0.05}
    targets[[7, 30]] = -1
    plain = category_wise_fine_tune(features, targets, weight, bias, evaluation=(features, targets), **options)
    assert plain[2].changed
    assert plain[2].summary()["rows_left_out"] == 0
    broken, labels = features.clone(), targets.clone()
    broken[7, 3], broken[30] = math.inf, math.nan
    labels[[7, 30]] = full[[7, 30]]
    with pytest.warns(UserWarning, match="2 of 300 rows of features are non-finite: they are ignored"):
        found = category_wise_fine_tune(broken, labels, weight, bias, evaluation=(broken, labels), **options)
    assert torch.equal(found[0], plain[0])
    assert torch.equal(found[1], plain[1])
    assert (found[2].rows_left_out, found[2].evaluation_rows_left_out) == (2, 2)
    torch.testing.assert_close(found[2].evaluation_after, plain[2].evaluation_after, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_heads_are_fitted_in_float32(dtype):
    features, targets, weight, bias, _ = problem(dtype=torch.float32)
    weight, bias = weight.to(dtype), bias.to(dtype)
    options = {"epochs": 30, "lr": 0.02, "patience": None}
    new_weight, new_bias, record = category_wise_fine_tune(features, targets, weight, bias, **options)
    wanted, _, exact = category_wise_fine_tune(features, targets, weight.float(), bias.float(), **options)
    assert new_weight.dtype == new_bias.dtype == dtype
    assert len(record.changed) > 3
    torch.testing.assert_close(new_weight[record.changed].float(), wanted[record.changed], rtol=0.01, atol=1e-3)
    logits = features @ new_weight.t().float() + new_bias.float()
    held = targets.masked_fill(~record.held_out, -1)
    for c in set(range(9)) - set(record.skipped):  # the record is of the heads as they are returned
        assert record.ap_after[c].item() == pytest.approx(ap_oracle(logits[:, c], held[:, c]), abs=1e-12)
        assert record.ap_after[c] >= record.ap_before[c]
        assert (c in record.changed) == (record.ap_after[c] > record.ap_before[c])
    torch.testing.assert_close(record.history, exact.history, equal_nan=True)


def test_nan_labels_are_unknown():
    features, targets, weight, bias, _ = problem()
    wanted = category_wise_fine_tune(features, targets, weight, bias, epochs=3, lr=0.01)
    with_nan = targets.float().masked_fill(targets == -1, math.nan)
    found = category_wise_fine_tune(
        features, with_nan, weight, bias, epochs=3, lr=0.01, evaluation=(features, with_nan)
    )
    assert torch.equal(found[0], wanted[0])
    assert found[2].evaluation_before.isfinite().sum() == 8


# ----------------------------------------------------------------------------------------------------------------- gain
def drawn_ap(logits, labels, draws):
    """scikit-learn on the samples as often as they are drawn."""
    repeated = [(z, y) for z, y, n in zip(logits, labels, draws, strict=True) for _ in range(n) if y != -1]
    if not any(y == 1 for _, y in repeated):
        return math.nan
    return average_precision_score([y for _, y in repeated], [z for z, _ in repeated])


@settings(max_examples=examples(100), deadline=None)
@given(st.data())
def test_bootstrap_is_ap_on_the_drawn_samples(data):
    n, r = data.draw(st.integers(1, 8)), 3
    cells = [st.sampled_from(values) for values in ([-1.0, 0.0, 0.0, 1.0, 2.0], [-1, 0, 1], [0, 1, 2])]
    logits, labels, *draws = ([data.draw(cell) for _ in range(n)] for cell in (*cells[:2], *[cells[2]] * r))
    found = resampled_ap(
        torch.tensor([logits]), torch.tensor([labels]), torch.arange(n)[None], torch.tensor(draws, dtype=torch.uint8)
    )
    wanted = [[drawn_ap(logits, labels, each)] for each in draws]
    np.testing.assert_allclose(found.numpy(), wanted, atol=1e-6, equal_nan=True)


def test_draws_of_the_bootstrap_take_a_byte_each():
    class Largest(TorchDispatchMode):
        bytes = 0

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            result = function(*args, **(kwargs or {}))
            if isinstance(result, torch.Tensor):
                self.bytes = max(self.bytes, result.untyped_storage().nbytes())
            return result

    with Largest() as largest:
        draws = _draws(1000, 200, torch.Generator().manual_seed(0))
    assert (draws.sum(1) == 1000).all()
    assert (draws[0] == 1).all()
    assert not torch.equal(draws[1], draws[2])
    assert largest.bytes == draws.nbytes == 201 * 1000


def test_gain_is_that_on_labels_that_did_not_choose():
    """Slowly: for either half of the held-out labels, the best epoch by it, and the gain in AP on the other half."""
    features, targets, weight, bias, _ = problem(samples=1000)
    epochs = 8
    options = {"lr": 0.03, "patience": None}
    record = category_wise_fine_tune(features, targets, weight, bias, epochs=epochs, **options)[2]
    fit, held, _ = split_known(targets.t().contiguous(), 0.2, 5, torch.Generator().manual_seed(0))
    heads = [weight.clone(), bias.clone()[:, None]]
    adam = Adam(features, fit, heads, CFTOptions(epochs=epochs, **options), torch.Generator())
    states = [[tensor.clone() for tensor in heads]]
    for _ in range(epochs):
        adam.epoch(torch.tensor([c for c in range(9) if c not in record.skipped]))
        states.append([tensor.clone() for tensor in heads])
    gains = []
    for c in set(range(9)) - set(record.skipped):
        halves = [torch.full((1000,), -1), torch.full((1000,), -1)]
        for value in (0, 1):
            for k, i in enumerate((held[c] == value).nonzero()[:, 0].tolist()):
                halves[k % 2][i] = value
        logits = [features @ w[c] + b[c] for w, b in states]
        ap = [[ap_oracle(z, half) for z in logits] for half in halves]
        best = [max(range(epochs + 1), key=lambda e, values=values: round(values[e], 12)) for values in ap]
        gains.append(np.mean([ap[1 - k][best[k]] - ap[1 - k][0] for k in (0, 1)]))
    assert record.gain == pytest.approx(np.mean(gains), abs=1e-6)
    assert record.gain_interval[0] < record.gain < record.gain_interval[1]
    assert record.gain < (record.ap_after - record.ap_before).nanmean()  # that one chose its own best epoch
    assert record.summary()["gain"] == record.gain


def test_a_single_held_out_label_is_no_gain_of_zero():
    """Of one positive, or one negative, either half of the held-out labels is without: nothing judges the category."""
    features, targets, weight, bias, _ = problem(samples=1000)
    options = {"epochs": 20, "lr": 0.03, "patience": None}
    few = targets[:, FEW].clone()
    assert int((few == 1).sum()) == 4  # one of them is held out
    other_kind = torch.where(few == -1, few, 1 - few)
    without = category_wise_fine_tune(features, targets, weight, bias, **options)[2]
    assert FEW in without.skipped
    heads = torch.zeros_like(weight[:1]), torch.zeros_like(bias[:1])  # which know nothing, and will change
    for labels in (few, other_kind):
        alone = category_wise_fine_tune(features, labels[:, None], *heads, min_known=4, **options)[2]
        assert alone.changed
        assert math.isnan(alone.gain)
        assert all(map(math.isnan, alone.gain_interval))
        assert alone.kept == "model"
        targets[:, FEW] = labels
        together = category_wise_fine_tune(features, targets, weight, bias, min_known=4, **options)[2]
        assert FEW not in together.skipped
        assert together.gain == pytest.approx(without.gain, abs=1e-9)  # the mean over the others
    assert without.gain > 0.01


def test_heads_are_kept_only_if_the_gain_is_beyond_its_noise():
    features, targets, weight, bias, _ = problem(samples=2000)
    bent = category_wise_fine_tune(features, targets, weight, bias, epochs=60, lr=0.02, patience=None)[2]
    assert bent.kept == bent.summary()["kept"] == "cft"
    assert bent.gain_interval[0] > 0
    # Labels that have nothing to do with the features: the best epoch by 20 labels is better on these alone.
    noise = torch.randint(0, 2, (100, 9), generator=torch.Generator().manual_seed(1))
    luck = category_wise_fine_tune(features[:100], noise, weight, bias, epochs=30, lr=0.05, patience=None)[2]
    assert luck.changed
    assert (luck.ap_after - luck.ap_before).nanmean() > 0.02
    assert luck.kept == "model"


def test_kept_without_anything_to_judge_by():
    features, targets, weight, bias, _ = problem()
    record = category_wise_fine_tune(features, targets, weight, bias, epochs=0)[2]
    assert (record.kept, math.isnan(record.gain)) == ("model", True)


def test_options_as_one_object():
    features, targets, weight, bias, _ = problem()
    by_name = category_wise_fine_tune(features, targets, weight, bias, epochs=3, lr=0.01)[0]
    options = CFTOptions(epochs=9, lr=0.01)
    assert torch.equal(category_wise_fine_tune(features, targets, weight, bias, options, epochs=3)[0], by_name)
    with pytest.raises(TypeError, match="epoch"):
        category_wise_fine_tune(features, targets, weight, bias, epoch=3)


def test_patience_stops_each_head_for_itself():
    features, targets, weight, bias, _ = problem()
    record = category_wise_fine_tune(features, targets, weight, bias, epochs=40, patience=3, lr=0.05)[2]
    ran = [record.epochs[c].item() for c in range(9) if c not in record.skipped]
    assert len(set(ran)) > 2
    for c in range(9):
        n, best = record.epochs[c].item(), record.best_epoch[c].item()
        assert n == min(40, best + 3) * (c not in record.skipped)
        assert record.history[n + 1 :, c].isnan().all()


# --------------------------------------------------------------------------------------------------------------- inputs
def test_mapped_half_precision_and_strided_features(tmp_path, device):
    features, targets, weight, bias, _ = problem(dtype=torch.float32)
    features = features.half().float()  # so that all of these are the same numbers
    np.save(tmp_path / "f32.npy", features.numpy())
    np.save(tmp_path / "f16.npy", features.half().numpy())
    features.numpy().tofile(tmp_path / "f32.bin")
    wide = torch.zeros(300, 24)
    wide[:, ::2] = features
    options = {"epochs": 4, "batch_size": 32, "lr": 0.01}
    wanted = category_wise_fine_tune(features, targets, weight, bias, **options)
    weight, bias = weight.to(device), bias.to(device)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for given in (
            features.to(device),
            np.load(tmp_path / "f32.npy", mmap_mode="r"),
            np.load(tmp_path / "f16.npy", mmap_mode="r"),
            torch.from_file(str(tmp_path / "f32.bin"), size=300 * 12).view(300, 12),
            wide[:, ::2],
        ):
            found = category_wise_fine_tune(given, targets.numpy(), weight, bias, **options)
            assert found[0].device.type == device.type
            torch.testing.assert_close(found[0].cpu(), wanted[0], rtol=0, atol=1e-6)


def test_a_seed_fixes_everything():
    features, targets, weight, bias, _ = problem()
    for options in ({"batch_size": 16}, {"method": "ga", "mutation": 0.05}):
        runs = [
            category_wise_fine_tune(features, targets, weight, bias, epochs=4, lr=0.01, seed=seed, **options)[0]
            for seed in (0, 0, 1)
        ]
        assert torch.equal(runs[0], runs[1])
        assert not torch.equal(runs[0], runs[2])


def test_genetic_algorithm_fits_ap_itself():
    features, targets, weight, bias, full = problem(samples=600)
    targets = hide_labels(full, 0.5)
    new_weight, new_bias, record = category_wise_fine_tune(
        features, targets, weight, bias, method="ga", epochs=60, patience=None, mutation=0.05
    )
    fitted = targets.masked_fill(record.held_out, -1)
    gain = [
        ap_oracle(features @ new_weight[c] + new_bias[c], fitted[:, c])
        - ap_oracle(features @ weight[c] + bias[c], fitted[:, c])
        for c in record.changed
    ]
    assert len(gain) >= 7
    assert np.mean(gain) > 0.02


def test_record_is_what_the_package_exports():
    features, targets, weight, bias, _ = problem()
    record = category_wise_fine_tune(features, targets, weight, bias, epochs=1)[2]
    assert isinstance(record, CFTRecord)


# --------------------------------------------------------------------------------------------------------------- errors
@pytest.mark.parametrize(
    ("wrong", "error", "message"),
    [
        ({"features": torch.zeros(4, 3)}, ValueError, r"features has shape \(4, 3\): must be \[samples, 2\]"),
        ({"features": torch.zeros(4, 2, dtype=torch.int8)}, TypeError, "features is torch.int8"),
        ({"features": [[0.0]]}, TypeError, "features is list"),
        ({"targets": torch.zeros(4, 2)}, ValueError, r"targets has shape \(4, 2\): must be \(4, 3\)"),
        ({"targets": torch.full((4, 3), 2)}, ValueError, r"targets\[0, 0\] is 2"),
        ({"targets": None}, TypeError, "targets is NoneType"),
        (
            {"features": torch.zeros(0, 2), "targets": torch.zeros(0, 3)},
            ValueError,
            r"\(0, 2\): must have at least one",
        ),
        ({"evaluation": (torch.zeros(0, 2), torch.zeros(0, 3))}, ValueError, r"evaluation features has shape \(0, 2\)"),
        ({"weight": torch.zeros(2)}, ValueError, r"weight has shape \(2,\): must be \[C, D\]"),
        ({"bias": torch.zeros(2)}, ValueError, r"bias is torch.float32 of shape \(2,\)"),
        ({"bias": torch.zeros(3).double()}, ValueError, "bias is torch.float64"),
        ({"bias": None}, TypeError, "bias is NoneType"),
        ({"method": "sgd"}, ValueError, "method='sgd': must be one of adam, ga"),
        ({"schedule": "step"}, ValueError, "schedule='step': must be one of constant, cosine"),
        ({"method": "ga", "batch_size": 8}, ValueError, "batch_size=8: must be None with method='ga'"),
        ({"batch_size": 0}, ValueError, "batch_size=0: must be a whole number from 1 on"),
        ({"epochs": 1.5}, ValueError, "epochs=1.5: must be a whole number from 0 on"),
        ({"patience": 0}, ValueError, "patience=0"),
        ({"min_known": 1}, ValueError, "min_known=1: must be a whole number from 2 on"),
        ({"lr": 0.0}, ValueError, "lr=0.0: must be above 0"),
        ({"lr": torch.ones(2)}, ValueError, r"one for each of 3 categories"),
        ({"gamma_neg": -1.0}, ValueError, "gamma_neg=-1.0: must be at least 0"),
        ({"clip": 1.0}, ValueError, "clip=1.0: must be from 0 to below 1"),
        ({"holdout": 0.0}, ValueError, "holdout=0.0: must be above 0 and below 1"),
        ({"population": 1}, ValueError, "population=1: must be a whole number from 2 on"),
        ({"mutation": 0.0}, ValueError, "mutation=0.0: must be above 0"),
        ({"evaluation": (torch.zeros(4, 3), torch.zeros(4, 3))}, ValueError, r"evaluation features has shape \(4, 3\)"),
    ],
)
def test_errors_name_argument_value_and_rule(wrong, error, message):
    right = {
        "features": torch.zeros(4, 2),
        "targets": torch.zeros(4, 3),
        "weight": torch.zeros(3, 2),
        "bias": torch.zeros(3),
        "epochs": 1,
    }
    with pytest.raises(error, match=message):
        category_wise_fine_tune(**{**right, **wrong})
