"""What the semantic methods share: decoupling, graph, gated network, classifiers; SSGRL, KGGR, GCN-ML and P-GCN."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional as F

from gpu_logicmix import build_model
from gpu_logicmix.losses.base import Batch
from gpu_logicmix.methods import gcn_ml, semantic
from gpu_logicmix.methods.base import HEADS

SMALL = ["words=7", "width=12", "joint=5", "out=9"]


def small(name, categories=4, features=10, **options):
    given = {"ssgrl": SMALL, "kggr": SMALL, "gcn-ml": ["words=7", "hidden=6"], "p-gcn": ["width=6"]}.get(name, SMALL)
    return HEADS.make(name, [*given, *(f"{k}={v}" for k, v in options.items())], features, categories)


# ------------------------------------------------------------------------------------------------------------- graph
def test_the_graph_of_the_worked_example():
    labels = torch.tensor([[1, 1, -1], [1, 0, -1], [-1, 1, 0], [1, 1, 0]])  # here -1 is unknown
    expected = torch.tensor([[1, 2 / 3, 0], [2 / 3, 1, 0], [0, 0, 1]])
    torch.testing.assert_close(semantic.label_graph(labels), expected)
    torch.testing.assert_close(semantic.label_graph(labels.numpy().astype(np.int8)), expected)


@given(st.integers(0, 10**6), st.integers(1, 30), st.integers(1, 6))
def test_the_graph_counts_known_positives(seed, rows, categories):
    labels = np.random.default_rng(seed).integers(-1, 2, (rows, categories))
    graph = semantic.label_graph(labels)
    for i in range(categories):
        for j in range(categories):
            n, both = sum(labels[:, i] == 1), sum((labels[:, i] == 1) & (labels[:, j] == 1))
            assert graph[i, j].item() == pytest.approx(1 if i == j else both / n if n else 0)


def test_the_graph_of_many_rows_is_counted_in_pieces():
    labels = torch.randint(-1, 2, (40_000, 3), generator=torch.Generator().manual_seed(0))
    positive = (labels == 1).double()
    torch.testing.assert_close(semantic.pair_counts(labels), positive.T @ positive)


def test_the_correlation_of_gcn_ml():
    counts = torch.tensor([[10.0, 8, 1], [8, 20, 2], [1, 2, 5]], dtype=torch.float64)
    expected = [[0.888889, 0.210818, 0], [0.105409, 0.8, 0.105409], [0, 0, 0.888889]]
    torch.testing.assert_close(
        gcn_ml.correlation(counts), torch.tensor(expected, dtype=torch.float64), atol=2e-6, rtol=0
    )
    empty = gcn_ml.correlation(torch.zeros(2, 2, dtype=torch.float64))
    torch.testing.assert_close(empty, torch.eye(2, dtype=torch.float64))


# ------------------------------------------------------------------------------------------------------------ layers
def slow_decoupling(layer, features, words):
    batch, depth, height, width = features.shape
    out = torch.zeros(batch, len(words), depth)
    for b in range(batch):
        for c in range(len(words)):
            scores = torch.zeros(height, width)
            for y in range(height):
                for x in range(width):
                    joint = torch.tanh(layer.image(features[b, :, y, x]) * layer.word(words[c]))
                    scores[y, x] = layer.outer(layer.inner(joint))[0]
            attention = scores.flatten().softmax(0).view(height, width)
            out[b, c] = (features[b] * attention).sum((1, 2))
    return out


@pytest.mark.parametrize("chunk", [1 << 24, 60, 1])
def test_decoupling_against_loops(monkeypatch, chunk):
    monkeypatch.setattr(semantic, "CHUNK", chunk)
    torch.manual_seed(0)
    layer = semantic.SemanticDecoupling(6, 4, 5)
    features, words = torch.randn(2, 6, 3, 2, requires_grad=True), torch.randn(7, 4, requires_grad=True)
    found, attention = layer(features, words)
    expected = slow_decoupling(layer, features, words)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(attention.sum(2), torch.ones(2, 7))
    inputs = (features, words, *layer.parameters())
    for a, b in zip(
        torch.autograd.grad(found.square().sum(), inputs),
        torch.autograd.grad(expected.square().sum(), inputs),
        strict=True,
    ):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-4)


def test_without_a_preference_the_feature_is_the_mean_of_the_map():
    layer = semantic.SemanticDecoupling(6, 4, 5)
    torch.nn.init.zeros_(layer.outer.weight)
    features = torch.randn(2, 6, 3, 2)
    found, _ = layer(features, torch.randn(7, 4))
    torch.testing.assert_close(found, features.mean((2, 3))[:, None].expand(-1, 7, -1))


def slow_gated_graph(layer, state, graph):
    width = state.shape[1]
    (w1, w2, w3), (b1, b2, b3) = layer.neighbours.weight.split(width), layer.neighbours.bias.split(width)
    (u1, u2), (c1, c2) = layer.own.weight.split(width), layer.own.bias.split(width)
    for _ in range(layer.steps):
        new = torch.empty_like(state)
        for i in range(len(state)):
            into = sum(graph[i, j] * state[j] for j in range(len(state)))
            out = sum(graph[j, i] * state[j] for j in range(len(state)))
            a, h = torch.cat((into, out)), state[i]
            u = torch.sigmoid(w1 @ a + b1 + u1 @ h + c1)
            r = torch.sigmoid(w2 @ a + b2 + u2 @ h + c2)
            g = torch.tanh(w3 @ a + b3 + layer.new.weight @ (r * h) + layer.new.bias)
            new[i] = (1 - u) * h + u * g
        state = new
    return state


def test_the_gated_graph_against_loops():
    torch.manual_seed(0)
    layer = semantic.GatedGraph(4, 3)
    state, graph = torch.randn(2, 5, 4), torch.rand(5, 5)
    with torch.no_grad():
        found = layer(state, graph)
        for b in range(2):
            torch.testing.assert_close(found[b], slow_gated_graph(layer, state[b], graph))


def test_a_gated_graph_of_zeros_halves_the_state_in_each_step():
    layer = semantic.GatedGraph(4, 3)
    for p in layer.parameters():
        torch.nn.init.zeros_(p)
    state = torch.randn(2, 5, 4)
    torch.testing.assert_close(layer(state, torch.rand(5, 5)), 0.125 * state)


def test_each_category_has_its_own_classifier():
    layer = semantic.CategoryClassifier(3, 4).requires_grad_(False)
    x = torch.randn(2, 3, 4)
    expected = [[float(layer.weight[c] @ x[b, c] + layer.bias[c]) for c in range(3)] for b in range(2)]
    torch.testing.assert_close(layer(x), torch.tensor(expected))
    assert layer.weight.abs().max() <= 0.5


# ------------------------------------------------------------------------------------------------------------- heads
NAMES = ["ssgrl", "kggr", "gcn-ml", "p-gcn", "sst", "hst", "sarb", "dsrb"]


@pytest.mark.parametrize("categories", [1, 20, 80, 200])
@pytest.mark.parametrize("name", NAMES)
def test_shapes_and_gradients(name, categories):
    torch.manual_seed(0)
    head = small(name, categories)
    head.prepare(torch.randint(-1, 2, (30, categories)), [f"c{i}" for i in range(categories)])
    batch = Batch(torch.randint(-1, 2, (3, categories)), torch.arange(3), torch.tensor([False, True, False]), 6)
    output = head(torch.randn(3, 10, 4, 4), batch)
    assert output.logits.shape == (3, categories)
    value = output.logits.square().sum()
    own = head.auxiliary(output, batch)
    if own is not None:
        value = value + own.total / own.count
    value.backward()
    assert torch.isfinite(value)
    missing = [n for n, p in head.named_parameters() if p.requires_grad and p.grad is None]
    assert missing == []  # a distributed run stops at a parameter without a gradient
    assert all(p.grad.isfinite().all() for p in head.parameters() if p.requires_grad)
    head.eval()
    with torch.no_grad():
        assert head(torch.randn(2, 10, 4, 4)).logits.shape == (2, categories)


@pytest.mark.parametrize("epoch", [0, 6])
@pytest.mark.parametrize("name", NAMES)
def test_every_parameter_has_a_gradient_in_every_epoch(name, epoch):
    head = small(name)
    batch = Batch(torch.randint(-1, 2, (3, 4)), epoch=epoch)
    output = head(torch.randn(3, 10, 4, 4), batch)
    own = head.auxiliary(output, batch)
    (output.logits.sum() + (0 if own is None else own.total)).backward()
    assert [n for n, p in head.named_parameters() if p.requires_grad and p.grad is None] == []


@pytest.mark.parametrize("name", NAMES)
def test_the_state_is_in_the_state_dict(name):
    """What a head learnt, stored and drew in one process goes on in another as if nothing had happened."""

    def train(head, steps, first=0):
        out = []
        for step in range(first, first + steps):
            torch.manual_seed(step)
            x, batch = torch.randn(4, 10, 3, 3), Batch(torch.randint(-1, 2, (4, 4)), epoch=step // 2 + 4)
            if step % 2 == 0:
                head.begin_epoch(batch.epoch, 9, lambda: iter([(torch.ones(4, 10, 3, 3), torch.ones(4, 4), None)]))
            output = head.train()(x, batch)
            own = head.auxiliary(output, batch)
            value = output.logits.square().mean() + (0 if own is None else own.total)
            value.backward()
            with torch.no_grad():
                for p in head.parameters():
                    p -= 0.01 * p.grad
                    p.grad = None
            out.append(value.detach())
        return out

    torch.manual_seed(1)
    head = small(name)
    train(head, 3)
    torch.manual_seed(2)
    other = small(name)
    other.load_state_dict(head.state_dict())
    assert all(map(torch.equal, train(head, 4, 3), train(other, 4, 3)))


@pytest.mark.parametrize("name", [n for n in NAMES if n != "p-gcn"])
def test_word_vectors_are_fixed_if_given_and_learnt_if_not(name):
    labels, names = torch.randint(-1, 2, (30, 4)), list("abcd")
    vectors = torch.randn(4, 7)
    head = small(name)
    assert head.uses_word_vectors
    head.prepare(labels, names, vectors)
    assert torch.equal(head.words, vectors)
    assert not head.words.requires_grad
    assert "words" in head.state_dict()
    head = small(name)
    head.prepare(labels, names, None)
    assert head.words.requires_grad
    assert any("learnt" in message for message in head.messages)
    with pytest.raises(ValueError, match=r"word vectors \[4, 300\] .* set its option words=300"):
        small(name).prepare(labels, names, torch.randn(4, 300))


def test_ssgrl_is_as_wide_as_the_backbone_and_kggr_starts_as_ssgrl():
    torch.manual_seed(0)
    one = HEADS.make("ssgrl", ["words=7", "joint=5", "out=9"], 10, 4)
    assert one.graph_network.new.in_features == 10
    torch.manual_seed(0)
    two = HEADS.make("kggr", ["words=7", "joint=5", "out=9"], 10, 4)
    x = torch.randn(2, 10, 3, 3)
    torch.testing.assert_close(one(x).logits, two(x).logits)
    torch.nn.init.normal_(two.transferred.weight)
    assert not torch.allclose(one(x).logits, two(x).logits)


def test_gcn_ml_from_the_formula():
    torch.manual_seed(0)
    head = small("gcn-ml")
    head.prepare(torch.randint(0, 2, (50, 4)), list("abcd"))
    x = torch.randn(2, 10, 3, 3)
    hidden = head.graph @ head.words @ head.first.weight
    hidden = torch.where(hidden > 0, hidden, 0.2 * hidden)
    classifiers = head.graph @ hidden @ head.second.weight
    torch.testing.assert_close(head(x).logits, F.adaptive_max_pool2d(x, 1)[..., 0, 0] @ classifiers.T)


def test_pooling_of_the_map():
    torch.manual_seed(0)
    head = small("ssgrl", pool=2).eval()
    x = torch.randn(1, 10, 4, 4)
    pooled = F.avg_pool2d(x, 2).repeat_interleave(2, 2).repeat_interleave(2, 3)
    torch.testing.assert_close(head(x).logits, head(pooled).logits)
    assert head(torch.randn(1, 10, 1, 1)).logits.isfinite().all()


@pytest.mark.parametrize("name", NAMES)
def test_on_a_network(name):
    options = {"gcn-ml": [], "p-gcn": []}.get(name, ["width=16", "joint=8", "out=8"])
    model = build_model("test_resnet", 5, name, head_options=options)
    batch = Batch(torch.randint(-1, 2, (2, 5)))
    assert model(torch.rand(2, 3, 64, 64), batch).logits.shape == (2, 5)
    assert model.classifier is None
    assert model.eval()(torch.rand(1, 3, 64, 64)).isfinite().all()
    assert "Options (--head-option" in HEADS.help(name)


def test_options_out_of_range():
    with pytest.raises(ValueError, match="pool=0: must be 1 or more"):
        small("ssgrl", pool=0)
    with pytest.raises(ValueError, match=r"alpha=1.5: must be from 0 to 1"):
        small("sarb", alpha=1.5)


@pytest.mark.parametrize(
    ("name", "option", "message"),
    [
        ("p-gcn", "width=0", "width=0: must be 1 or more"),
        ("gcn-ml", "hidden=0", "hidden=0: must be 1 or more"),
        ("gcn-ml", "words=0", "words=0: must be 1 or more"),
        ("ssgrl", "steps=-2", "steps=-2: must be 0 or more"),
        ("sst", "stored=0", "stored=0: must be 1 or more"),
        ("sarb", "start=-1", "start=-1: must be 0 or more"),
        ("dsrb", "prototypes=10", "prototypes=10: must be 4"),
        ("mlp", "hidden=0", "hidden=0: must be 1 or more"),
        ("mlp", "dropout=-1", r"dropout=-1.0: must be at least 0 and below 1"),
        ("linear", "dropout=2", r"dropout=2.0: must be at least 0 and below 1"),
    ],
)
def test_options_that_no_head_can_have(name, option, message):
    with pytest.raises(ValueError, match=message):
        HEADS.make(name, [option], 8, 3)


def test_help_shows_the_prototypes_that_dsrb_has():
    assert "  prototypes=4\n" in HEADS.help("dsrb")
    assert HEADS.make("dsrb", ["prototypes=4", "width=8"], 8, 3).prototypes.shape == (3, 4, 8)
