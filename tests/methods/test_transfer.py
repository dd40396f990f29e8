"""SST, HST, SARB and DSRB: worked numbers, slow versions, and the step without a host sync."""

import itertools
import math
import subprocess
import sys

import pytest
import torch
from cases import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.nn import functional as F

from gpu_logicmix.losses.base import Batch, LossSum
from gpu_logicmix.losses.everyone import Everyone, random_integers
from gpu_logicmix.methods import dsrb, hst, prototypes, sarb, sst, transfer
from gpu_logicmix.methods.base import HEADS

SMALL = ["words=7", "width=12", "joint=5", "out=9"]
TRANSFER = ["sst", "hst", "sarb", "dsrb"]


def small(name, categories=4, **options):
    return HEADS.make(name, [*SMALL, *(f"{k}={v}" for k, v in options.items())], 10, categories)


def mean(loss):
    return float(loss.total / loss.count.clamp(min=1))


def seed(n=0):
    return torch.tensor(n)


# ------------------------------------------------------------------------------------------------------------ losses
def test_signs():
    assert transfer.signs(torch.tensor([[1, 0, -1]], dtype=torch.int8)).tolist() == [[1, -1, 0]]
    assert transfer.signs(torch.tensor([[1, 0, -1, 0.3, math.nan]])).tolist() == [[1, -1, 0, 0, 0]]


def test_partial_bce_of_the_worked_example():
    z, t = torch.tensor([[0.0, 1, -1, 2]]), torch.tensor([[1, -1, 0, 0.5]])
    loss = transfer.partial_bce(z, t)
    assert mean(loss) == pytest.approx(1.044446, abs=1e-6)
    cells = [transfer.partial_bce(z[:, c], t[:, c]).total.item() for c in range(4)]
    assert cells == pytest.approx([0.693147, 1.313262, 0, 1.126928], abs=1e-6)
    assert loss.count == 3
    assert mean(transfer.partial_bce(z, torch.zeros(1, 4))) == 0


def slow_contrastive(features, labels, seed):
    pairs = list(itertools.combinations(range(len(labels)), 2))
    order = list(itertools.product(range(labels.shape[1]), range(len(pairs))))
    numbers = [(pairs[k][0] << 20) + pairs[k][1] + (c << 40) for c, k in order]
    keys = dict(zip(order, random_integers(torch.tensor(numbers, dtype=torch.int64), seed).tolist(), strict=True))
    sets = {"pp": [], "pn": [], "nn": []}
    for c, k in order:
        (i, j), cos = pairs[k], F.cosine_similarity(features[pairs[k][0], c], features[pairs[k][1], c], dim=0)
        a, b = labels[i, c].item(), labels[j, c].item()
        if a == b == 1:
            sets["pp"].append((keys[c, k], 1 - cos.item()))
        elif a == b == -1:
            sets["nn"].append((keys[c, k], 1 + cos.item()))
        elif a * b == -1:
            sets["pn"].append((keys[c, k], 1 + cos.item()))
    n = len(sets["pp"])
    used = [v for _, v in sets["pp"]]
    for kind in ("pn", "nn"):
        values = [v for _, v in sets[kind]]
        if n:
            drawn = [v for _, v in sorted(sets[kind])[: 2 * n]]
            values = drawn + sorted(values, reverse=True)[:n]
        used += values
    return sum(used) / max(len(used), 1)


@settings(deadline=None)
@given(st.integers(0, 10**6), st.integers(0, 7), st.integers(1, 4), st.sampled_from([0.1, 0.5, 0.9]))
def test_contrastive_against_loops(number, rows, categories, known):
    generator = torch.Generator().manual_seed(number)
    features = torch.randn(rows, categories, 5, generator=generator)
    labels = torch.randint(0, 2, (rows, categories), generator=generator) * 2.0 - 1
    labels = labels * (torch.rand(rows, categories, generator=generator) < known)
    found = mean(transfer.contrastive(features, labels, torch.arange(rows), seed(number)))
    assert found == pytest.approx(slow_contrastive(features, labels, seed(number)), abs=1e-5)


def test_contrastive_of_the_worked_example():
    """One pair of each kind with cosines 0.8, 0.1 and -0.2, each in a category of its own."""

    def pair(cos):
        return torch.tensor([[1, 0.0], [cos, (1 - cos**2) ** 0.5]])

    features = torch.stack([pair(0.8), pair(0.1), pair(-0.2)], 1)
    labels = torch.tensor([[1.0, 1, -1], [1, -1, -1]])
    loss = transfer.contrastive(features, labels, torch.arange(2), seed())
    assert loss.count == 5
    assert mean(loss) == pytest.approx(0.8, abs=1e-6)


def test_random_integers_are_splitmix64():
    mask, golden = 2**64 - 1, 0x9E3779B97F4A7C15

    def scrambled(x):
        x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & mask
        x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & mask
        return x ^ (x >> 31)

    assert scrambled(golden) == 0xE220A8397B1DCDAF  # the generator's first output from state 0
    for start in (0, 5, 2**30 + 7):
        for number in (-(2**60), -5, 0, 1, 2**41 + 3):
            expected = scrambled((scrambled(start * golden & mask) + (number + 1) * golden) & mask)
            expected -= 2**64 if expected >= 2**63 else 0
            assert random_integers(torch.tensor(number), seed(start)).item() == expected
    drawn = random_integers(torch.arange(30_000), seed(1)).remainder(10)
    assert torch.bincount(drawn).sub(3000).abs().max() < 250


# --------------------------------------------------------------------------------------------------------------- SST
def test_pair_loss_of_the_worked_example():
    pairs, labels = torch.tensor([[0], [1]]), torch.tensor([[1.0, 1]])
    assert mean(sst.pair_loss(torch.tensor([[1.0]]), labels, pairs)) == pytest.approx(0.084249, abs=1e-6)
    for other in ([1.0, 0], [1, -1], [0, 0]):
        found = mean(sst.pair_loss(torch.tensor([[1.0]]), torch.tensor([other]), pairs))
        assert found == pytest.approx(0.530053, abs=1e-6)
    assert mean(sst.pair_loss(torch.tensor([[-3.5]]), torch.zeros(1, 2), pairs)) == 0


def test_within_image_of_the_worked_example():
    logits = torch.tensor([[0.9, 0.96, 0.2]]).logit().expand(3, -1)
    labels = torch.tensor([[1.0, 1, 0], [1, -1, 0], [0, -1, 0]])
    score = sst.within_image(logits, labels, torch.triu_indices(3, 3, 1))
    assert score[:, 2].tolist() == pytest.approx([0.58, 0.96, 0])
    assert sst.add_positives(labels, score, 0.95).tolist() == [[1, 1, 0], [1, -1, 1], [0, -1, 0]]


@pytest.mark.parametrize("chunk", [1 << 24, 40])
def test_the_pair_head_against_its_layers(monkeypatch, chunk):
    monkeypatch.setattr(sst, "CHUNK", chunk)
    torch.manual_seed(0)
    head = sst.PairHead(5, 6, 4, 7)
    x = torch.randn(2, 5, 6, requires_grad=True)
    found = head(x)
    expected = torch.zeros(2, 10)
    joined = torch.nn.Linear(8, 7)
    joined.weight.data = torch.cat((head.first.weight, head.second.weight), 1)
    for b in range(2):
        for k, (i, j) in enumerate(itertools.combinations(range(5), 2)):
            hidden = F.linear(
                torch.cat((head.embed(x[b, i]), head.embed(x[b, j]))),
                torch.cat((head.first.weight, head.second.weight), 1),
                head.first.bias,
            ).relu()
            expected[b, k] = head.weight[k] @ head.inner(hidden) + head.bias[k]
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    inputs = (x, *head.parameters())
    for a, b in zip(
        torch.autograd.grad(found.square().sum(), inputs),
        torch.autograd.grad(expected.square().sum(), inputs),
        strict=True,
    ):
        torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-4)


def test_the_first_layer_of_the_pair_head_starts_as_one_of_twice_the_width():
    head = sst.PairHead(3, 6, 50, 70)
    bound = 100**-0.5
    for values in (head.first.weight, head.second.weight, head.first.bias):
        assert 0.8 * bound < values.abs().max() <= bound


@settings(deadline=None, max_examples=examples(40))
@given(st.integers(0, 10**6), st.integers(1, 6), st.integers(1, 5))
def test_the_queue_is_a_list_that_grows_at_its_front(number, room, rows):
    head = small("sst", stored=room)
    generator = torch.Generator().manual_seed(number)
    lists = [torch.zeros(room, 12) for _ in range(4)]
    for _ in range(4):
        features = torch.randn(rows, 4, 12, generator=generator)
        present = torch.rand(rows, 4, generator=generator) < 0.5
        head.store(features, present)
        for c in range(4):
            lists[c] = torch.cat((features[present[:, c], c], lists[c]))[:room]
            expected = sorted(F.normalize(lists[c], dim=1).tolist())
            assert torch.allclose(torch.tensor(sorted(head.queue[c].tolist())), torch.tensor(expected), atol=1e-6)
    x = torch.randn(3, 4, 12, generator=generator)
    score = head.across_images(x)
    for b in range(3):
        for c in range(4):
            assert score[b, c].item() == pytest.approx(F.cosine_similarity(x[b, c], lists[c]).mean().item(), abs=1e-5)


def test_the_threshold_falls_from_epoch_to_epoch():
    head = small("sst")
    assert [head.threshold_at(e) for e in (0, 5, 6)] == pytest.approx([0.95, 0.95, 0.925])
    assert head.threshold_at(12) == pytest.approx(0.775)
    assert head.threshold_at(13) == head.threshold_at(19) == pytest.approx(0.75)


def slow_sst(head, output, batch, labels, ramp):
    f, z = output.extra["features"], output.logits
    logits = head.pairs(f)
    value = 10 * ramp * mean(sst.pair_loss(logits, labels, head.pairs.pairs))
    value += 0.05 * ramp * slow_contrastive(f, labels, head.draws)
    if batch.epoch >= 5:
        p = torch.eye(4).repeat(len(f), 1, 1)
        for k, (i, j) in enumerate(itertools.combinations(range(4), 2)):
            p[:, i, j] = p[:, j, i] = logits[:, k].sigmoid()
        for kind in ("intra", "inter"):
            y = labels.clone()
            for b in range(len(f)):
                positive = [c for c in range(4) if labels[b, c] == 1]
                for c in range(4):
                    if kind == "intra":
                        s = sum(p[b, c, k].item() for k in positive) / max(1, len(positive))
                    else:
                        s = F.cosine_similarity(f[b, c], head.queue[c]).mean().item()
                    if labels[b, c] == 0 and s >= head.threshold_at(batch.epoch):
                        y[b, c] = 1
            value += mean(transfer.partial_bce(z, y))
    return value


@pytest.mark.parametrize("epoch", [0, 1, 5, 9])
def test_the_loss_of_sst(epoch):
    torch.manual_seed(0)
    head = small("sst", stored=2, threshold=0.4, lowest=0.1)
    head.prepare(torch.randint(-1, 2, (40, 4)), list("abcd"))
    mixed = torch.tensor([False, True, False, False, False])
    with torch.no_grad():
        for step in range(3):
            batch = Batch(torch.randint(-1, 2, (5, 4)), None, mixed, epoch)
            output = head(torch.randn(5, 10, 3, 3), batch)
            found = head.auxiliary(output, batch)
            ramp = 5 * step / 40 if epoch == 0 else 1  # what share of the first epoch is over
            expected = slow_sst(head, output, batch, transfer.signs(batch.targets), ramp)
            assert mean(found) == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("name", TRANSFER)
def test_a_run_that_starts_from_the_weights_of_another_fades_its_losses_in(name):
    """It loads the state first and prepares then; a resumed run prepares first, and goes on where it was."""
    labels = torch.randint(-1, 2, (40, 4), generator=torch.Generator().manual_seed(0))
    batch = Batch(torch.ones(5, 4), None, None, 0)

    def ramps(head):
        output = head(torch.randn(5, 10, 3, 3), batch)
        return [float(head.step(output, batch).ramp) for _ in range(3)]

    with torch.no_grad():
        before, started, resumed = (small(name) for _ in range(3))
        before.prepare(labels, list("abcd"))
        assert ramps(before) == pytest.approx([0, 5 / 40, 10 / 40])
        before.auxiliary(before(torch.randn(5, 10, 3, 3), batch), batch)
        started.load_state_dict(before.state_dict())
        started.prepare(labels, list("abcd"))
        assert ramps(started) == pytest.approx([0, 5 / 40, 10 / 40])
        resumed.prepare(labels, list("abcd"))
        resumed.load_state_dict(before.state_dict())
        assert ramps(resumed) == pytest.approx([20 / 40, 25 / 40, 30 / 40])
        if name == "sst":
            assert before.queue.any()
            assert before.next.any()
            assert torch.equal(resumed.queue, before.queue)
            assert not started.queue.any()
            assert not started.next.any()


def test_mixed_samples_are_not_stored():
    head = small("sst", stored=3)
    with torch.no_grad():
        for mixed in (None, torch.tensor([True, True]), torch.tensor([True, False])):
            before = head.queue.clone()
            batch = Batch(torch.ones(2, 4), None, mixed, 0)
            head.auxiliary(head(torch.randn(2, 10, 3, 3), batch), batch)
            changed = (head.queue != before).any(2).sum(1)
            assert (changed == (2 if mixed is None else int((~mixed).sum()))).all()


@pytest.mark.slow
def test_the_pair_head_of_200_categories_fits_in_2_gb():
    """At full width, forward and backward with a batch of 8; the peak of a process that does nothing else."""
    code = """
import resource, torch
from gpu_logicmix.methods.sst import PairHead
torch.set_num_threads(1)
head = PairHead(200, 1024, 512, 1024)
x = torch.randn(8, 200, 1024, requires_grad=True)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
logits = head(x)
assert logits.shape == (8, 19900)
logits.square().mean().backward()
more = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
print(more * 1024, 4 * sum(p.numel() for p in head.parameters()))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    more, parameters = map(int, done.stdout.split())
    assert more + parameters < 2e9, (more, parameters)


# --------------------------------------------------------------------------------------------------------------- HST
def test_soft_scores_of_the_worked_example():
    score, threshold = torch.tensor([0.96, 0.58, 0.3]), torch.tensor(0.5)
    torch.testing.assert_close(hst.soft_score(score, threshold), torch.tensor([0.46, 0.08, 0]))
    threshold = torch.tensor(0.9, requires_grad=True)
    labels = torch.tensor([1.0, 1, -1])
    soft = hst.soft_score(score, threshold, labels)
    torch.testing.assert_close(soft.detach(), torch.tensor([0.06, 0, 0]))
    transfer.partial_bce(soft, labels).total.backward()
    assert threshold.grad > 0  # known positives below it: it goes down


@pytest.mark.parametrize(("sign", "values"), [("paper", [0.2, 1.8, 1]), ("released", [1.8, 0.2, 1])])
def test_the_prototype_loss_has_the_sign_of_the_paper(sign, values):
    head = small("hst", sign=sign)
    for label, value in zip((1.0, -1, 0), values, strict=True):
        assert mean(head.prototype_loss(torch.tensor([[0.8]]), torch.tensor([[label]]))) == pytest.approx(value)


@pytest.mark.parametrize("epoch", [0, 1, 5])
def test_the_loss_of_hst(epoch):
    torch.manual_seed(0)
    head = small("hst", threshold=0.3)
    head.prepare(torch.randint(-1, 2, (40, 4)), list("abcd"))
    head.prototypes.normal_()
    batch = Batch(torch.randint(-1, 2, (5, 4)), epoch=epoch)
    y = transfer.signs(batch.targets)
    with torch.no_grad():
        output = head(torch.randn(5, 10, 3, 3), batch)
        found = mean(head.auxiliary(output, batch))
        z, f, ramp = output.logits, output.extra["features"], 0 if epoch == 0 else 1
        logits = head.pairs(f)
        expected = 10 * ramp * mean(sst.pair_loss(logits, y, head.pairs.pairs))
        expected += 0.05 * ramp * slow_contrastive(f, y, head.draws)
        if epoch >= 5:
            cos = F.cosine_similarity(f[:, :, None], head.prototypes[None], dim=3).mean(2)
            for score in (sst.within_image(logits, y, head.pairs.pairs), cos):
                s = (score - 0.3).clamp(0, 1)
                expected += mean(transfer.partial_bce(z, torch.where((y == 0) & (s > 0), 1.0, y)))
                expected += 0.1 * mean(transfer.partial_bce(s, y))
            expected += 0.05 * (1 - y * cos).mean().item()
    assert found == pytest.approx(expected, abs=1e-5)


# ------------------------------------------------------------------------------------------------------ SARB and DSRB
def test_the_blend_of_the_worked_example():
    y, partner = torch.tensor([[0.0, -1, 1, 0]]), torch.tensor([[1.0, 1, -1, 0]])
    f, other = torch.randn(1, 4, 3), torch.randn(1, 4, 3)
    features, labels = sarb.blend(f, y, (y == 0) & (partner == 1), other, torch.tensor(0.5))
    assert labels.tolist() == [[0.5, -1, 1, 0]]
    torch.testing.assert_close(features[:, 0], (f + other)[:, 0] / 2)
    assert torch.equal(features[:, 1:], f[:, 1:])


def test_one_category_is_chosen_of_those_that_are_eligible():
    keys = random_integers(torch.arange(2000), seed(3)).view(400, 5)
    eligible = torch.rand(400, 5, generator=torch.Generator().manual_seed(0)) < 0.5
    found = sarb.chosen(keys, eligible)
    assert (found.sum(1) == eligible.any(1)).all()  # none in a row without unknown labels
    assert not (found & ~eligible).any()
    times = sarb.chosen(keys, torch.ones(400, 5, dtype=torch.bool)).sum(0)
    assert times.min() > 50


@pytest.mark.parametrize("name", ["sarb", "dsrb"])
def test_the_loss_of_sarb(name):
    torch.manual_seed(0)
    head = small(name, alpha=0.3, beta=0.8, start=2)
    head.prepare(torch.randint(-1, 2, (40, 4)), list("abcd"))
    head.prototypes.normal_()
    head.found.copy_(torch.tensor([True, True, False, True]))
    batch = Batch(torch.randint(-1, 2, (5, 4)), epoch=2)
    batch.targets[1] = torch.tensor([1, 0, 1, 0])  # nothing unknown
    y = transfer.signs(batch.targets)
    with torch.no_grad():
        output = head(torch.randn(5, 10, 4, 4), batch)
        found = mean(head.auxiliary(output, batch))
        f = output.extra["features"]
        f1, y1, f2, y2 = f.clone(), y.clone(), f.clone(), y.clone()
        numbers = [[-1 - (b << 20) - c for c in range(4)] for b in range(5)]
        keys = random_integers(torch.tensor(numbers), head.draws)
        for b in range(5):
            for c in range(4):
                if y[b, c] == 0 and y[4 - b, c] == 1:
                    f1[b, c], y1[b, c] = 0.3 * f[b, c] + 0.7 * f[4 - b, c], 0.7
            unknown = [c for c in (0, 1, 3) if y[b, c] == 0]
            if unknown:
                c = max(unknown, key=lambda c: keys[b, c].item())
                if name == "sarb":
                    k = random_integers(torch.tensor(-(2**60)), head.draws).item() % 10
                else:
                    k = (output.extra["quadrant"][b, c].item() - 1 - keys[b, c].item() % 3) % 4
                    assert k != output.extra["quadrant"][b, c]
                f2[b, c], y2[b, c] = 0.8 * f[b, c] + 0.2 * head.prototypes[c, k], 0.2
        expected = 0.05 * slow_contrastive(f, y, head.draws)
        expected += mean(transfer.partial_bce(head.predict(f1), y1)) + mean(transfer.partial_bce(head.predict(f2), y2))
    assert (y1 != y).any()
    assert (y2 != y).any()
    assert found == pytest.approx(expected, abs=1e-5)


def test_alpha_and_beta_stay_shares_and_learn():
    head = small("sarb", start=0)
    head.found.fill_(True)
    with torch.no_grad():
        head.alpha.fill_(1.7)
        head.beta.fill_(-0.2)
    batch = Batch(torch.tensor([[1, -1, 0, -1], [-1, 1, -1, 0]]), epoch=1)
    head.auxiliary(head(torch.randn(2, 10, 3, 3), batch), batch).total.backward()
    assert (head.alpha.item(), head.beta.item()) == (1, 0)
    head = small("sarb", start=0)
    head.found.fill_(True)
    head.auxiliary(head(torch.randn(2, 10, 3, 3), batch), batch).total.backward()
    assert head.alpha.grad != 0
    assert head.beta.grad != 0


def test_quadrants_and_blending_sums_is_blending_maps():
    torch.manual_seed(0)
    features, attention = torch.randn(3, 6, 7, 7), torch.rand(3, 4, 49)
    found = dsrb.quadrant(features, attention)
    maps = attention.view(3, 4, 1, 7, 7) * features[:, None]  # what the paper blends
    for b, c in itertools.product(range(3), range(4)):
        y, x = divmod(maps[b, c].sum(0).flatten().argmax().item(), 7)
        assert found[b, c] == 2 * (y >= 3) + (x >= 3)
    sums = maps.sum((3, 4))
    torch.testing.assert_close((0.3 * maps + 0.7 * maps.flip(0)).sum((3, 4)), 0.3 * sums + 0.7 * sums.flip(0))


# --------------------------------------------------------------------------------------------------------- prototypes
def slow_k_means(points, clusters, rounds=30):
    n = len(points)
    centres = [points[i % n if n < clusters else i * n // clusters] for i in range(clusters)]
    for _ in range(rounds):
        nearest = [min(range(clusters), key=lambda k: (p - centres[k]).norm().item()) for p in points]
        for k in range(clusters):
            own = [p for p, at in zip(points, nearest, strict=True) if at == k]
            if own:
                centres[k] = torch.stack(own).mean(0)
    return torch.stack(centres)


def test_k_means_against_loops():
    torch.manual_seed(0)
    points, count = torch.randn(4, 20, 3), torch.tensor([20, 7, 2, 0])
    points[torch.arange(20) >= count[:, None]] = 0
    found = prototypes.k_means(points, count, 3)
    for c in range(3):
        torch.testing.assert_close(found[c], slow_k_means(points[c, : count[c]], 3))
    assert (found[3] == 0).all()
    assert {tuple(p.tolist()) for p in found[2]} == {tuple(p.tolist()) for p in points[2, :2]}


def test_positive_features_are_the_first_known_positives():
    torch.manual_seed(0)
    maps = [torch.randn(n, 3, 2) for n in (4, 3, 5)]
    labels = [torch.randint(-1, 2, (n, 3)) for n in (4, 3, 5)]
    store, count = prototypes.positive_features(
        ((m, t, None) for m, t in zip(maps, labels, strict=True)), lambda m: m, 3, 3
    )
    every, truth = torch.cat(maps), torch.cat(labels)
    for c in range(3):
        expected = every[truth[:, c] == 1, c][:3]
        assert count[c] == len(expected)
        assert torch.equal(store[c, : len(expected)], expected)
        assert (store[c, len(expected) :] == 0).all()


def samples(batches=3):
    for n in range(batches):
        torch.manual_seed(n)
        yield torch.randn(4, 10, 4, 4), torch.randint(-1, 2, (4, 4)), torch.arange(4)


@pytest.mark.parametrize("name", ["hst", "sarb", "dsrb"])
def test_when_prototypes_are_made(name):
    head = small(name, start=2, every=2).train()
    made = []
    for epoch in range(7):
        before = head.prototypes.clone()
        with torch.no_grad():
            head.reduce[0].weight.add_(0.1)
        head.begin_epoch(epoch, 7, samples)
        made.append(not torch.equal(before, head.prototypes))
        assert head.training
        assert head.reduce[1].training
    assert made == [False, False, True, False, True, False, True]
    assert head.found.any()
    assert head.reduce[1].num_batches_tracked == 0  # in eval mode


def test_prototypes_of_quarters():
    head = small("dsrb", start=0, positives=2).eval()
    torch.manual_seed(5)
    with torch.no_grad():
        made, found = head.make_prototypes(samples())
        lists = [[[] for _ in range(4)] for _ in range(4)]
        for features, targets, _ in samples():
            m, own, attention = head.category_features(features)
            q = dsrb.quadrant(m, attention)
            for b, c in itertools.product(range(4), range(4)):
                if targets[b, c] == 1 and len(lists[c][q[b, c]]) < 2:
                    lists[c][q[b, c]].append(own[b, c])
    for c in range(4):
        every = [f for quarter in lists[c] for f in quarter]
        assert found[c] == bool(every)
        for k in range(4):
            expected = torch.stack(lists[c][k] or every).mean(0)
            torch.testing.assert_close(made[c, k], expected)


def test_categories_with_few_positives_are_listed():
    labels = torch.zeros(30, 3)
    labels[:4, 0], labels[:20, 1] = 1, 1
    head = small("sarb", 3)
    head.prepare(labels, ["cat", "dog", "b\x1bd"])
    expected = "2 categories have fewer known positives than prototypes (10): cat (4), b\\x1bd (0)"
    assert any(expected in message for message in head.messages)


# ------------------------------------------------------------------------------------------------------- no host sync
@pytest.mark.filterwarnings("ignore:CUDA is not available")
@pytest.mark.parametrize("name", ["ssgrl", "kggr", "gcn-ml", "p-gcn", *TRANSFER])
@pytest.mark.parametrize("epoch", [0, 6])
def test_a_step_on_fake_cuda(name, epoch):
    """A fake CUDA tensor has no value to wait for, and a tensor in the wrong place raises."""
    head = HEADS.make(name, ["width=12"] if name not in ("gcn-ml", "p-gcn") else [], 10, 4)
    with FakeTensorMode(allow_non_fake_inputs=True):
        for module in head.modules():
            for key, value in module.named_parameters(recurse=False):
                setattr(module, key, torch.nn.Parameter(torch.empty_like(value, device="cuda"), value.requires_grad))
            for key, value in module.named_buffers(recurse=False):
                module._buffers[key] = torch.empty_like(value, device="cuda")
        targets = torch.empty(6, 4, dtype=torch.int8, device="cuda")
        mixed = torch.empty(6, dtype=torch.bool, device="cuda")
        batch = Batch(targets, torch.empty(6, dtype=torch.int64, device="cuda"), mixed, epoch)
        output = head(torch.empty(6, 10, 4, 4, device="cuda"), batch)
        main = LossSum(output.logits.sum(), (targets >= 0).sum())
        loss = head.with_auxiliary(main, output, batch)
        assert loss.total.device.type == "cuda"
        with pytest.raises(DataDependentOutputException):  # so that this test can fail
            loss.total.item()


def test_rows_that_only_fill_a_batch_do_not_count():
    torch.manual_seed(0)
    one, x = small("sarb", start=0).eval(), torch.randn(4, 10, 3, 3)
    one.found.fill_(True)
    batch = Batch(torch.randint(-1, 2, (3, 4)), epoch=1)
    state = {k: v.clone() for k, v in one.state_dict().items()}
    first = one.auxiliary(one(x, batch), batch).total
    one.load_state_dict(state)
    second = one.auxiliary(one(x[:3], batch), batch).total
    torch.testing.assert_close(first, second)


@pytest.mark.parametrize("name", TRANSFER)
def test_a_step_without_samples(name):
    head = small(name, start=0).eval()
    batch = Batch(torch.zeros(0, 4), epoch=1)
    output = head(torch.randn(2, 10, 3, 3), batch)
    assert head.auxiliary(output, batch).total.isfinite()


def test_alone_everyone_is_the_batch():
    everyone = Everyone(3, 8, torch.device("cpu"))
    x = torch.randn(3, 2)
    assert everyone.all(x) is x
    assert everyone.own.tolist() == [0, 1, 2]
    assert everyone.reversed().tolist() == [2, 1, 0]
